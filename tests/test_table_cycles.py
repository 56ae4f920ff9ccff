"""Long runs of the table: nothing grows, no slot is used before its turn, no transfer waits for ever."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
from pair import LENGTHS, Pair, key_array

from gdskv.io.base import RESULT
from gdskv.table import BlockTable, Rejection
from gdskv.table.state import NENTS, NHEAP, NLISTED, NXFREE, ORPH_HEAD, ORPH_TAIL

BLOCKS = 2  # of a document


class Engine:
    """Asks a table for documents in turn; transfers are done as soon as they may start."""

    def __init__(self, table: BlockTable, documents: int) -> None:
        self.table = table
        self.documents = [key_array([10 * n + i for i in range(1, BLOCKS + 1)]) for n in range(1, documents + 1)]
        self.priority, self.ttl = np.full(BLOCKS, 35, np.uint8), np.zeros(BLOCKS, np.int64)
        self.ids, self.results = np.zeros(64, np.int32), np.zeros(64, RESULT)
        self.results["moved"] = LENGTHS[0]

    def move(self) -> None:
        while self.table.deferred:
            n, _ = self.table.launch(64, self.ids)
            self.results["tag"][:n] = self.ids[:n]
            self.table.complete(self.results, n, LENGTHS)

    def cycle(self, n: int) -> int:
        """One document comes, which makes others leave; how many of its blocks came from below."""
        keys = self.documents[n % len(self.documents)]
        begun = self.table.begin(keys, BLOCKS)
        assert not isinstance(begun, Rejection)
        self.move()
        assert self.table.landed(begun, 0) == BLOCKS
        self.table.commit(keys, begun.slots, self.priority, self.ttl, False)
        self.table.release(begun.slots)
        return begun.matched


def accounts(table: BlockTable) -> list[Any]:
    """Whatever could grow."""
    m = table.arrays.m
    counts = table.counters()
    levels = {name: counts[name] for name in counts if name.split("_")[-1] in ("used", "free", "leased", "bad")}
    return [levels, *(m[at + t] for at in (NHEAP, NLISTED) for t in range(3)), m[NENTS], m[NXFREE], table.deferred]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_r9_counts_and_memory_are_flat_over_100_000_spill_and_reuse_cycles() -> None:
    table = BlockTable(4, 4, 64)
    engine = Engine(table, documents=16)  # 32 blocks: each comes back from disk after others have pushed it out
    for n in range(1_000):
        engine.cycle(n)
    table.check(exclusive=True)
    gc.collect()
    before, memory = accounts(table), resident()
    reused = sum(engine.cycle(n) for n in range(1_000, 101_000))
    gc.collect()
    table.check(exclusive=True)
    assert reused == BLOCKS * 100_000
    assert accounts(table) == before
    assert table.arrays.m[ORPH_HEAD] == table.arrays.m[ORPH_TAIL]
    assert resident() - memory < 4 << 20
    assert table.counters()["onboards_disk"] > 100_000
    assert table.counters()["spills"] == 32, "one disk copy is kept"


def test_r9_counts_are_flat_where_every_block_is_new() -> None:
    table = BlockTable(4, 4, 16)
    engine = Engine(table, documents=5_000)
    for n in range(1_000):
        engine.cycle(n)
    before = accounts(table)
    for n in range(1_000, 5_000):
        engine.cycle(n)
    table.check(exclusive=True)
    assert accounts(table) == before


def chain(pair: Pair, *keys: int) -> None:
    """A request that computes a chain."""
    request = pair.begin(list(keys), len(keys))
    assert request is not None
    finish(pair)
    assert pair.is_ready(request)
    pair.commit(request, [35] * len(keys), [0] * len(keys))
    pair.release(request)


def finish(pair: Pair) -> None:
    while pair.twin.deferred or pair.twin.launched:
        pair.launch(64)
        for x in list(pair.twin.launched):
            pair.complete(x)


def test_w8_a_disk_slot_that_is_read_is_not_overwritten_before_the_read_has_landed() -> None:
    pair = Pair(2, 0, 1)
    for key in (1, 2, 3):
        chain(pair, key)  # 1 goes to the only disk slot
    reader = pair.begin([1], 1)
    assert reader is not None
    (read,) = pair.launch(64)
    assert (read.kind, read.block.key) == ("disk to device", 1)
    pair.release(reader)
    assert pair.begin([4], 1) is not None  # 3 leaves, and takes the disk slot that 1 is still read from
    assert pair.twin.blocks[3].at[2] is read.source
    assert pair.launch(64) == []
    pair.complete(read)
    (write,) = pair.launch(64)
    assert (write.kind, write.block.key) == ("device to disk", 3)
    pair.complete(write)


def test_w7_a_device_slot_is_not_refilled_before_its_block_has_left_it() -> None:
    pair = Pair(1, 1, 0)
    chain(pair, 1)
    second = pair.begin([2], 1)
    assert second is not None
    (move,) = pair.launch(64)
    assert (move.kind, move.block.key) == ("device to host", 1)
    assert not pair.is_ready(second)
    pair.complete(move)
    assert pair.is_ready(second)


def test_two_blocks_that_change_places_do_not_wait_for_each_other() -> None:
    pair = Pair(1, 2, 0)
    chain(pair, 1)
    chain(pair, 2)
    assert pair.where() == {1: {1: 1}, 2: {0: 0}}
    for key in (1, 2, 1, 2):
        request = pair.begin([key], 1)  # up, while the other goes down, over and over before anything has moved
        assert request is not None
        pair.release(request)
    assert pair.table.deferred == 8
    kinds = []
    while pair.twin.deferred:
        started = pair.launch(64)
        assert started, "transfers wait in a circle"
        for x in started:
            kinds.append((x.kind, x.block.key))
            pair.complete(x)
    assert len(kinds) == 8
    finish(pair)


def test_r5_landed_reads_free_slots_for_what_waits() -> None:
    pair = Pair(2, 2, 4)
    for key in (1, 2, 3, 4):
        chain(pair, key)
        finish(pair)
    requests = [pair.begin([key], 1) for key in (1, 2)]
    assert all(requests)
    assert pair.begin([5], 1) is None, "all slots are leased: rejected at once"
    pair.launch(64)
    for request in requests:
        assert request is not None
        pair.release(request)
    assert pair.begin([5], 1) is not None
    finish(pair)


def test_r3_a_lease_ends_with_its_owner_however_often_a_block_is_leased() -> None:
    pair = Pair(0, 2, 2)
    pair.store([1, 2], [35, 35], [0, 0], 0)
    finish(pair)
    found = [pair.find([1, 2]) for _ in range(3)]
    assert pair.store([3], [35], [0], 1) == 0, "both slots are leased"
    for one in found:
        pair.leave(one)
    assert pair.table.counters()["host_leased"] == 0
    assert pair.store([3], [35], [0], 2) == 1
    finish(pair)


def test_a_commit_of_other_content_in_a_matched_slot_is_refused_and_changes_nothing() -> None:
    table = BlockTable(4, 0, 0)
    wishes = np.full(2, 35, np.uint8), np.zeros(2, np.int64), False
    first = table.begin(key_array([1, 2]), 2)
    assert not isinstance(first, Rejection)
    table.commit(key_array([1, 2]), first.slots, *wishes)
    assert table.commit(key_array([1, 3]), first.slots, *wishes) == -2
    assert len(table.match(key_array([1, 3]))[0]) == 1
    table.check()
