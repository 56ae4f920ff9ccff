"""``Pump``: brings an I/O engine's results to the table and the table's transfers to the engine, in bounded rounds.

Waits for nothing. Must not know keys, requests or tickets.
"""

from __future__ import annotations

import errno
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdskv import extents
from gdskv.io.base import READ, RESULT, TRANSFER, IOEngine, Results, Transfers
from gdskv.ledger import Records
from gdskv.table import DISK, BlockTable

__all__ = ["ROUND", "Pump"]

ROUND = 512
"""Results taken in, and transfers handed out, at a time."""
SOME = 128
"""Transfers handed out by a call that is not a poll."""
BUDGET_NS = 250_000
"""After that no further round begins in a call: what is left keeps until the next."""


class Pump:
    """What moves, on its way between table and engine.

    Parameters
    ----------
    table : BlockTable
    io : IOEngine
    ledger : Records or None
        Keeps the disk tier's records; they are written by the same engine.
    lengths : ndarray of int64
        Bytes of a transfer, by its kind.
    pools : ndarray of int64, shape (2, 3)
        Device and host: number of the first slot, address, stride.
    slabs : ndarray of int64
        First disk slot of each slab, and the end.
    """

    def __init__(
        self,
        table: BlockTable,
        io: IOEngine,
        ledger: Records | None,
        lengths: NDArray[np.int64],
        pools: NDArray[np.int64],
        slabs: NDArray[np.int64],
    ) -> None:
        self._table, self._io, self._ledger = table, io, ledger
        self._lengths, self._pools, self._slabs = lengths, pools, slabs
        self._shortest = int(lengths.min())
        self._ids = np.empty(ROUND, np.int32)
        self._results = np.zeros(ROUND, RESULT)
        self._reads, self._writes = _Queue(), _Queue()
        """Described and not yet accepted by the engine; writes must not hold back reads and copies."""
        self._again: set[int] = set()
        """Reads that failed once and are with the device again."""
        self.reads_again = 0
        """How many there were."""
        self.failed: list[tuple[int, int]] = []
        """Ticket and index of blocks that did not arrive; whoever knows the tickets takes them out."""

    def start(self) -> None:
        """Hand out some of what may start, so that the device has work until the next poll."""
        self._hand_out(SOME)
        self._submit()

    def run(self) -> None:
        """Take in what has landed and hand out what may start, rounds of both until little is left or time is up."""
        end = time.perf_counter_ns() + BUDGET_NS
        more = True
        while more:
            landed = self._take_in()
            started = self._hand_out()
            self._submit()
            more = ROUND in (landed, started) and time.perf_counter_ns() < end
        if self._ledger is not None:
            self._record(self._ledger)

    def _take_in(self) -> int:
        table, ledger = self._table, self._ledger
        n = self._io.poll(self._results)
        if n:
            results = self._results[:n]
            if ledger is not None:
                ledger.health.see(table, results)
                records = results["tag"] >= table.transfers
                if records.any():
                    ledger.finish(table, results[records])
                    results = results[~records]
            results = self._once_more(results)
            self._fail(table.complete(results, len(results), self._lengths))
        return n

    def _once_more(self, results: Results) -> Results:
        """Reads that failed go to the device once more before anybody is told; what is left of `results`."""
        tags, moved = results["tag"], results["moved"]
        if not len(results) or (not self._again and int(moved.min()) >= self._shortest):
            return results
        kinds = self._table.arrays.x["kind"][tags]
        failed = (extents.OPS[kinds] == READ) & (moved != self._lengths[kinds]) & (moved != -errno.ECANCELED)
        again = [tag for tag in tags[failed].tolist() if tag not in self._again]
        self._again.difference_update(tags.tolist())
        if not again:
            return results
        self._again.update(again)
        self.reads_again += len(again)
        self._describe(np.array(again, np.int32), len(again))
        return results[~np.isin(tags, again)]

    def _hand_out(self, most: int = ROUND) -> int:
        table = self._table
        if not table.deferred:
            return 0
        n, never = table.launch(most, self._ids)
        self._fail(never)
        if n:
            self._describe(self._ids, n)
        return n

    def _describe(self, ids: NDArray[np.int32], n: int) -> None:
        """Say what the engine is to do for `n` transfers."""
        split = extents.describe(
            ids,
            n,
            self._table.arrays.x,
            extents.OPS,
            self._lengths,
            self._pools,
            self._slabs,
            self._table.base(DISK),
            self._reads.room(n),
            self._writes.room(n),
        )
        self._reads.add(split)
        self._writes.add(n - split)

    def _record(self, ledger: Records) -> None:
        if ledger.health.tick(self._table):
            ledger.catch_up(self._table)
        if len(self._writes) < ROUND:
            records = ledger.collect(self._table, int(self._table.now))
            if len(records):
                self._writes.room(len(records))[:] = records
                self._writes.add(len(records))
                self._writes.submit(self._io)

    def _submit(self) -> None:
        self._reads.submit(self._io)
        self._writes.submit(self._io)

    def _fail(self, rows: NDArray[np.int64]) -> None:
        if len(rows):
            self.failed.extend((ticket, index) for ticket, index in rows.tolist())


class _Queue:
    """Transfers in order, in one array that is seldom moved and grows where it must."""

    def __init__(self) -> None:
        self._array: NDArray[Any] = np.zeros(4 * ROUND, TRANSFER)
        self._head = self._tail = 0

    def __len__(self) -> int:
        return self._tail - self._head

    def room(self, n: int) -> Transfers:
        """Space for `n` behind the last one; they count once they are added."""
        if self._tail + n > len(self._array):
            kept = self._array[self._head : self._tail]
            larger = np.zeros(max(len(self._array), 2 * (len(kept) + n)), TRANSFER)
            larger[: len(kept)] = kept
            self._array, self._head, self._tail = larger, 0, len(kept)
        return self._array[self._tail : self._tail + n]

    def add(self, n: int) -> None:
        self._tail += n

    def submit(self, io: IOEngine) -> None:
        """Hand a round of them over, as far as there is room in the engine's queues."""
        if self._head == self._tail:
            return
        self._head += io.submit(self._array[self._head : min(self._tail, self._head + 2 * ROUND)])
        if self._head == self._tail:
            self._head = self._tail = 0
