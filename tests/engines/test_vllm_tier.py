"""gdskv as the disk tier under vLLM's own CPU tier. Copies between GPU and CPU are a double (`vllm_cpu_offload`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Wanted
from test_vllm import BLOCK_BYTES, FULL, PROMPTS, Start, document


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """vLLM leaves its CPU tier in /dev/shm when it is killed."""
    before = set(Path("/dev/shm").glob("vllm_offload_*.mmap"))
    yield
    for left in set(Path("/dev/shm").glob("vllm_offload_*.mmap")) - before:
        left.unlink()


def tiers(kv: Path, chunks: int = 64, **more: Any) -> dict[str, Any]:
    tier = {"type": "GdskvTier", "module_path": "gdskv.engines.vllm_tier", "disk_bytes": 512 * BLOCK_BYTES}
    tier |= {"directories": [str(kv)], "min_free": 0} | more
    return {"cpu_bytes_to_use": chunks * BLOCK_BYTES, "secondary_tiers": [tier]}


def test_below_vllms_own_cpu_tier(start: Start, kv: Path, wanted: Wanted) -> None:
    right = wanted(PROMPTS)
    engine = start(None, tiering=tiers(kv))
    cold = engine.generate(PROMPTS)
    assert cold["tokens"] == right and sum(cold["cached"]) == 0
    engine.generate([document(100 + n) for n in range(4)])  # more than the CPU tier holds
    assert engine.reset()
    before = engine.stats()["matched_disk"]
    warm = engine.generate(PROMPTS)
    assert warm["tokens"] == right and sum(warm["cached"]) == 4 * FULL
    assert engine.stats()["matched_disk"] > before
    engine.settle()
    engine.kill()

    engine = start(None, tiering=tiers(kv))
    assert engine.stats()["recovered"] >= 8 * 15
    again = engine.generate(PROMPTS)
    assert again["tokens"] == right and again["cached"] == [FULL] * 4
    engine.settle()
    engine.kill()

    (slab,) = kv.rglob("blocks.slab")
    with slab.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    engine = start(None, tiering=tiers(kv))
    bad = engine.generate(PROMPTS)
    assert bad["tokens"] == right and sum(bad["cached"]) == 0
    assert engine.stats()["bad_payloads"] > 0


def test_a_tier_needs_a_disk_and_no_memory_of_its_own(start: Start, kv: Path) -> None:
    with pytest.raises(AssertionError, match="memory is vLLM's own tier here"):
        start(None, tiering=tiers(kv, host_bytes="1MiB"))
