"""The I/O engine over KvikIO: GPU memory and host memory to and from disk, by GPUDirect Storage where the node has it.

Fulfils :mod:`gdskv.io.base`; must not know blocks, tiers or policy. Who owns what: everything in `KvikioEngine` belongs
to the calling thread. KvikIO's own threads move bytes; a thread of a POSIX engine computes checksums; neither takes the
GIL. In direct mode one more thread hands transfers over, because KvikIO then waits for the default stream.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gdskv.io import cuda
from gdskv.io.base import ALIGNMENT, COPY, NO_SLAB, READ, TRANSFER, WRITE, Results, Slab, Tags, Transfers
from gdskv.io.bounce import Bounce
from gdskv.io.checks import Checks
from gdskv.io.extents import BAD, DEVICE, OURS, PLAIN, Extent, Row, sort
from gdskv.io.kvikio_calls import Buffer, configure, errno_of, open_file
from gdskv.io.posix import PosixEngine

__all__ = ["KvikioEngine"]

log = logging.getLogger(__name__)

READ_THREADS = 8
WRITE_THREADS = 12
"""Twice the POSIX engine's, whose threads take the next write themselves: here one that ends waits for a poll."""

_WHAT = ("transfers", "calls", "bytes", "errors", "short")
_TRANSFERS, _CALLS, _BYTES, _ERRORS, _SHORT = range(5)
_QUIET = 0.1  # seconds without a read after which writes have the drive for themselves
_READS_A_WRITE = 4  # as the POSIX engine: beside reads one write, and one more for every four reads
_SPARE = 4  # buffers of a lane and direction beyond one a thread: of what is filled, checked or copied meanwhile
_PIECES = 4  # tasks that an extent is cut into at most, each of `_LEAST` bytes or more
_LEAST = 512 << 10
_COPIES = 16  # copies to, from or between device memories at a time


