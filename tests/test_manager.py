"""BlockManager on real files: prefixes go from device to host to disk and come back with their bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, payload, tokens

import gdskv


@pytest.fixture
def engine(tmp_path: Path):
    with gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE) as kv:
        yield Engine(kv)


def test_a_prefix_comes_back_from_each_tier(engine: Engine) -> None:
    first = engine.run(0, 4 * TOKENS)
    assert first.matched == (0, 0, 0)
    assert engine.run(0, 4 * TOKENS).matched == (4 * TOKENS, 0, 0)
    engine.run(1, 8 * TOKENS)
    assert engine.run(0, 4 * TOKENS).matched == (0, 4 * TOKENS, 0)
    for doc in range(2, 5):
        engine.run(doc, 8 * TOKENS)
    assert engine.run(0, 4 * TOKENS).matched == (0, 0, 4 * TOKENS)
    assert engine.verified == 12
    assert engine.kv.stats()["failed_reads"] == 0


def test_a_block_that_is_on_disk_is_not_written_again(engine: Engine) -> None:
    for _ in range(6):
        for doc in range(3):
            engine.run(doc, 8 * TOKENS)
    assert engine.kv.stats()["spills"] <= 24
    assert engine.kv.stats()["matched_disk"] > 24


def test_a_partly_filled_last_block_gets_a_slot_and_is_not_found(engine: Engine) -> None:
    request = engine.run(0, 2 * TOKENS + 5)
    assert len(request.blocks) == 3
    assert len(request.keys) == 2
    assert engine.kv.match(tokens(0, 3 * TOKENS), now=engine.now).device == 2 * TOKENS


def test_decoding_fills_and_commits_further_blocks(engine: Engine) -> None:
    kv = engine.kv
    request = engine.begin(0, TOKENS + 3)
    engine.wait(request)
    engine.compute(request)
    kv.commit(request, now=0)
    assert kv.allocate(request, 1, now=0) is None
    engine.wait(request)
    kv.commit(request, tokens(0, 3 * TOKENS), now=0)
    assert len(request.keys) == 3
    assert np.array_equal(request.keys, gdskv.block_keys(tokens(0, 3 * TOKENS), TOKENS, namespace=kv.store.digest))
    with pytest.raises(gdskv.GdskvError, match="allocate"):
        kv.commit(request, tokens(0, 4 * TOKENS), now=0)
    kv.release(request, now=0)
    assert kv.match(tokens(0, 3 * TOKENS), now=0).device == 3 * TOKENS


def test_a_commit_of_a_part_of_the_prompt_makes_only_that_findable(engine: Engine) -> None:
    kv = engine.kv
    request = engine.begin(0, 4 * TOKENS, retention=gdskv.Retention(ttl=60))
    engine.wait(request)
    kv.device_pool.view(int(request.blocks[0]))[:BLOCK] = payload(request.keys[0])
    kv.commit(request, tokens(0, TOKENS + 3), now=0)
    assert kv.match(tokens(0, 4 * TOKENS), now=0).device == TOKENS
    engine.drain()
    assert kv.stats()["spills"] == 1
    engine.finish(request)
    assert kv.match(tokens(0, 4 * TOKENS), now=0).device == 4 * TOKENS


def test_all_slots_leased_is_rejected_at_once_and_counted(engine: Engine) -> None:
    held = engine.begin(0, 6 * TOKENS)
    answer = engine.begin(1, 3 * TOKENS)
    assert answer == gdskv.Rejected("device slots are leased", 8, 6)
    assert engine.begin(1, 9 * TOKENS) == gdskv.Rejected("request is larger than the device tier", 8, 9)
    assert engine.kv.stats()["rejected"] == 2
    engine.kv.cancel(held, now=0)
    engine.run(1, 3 * TOKENS)


def test_release_and_cancel_may_be_said_twice(engine: Engine) -> None:
    request = engine.run(0, 2 * TOKENS)
    engine.kv.release(request, now=9)
    engine.kv.cancel(request, now=9)
    engine.kv.check()
    assert engine.kv.stats()["device_leased"] == 0


def test_two_requests_share_the_slots_of_a_common_prefix(engine: Engine) -> None:
    engine.run(0, 2 * TOKENS)
    a, b = engine.begin(0, 2 * TOKENS), engine.begin(0, 2 * TOKENS)
    assert a.blocks.tolist() == b.blocks.tolist()
    engine.finish(a)
    assert engine.kv.stats()["device_leased"] == 2
    engine.finish(b)


def test_a_block_on_its_way_is_joined_not_read_twice(engine: Engine) -> None:
    engine.run(0, 2 * TOKENS)
    for doc in range(1, 5):
        engine.run(doc, 8 * TOKENS)
    before = engine.kv.stats()["onboards_disk"]
    a, b = engine.begin(0, 2 * TOKENS), engine.begin(0, 2 * TOKENS)
    assert engine.kv.stats()["onboards_disk"] == before + 2
    engine.finish(a)
    engine.finish(b)


def test_salt_and_adapter_keep_prefixes_apart(engine: Engine) -> None:
    engine.run(0, 2 * TOKENS, salt=b"a")
    assert engine.run(0, 2 * TOKENS).matched.device == 0
    assert engine.run(0, 2 * TOKENS, adapter=b"a").matched.device == 0
    assert engine.run(0, 2 * TOKENS, salt=b"a").matched.device == 2 * TOKENS


def test_committing_other_tokens_than_begun_is_refused(engine: Engine) -> None:
    engine.run(0, 2 * TOKENS)
    request = engine.begin(0, 2 * TOKENS)
    engine.wait(request)
    other = gdskv.block_keys(tokens(7, 2 * TOKENS), TOKENS)
    with pytest.raises(gdskv.GdskvError, match="other tokens"):
        engine.kv.commit(request, keys=other, now=1)
    engine.kv.release(request, now=1)
    engine.kv.check()


def test_commit_before_ready_and_use_after_release_are_refused(engine: Engine) -> None:
    request = engine.run(0, TOKENS)
    with pytest.raises(gdskv.GdskvError, match="released"):
        engine.kv.commit(request, now=1)
    with pytest.raises(gdskv.GdskvError, match="released"):
        engine.kv.allocate(request, 1, now=1)


def test_prefetch_brings_blocks_to_host(engine: Engine) -> None:
    engine.run(0, 2 * TOKENS)
    for doc in range(1, 5):
        engine.run(doc, 8 * TOKENS)
    assert engine.kv.match(tokens(0, 2 * TOKENS), now=engine.now).disk == 2 * TOKENS
    assert engine.kv.prefetch(tokens(0, 2 * TOKENS), now=engine.now) == 2
    assert engine.run(0, 2 * TOKENS).matched.host == 2 * TOKENS


@pytest.mark.parametrize("tiers", [(4, 0, 0), (4, 4, 0), (4, 0, 16), (1, 1, 1), (1, 1, 8), (2, 1, 1)])
def test_any_combination_of_tiers_serves_right_bytes(tmp_path: Path, tiers: tuple[int, int, int]) -> None:
    with gdskv.BlockManager(config(tmp_path, *tiers), LAYOUT, NAMESPACE) as kv:
        engine = Engine(kv)
        for i in range(60):
            engine.run(i * 7 % 5, (1 + i % tiers[0]) * TOKENS)
        engine.drain()
        assert kv.stats()["device_leased"] == 0
        assert kv.stats()["failed_copies"] == 0


def test_a_manager_with_no_device_tier_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(gdskv.ConfigError, match="device_bytes"):
        gdskv.BlockManager(config(tmp_path, device=0), LAYOUT, NAMESPACE)


def test_a_device_that_the_engine_cannot_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gdskv.ConfigError, match="host memory only"):
        gdskv.BlockManager(config(tmp_path).model_copy(update={"device": "cuda", "io": "posix"}), LAYOUT, NAMESPACE)


def test_use_after_close_is_refused(tmp_path: Path) -> None:
    kv = gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE)
    assert kv.close()
    assert kv.close()
    with pytest.raises(gdskv.StoreClosed):
        kv.poll(now=0)


def test_a_flipped_byte_on_disk_is_a_recompute_not_a_wrong_block(engine: Engine) -> None:
    engine.run(0, 2 * TOKENS)
    for doc in range(1, 5):
        engine.run(doc, 8 * TOKENS)
    engine.drain()
    kv = engine.kv
    entry = kv.store.table.match(gdskv.block_keys(tokens(0, 2 * TOKENS), TOKENS, namespace=kv.store.digest))[0][1]
    slot = int(kv.store.table.arrays.e["slot"][entry, 2]) - kv.store.table.base(2)
    _, offset = kv.store.disk_pool.locate(slot)
    slab = next(p for p in engine_slabs(engine))
    with open(slab, "r+b") as file:
        file.seek(offset + 100)
        byte = file.read(1)
        file.seek(offset + 100)
        file.write(bytes([byte[0] ^ 1]))
    engine.now += 1
    request = engine.begin(0, 2 * TOKENS)
    engine.wait(request)
    assert request.failed.tolist() == [1]
    assert request.cached_blocks == 1
    engine.finish(request)
    assert kv.stats()["bad_payloads"] == 1
    assert kv.stats()["quarantined"] == 1
    assert engine.run(0, 2 * TOKENS).matched.device == 2 * TOKENS


def engine_slabs(engine: Engine) -> list[Path]:
    """The slab files of a manager."""
    return [
        p
        for d in engine.kv.store.config.directories
        for p in Path(d).rglob("*")
        if p.is_file() and p.stat().st_size >= BLOCK
    ]


def test_payload_is_a_function_of_the_key() -> None:
    keys = gdskv.block_keys(tokens(0, 2 * TOKENS), TOKENS)
    assert not np.array_equal(payload(keys[0]), payload(keys[1]))
