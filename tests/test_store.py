"""KVStore: host and disk under an engine's own memory, of whatever kind, with right and with wrong calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty import READ, Bench, aligned
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, config, payload, tokens

import gdskv
from gdskv.store import Done, Found, Ticket


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, store=True, host=8, disk=32) as b:
        yield b


def chain(doc: int, n: int) -> np.ndarray:
    return gdskv.block_keys(tokens(doc, n * TOKENS), TOKENS)


def crooked(n: int) -> np.ndarray:
    """Memory for `n` blocks that direct I/O does not take."""
    raw = np.zeros(n * BLOCK + 4096 + 8, np.uint8)
    start = -raw.ctypes.data % 4096 + 8
    return raw[start : start + n * BLOCK].reshape(n, BLOCK)


def fill(memory: np.ndarray, keys: np.ndarray) -> np.ndarray:
    for i, key in enumerate(keys):
        memory[i] = payload(key)
    return memory


def right(memory: np.ndarray, keys: np.ndarray) -> bool:
    return all(np.array_equal(memory[i], payload(key)) for i, key in enumerate(keys))


def put(b: Bench, doc: int, n: int, **more: Any) -> Done:
    b.kv.store(chain(doc, n), source=fill(aligned(n), chain(doc, n)), now=b.engine.now, **more)
    return b.finished()


def get(b: Bench, doc: int, n: int, into: Any) -> Done:
    b.kv.load(b.kv.match(chain(doc, n), now=b.engine.now), into=into, now=b.engine.now)
    return b.finished()


def to_disk(b: Bench, doc: int, n: int) -> None:
    """Let a document be on disk alone."""
    put(b, doc, n)
    other = 1000
    while b.store.table.match(chain(doc, n))[1].tolist() != [2] * n:
        put(b, other, 2)
        b.drain()
        other += 1


# ---- from and to memory of every kind


def test_what_was_stored_is_matched_and_loaded_from_host_and_from_disk(bench: Bench) -> None:
    done = put(bench, 0, 4)
    assert isinstance(done.ticket, Ticket) and done.ticket.blocks == 4
    assert done.bytes == 4 * BLOCK and done.failed.tolist() == []
    found = bench.kv.match(chain(0, 6), now=0)
    assert (found.length, found.tier.tolist()) == (4, [1] * 4)
    bench.kv.release(found)
    assert get(bench, 0, 4, memory := aligned(4)).bytes == 4 * BLOCK
    assert right(memory, chain(0, 4))
    to_disk(bench, 1, 3)
    get(bench, 1, 3, memory := aligned(3))
    assert right(memory, chain(1, 3))
    assert bench.stats["staged"] == 0
    bench.settled()


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize(
    "kind", ["array", "addresses", "view of a larger one", "other shape", "tensor", "tensor with a stride", "crooked"]
)
def test_memory_of_every_kind(tmp_path: Path, kind: str, where: str) -> None:
    with Bench(tmp_path, store=True, host=8, disk=32) as b:
        keys = chain(0, 4)
        (put if where == "host" else to_disk)(b, 0, 4)
        raw = aligned(8)
        half = torch.from_numpy(raw.reshape(-1)).view(torch.float16)
        into, seen = {
            "array": (raw, raw[:4]),
            "addresses": (raw.ctypes.data + np.uint64(BLOCK) * np.array([6, 0, 3, 1], np.uint64), raw[[6, 0, 3, 1]]),
            "view of a larger one": (raw[1::2], raw[1::2]),
            "other shape": (raw.view(np.float32).reshape(8, 2, 2, BLOCK // 16), raw[:4]),
            "tensor": (half.view(8, 4, BLOCK // 8), raw[:4]),
            "tensor with a stride": (half.view(4, 2, BLOCK // 2)[:, 1], raw[1::2]),
            "crooked": (c := crooked(4), c),
        }[kind]
        assert get(b, 0, 4, into).failed.tolist() == []
        if kind == "addresses":
            seen = raw[[6, 0, 3, 1]]
        assert right(seen, keys)
        assert b.stats["staged"] == (4 if kind == "crooked" and where == "disk" else 0)
        b.kv.store(chain(1, 4), source=into, now=0)
        b.finished()
        get(b, 1, 4, back := aligned(4))
        assert np.array_equal(back, seen)
        b.settled()


def test_blocks_of_no_whole_pages_are_staged(tmp_path: Path) -> None:
    layout = gdskv.KVLayout.raw(1000, 1)
    settings = gdskv.CacheConfig(host_bytes=4 * 4096, disk_bytes=16 * 4096, directories=[tmp_path], min_free=0)
    with gdskv.KVStore(settings, layout, NAMESPACE) as kv:
        keys = gdskv.block_keys(range(12), 1)
        source = np.arange(12_000, dtype=np.uint64).astype(np.uint8).reshape(12, 1000)
        for start in (0, 4, 8):  # four fit into host at a time
            kv.store(keys[: start + 4], source=source, now=0)
            while not kv.idle:
                kv.poll(now=0)
        found = kv.match(keys, now=0)
        assert found.length == 12
        kv.release(found)
        into = np.zeros_like(source)
        found = kv.match(keys[:3], now=0)
        assert set(found.tier.tolist()) == {2}
        kv.load(found, into=into, now=0)
        while not kv.idle:
            kv.poll(now=0)
        assert np.array_equal(into[:3], source[:3])
        assert kv.stats()["staged"] == 3
        kv.check()


def test_a_store_of_known_blocks_moves_nothing(bench: Bench) -> None:
    put(bench, 0, 4)
    before = bench.stats["io_copy_transfers"]
    done = put(bench, 0, 4)
    assert done.ticket.blocks == 4 and done.failed.tolist() == []
    assert bench.stats["io_copy_transfers"] == before
    done = put(bench, 0, 6)
    assert done.ticket.blocks == 6
    assert bench.stats["io_copy_transfers"] == before + 2


def test_a_match_ends_at_the_first_block_that_is_not_there(bench: Bench) -> None:
    put(bench, 0, 4)
    other = np.concatenate([chain(0, 2), chain(1, 4)[2:]])
    found = bench.kv.match(other, now=0)
    assert found.length == 2
    bench.kv.release(found)
    assert bench.kv.match(chain(7, 3), now=0).length == 0
    assert bench.kv.match(np.empty((0, 2), np.uint64), now=0).length == 0
    bench.settled()


def test_a_block_on_its_way_in_can_be_matched_and_loaded(bench: Bench) -> None:
    bench.hold.hold(2)
    keys = chain(0, 2)
    bench.kv.store(keys, source=fill(aligned(2), keys), now=0)
    found = bench.kv.match(keys, now=0)
    assert found.length == 2
    bench.kv.load(found, into=(memory := aligned(2)), now=0)
    bench.polls()
    assert bench.done == []
    bench.hold.let()
    bench.drain()
    assert [d.failed.tolist() for d in bench.done] == [[], []]
    assert right(memory, keys)
    bench.settled()


def test_a_peek_is_no_use_and_a_match_is_one(bench: Bench) -> None:
    put(bench, 0, 2)
    put(bench, 1, 2)
    before = bench.stats
    assert bench.kv.peek(chain(0, 3), now=0).tolist() == [1, 1]
    assert bench.stats == before, "nothing is held or counted"
    used = bench.store.table.arrays.e["last"].copy()
    bench.kv.peek(chain(0, 2), now=0)
    assert (bench.store.table.arrays.e["last"] == used).all()
    bench.kv.release(bench.kv.match(chain(0, 2), now=0))
    assert (bench.store.table.arrays.e["last"] > used).sum() == 2
    bench.settled()


def test_events_tell_who_heard_them_all_what_each_tier_serves(tmp_path: Path) -> None:
    heard: set[tuple[int, int, int]] = set()

    def hear(b: Bench) -> int:
        events = b.kv.events()
        for k0, k1, tier, stored in events.tolist():
            (heard.add if stored else heard.remove)((k0, k1, tier))
        return len(events)

    def served(doc: int, n: int) -> list[str]:
        return ["".join(str(tier) for tier in (1, 2) if (*key, tier) in heard) for key in chain(doc, n).tolist()]

    with Bench(tmp_path, store=True, host=8, disk=32, events=True) as b:
        ticket = b.kv.store(chain(0, 3), source=fill(aligned(3), chain(0, 3)), now=0)
        assert hear(b) == 0, "not before all of a block has landed"
        assert b.finished().ticket == ticket and hear(b) == 3 and served(0, 3) == ["1"] * 3
        assert hear(b) == 0, "nothing is told twice"
        to_disk(b, 0, 3)  # with nobody asking meanwhile
        hear(b)
        assert served(0, 3) == ["2"] * 3
        used = {tier: sum(about[2] == tier for about in heard) for tier in (1, 2)}
        assert used == {1: b.stats["host_used"], 2: b.stats["disk_used"]}
        b.kv.close()
    heard.clear()
    with Bench(tmp_path, store=True, host=8, disk=32, events=True) as b:
        assert hear(b) == 0, "what came back is told of when it is asked for"
        b.kv.release(b.kv.match(chain(0, 2), now=0))
        assert hear(b) == 2 and served(0, 3) == ["2", "2", ""]
        for doc in range(2000, 2020):
            put(b, doc, 4)
        b.drain()
        hear(b)
        assert served(0, 3) == [""] * 3
        b.settled()


def test_without_a_listener_no_event_is_kept(bench: Bench) -> None:
    put(bench, 0, 3)
    assert len(bench.kv.events()) == 0 and len(bench.store.table.arrays.tq) == 1


def test_prefetch_brings_a_bounded_number_to_host(bench: Bench) -> None:
    to_disk(bench, 0, 4)
    assert bench.kv.prefetch(chain(0, 4), now=0) == 2, "at most a quarter of the host tier"
    bench.drain()
    found = bench.kv.match(chain(0, 4), now=0)
    assert found.tier.tolist() == [1, 1, 2, 2]
    bench.kv.load(found, into=(memory := aligned(4)), now=0)
    bench.finished()
    assert right(memory, chain(0, 4))
    assert bench.stats["prefetches"] == 2
    bench.settled()


def test_poll_gives_each_ticket_once(bench: Bench) -> None:
    put(bench, 0, 4)
    tickets = [
        bench.kv.load(bench.kv.match(chain(0, n), now=0), into=aligned(n), now=0) for n in (1, 2, 3, 4) for _ in (0, 1)
    ]
    bench.drain()
    assert sorted(d.ticket.id for d in bench.done) == sorted(t.id for t in tickets)
    assert {d.ticket.id: d.bytes for d in bench.done} == {t.id: t.blocks * BLOCK for t in tickets}
    bench.polls(3)
    assert len(bench.done) == 8
    bench.settled()


# ---- with a tier only


def test_no_host_tier(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0, disk=16) as b:
        put(b, 0, 4)
        found = b.kv.match(chain(0, 4), now=0)
        assert found.tier.tolist() == [2] * 4
        b.kv.release(found)
        get(b, 0, 4, memory := aligned(4))
        assert right(memory, chain(0, 4))
        assert b.kv.prefetch(chain(0, 4), now=0) == 0
        for doc in range(1, 10):
            put(b, doc, 4)
        s = b.stats
        assert s["disk_used"] == 16 and s["evicted_disk"] == 24
        b.settled()


def test_no_host_tier_and_crooked_memory_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0, disk=16) as b:
        put(b, 0, 2)
        found = b.kv.match(chain(0, 2), now=0)
        for call in (
            lambda: b.kv.load(found, into=crooked(2), now=0),
            lambda: b.kv.store(chain(1, 2), source=crooked(2), now=0),
        ):
            with pytest.raises(gdskv.GdskvError, match=r"not aligned to 4096 and there is no host tier .* host_bytes"):
                call()
        b.kv.load(found, into=(memory := aligned(2)), now=0)  # the match is still good
        b.finished()
        assert right(memory, chain(0, 2))
        b.settled()


def test_no_disk_tier(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=4, disk=0) as b:
        for doc in range(4):
            put(b, doc, 2)
        assert [b.kv.match(chain(doc, 2), now=0).length for doc in range(2)] == [0, 0]
        get(b, 3, 2, memory := crooked(2))
        assert right(memory, chain(3, 2))
        s = b.stats
        assert s["dropped_last"] == 4 and s["staged"] == 0 and s["spills"] == 0
        b.settled()


def test_no_tier_at_all_is_refused() -> None:
    with pytest.raises(gdskv.ConfigError, match="host_bytes, disk_bytes"):
        gdskv.KVStore(gdskv.CacheConfig(), LAYOUT, NAMESPACE)


def test_one_slot_a_tier(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=1, disk=1) as b:
        for i in range(30):
            put(b, i % 3, 1)
            found = b.kv.match(chain(i % 3, 1), now=0)
            assert found.length == 1
            b.kv.load(found, into=(memory := aligned(1)), now=0)
            b.finished()
            assert right(memory, chain(i % 3, 1))
            b.kv.check()
        assert put(b, 9, 4).ticket.blocks == 1, "a leading run, as far as there is room"
        b.settled()


# ---- wrong calls


def test_a_match_is_loaded_once(bench: Bench) -> None:
    put(bench, 0, 2)
    found = bench.kv.match(chain(0, 2), now=0)
    bench.kv.load(found, into=aligned(2), now=0)
    for _ in range(2):
        with pytest.raises(gdskv.GdskvError, match=r"loaded or released already. Call match again"):
            bench.kv.load(found, into=aligned(2), now=0)
    bench.kv.release(found)
    bench.finished()
    bench.settled()


def test_release_may_be_said_twice_and_ends_the_match(bench: Bench) -> None:
    put(bench, 0, 2)
    found, other = bench.kv.match(chain(0, 2), now=0), bench.kv.match(chain(0, 2), now=0)
    for _ in range(3):
        bench.kv.release(found)
    assert bench.stats["host_leased"] == 2, "the other match holds them still"
    with pytest.raises(gdskv.GdskvError, match="released already"):
        bench.kv.load(found, into=aligned(2), now=0)
    bench.kv.release(other)
    bench.settled()


def test_an_empty_match_loads_nothing_and_says_so(bench: Bench) -> None:
    found = bench.kv.match(chain(0, 2), now=0)
    assert isinstance(found, Found) and found.length == 0
    bench.kv.release(found)
    ticket = bench.kv.load(found, into=aligned(2), now=0)
    (done,) = bench.kv.poll(now=0)
    assert (done.ticket, done.bytes, done.failed.tolist()) == (ticket, 0, [])


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (np.zeros(1, np.uint64), "1 addresses for 2 blocks"),
        (np.zeros((1, BLOCK), np.uint8), r"shape \(1, 4096\) does not hold 2 blocks of 4096 contiguous bytes"),
        (np.zeros((2, BLOCK // 2), np.uint8), "does not hold 2 blocks"),
        (np.zeros((2, 2 * BLOCK), np.uint8)[:, ::2], "does not hold 2 blocks"),
        (np.zeros((BLOCK, 2), np.uint8).T, "does not hold 2 blocks"),
        (np.zeros(2 * BLOCK, np.uint8), "does not hold 2 blocks"),
        (np.zeros((), np.uint8), "does not hold 2 blocks"),
        (np.broadcast_to(np.zeros((1, BLOCK), np.uint8), (2, BLOCK)), "does not hold 2 blocks|read-only"),
        (torch.zeros((2, BLOCK), dtype=torch.uint8).t(), "does not hold 2 blocks"),
        (torch.zeros((2, BLOCK), dtype=torch.uint8, device="meta"), "memory on meta is out of .* reach"),
        ([1, 2], "memory is a list"),
        (None, "memory is a NoneType"),
        (b"x" * 2 * BLOCK, "memory is a bytes"),
    ],
)
def test_memory_that_does_not_fit_is_refused_and_nothing_is_lost(bench: Bench, memory: Any, message: str) -> None:
    put(bench, 0, 2)
    found = bench.kv.match(chain(0, 2), now=0)
    with pytest.raises(gdskv.GdskvError, match=message):
        bench.kv.load(found, into=memory, now=0)
    if "read-only" not in message:
        with pytest.raises(gdskv.GdskvError, match=message):
            bench.kv.store(chain(1, 2), source=memory, now=0)
    bench.kv.load(found, into=(good := aligned(2)), now=0)
    bench.finished()
    assert right(good, chain(0, 2))
    bench.settled()


def test_read_only_memory_can_be_stored_from_and_not_loaded_to(bench: Bench) -> None:
    memory = fill(aligned(2), chain(0, 2))
    memory.flags.writeable = False
    bench.kv.store(chain(0, 2), source=memory, now=0)
    bench.finished()
    with pytest.raises(gdskv.GdskvError, match="read-only"):
        bench.kv.load(bench.kv.match(chain(0, 2), now=0), into=memory, now=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (np.zeros((2, 2), np.int64), "keys are int64 of shape"),
        (np.zeros((2, 3), np.uint64), r"shape \(2, 3\)"),
        (np.zeros(4, np.uint64), r"shape \(4,\)"),
        ([b"x" * 16], "a list"),
    ],
)
def test_keys_of_another_kind_are_refused(bench: Bench, keys: Any, message: str) -> None:
    for call in (
        lambda: bench.kv.match(keys, now=0),
        lambda: bench.kv.prefetch(keys, now=0),
        lambda: bench.kv.store(keys, source=aligned(2), now=0),
    ):
        with pytest.raises(gdskv.KeyFormatError, match=message):
            call()


def test_keys_may_be_a_view_or_read_only(bench: Bench) -> None:
    put(bench, 0, 4)
    doubled = np.repeat(chain(0, 4), 2, axis=0)
    frozen = chain(0, 4)
    frozen.flags.writeable = False
    for keys in (doubled[::2], frozen, np.asfortranarray(chain(0, 4))):
        found = bench.kv.match(keys, now=0)
        assert found.length == 4
        bench.kv.release(found)


def test_use_after_close_is_refused(tmp_path: Path) -> None:
    kv = gdskv.KVStore(config(tmp_path, device=0), LAYOUT, NAMESPACE)
    assert kv.close() and kv.close()
    for call in (
        lambda: kv.match(chain(0, 1), now=0),
        lambda: kv.store(chain(0, 1), source=aligned(1), now=0),
        lambda: kv.poll(now=0),
    ):
        with pytest.raises(gdskv.StoreClosed, match="Open a new one"):
            call()


# ---- giving up


def test_cancel_before_anything_started(bench: Bench) -> None:
    to_disk(bench, 0, 3)
    bench.hold.hold(READ)
    ticket = bench.kv.load(bench.kv.match(chain(0, 3), now=0), into=(memory := aligned(3)), now=0)
    bench.kv.cancel(ticket)
    bench.kv.cancel(ticket)
    assert bench.finished().failed.tolist() == [0, 1, 2]
    assert not memory.any()
    bench.kv.cancel(ticket)
    bench.hold.let()
    get(bench, 0, 3, memory)
    assert right(memory, chain(0, 3))
    bench.settled()


def test_cancel_of_what_has_happened_changes_nothing(bench: Bench) -> None:
    put(bench, 0, 3)
    ticket = bench.kv.load(bench.kv.match(chain(0, 3), now=0), into=(memory := aligned(3)), now=0)
    bench.polls()
    bench.kv.cancel(ticket)
    (done,) = bench.done
    assert done.failed.tolist() == [] and right(memory, chain(0, 3))
    bench.settled()


def test_close_writes_each_block_once_even_where_memory_holds_more_than_the_disk(tmp_path: Path) -> None:
    kv = gdskv.KVStore(config(tmp_path, device=0, host=32, disk=8), LAYOUT, NAMESPACE)
    kv.store(chain(0, 32), source=fill(aligned(32), chain(0, 32)), now=0)
    while not kv.idle:
        kv.poll(now=0)
    assert kv.close(timeout=30)
    assert kv.stats()["spills"] <= 16
    with gdskv.KVStore(config(tmp_path, device=0, host=0, disk=8), LAYOUT, NAMESPACE) as again:
        found = again.match(chain(0, 32), now=0)
        assert found.length == 8
