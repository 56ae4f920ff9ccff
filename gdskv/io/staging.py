"""A ring of staging buffers on the GPU between an engine's pages and disk or host memory.

An I/O engine (:mod:`gdskv.io.base`) around another: transfers of blocks that `DevicePages` names come here, all others
go straight on. A gather makes one extent of a block's pieces in a buffer, from where it moves as one; a scatter is the
way back. Must not know tiers or policy. Everything here belongs to the calling thread, and nothing waits for the GPU,
but for a launch that CUDA refused half-way.

Four fences keep bytes right; each is a method that a test takes away:

* `_after_caller`: a kernel touches pages only after what the engine had started on its stream before the call;
* `_may_write`: a buffer goes to the drive only after the gather that fills it;
* `_may_reuse`: a buffer takes other bytes only after the scatter, or the copy, that empties it;
* `_may_return`: pages are the caller's again only after the kernel that reads or writes them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdskv.io.base import COPY, READ, RESULT, TRANSFER, WRITE, IOEngine, Results, Tags, Transfers
from gdskv.io.buffers import Staging
from gdskv.io.kernels import Mover

if TYPE_CHECKING:
    from gdskv.pools.pages import DevicePages

__all__ = ["BLOCKS", "StagedEngine"]

log = logging.getLogger(__name__)

BLOCKS = 64
"""Blocks of one launch, at most."""
_WHAT = ("transfers", "launches", "bytes", "errors")
_TRANSFERS, _LAUNCHES, _BYTES, _ERRORS = range(4)
_FIRST_TAG = -2  # of what goes on to the engine inside: -2 - buffer. Tags of callers are not negative.


class _Row(NamedTuple):
    """One transfer between a block of pages and elsewhere."""

    tag: int
    op: int
    into: bool  # the pages
    slab: int
    offset: int
    block: int  # its name
    host: int  # the other end of a copy
    length: int


class _Batch:
    """One launch: rows, the buffers that they go through, and how far it is."""

    __slots__ = ("buffers", "crc", "ended", "error", "event", "freed", "into", "number", "returned", "rows", "written")

    def __init__(self, rows: Sequence[_Row], buffers: Sequence[int]) -> None:
        self.rows, self.buffers, self.into = rows, buffers, rows[0].into
        self.number = -1
        self.event: Any = None
        self.ended = False
        self.error = 0  # errno
        self.crc = [0] * len(rows)
        self.freed = self.written = self.returned = False


class StagedEngine:
    """Moves blocks of pages through staging buffers, and everything else with the engine inside.

    Buffers are handed out as runs, so that blocks that are neighbours on disk still move as one call. Reads come before
    copies, those before writes, and writes hold half of the buffers at most.

    Parameters
    ----------
    inner
        The engine that reads and writes slabs. Of the staging buffers it computes no checksums: the kernels do.
    staging, pages
        The buffers, and where blocks lie. Closed with this engine are the buffers.
    mover
        Launches on the stream of `staging`, `LAUNCHES` of `BLOCKS` blocks at most.
    queue_depth
        Reads, writes and copies each that are accepted at a time.
    """

    def __init__(
        self, inner: IOEngine, staging: Staging, pages: DevicePages, mover: Mover, *, queue_depth: int = 4096
    ) -> None:
        self.inner = inner
        self._staging, self._stream, self._pages, self._mover = staging, staging.stream, pages, mover
        self._depth = queue_depth
        self._reads: deque[_Row] = deque()
        self._copies_in: deque[_Row] = deque()
        self._copies_out: deque[_Row] = deque()
        self._writes: deque[_Row] = deque()
        self._used = [0, 0, 0]  # by op: accepted and without a result
        self._busy = [False] * staging.buffers
        self._next, self._n_busy, self._n_writing = 0, 0, 0
        self._batches: list[_Batch] = []
        self._going: dict[int, tuple[_Row, _Batch | None, int]] = {}  # by buffer: on its way to or from the drive
        self._to_inner: tuple[deque[tuple[int, ...]], deque[tuple[int, ...]]] = (deque(), deque())  # reads, writes
        self._at_inner = 0
        self._landed: deque[tuple[_Row, int]] = deque()  # read into a buffer
        self._sent: list[tuple[_Row, int, int, _Batch, int]] = []  # written; the pages are to be returned
        self._ready: deque[tuple[int, int, int, int, bool]] = deque()  # a result, and whether it is ours
        self._own = self._held = 0
        self._counts = np.zeros((2, len(_WHAT)), np.int64)  # gather, scatter
        self._refused = self._cancelled = 0
        self._room = np.zeros(1024, RESULT)
        self._said: set[str] = set()
        self._stopped = self._closed = False

    # ---- the fences

    def _after_caller(self) -> None:
        """What is launched from now on begins after what the caller had started on his stream."""
        self._stream.after(self._pages.stream)

    def _may_write(self, batch: _Batch) -> bool:
        return batch.ended

    def _may_reuse(self, batch: _Batch) -> bool:
        return batch.ended

    def _may_return(self, batch: _Batch) -> bool:
        return batch.ended

    # ---- the contract

    def submit(self, transfers: Transfers) -> int:
        if self._stopped:
            return 0
        batch = np.ascontiguousarray(transfers, TRANSFER)
        here, there = self._pages.named(batch["address"]), self._pages.named(batch["target"])
        ours = here | (there & (batch["op"] == COPY))
        if not ours.any():
            return self.inner.submit(batch)
        n = len(batch)
        for op in (READ, WRITE, COPY):
            rows = np.flatnonzero(ours & (batch["op"] == op))
            if len(rows) > self._depth - self._used[op]:
                n = min(n, int(rows[self._depth - self._used[op]]))
        others = np.flatnonzero(~ours[:n])
        if len(others):
            taken = self.inner.submit(batch[others])
            if taken < len(others):
                n = int(others[taken])
        rows = np.flatnonzero(ours[:n])
        if len(rows):
            self._after_caller()
            for transfer, into in zip(batch[rows].tolist(), there[rows].tolist()):
                self._accept(transfer, into)
            self._feed()
        return n

    def poll(self, out: Results) -> int:
        n = self._listen(out)
        if self._own or self._held:
            self._progress()
            self._feed()
            while n < len(out) and self._ready:
                *result, ours = self._ready.popleft()
                out[n] = tuple(result)
                self._own -= ours
                self._held -= not ours
                n += 1
        return n

    def cancel(self, tags: Tags) -> int:
        wanted = set(np.asarray(tags, np.int64).tolist())
        if not wanted:
            return 0
        before = self._cancelled
        self._cancel(wanted)
        going = [_FIRST_TAG - buffer for buffer, (row, *_) in self._going.items() if row.tag in wanted]
        return self._cancelled - before + self.inner.cancel(np.array([*tags, *going], np.int64))

    @property
    def in_flight(self) -> int:
        return self._own + self._held + self.inner.in_flight - self._at_inner

    def counters(self) -> dict[str, int]:
        """As the engine inside, and what passed through the kernels: ``gather_bytes``, ``scatter_launches``, .."""
        totals = self.inner.counters()
        totals["refused"] += self._refused
        totals["cancelled"] += self._cancelled
        for way, name in enumerate(("gather", "scatter")):
            totals |= {f"{name}_{what}": int(self._counts[way, column]) for column, what in enumerate(_WHAT)}
        return totals

    def path(self, slab: int) -> str:
        """As the engine inside: staging is a way within the GPU's memory."""
        return self.inner.path(slab)

    def close(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._stopped and (self._moving() or self._queued()) and time.monotonic() < end:
            self._turn()
            self._feed()
        if not self._stopped:
            self._stopped = True
            self._cancel(None)
        while self._moving() and time.monotonic() < end:
            self._turn()
        drained = self.inner.close(max(0.0, end - time.monotonic()))
        self._turn()
        while self._moving() and time.monotonic() < end:
            self._turn()
        if self._moving() or not drained:
            return False
        if not self._closed:
            self._closed = True
            self._mover.close()
            self._staging.close()
        return True

    # ---- taking in

    def _accept(self, transfer: tuple[int, ...], into: bool) -> None:
        tag, op, slab, offset, address, target, length = transfer
        into = op == READ or (op == COPY and into)
        block, host = (target, address) if op == COPY and into else (address, target)
        row = _Row(tag, op, into, slab, offset, block, host, length)
        self._own += 1
        self._used[op] += 1
        whole = self._staging.buffer_bytes if op != COPY else self._pages.layout.block_bytes
        both = op == COPY and self._pages.base <= row.host < self._pages.end
        if length != whole or both:
            self._refused += 1
            self._finish(row, -errno.EINVAL, 0, 0)
            return
        {READ: self._reads, WRITE: self._writes, COPY: self._copies_in if into else self._copies_out}[op].append(row)

    def _take(self, most: int) -> range:
        """Mark a run of free buffers, at most `most`, as busy; empty if there is none."""
        if self._n_busy == len(self._busy) or most <= 0:
            return range(0)
        first = self._next
        while self._busy[first]:
            first = (first + 1) % len(self._busy)
        last = first
        while last < len(self._busy) and last - first < most and not self._busy[last]:
            self._busy[last] = True
            last += 1
        self._n_busy += last - first
        self._next = last % len(self._busy)
        return range(first, last)

    def _release(self, buffers: Iterable[int], op: int) -> None:
        for buffer in buffers:
            self._busy[buffer] = False
            self._n_busy -= 1
            self._n_writing -= op == WRITE

    def _address(self, buffer: int) -> int:
        return self._staging.base + buffer * self._staging.buffer_bytes

    # ---- handing over

    def _feed(self) -> None:
        """Start what may start."""
        self._scatter_landed()
        if not self._stopped:
            most = self._mover.blocks
            while self._reads and (buffers := self._take(min(most, len(self._reads)))):
                for buffer in buffers:
                    self._send(self._reads.popleft(), buffer, None, 0)
            for copies in (self._copies_in, self._copies_out):
                while copies and self._mover.room and (buffers := self._take(min(most, len(copies)))):
                    self._launch([copies.popleft() for _ in buffers], buffers)
            while self._writes and self._mover.room:
                buffers = self._take(min(most, len(self._writes), len(self._busy) // 2 - self._n_writing))
                if not buffers:
                    break
                self._n_writing += len(buffers)
                self._launch([self._writes.popleft() for _ in buffers], buffers)
        for rows in self._to_inner:
            while rows:
                batch = np.array([rows[i] for i in range(min(len(rows), 256))], TRANSFER)
                taken = self.inner.submit(batch)
                self._at_inner += taken
                for _ in range(taken):
                    rows.popleft()
                if taken < len(batch):
                    break

    def _send(self, row: _Row, buffer: int, batch: _Batch | None, index: int) -> None:
        """A buffer to or from the drive."""
        self._going[buffer] = (row, batch, index)
        transfer = (_FIRST_TAG - buffer, row.op, row.slab, row.offset, self._address(buffer), 0, row.length)
        self._to_inner[row.op].append(transfer)

    def _scatter_landed(self) -> None:
        while self._landed and self._mover.room:
            some = [self._landed.popleft() for _ in range(min(len(self._landed), self._mover.blocks))]
            self._launch([row for row, _ in some], [buffer for _, buffer in some])

    def _launch(self, rows: list[_Row], buffers: Sequence[int]) -> None:
        batch = _Batch(rows, buffers)
        extents = np.array([self._address(buffer) for buffer in buffers], np.uint64)
        pages = self._pages.rows(np.array([row.block for row in rows], np.uint64))
        copies = [(row.host, self._address(buffer), row.length) for row, buffer in zip(rows, buffers) if row.op == COPY]
        counts = self._counts[int(batch.into)]
        counts[_LAUNCHES] += 1
        try:
            if batch.into:
                for host, address, length in copies:
                    self._stream.copy(address, host, length)
            batch.number = self._mover.launch(not batch.into, extents, pages)
            if not batch.into:
                for host, address, length in copies:
                    self._stream.copy(host, address, length)
            batch.event = self._stream.mark()
        except OSError as error:
            self._say(str(error))
            with contextlib.suppress(OSError):
                self._stream.wait()  # what was started of it must not meet the next user of the buffers
            if batch.number >= 0:
                self._mover.end(batch.number)
            self._fail(batch, error.errno or errno.EIO)
            return
        self._batches.append(batch)

    def _fail(self, batch: _Batch, code: int) -> None:
        for row in batch.rows:
            self._finish(row, -code, 0)
        self._release(batch.buffers, batch.rows[0].op)

    # ---- taking back

    def _turn(self) -> None:
        """A round of `close`: results that are not ours wait until they are polled."""
        out = np.zeros(len(self._room), RESULT)
        for i in range(self._listen(out)):
            self._ready.append((*out[i].tolist(), False))
            self._held += 1
        self._progress()
        self._scatter_landed()
        if self._stopped:
            self._cancel(None)  # what a gather has just made ready
        time.sleep(0.0005)

    def _listen(self, out: Results) -> int:
        """Take results from the engine inside; those of other transfers go to `out`, and their number is returned."""
        room = self._room[: len(out)]
        n = self.inner.poll(room) if self.inner.in_flight else 0
        if not self._at_inner or not n:
            out[:n] = room[:n]
            return n
        ours = room["tag"][:n] <= _FIRST_TAG
        others = n - int(ours.sum())
        out[:others] = room[:n][~ours]
        for tag, moved, _, started in room[:n][ours].tolist():
            buffer = _FIRST_TAG - tag
            row, batch, index = self._going.pop(buffer)
            self._at_inner -= 1
            if batch is not None:
                self._sent.append((row, moved, started, batch, index))
                self._release([buffer], WRITE)
            elif moved == row.length:
                self._landed.append((row, buffer))
            else:
                self._finish(row, moved, 0, started)
                self._release([buffer], READ)
        return others

    def _progress(self) -> None:
        """Look once at every launch and let on what its fences let."""
        for batch in self._batches:
            if not batch.ended:
                self._look_at(batch)
            if batch.rows[0].op == WRITE:
                if not batch.written and self._may_write(batch):
                    batch.written = True
                    if batch.error:
                        self._fail(batch, batch.error)
                    else:
                        for index, (row, buffer) in enumerate(zip(batch.rows, batch.buffers)):
                            self._send(row, buffer, batch, index)
                continue
            if not batch.freed and self._may_reuse(batch):
                batch.freed = True
                self._release(batch.buffers, COPY)
            if not batch.returned and self._may_return(batch):
                batch.returned = True
                for row, crc in zip(batch.rows, batch.crc):
                    self._finish(row, -batch.error or row.length, crc if row.op == READ else 0)
        self._batches = [b for b in self._batches if not (b.ended and (b.written or (b.freed and b.returned)))]
        still = []
        for row, moved, started, batch, index in self._sent:
            if self._may_return(batch):
                self._finish(row, moved, batch.crc[index] if moved == row.length else 0, started)
            else:
                still.append((row, moved, started, batch, index))
        self._sent = still

    def _look_at(self, batch: _Batch) -> None:
        try:
            batch.ended = self._stream.done(batch.event)
        except OSError as error:
            self._say(str(error))
            batch.ended, batch.error = True, error.errno or errno.EIO
        if batch.ended:
            batch.crc = self._mover.crc(batch.number, len(batch.rows)).tolist()
            self._mover.end(batch.number)

    def _say(self, message: str) -> None:
        """Log each kind of failure once: the results say how many there were."""
        if message not in self._said and len(self._said) < 64:
            self._said.add(message)
            log.warning("%s", message)

    def _finish(self, row: _Row, moved: int, crc: int, started: int = 1) -> None:
        self._used[row.op] -= 1
        count = self._counts[int(row.into)]
        count[_TRANSFERS] += 1
        count[_BYTES] += max(0, moved)
        count[_ERRORS] += moved < 0
        self._ready.append((row.tag, moved, crc, started, True))

    def _cancel(self, wanted: set[int] | None) -> None:
        """Take back what has not been handed on, all or those with a tag in `wanted`."""
        for rows in (self._reads, self._copies_in, self._copies_out, self._writes):
            for row in [row for row in rows if wanted is None or row.tag in wanted]:
                rows.remove(row)
                self._take_back(row)
        for transfers in self._to_inner:
            for transfer in list(transfers):
                buffer = _FIRST_TAG - transfer[0]
                row = self._going[buffer][0]
                if wanted is None or row.tag in wanted:
                    transfers.remove(transfer)
                    del self._going[buffer]
                    self._release([buffer], row.op)
                    self._take_back(row)

    def _take_back(self, row: _Row) -> None:
        self._cancelled += 1
        self._finish(row, -errno.ECANCELED, 0, 0)

    def _queued(self) -> bool:
        return bool(self._reads or self._copies_in or self._copies_out or self._writes or any(self._to_inner))

    def _moving(self) -> bool:
        return bool(self._batches or self._at_inner or self._landed or self._sent)