def _pieces(threads: int, out: int) -> int:
    """Tasks of the last of `out` extents in flight: more than one where there are so few that threads would idle."""
    return max(1, min(_PIECES, threads // max(1, out)))


class KvikioEngine:
    """Moves bytes with KvikIO: one ``CuFile`` per slab for life, one task per extent while threads are short.

    A lane hands over as many reads and writes as it has threads and keeps the rest, so nothing waits inside KvikIO:
    what is kept can be cancelled, and a read never stands behind a write. Slabs that hold records, transfers that are
    no whole pages, flushes and copies in host memory go through a POSIX engine of its own.

    Checksums are computed by one thread of a POSIX engine, of device memory on a copy of it in pinned host memory.
    Where the bytes pass through the host anyway (a slab that is not direct), KvikIO reads into and writes from that
    copy: one copy for both. In direct mode it is an additional one.

    Parameters
    ----------
    slabs
        The files of blocks.
    records
        Further slabs, numbered after those, of small records; they move without KvikIO.
    direct
        For each of `slabs` whether its bytes were seen to move without the host, as :mod:`gdskv.io.modes` finds out.
        Default: of none.
    device
        Number of the GPU, in whose context copies are made, whatever thread calls.
    device_memory
        ``(address, bytes)`` of pools on a GPU. Of other memory the driver is asked each time.
    unchecked
        ``(address, bytes)`` of memory whose checksums the caller computes himself.
    checksums, read_threads, write_threads, queue_depth, max_extent
        As of :class:`gdskv.io.posix.PosixEngine`, but 0 threads are `READ_THREADS` and `WRITE_THREADS` of here. They
        belong to KvikIO's pool, which all engines of a process share; it grows and never shrinks. Device memory whose
        checksums are computed moves in transfers of at most `max_extent` or `largest`, whichever is more; longer ones
        are refused.
    largest
        Bytes of the longest transfer that will come.

    Raises
    ------
    ImportError
        KvikIO is not installed.
    OSError
        There is no CUDA driver, or KvikIO cannot open a slab.
    """

    def __init__(
        self,
        slabs: Sequence[Slab],
        *,
        records: Sequence[Slab] = (),
        direct: Sequence[bool] = (),
        device: int = 0,
        device_memory: Sequence[tuple[int, int]] = (),
        unchecked: tuple[int, int] = (0, 0),
        checksums: bool = True,
        read_threads: int = 0,
        write_threads: int = 0,
        queue_depth: int = 4096,
        max_extent: int = 2 << 20,
        largest: int = 0,
    ) -> None:
        driver = cuda.load()
        if driver is None:
            raise OSError(errno.ENODEV, "KvikIO needs a CUDA driver (libcuda.so.1) with a device. Use io='posix'.")
        self._cuda = driver
        self._lanes = max((slab.lane for slab in slabs), default=-1) + 1
        self._most = (read_threads or READ_THREADS, write_threads or WRITE_THREADS)
        self._depth, self._max_extent, self._checksums = queue_depth, max_extent, checksums
        self._slabs = np.array([(s.lane, s.direct, s.size) for s in slabs], np.int64).reshape(-1, 3)
        self._direct = [int(d) for d in direct] or [0] * len(slabs)
        self._memory = np.array(device_memory, np.int64).reshape(-1, 2)
        self._unchecked = range(unchecked[0], sum(unchecked))
        self._largest = max(max_extent, largest)
        tasks = sum(_pieces(n, out) for n in self._most for out in range(1, n + 1))  # the n-th came when n were out
        configure(self._lanes * tasks, self._largest, any(s.direct for s in slabs))
        self._files = [open_file(slab) for slab in slabs]
        self._plain = PosixEngine(
            [*slabs, *records],
            checksums=checksums,
            read_threads=1,
            write_threads=1,
            queue_depth=queue_depth,
            max_extent=max_extent,
        )
        # Each extent handed over has its members' checksums in this queue at most once
        pieces = self._lanes * (sum(self._most) + 2 * _SPARE) * (self._largest // ALIGNMENT) + 1
        self._checks = Checks(min(pieces, 65536))
        buffers = [self._lanes * (n + _SPARE) if checksums and not unchecked[1] else 1 for n in self._most]
        self._bounce = Bounce(driver, device, (buffers[READ], buffers[WRITE]), self._largest)
        self._copier = cuda.CopyStream(driver, device, _COPIES)

        self._queued: list[deque[Extent]] = [deque() for _ in range(2 * self._lanes + 1)]  # the last: device copies
        self._used = [0] * (2 * self._lanes + 1)
        self._out: list[list[Extent]] = [[] for _ in range(2 * self._lanes)]
        self._ahead: list[deque[Extent]] = [deque() for _ in range(self._lanes)]  # writes with a buffer
        self._last_read = [-1.0] * self._lanes
        self._copying: list[tuple[Row, Any]] = []
        self._to_fill: deque[Extent] = deque()  # of direct slabs: for a checksum, when there is a buffer
        self._passing_through: list[Extent] = []  # copied between memory and buffer, beside or after their call
        self._ready: deque[tuple[int, int, int, int]] = deque()
        self._own = 0  # in flight, without those of `_plain`
        self._counts = np.zeros((3, 2, len(_WHAT)), np.int64)  # op, compat or direct, what
        self._refused = self._cancelled = 0
        self._stopped = self._closed = False
        self._sort(np.zeros(1, TRANSFER))  # compiled now, so that no request waits for it
        self._said: set[str] = set()
        self._passing: queue.SimpleQueue[Extent | None] | None = None
        if any(self._direct):
            self._passing = queue.SimpleQueue()
            threading.Thread(target=self._pass_on, args=(self._passing,), name="gdskv-kvikio", daemon=True).start()

    # ---- the contract

    def submit(self, transfers: Transfers) -> int:
        if self._stopped:
            return 0
        batch = np.ascontiguousarray(transfers, TRANSFER)
        if not len(batch):
            return 0
        queues, kinds, plain = self._sort(batch)
        n = len(batch)
        if n + max(self._used) > self._depth:
            for number, used in enumerate(self._used):
                here = np.flatnonzero((queues == number) & (kinds != PLAIN))
                if len(here) > self._depth - used:
                    n = min(n, int(here[self._depth - used]))
        if plain:
            through = np.flatnonzero(kinds[:n] == PLAIN)
            taken = self._plain.submit(batch[through])
            if taken < len(through):
                n = int(through[taken])
        if n > plain or (kinds[:n] != PLAIN).any():
            self._queue(batch[:n], queues, kinds)
            self._feed()
        return n

    def poll(self, out: Results) -> int:
        n = 0
        if self._own:
            self._progress()
            self._feed()
            self._look_after_copies()  # the first that were started above have ended by now
            n = min(len(out), len(self._ready))
            for i in range(n):
                out[i] = self._ready.popleft()
            self._own -= n
        if n < len(out) and self._plain.in_flight:
            n += self._plain.poll(out[n:])
        return n

    def cancel(self, tags: Tags) -> int:
        wanted = set(np.asarray(tags, np.int64).tolist())
        return self._cancel(wanted) + self._plain.cancel(tags) if wanted else 0

    @property
    def in_flight(self) -> int:
        return self._own + self._plain.in_flight

    def counters(self) -> dict[str, int]:
        totals = self._plain.counters()
        totals["refused"] += self._refused
        totals["cancelled"] += self._cancelled
        totals["read_threads"], totals["write_threads"] = (self._lanes * n for n in self._most)
        for op, name in enumerate(("read", "write")):
            for path, suffix in enumerate(("compat", "direct")):
                for column, what in enumerate(_WHAT):
                    totals[f"{name}_{what}_kvikio_{suffix}"] = int(self._counts[op, path, column])
        for column, what in enumerate(_WHAT):
            totals[f"copy_{what}_device"] = int(self._counts[COPY, 0, column])
            totals[f"copy_{what}"] += totals[f"copy_{what}_device"]
        return totals

    def path(self, slab: int) -> str:
        """``"kvikio_direct"`` or ``"kvikio_compat"``, as in the counters; of records what the POSIX engine says."""
        if slab < len(self._files):
            return "kvikio_direct" if self._direct[slab] else "kvikio_compat"
        return self._plain.path(slab)

    def close(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._stopped and (self._moving() or any(self._queued)) and time.monotonic() < end:
            self._progress()
            self._feed()
            time.sleep(0.0005)
        if not self._stopped:
            self._stopped = True
            self._cancel(None)
        while self._moving() and time.monotonic() < end:
            self._progress()
            time.sleep(0.0005)
        self._progress()
        drained = self._plain.close(max(0.0, end - time.monotonic()))
        if self._moving() or not drained:
            return False
        if not self._closed:
            self._closed = True
            self._checks.close()
            if self._passing is not None:
                self._passing.put(None)
            for file in self._files:
                file.close()
            self._bounce.close()
            self._copier.close()
        return True

    # ---- taking in

    def _sort(self, batch: Transfers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """For each transfer its queue and its kind, as :func:`gdskv.io.extents.sort`, and nothing left to ask; and how
        many are `PLAIN`."""
        queues, kinds = np.zeros((2, len(batch)), np.int64)
        plain, ours, longest = sort(batch, self._slabs, self._memory, queues, kinds)
        before, end = PLAIN, 0
        for row in np.flatnonzero(kinds == OURS).tolist() if ours else ():
            if batch["op"][row] != COPY:
                address = int(batch["address"][row])
                if address != end:  # else it is the memory of the one before
                    before = DEVICE if self._cuda.is_device(address) else OURS
                kinds[row], end = before, address + int(batch["length"][row])
            elif not any(self._is_device(int(batch[side][row])) for side in ("address", "target")):
                kinds[row] = PLAIN
                plain += 1
        if self._checksums and longest > self._largest:
            kinds[(kinds == DEVICE) & (batch["length"] > self._largest)] = BAD
        return queues, kinds, plain

    def _is_device(self, address: int) -> bool:
        for base, size in self._memory.tolist():
            if base <= address < base + size:
                return True
        return self._cuda.is_device(address)

    def _queue(self, batch: Transfers, queues: npt.NDArray[np.int64], kinds: npt.NDArray[np.int64]) -> None:
        rows = zip(batch.tolist(), queues.tolist(), kinds.tolist(), strict=False)
        for (tag, op, slab, offset, address, target, length), number, kind in rows:
            if kind == PLAIN:
                continue
            self._own += 1
            self._used[number] += 1
            row = Row(tag, number, address, length)
            queued = self._queued[number]
            if kind == BAD:
                self._refused += 1
                self._answer(row, -errno.EINVAL, 0, 0)
            elif op == COPY:
                queued.append(Extent(COPY, NO_SLAB, target, True, False, row))
            elif not (queued and queued[-1].join(op, slab, offset, kind == DEVICE, row, self._max_extent)):
                buffered = kind == DEVICE and not self._direct[slab] and self._is_checked(address)
                queued.append(Extent(op, slab, offset, kind == DEVICE, buffered, row))

    # ---- handing over

    def _feed(self) -> None:
        """Hand over what may start: a bounded number, however much is queued."""
        if self._stopped:
            return
        for lane in range(self._lanes):
            reads, writes = self._queued[2 * lane], self._queued[2 * lane + 1]
            while reads and len(self._out[2 * lane]) < self._most[READ] and self._may_start(reads[0]):
                self._start(reads.popleft())
            out, ahead, most = self._out[2 * lane + 1], self._ahead[lane], self._writes_at_a_time(lane)
            while writes and self._may_start(writes[0]):
                if len(out) + (len(ahead) if writes[0].buffered else 0) >= most + _SPARE * writes[0].buffered:
                    break
                self._start(writes.popleft())
        copies = self._queued[-1]
        while copies and len(self._copying) < _COPIES:
            extent = copies.popleft()
            row = extent.rows[0]
            self._counts[COPY, 0, _CALLS] += 1
            try:
                self._copying.append((row, self._copier.start(extent.offset, row.address, row.length)))
            except OSError as error:
                self._finish(COPY, NO_SLAB, row, self._why(error), 0)
        self._look_for_buffers()
        self._checks.send()

    def _writes_at_a_time(self, lane: int) -> int:
        most = self._most[WRITE]
        busy = len(self._out[2 * lane])
        if busy or time.monotonic() - self._last_read[lane] < _QUIET:
            most = min(most, max(1, busy // _READS_A_WRITE))
        return most

    def _may_start(self, extent: Extent) -> bool:
        return not extent.buffered or self._bounce.room(extent.op)

    def _start(self, extent: Extent) -> None:
        number = extent.rows[0].queue
        self._counts[extent.op, self._direct[extent.slab], _CALLS] += 1
        if extent.buffered:
            self._bounce.take(extent)
            if extent.op == WRITE:
                self._ahead[number // 2].append(extent)
                try:
                    self._bounce.fill(extent)
                except OSError as error:
                    extent.moved = self._why(error)
                return
        self._out[number].append(extent)
        if extent.device and not extent.buffered and self._passing is not None:
            self._passing.put(extent)
        else:
            self._hand_over(extent, extent.buffer or extent.address)
        if extent.op == WRITE:
            self._check(extent)

    def _hand_over(self, extent: Extent, address: int) -> None:
        file, buffer = self._files[extent.slab], Buffer(address, extent.length)
        call = file.pread if extent.op == READ else file.pwrite
        try:
            extent.future = call(buffer, extent.length, extent.offset, self._task(extent))
        except Exception as error:  # KvikIO raises what its C++ throws: RuntimeError, mostly
            extent.future = error

    def _task(self, extent: Extent) -> int:
        """Bytes of an extent that one of KvikIO's threads moves. cuFile gets whole extents."""
        if self._direct[extent.slab]:
            return extent.length
        out = len(self._out[extent.rows[0].queue])
        pieces = max(1, min(_pieces(self._most[extent.op], out), extent.length // _LEAST))
        return -(-extent.length // (pieces * ALIGNMENT)) * ALIGNMENT

    def _pass_on(self, extents: queue.SimpleQueue[Extent | None]) -> None:
        while (extent := extents.get()) is not None:
            self._hand_over(extent, extent.address)

    # ---- checksums

    def _is_checked(self, address: int) -> bool:
        return self._checksums and address not in self._unchecked

    def _check(self, extent: Extent) -> None:
        """Compute the checksums of an extent that KvikIO moved to or from its memory itself."""
        if not self._is_checked(extent.address):
            return
        if extent.device:
            extent.checks = 1  # it is not settled before they are there
            self._to_fill.append(extent)
        else:
            self._checks.add(extent, extent.address)

    def _look_for_buffers(self) -> None:
        waiting = len(self._to_fill)
        for _ in range(waiting):
            extent = self._to_fill.popleft()
            if not self._bounce.room(extent.op):
                self._to_fill.append(extent)
                continue
            self._bounce.take(extent)
            try:
                self._bounce.fill(extent)
            except OSError as error:
                self._cannot_check(extent, error)
            self._passing_through.append(extent)

    def _cannot_check(self, extent: Extent, error: OSError) -> None:
        """Bytes that cannot be checked are as good as not moved."""
        self._why(error)
        extent.checks, extent.crc = 0, []

    # ---- taking back

    def _progress(self) -> None:
        """Look once at all that is out: futures, events, checksums."""
        for number, out in enumerate(self._out):
            if out:
                self._out[number] = [extent for extent in out if not self._ended(extent)]
        for lane, ahead in enumerate(self._ahead):
            out, most = self._out[2 * lane + 1], self._writes_at_a_time(lane) if ahead else 0
            while ahead and len(out) < most and self._filled(ahead[0]):
                extent = ahead.popleft()
                if extent.ended:
                    self._settle(extent)
                    continue
                out.append(extent)
                self._hand_over(extent, extent.buffer)
                self._checks.add(extent, extent.buffer)
        if self._copying:
            self._copying = [(row, event) for row, event in self._copying if not self._copied(row, event)]
        self._look_after_copies()

    def _look_after_copies(self) -> None:
        """Look once at the copies and checksums of what was moved."""
        if self._passing_through:
            self._passing_through = [extent for extent in self._passing_through if not self._passed(extent)]
        for extent in self._checks.poll():
            self._settle(extent)
        self._look_for_buffers()
        self._checks.send()

    def _ended(self, extent: Extent) -> bool:
        """Whether KvikIO is done with an extent."""
        future = extent.future
        if future is None:
            return False  # not handed over yet
        if isinstance(future, Exception):
            extent.moved = self._why(future)
        elif not future.done():
            return False
        else:
            try:
                extent.moved = int(future.get())
            except Exception as error:
                extent.moved = self._why(error)
        extent.future = None
        extent.ended = True
        if extent.op == READ:
            self._last_read[extent.rows[0].queue // 2] = time.monotonic()
            if extent.moved == extent.length:
                self._land(extent)
        self._settle(extent)
        return True

    def _filled(self, extent: Extent) -> bool:
        """Whether the buffer of a write is full, or never will be: then it has ended."""
        try:
            if extent.event is not None and not self._bounce.done(extent):
                return False
        except OSError as error:
            extent.moved = self._why(error)
        extent.ended = extent.moved < 0
        return True

    def _land(self, extent: Extent) -> None:
        """Of a read that is whole: copy it to where it belongs, and compute its checksums meanwhile."""
        if not extent.buffered:
            self._check(extent)
            return
        try:
            self._bounce.empty(extent)
        except OSError as error:
            extent.moved = self._why(error)
        if extent.event is not None:
            self._passing_through.append(extent)
        if extent.moved == extent.length:
            self._checks.add(extent, extent.buffer)

    def _passed(self, extent: Extent) -> bool:
        """Whether the copy between memory and buffer, after or beside the call, has ended."""
        try:
            if extent.event is not None and not self._bounce.done(extent):
                return False
            if not extent.buffered and extent.checks:
                self._checks.add(extent, extent.buffer)
        except OSError as error:
            if extent.buffered:
                extent.moved = self._why(error)
            else:
                self._cannot_check(extent, error)
        self._settle(extent)
        return True

    def _copied(self, row: Row, event: Any) -> bool:
        moved = row.length
        try:
            if not self._copier.done(event):
                return False
        except OSError as error:
            moved = self._why(error)
        self._finish(COPY, NO_SLAB, row, moved, 0)
        return True

    def _settle(self, extent: Extent) -> None:
        """When bytes, copies and checksums are in: give each member its result, or try members alone."""
        if extent.checks or extent.event is not None or (extent.buffered and not extent.ended):
            return
        self._bounce.release(extent)
        if not extent.ended:
            return
        moved = extent.moved
        if moved == extent.length and not extent.crc and self._is_checked(extent.address):
            moved = -errno.EIO
        if moved != extent.length and len(extent.rows) > 1 and not self._stopped:
            singles = [single for _, single in extent.alone()]  # one bad sector must not cost its neighbours
            for single in singles:
                single.full = True
            self._queued[extent.rows[0].queue].extendleft(reversed(singles))
            return
        for member, row in enumerate(extent.rows):
            whole = moved == extent.length
            crc = extent.crc[member] if whole and extent.crc else 0
            self._finish(extent.op, extent.slab, row, row.length if whole else min(moved, 0), crc)

    def _finish(self, op: int, slab: int, row: Row, moved: int, crc: int) -> None:
        count = self._counts[op, self._direct[slab] if op != COPY else 0]
        count[_TRANSFERS] += 1
        count[_BYTES] += max(0, moved)
        count[_ERRORS] += moved < 0
        count[_SHORT] += 0 <= moved < row.length
        self._answer(row, moved, crc, 1)

    def _answer(self, row: Row, moved: int, crc: int, started: int) -> None:
        self._used[row.queue] -= 1
        self._ready.append((row.tag, moved, crc, started))

    def _cancel(self, wanted: set[int] | None) -> int:
        """Take queued transfers back, all or those with a tag in `wanted`."""
        before = self._cancelled
        for number, queued in enumerate(self._queued):
            kept: deque[Extent] = deque()
            for extent in queued:
                left, gone = extent.without(wanted)
                kept.extend(left)
                for row in gone:
                    self._cancelled += 1
                    self._answer(row, -errno.ECANCELED, 0, 0)
            self._queued[number] = kept
        return self._cancelled - before

    def _moving(self) -> bool:
        """Whether bytes or checksums are on their way."""
        out = any(self._out) or any(self._ahead)
        return bool(out or self._copying or self._passing_through or self._to_fill or self._checks)

    def _why(self, error: Exception) -> int:
        """The result that says so, of an error of KvikIO or of CUDA."""
        self._say(str(error))
        return -(error.errno or errno.EIO) if isinstance(error, OSError) else -errno_of(str(error))

    def _say(self, message: str) -> None:
        """Log each kind of failure once: the results say how many there were."""
        kind = message.rpartition(": ")[2]
        if kind not in self._said and len(self._said) < 64:
            self._said.add(kind)
            log.warning("%s", message)
