"""The real vLLM with tensor parallel size 2 on a CPU: two worker processes, one answer."""

from __future__ import annotations

import os
from pathlib import Path

from conftest import Wanted
from test_vllm import FULL, PROMPTS, Start, document, settings, slab


def test_two_ranks_from_each_tier_after_kills_and_with_one_ranks_slab_overwritten(
    start: Start, kv: Path, wanted: Wanted
) -> None:
    two = {"tensor_parallel_size": 2}
    forked, spawned = ({"VLLM_WORKER_MULTIPROC_METHOD": method} for method in ("fork", "spawn"))
    engine = start(settings(kv, host=64), variables=forked, **two)
    right = wanted(PROMPTS)
    assert engine.stats()["ranks"] == 2
    cold = engine.generate(PROMPTS)
    assert cold["tokens"] == right and cold["found"] == {"gpu": 0, "host": 0, "disk": 0}
    assert engine.generate(PROMPTS)["found"] == {"gpu": 4 * FULL, "host": 0, "disk": 0}
    assert engine.reset()
    host = engine.generate(PROMPTS)
    assert host["tokens"] == right and host["found"] == {"gpu": 0, "host": 4 * FULL, "disk": 0}
    engine.generate([document(100 + n) for n in range(4)])
    assert engine.reset()
    disk = engine.generate(PROMPTS)
    assert disk["tokens"] == right and disk["found"] == {"gpu": 0, "host": 0, "disk": 4 * FULL}
    assert engine.abort_in_flight([document(300)], 2) == 1
    engine.settle()
    assert engine.check()["disagreed"] == 0
    engine.kill()

    engine = start(settings(kv, host=64), variables=spawned, **two)
    disk = engine.generate(PROMPTS)
    assert disk["tokens"] == right and disk["found"] == {"gpu": 0, "host": 0, "disk": 4 * FULL}
    engine.settle()
    engine.kill()

    with slab(kv, rank=1).open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    engine = start(settings(kv, host=64), variables=forked, **two)
    bad = engine.generate(PROMPTS)
    assert bad["tokens"] == right and sum(bad["cached"]) == 0 and bad["failed"] == 4 * 15
    assert engine.reset()
    again = engine.generate(PROMPTS)
    assert again["tokens"] == right and again["found"]["host"] == 4 * FULL
