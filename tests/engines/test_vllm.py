"""The real vLLM on a CPU, with gdskv below its pool: the tokens are those without it, and each block is from where it
must be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Vllm, Wanted

BLOCK = 32  # tokens
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 32 * 4  # layers, heads, tokens, keys and values, head_dim, float32

Start = Callable[..., Vllm]


def document(number: int, tokens: int = 500) -> list[int]:
    return [(i * 7 + number * 131 + (i * i) % 97) % 1000 + 1 for i in range(tokens)]


def settings(kv: Path, host: int = 256, disk: int = 512, **more: Any) -> dict[str, Any]:
    """Tiers of that many blocks."""
    return {
        "host_bytes": host * BLOCK_BYTES,
        "disk_bytes": disk * BLOCK_BYTES,
        "directories": [str(kv)],
        "min_free": 0,
    } | more


def slab(kv: Path, rank: int = 0) -> Path:
    (file,) = (kv / f"rank{rank}").rglob("blocks.slab")
    return file


PROMPTS = [document(n) for n in range(4)]
FULL = 15 * BLOCK  # cached of each: its last block is not full


def test_cold_then_from_each_tier_and_after_a_restart(start: Start, kv: Path, wanted: Wanted) -> None:
    engine = start(settings(kv, host=64))
    right = wanted(PROMPTS)
    cold = engine.generate(PROMPTS)
    assert cold["tokens"] == right and cold["found"] == {"gpu": 0, "host": 0, "disk": 0}
    warm = engine.generate(PROMPTS)
    assert warm["tokens"] == right and warm["found"] == {"gpu": 4 * FULL, "host": 0, "disk": 0}
    assert engine.reset()
    host = engine.generate(PROMPTS)
    assert host["tokens"] == right and host["found"] == {"gpu": 0, "host": 4 * FULL, "disk": 0}
    engine.generate([document(100 + n) for n in range(4)])  # more than host holds
    engine.settle()
    assert engine.reset()
    disk = engine.generate(PROMPTS)
    assert disk["tokens"] == right and disk["found"] == {"gpu": 0, "host": 0, "disk": 4 * FULL}
    assert engine.check()["failed_load_blocks"] == 0
    engine.stop()
    again = start(settings(kv, host=64))
    assert again.stats()["recovered"] >= 8 * 15
    disk = again.generate(PROMPTS)
    assert disk["tokens"] == right and disk["found"] == {"gpu": 0, "host": 0, "disk": 4 * FULL}
    # a longer prompt goes on where the cached one ends, and what it adds is cached as well
    longer = [prompt + document(50, 100) for prompt in PROMPTS]
    assert again.generate(longer)["tokens"] == wanted(longer)
    assert again.reset()
    grown = again.generate(longer)
    assert grown["tokens"] == wanted(longer) and grown["cached"] == [18 * BLOCK] * 4
    assert again.reset(connector=True), "as after new weights"
    again.settle()
    cold = again.generate(PROMPTS)
    assert cold["tokens"] == right and cold["found"] == {"gpu": 0, "host": 0, "disk": 0}
    again.stop()


def test_sigkill_while_idle_and_restart_comes_back_warm(start: Start, kv: Path, wanted: Wanted) -> None:
    engine = start(settings(kv))
    engine.generate(PROMPTS)
    assert engine.settle()["disk_used"] == 4 * 15, "an idle engine writes what memory alone holds"
    engine.kill()
    again = start(settings(kv))
    found = again.generate(PROMPTS)
    assert found["tokens"] == wanted(PROMPTS) and found["found"]["disk"] == 4 * FULL


def test_every_byte_of_the_slab_overwritten_is_computed_again(start: Start, kv: Path, wanted: Wanted) -> None:
    engine = start(settings(kv))
    engine.generate(PROMPTS)
    engine.stop()
    size = slab(kv).stat().st_size
    with slab(kv).open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    engine = start(settings(kv))
    assert engine.stats()["recovered"] == 4 * 15
    found = engine.generate(PROMPTS)
    assert found["tokens"] == wanted(PROMPTS), "bytes that are not those that were written are not served"
    assert found["failed"] == 4 * 15 and sum(found["cached"]) == 0
    assert engine.stats()["bad_payloads"] > 0
    engine.settle()
    assert engine.reset()
    again = engine.generate(PROMPTS)
    assert again["tokens"] == wanted(PROMPTS) and again["found"]["host"] == 4 * FULL, "and stored again"
    # one bad block in the middle: the blocks before it count
    engine.stop()
    engine = start(settings(kv))
    engine.generate([PROMPTS[0]])
    engine.stop()
    with slab(kv).open("r+b") as file:
        file.truncate(size // 2)
    engine = start(settings(kv))
    found = engine.generate(PROMPTS)
    assert found["tokens"] == wanted(PROMPTS)
    engine.settle()
    engine.check()


def test_a_slab_truncated_under_a_running_engine(start: Start, kv: Path, wanted: Wanted) -> None:
    engine = start(settings(kv, host=64))
    engine.generate(PROMPTS)
    engine.generate([document(100 + n) for n in range(4)])
    engine.settle()
    assert engine.reset()
    os.truncate(slab(kv), 4096 + 20 * BLOCK_BYTES)
    found = engine.generate(PROMPTS)
    assert found["tokens"] == wanted(PROMPTS) and found["failed"] > 0
    assert engine.stats()["failed_reads"] > 0
    engine.settle()
    assert engine.reset()
    assert engine.generate(PROMPTS)["tokens"] == wanted(PROMPTS)


def test_tiers_so_small_that_they_churn_and_a_pool_so_small_that_requests_are_preempted(
    start: Start, kv: Path, wanted: Wanted
) -> None:
    engine = start(settings(kv, host=12, disk=40), num_gpu_blocks_override=48, max_model_len=1024)
    prompts = [document(n % 5, 150 + 40 * (n % 3)) for n in range(12)]
    right = wanted(prompts, 160)
    for _ in range(3):
        assert engine.generate(prompts, 160)["tokens"] == right
        assert engine.reset()
    assert engine.preemptions() > 0
    stats = engine.settle()
    assert stats["evicted_disk"] > 0 and stats["evicted_host"] > 0
    engine.check()


def test_twenty_requests_at_once_with_shared_prefixes(start: Start, kv: Path, wanted: Wanted) -> None:
    prompts = [document(n % 3, 320) + document(200 + n, 60 + 10 * n) for n in range(20)]
    right = wanted(prompts, 16)
    engine = start(settings(kv))
    assert engine.generate(prompts, 16)["tokens"] == right
    assert engine.reset()
    found = engine.generate(prompts, 16)
    assert found["tokens"] == right and found["found"]["host"] > 0
    assert min(found["cached"]) >= 10 * BLOCK
    engine.settle()
    engine.check()


def test_requests_aborted_while_their_blocks_are_on_the_way(start: Start, kv: Path, wanted: Wanted) -> None:
    engine = start(settings(kv, host=64))
    engine.generate(PROMPTS)
    engine.generate([document(100 + n) for n in range(4)])
    engine.settle()
    for steps in (0, 1, 2, 3, 5, 8):
        assert engine.reset()
        assert engine.abort_in_flight([*PROMPTS, document(300 + steps)], steps) == 5
        found = engine.generate(PROMPTS)
        assert found["tokens"] == wanted(PROMPTS)
    engine.settle()
    assert engine.check()["failed_load_blocks"] == 0


def test_a_full_disk_stops_no_request(start: Start, full_disk: Any, wanted: Wanted) -> None:
    engine = start(settings(full_disk.path, host=64, disk=128))
    engine.generate(PROMPTS)
    full_disk.fill(slab(full_disk.path))
    others = [document(100 + n) for n in range(4)]
    assert engine.generate(others)["tokens"] == wanted(others)
    assert engine.generate(PROMPTS)["tokens"] == wanted(PROMPTS)
    stats = engine.settle()
    assert stats["failed_writes"] > 0 and stats["directories_read_only"] == 1, stats


def test_retention_by_request_and_what_is_not_cached(start: Start, kv: Path, wanted: Wanted) -> None:
    engine = start(settings(kv, host=64, disk=128, retained_fraction=0.5))
    first = engine.generate(PROMPTS[:1], params={"gdskv": {"ttl": 3600, "priority": 80, "tenant": "a"}})
    assert first["tokens"] == wanted(PROMPTS[:1])
    assert engine.stats()["retained"] == 15
    for n in range(20):  # far more than both tiers hold
        engine.generate([document(100 + n)])
    engine.settle()
    assert engine.reset()
    found = engine.generate(PROMPTS[:1])
    assert found["tokens"] == wanted(PROMPTS[:1]) and found["cached"] == [FULL], "kept for an hour"
    before = engine.stats()["wrong_retention"]
    assert engine.generate(PROMPTS[:1], params={"gdskv": {"ttl": -1}})["tokens"] == wanted(PROMPTS[:1])
    assert engine.stats()["wrong_retention"] == before + 1
    # two users who must not share
    apart = [{"prompt_token_ids": PROMPTS[1], "cache_salt": salt} for salt in ("x", "y")]
    engine.generate(apart[:1])
    assert engine.generate(apart[1:])["cached"] == [0]


@pytest.mark.parametrize(
    ("more", "variables", "words"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, {}, "Set --prefix-caching-hash-algo sha256"),
        ({"enable_prefix_caching": False}, {}, "Set --enable-prefix-caching"),
        ({"gdskv": {"host_bytes": "1MiB", "directories": ["/nowhere"]}}, {}, "/nowhere is not a directory"),
        ({"gdskv": {"host_bites": "1MiB"}}, {}, "Did you mean host_bytes"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(
    start: Start, kv: Path, more: dict[str, Any], variables: dict[str, str], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        start(**({"gdskv": settings(kv), "variables": variables} | more))
