"""Kinds W1 to W10: ways in which other caches came to serve wrong bytes, on real files with faults put in."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import Fail, Flip, Short
from faulty import COPY, READ, WRITE, Bench, aligned, disk_offset, read_block, rewrite
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, payload, tokens

import gdskv


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as b:
        yield b


@pytest.mark.parametrize("fault", [Short(0), Short(512), Short(BLOCK - 1), Fail(errno.EIO)], ids=str)
def test_w1_a_short_or_failed_read_is_never_counted_as_loaded(bench: Bench, fault: Any) -> None:
    bench.to_disk(0, 3)
    bench.fail(READ, fault)
    request = bench.engine.begin(0, 3 * TOKENS)
    assert request.matched.disk == 3 * TOKENS
    bench.engine.wait(request)
    assert len(request.failed) == 1
    assert request.cached_blocks == request.failed[0]
    bench.engine.finish(request)
    s = bench.stats
    assert (s["failed_reads"], s["transient_errors"], s["quarantined"]) == (1, 1, 0)
    assert bench.engine.run(0, 3 * TOKENS).matched.device == 3 * TOKENS
    bench.settled()


def test_w1_the_store_tells_which_blocks_did_not_come(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0) as b:
        keys = gdskv.block_keys(tokens(0, 4 * TOKENS), TOKENS)
        memory = aligned(4)
        for i in range(4):
            memory[i] = payload(keys[i])
        b.kv.store(keys, source=memory, now=0)
        b.finished()
        memory[:] = 0
        b.fail(READ, Short(100))
        ticket = b.kv.load(b.kv.match(keys, now=0), into=memory, now=0)
        done = b.finished()
        assert done.ticket == ticket
        assert len(done.failed) == 1 and done.bytes == 3 * BLOCK
        for i in {0, 1, 2, 3} - set(done.failed.tolist()):
            assert np.array_equal(memory[i], payload(keys[i]))
        assert b.stats["failed_reads"] == 1
        b.settled()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_w2_a_failed_write_is_never_visible(bench: Bench, code: int) -> None:
    bench.fail(WRITE, Fail(code), times=1000)
    for doc in range(8):
        bench.engine.run(doc, 8 * TOKENS)
    bench.drain()
    assert all(bench.found(doc, 8).disk == 0 for doc in range(8))
    s = bench.stats
    assert s["failed_writes"] > 0 and s["disk_used"] == 0
    bench.mend()
    bench.tick(100)
    for doc in range(8):
        bench.engine.run(doc, 8 * TOKENS)
    bench.drain()
    assert bench.stats["disk_used"] > 0, "the tier serves again when the device does"
    bench.settled()


def test_w2_who_joined_a_block_whose_write_fails_is_told(tmp_path: Path) -> None:
    with Bench(tmp_path, device=2, host=0, disk=16) as b:
        b.engine.run(0, 2 * TOKENS)
        b.hold.hold(WRITE)
        b.fail(WRITE, Fail(), times=2)
        other = b.engine.begin(1, 2 * TOKENS)  # document 0 is on its way to disk
        b.kv.cancel(other, now=0)
        request = b.engine.begin(0, 2 * TOKENS)
        assert request.matched.disk == 2 * TOKENS
        b.hold.let()
        b.engine.wait(request)
        assert request.failed.tolist() == [0, 1]
        b.engine.finish(request)
        assert b.stats["failed_writes"] == 2
        b.settled()


def test_w2_a_store_that_fails_is_reported_and_not_found(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0) as b:
        keys = gdskv.block_keys(tokens(0, 3 * TOKENS), TOKENS)
        b.fail(WRITE, Fail(errno.ENOSPC), times=3)
        b.kv.store(keys, source=aligned(3), now=0)
        done = b.finished()
        assert done.failed.tolist() == [0, 1, 2] and done.bytes == 0
        assert b.kv.match(keys, now=0).length == 0
        assert b.stats["failed_writes"] == 3
        b.settled()


def test_w3_blocks_that_changed_places_on_disk_are_not_served(bench: Bench) -> None:
    bench.to_disk(0, 2)
    first, second = (disk_offset(bench.store, 0, i) for i in (0, 1))
    rewrite(bench.folder, [(first, read_block(bench.folder, second)), (second, read_block(bench.folder, first))])
    request = bench.engine.begin(0, 2 * TOKENS)
    bench.engine.wait(request)
    assert request.failed.tolist() == [0, 1]
    bench.engine.finish(request)
    s = bench.stats
    assert (s["bad_payloads"], s["quarantined"]) == (2, 2)
    bench.settled()


def test_w3_a_flipped_bit_is_found_and_its_slot_not_used_again(bench: Bench) -> None:
    bench.to_disk(0, 2)
    bench.fail(READ, Flip(17))
    request = bench.engine.begin(0, 2 * TOKENS)
    bench.engine.wait(request)
    assert len(request.failed) == 1
    bench.engine.finish(request)
    s = bench.stats
    assert (s["bad_payloads"], s["quarantined"], s["disk_bad"]) == (1, 1, 1)
    bench.settled()


def test_w3_what_another_block_took_the_place_of_is_not_loaded(tmp_path: Path) -> None:
    """A match that lost its block must not load the block that got its entry in the table, through staging either."""
    with Bench(tmp_path, store=True, host=8, disk=16) as b:
        keys = [gdskv.block_keys(tokens(doc, TOKENS), TOKENS) for doc in range(2)]
        memory = aligned(1)
        memory[0] = payload(keys[0][0])
        b.kv.store(keys[0], source=memory, now=0)
        b.drain()
        for i in range(8):  # then it is on disk alone
            b.kv.store(gdskv.block_keys(tokens(100 + i, TOKENS), TOKENS), source=aligned(1), now=1)
            b.drain()
        late, early = b.kv.match(keys[0], now=1), b.kv.match(keys[0], now=1)
        assert late.tier.tolist() == [2]
        b.fail(READ, Flip(1))
        b.kv.load(early, into=aligned(1), now=1)
        b.drain()
        assert b.stats["bad_payloads"] == 1
        memory[0] = payload(keys[1][0])
        b.kv.store(keys[1], source=memory, now=1)  # gets the entry that is free now
        b.drain()
        b.done.clear()
        got = np.zeros(BLOCK + 1, np.uint8)[1:].reshape(1, BLOCK)
        b.kv.load(late, into=got, now=1)
        done = b.finished()
        assert done.failed.tolist() == [0]
        assert not got.any()
        b.settled()


def test_w5_whatever_shapes_bytes_is_in_the_namespace() -> None:
    plain = {"layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float16", "tokens_per_block": 16}
    layouts = [
        gdskv.KVLayout(**plain),
        gdskv.KVLayout(**{**plain, "dtype": "bfloat16"}),  # the same size
        gdskv.KVLayout(**{**plain, "kv_heads": 4, "head_dim": 8}),  # the same size
        gdskv.KVLayout(**{**plain, "layers": 4, "tokens_per_block": 8}),  # the same size
        gdskv.KVLayout(**plain, fused=True),
        gdskv.KVLayout(**{**plain, "layers": 4, "kv_heads": 1, "head_dim": 32}, kind="mla"),  # the same size
    ]
    names = [
        {},
        {"revision": "b"},
        {"dtype": "fp8 model"},
        {"rope": "linear 2"},
        {"rope": {"type": "yarn", "factor": 4}},
        {"rope": {"type": "yarn", "factor": 8}},
        {"adapter": "lora-1"},
        {"kv_scales": "calibrated"},
        {"tp": 2},
        {"tp": 2, "rank": 1},
        {"pp": 2},
        {"cp": 2},
        {"extra": (("window", "4096"),)},
    ]
    digests = {gdskv.Namespace(model="m", **n).digest(layout) for n in names for layout in layouts}
    assert len(digests) == len(names) * len(layouts)


@pytest.mark.parametrize(("host", "op"), [(0, WRITE), (8, COPY)], ids=["to disk", "to host"])
def test_w7_a_device_block_is_not_overwritten_before_its_copy_has_left(tmp_path: Path, host: int, op: int) -> None:
    with Bench(tmp_path, device=2, host=host, disk=16) as b:
        b.engine.run(0, 2 * TOKENS)
        b.hold.hold(op)
        request = b.engine.begin(1, 2 * TOKENS)  # takes the slots of document 0, whose bytes are still there
        b.polls()
        assert b.hold.waiting(op) == 2
        assert not b.kv.is_ready(request), "nobody may compute into the slots yet"
        b.hold.let()
        b.engine.finish(request)
        assert b.engine.run(0, 2 * TOKENS).matched.device == 0
        assert b.engine.verified == 2
        b.settled()


def test_w7_retained_blocks_are_written_from_slots_that_stay(tmp_path: Path) -> None:
    with Bench(tmp_path, device=2, host=0, disk=16) as b:
        b.hold.hold(WRITE)
        b.engine.run(0, 2 * TOKENS, retention=gdskv.Retention(ttl=100))
        assert b.stats["retained_writes"] == 2
        request = b.engine.begin(1, 2 * TOKENS)
        b.polls()
        assert not b.kv.is_ready(request)
        b.hold.let()
        b.engine.finish(request)
        assert b.engine.run(0, 2 * TOKENS).matched.disk == 2 * TOKENS
        b.settled()


def test_w7_the_callers_memory_is_his_again_only_when_the_ticket_is_done(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True) as b:
        keys = gdskv.block_keys(tokens(0, 2 * TOKENS), TOKENS)
        memory = aligned(2)
        for i in range(2):
            memory[i] = payload(keys[i])
        b.hold.hold(COPY)
        b.kv.store(keys, source=memory, now=0)
        b.polls()
        assert b.done == []
        b.hold.let()
        b.finished()
        memory[:] = 0xFF
        b.kv.load(b.kv.match(keys, now=0), into=(got := aligned(2)), now=0)
        b.finished()
        assert all(np.array_equal(got[i], payload(keys[i])) for i in range(2))
        b.settled()


def test_w8_a_slot_being_read_is_not_overwritten_by_the_next_spill(tmp_path: Path) -> None:
    with Bench(tmp_path, device=2, host=0, disk=2) as b:
        b.engine.run(0, 2 * TOKENS)
        b.engine.run(1, 2 * TOKENS)
        b.drain()
        assert b.found(0, 2).disk == 2 * TOKENS
        b.hold.hold(READ)
        request = b.engine.begin(0, 2 * TOKENS)  # document 1 leaves the device meanwhile
        b.kv.cancel(request, now=0)
        other = b.engine.begin(2, 2 * TOKENS)  # document 0 is being read, and there is no other room on disk
        b.polls()
        reads = offsets(b, READ)
        before = len(b.recorder.transfers)
        assert b.hold.waiting(READ) == 2
        assert not set(offsets(b, WRITE, before)) & set(reads)
        b.hold.let()
        b.engine.finish(other)
        b.engine.run(0, 2 * TOKENS)
        b.engine.run(1, 2 * TOKENS)
        b.settled()


def test_w9_keys_have_128_bits_and_salt_and_adapter_domains_of_their_own() -> None:
    ids = tokens(0, 4 * TOKENS)
    keys = [
        gdskv.block_keys(ids, TOKENS, **more)
        for more in (
            {},
            {"salt": b"a"},
            {"adapter": b"a"},
            {"salt": b"ab"},
            {"salt": b"a", "adapter": b"b"},
            {"salt": b"", "adapter": b"ab"},
            {"namespace": b"a"},
            {"content": [(0, b"a")]},
        )
    ]
    assert keys[0].dtype == np.uint64 and keys[0].shape == (4, 2)
    assert len({k.tobytes() for chain in keys for k in chain}) == 4 * len(keys)


def test_w9_a_table_tells_keys_apart_that_differ_in_one_half(tmp_path: Path) -> None:
    with gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE) as kv:
        key = np.array([[7, 9]], np.uint64)
        request = kv.begin(keys=key, now=0)
        Engine(kv).finish(request)
        assert sum(kv.match(keys=key, now=0)) == TOKENS
        for other in ([7, 8], [6, 9], [9, 7]):
            assert kv.match(keys=np.array([other], np.uint64), now=0) == (0, 0, 0)


def test_w10_a_partial_block_is_in_no_tier(bench: Bench) -> None:
    bench.engine.run(0, 2 * TOKENS + 5)
    for doc in range(1, 6):
        bench.engine.run(doc, 8 * TOKENS)
    bench.drain()
    assert sum(bench.found(0, 3)) == 2 * TOKENS
    request = bench.engine.run(0, 3 * TOKENS)
    assert request.matched.disk == 2 * TOKENS
    assert bench.stats["committed"] == 2 + 40 + 1
    bench.settled()


# ---- what they share


def offsets(b: Bench, op: int, start: int = 0) -> list[int]:
    """Where transfers of payloads went."""
    return [int(t["offset"]) for t in b.recorder.transfers[start:] if t["op"] == op and t["slab"] == 0]
