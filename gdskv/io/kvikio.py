"""The I/O engine over KvikIO: GPU memory and host memory to and from disk, by GPUDirect Storage where the node has it.

Fulfils :mod:`gdskv.io.base`; must not know blocks, tiers or policy. Who owns what: everything in `KvikioEngine` belongs
to the calling thread. KvikIO's own threads move bytes; a thread of a POSIX engine computes checksums; neither takes the
GIL. In direct mode one more thread hands transfers over, because KvikIO then waits for the default stream.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdskv.io import cuda
from gdskv.io.base import ALIGNMENT, COPY, NO_SLAB, READ, RESULT, TRANSFER, WRITE, Results, Slab, Tags, Transfers
from gdskv.io.posix import READ_THREADS, WRITE_THREADS, PosixEngine

__all__ = ["KvikioEngine", "errno_of"]

log = logging.getLogger(__name__)

_WHAT = ("transfers", "calls", "bytes", "errors", "short")
_TRANSFERS, _CALLS, _BYTES, _ERRORS, _SHORT = range(5)
_QUIET = 0.1  # seconds without a read after which writes have the drive for themselves
_READS_A_WRITE = 4  # as the POSIX engine: beside reads one write, and one more for every four reads
_BOUNCES = 4  # host buffers through which device memory passes for its checksum, of `max_extent` bytes each
_COPIES = 16  # copies to, from or between device memories at a time
_ERRNO = {os.strerror(code): code for code in errno.errorcode}


class _Row(NamedTuple):
    """One transfer."""

    tag: int
    queue: int
    address: int
    length: int


class _Extent:
    """Neighbours on disk and in memory that move as one call."""

    __slots__ = (
        "address", "bounce", "checks", "crc", "device", "ended", "event", "future", "length", "moved", "offset", "op",
        "rows", "slab",
    )  # fmt: skip

    def __init__(self, op: int, slab: int, offset: int, device: bool, row: _Row) -> None:
        self.op, self.slab, self.offset, self.device = op, slab, offset, device
        self.address, self.length = row.address, row.length
        self.rows = [row]
        self.crc: list[int] = []
        self.future: Any = None
        self.event: Any = None
        self.ended = False
        self.moved = 0  # bytes, or -errno
        self.checks = 0  # checksums that are still to come
        self.bounce = -1


class _Buffer:
    """Memory as KvikIO takes it; the driver, not the interface, says whether it is of the host or of a device."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}


class KvikioEngine:
    """Moves bytes with KvikIO: one ``CuFile`` per slab for life, one task per extent.

    A lane hands over as many reads and writes as it has threads and keeps the rest, so nothing waits inside KvikIO:
    what is kept can be cancelled, and a read never stands behind a write. Slabs that hold records, transfers that are
    no whole pages, flushes and copies in host memory go through a POSIX engine of its own.

    Checksums are computed by one thread of a POSIX engine, of device memory on a copy of it in pinned host memory.

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
        As of :class:`gdskv.io.posix.PosixEngine`. Threads belong to KvikIO's pool, which all engines of a process
        share; it grows and never shrinks.

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
        self._device = sorted(device_memory)
        self._unchecked = range(unchecked[0], sum(unchecked))
        configure(self._lanes * sum(self._most), max_extent, any(s.direct for s in slabs))
        self._files = [_open(slab) for slab in slabs]

        # Each extent handed over has its members' checksums in this queue at most once
        pieces = self._lanes * sum(self._most) * max(1, max_extent // ALIGNMENT) + 1
        self._plain = PosixEngine(
            [*slabs, *records],
            checksums=checksums,
            read_threads=1,
            write_threads=1,
            queue_depth=queue_depth,
            max_extent=max_extent,
        )
        self._checker = PosixEngine([], queue_depth=min(pieces, 65536))
        self._bounces = np.frombuffer(mmap.mmap(-1, _BOUNCES * max_extent, mmap.MAP_PRIVATE), np.uint8)
        self._bounce_free = list(range(_BOUNCES))
        self._copier = cuda.CopyStream(driver, device, _BOUNCES + _COPIES)
        with self._copier:
            self._pinned = driver.pin(self._bounces.ctypes.data, len(self._bounces))

        self._queued: list[deque[_Extent]] = [deque() for _ in range(2 * self._lanes + 1)]  # the last: device copies
        self._used = [0] * (2 * self._lanes + 1)
        self._out: list[list[_Extent]] = [[] for _ in range(2 * self._lanes)]
        self._last_read = [-1.0] * self._lanes
        self._copying: list[tuple[_Row, Any]] = []
        self._to_stage: deque[_Extent] = deque()
        self._staging: list[_Extent] = []
        self._to_check: deque[tuple[_Extent, int, int, int]] = deque()  # extent, member, address, length
        self._checks: dict[int, tuple[_Extent, int]] = {}
        self._numbers = itertools.count()
        self._ready: deque[tuple[int, int, int, int]] = deque()
        self._own = 0  # in flight, without those of `_plain`
        self._counts = np.zeros((3, 2, len(_WHAT)), np.int64)  # op, compat or direct, what
        self._refused = self._cancelled = 0
        self._room = np.zeros(256, RESULT)
        self._stopped = self._closed = False
        self._said: set[str] = set()
        self._passing: queue.SimpleQueue[_Extent | None] | None = None
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
        queues, plain, good = self._sort(batch)
        n = len(batch)
        for number, used in enumerate(self._used):
            here = np.flatnonzero((queues == number) & ~plain)
            if len(here) > self._depth - used:
                n = min(n, int(here[self._depth - used]))
        through = np.flatnonzero(plain[:n])
        if len(through):
            taken = self._plain.submit(batch[through])
            if taken < len(through):
                n = int(through[taken])
        rows = np.flatnonzero(~plain[:n])
        if len(rows):
            self._queue(batch[rows], queues[rows], good[rows])
            self._feed()
        return n

    def poll(self, out: Results) -> int:
        n = 0
        if self._own:
            self._progress()
            self._feed()
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
            self._checker.close(1.0)
            if self._passing is not None:
                self._passing.put(None)
            for file in self._files:
                file.close()
            if self._pinned:
                with self._copier:
                    self._cuda.unpin(self._bounces.ctypes.data)
            self._copier.close()
        return True

    # ---- taking in

    def _sort(self, batch: Transfers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For each transfer its queue, whether it goes through the POSIX engine, and whether it can be at all."""
        copies = 2 * self._lanes
        op, slab, length = batch["op"], batch["slab"].astype(np.int64), batch["length"]
        queues = np.full(len(batch), copies, np.int64)
        plain = np.ones(len(batch), np.bool_)  # also what cannot be: the POSIX engine refuses it
        ours = ((op == READ) | (op == WRITE)) & (slab >= 0) & (slab < len(self._slabs)) & (length > 0)
        good = np.zeros(len(batch), np.bool_)
        if ours.any():
            info = self._slabs[np.where(ours, slab, 0)]
            offset = batch["offset"]
            aligned = (offset | length | batch["address"].astype(np.int64)) & (ALIGNMENT - 1) == 0
            inside = (offset >= 0) & (length <= info[:, 2]) & (offset <= info[:, 2] - length)
            ours &= inside & (aligned | (info[:, 1] == 0))
            whole = (offset | length) & (ALIGNMENT - 1) == 0
            good = ours & whole
            queues[good] = (2 * info[:, 0] + op)[good]
            plain[good] = False
        device = np.zeros(len(batch), np.bool_)
        for row in np.flatnonzero(op == COPY).tolist():
            address, target = int(batch["address"][row]), int(batch["target"][row])
            device[row] = length[row] > 0 and (self._is_device(address) or self._is_device(target))
        plain[device], good[device] = False, True
        return queues, plain, good

    def _is_device(self, address: int) -> bool:
        for base, size in self._device:
            if base <= address < base + size:
                return True
        return self._cuda.is_device(address)

    def _queue(self, batch: Transfers, queues: npt.NDArray[np.int64], good: npt.NDArray[np.bool_]) -> None:
        last: dict[int, _Extent] = {}
        self._own += len(batch)
        rows = zip(batch.tolist(), queues.tolist(), strict=True)
        for (tag, op, slab, offset, address, target, length), number in rows:
            self._used[number] += 1
            row = _Row(tag, number, address, length)
            before = last.get(number)
            if op == COPY:
                self._queued[number].append(_Extent(COPY, NO_SLAB, target, True, row))
            elif (
                before is not None
                and before.slab == slab
                and before.offset + before.length == offset
                and before.address + before.length == address
                and before.length + length <= self._max_extent
            ):
                before.rows.append(row)
                before.length += length
            else:
                last[number] = _Extent(op, slab, offset, self._is_device(address), row)
                self._queued[number].append(last[number])

    # ---- handing over

    def _feed(self) -> None:
        """Hand over what may start: a bounded number, however much is queued."""
        if self._stopped:
            return
        for lane in range(self._lanes):
            reads, writes = self._queued[2 * lane], self._queued[2 * lane + 1]
            while reads and len(self._out[2 * lane]) < self._most[READ]:
                self._start(reads.popleft())
            if writes:
                busy = len(self._out[2 * lane])
                most = self._most[WRITE]
                if busy or time.monotonic() - self._last_read[lane] < _QUIET:
                    most = min(most, max(1, busy // _READS_A_WRITE))
                while writes and len(self._out[2 * lane + 1]) < most:
                    self._start(writes.popleft())
        copies = self._queued[-1]
        while copies and len(self._copying) < _COPIES:
            extent = copies.popleft()
            row = extent.rows[0]
            self._counts[COPY, 0, _CALLS] += 1
            try:
                self._copying.append((row, self._copier.start(extent.offset, row.address, row.length)))
            except OSError as error:
                self._say(str(error))
                self._finish(COPY, NO_SLAB, row, -(error.errno or errno.EIO), 0)
        self._send_checks()

    def _start(self, extent: _Extent) -> None:
        self._out[extent.rows[0].queue].append(extent)
        self._counts[extent.op, self._direct[extent.slab], _CALLS] += 1
        if self._passing is not None and extent.device:
            self._passing.put(extent)
        else:
            self._hand_over(extent)
        if extent.op == WRITE and self._checked(extent):
            self._check(extent)

    def _hand_over(self, extent: _Extent) -> None:
        file, buffer = self._files[extent.slab], _Buffer(extent.address, extent.length)
        call = file.pread if extent.op == READ else file.pwrite
        try:
            extent.future = call(buffer, extent.length, extent.offset, extent.length)
        except Exception as error:  # KvikIO raises what its C++ throws: RuntimeError, mostly
            extent.future = error

    def _pass_on(self, extents: queue.SimpleQueue[_Extent | None]) -> None:
        while (extent := extents.get()) is not None:
            self._hand_over(extent)

    # ---- checksums

    def _checked(self, extent: _Extent) -> bool:
        return self._checksums and extent.address not in self._unchecked

    def _check(self, extent: _Extent) -> None:
        extent.checks = len(extent.rows)
        extent.crc = [0] * len(extent.rows)
        if extent.device:
            self._to_stage.append(extent)
        else:
            self._look_at(extent, extent.address)

    def _look_at(self, extent: _Extent, address: int) -> None:
        for member, row in enumerate(extent.rows):
            self._to_check.append((extent, member, address, row.length))
            address += row.length

    def _send_checks(self) -> None:
        while self._to_stage and self._bounce_free:
            extent = self._to_stage.popleft()
            extent.bounce = self._bounce_free.pop()
            try:
                extent.event = self._copier.start(self._bounce(extent), extent.address, extent.length)
                self._staging.append(extent)
            except OSError as error:
                self._cannot_check(extent, error)
        if not self._to_check:
            return
        batch = np.zeros(len(self._to_check), TRANSFER)
        for i, (extent, member, address, length) in enumerate(self._to_check):
            number = next(self._numbers)
            self._checks[number] = (extent, member)
            batch[i] = (number, COPY, NO_SLAB, 0, address, address, length)
        taken = self._checker.submit(batch)
        for number in batch["tag"][taken:].tolist():
            del self._checks[number]
        for _ in range(taken):
            self._to_check.popleft()

    def _bounce(self, extent: _Extent) -> int:
        return self._bounces.ctypes.data + extent.bounce * self._max_extent

    def _cannot_check(self, extent: _Extent, error: OSError) -> None:
        """Bytes that cannot be checked are as good as not moved."""
        self._say(str(error))
        self._bounce_free.append(extent.bounce)
        extent.bounce, extent.checks = -1, 0
        extent.crc = []
        if extent.ended:
            self._resolve(extent)

    # ---- taking back

    def _progress(self) -> None:
        """Look once at all that is out: futures, events, checksums."""
        for number, out in enumerate(self._out):
            if out:
                self._out[number] = [extent for extent in out if not self._ended(extent)]
        if self._copying:
            self._copying = [(row, event) for row, event in self._copying if not self._copied(row, event)]
        if self._staging:
            self._staging = [extent for extent in self._staging if not self._staged(extent)]
        while self._checks and (n := self._checker.poll(self._room)):
            for number, crc in zip(self._room["tag"][:n].tolist(), self._room["crc"][:n].tolist(), strict=True):
                extent, member = self._checks.pop(number)
                extent.crc[member] = crc
                extent.checks -= 1
                if extent.checks == 0:
                    if extent.bounce >= 0:
                        self._bounce_free.append(extent.bounce)
                        extent.bounce = -1
                    if extent.ended:
                        self._resolve(extent)
        self._send_checks()

    def _ended(self, extent: _Extent) -> bool:
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
            if self._checked(extent) and extent.moved == extent.length:
                self._check(extent)
        if extent.checks == 0:
            self._resolve(extent)
        return True

    def _copied(self, row: _Row, event: Any) -> bool:
        moved = row.length
        try:
            if not self._copier.done(event):
                return False
        except OSError as error:
            self._say(str(error))
            moved = -(error.errno or errno.EIO)
        self._finish(COPY, NO_SLAB, row, moved, 0)
        return True

    def _staged(self, extent: _Extent) -> bool:
        try:
            if not self._copier.done(extent.event):
                return False
        except OSError as error:
            self._cannot_check(extent, error)
            return True
        self._look_at(extent, self._bounce(extent))
        return True

    def _resolve(self, extent: _Extent) -> None:
        """Bytes and checksums are in: give each member its result, or try members alone where several failed."""
        moved = extent.moved
        if moved == extent.length and self._checked(extent) and not extent.crc:
            moved = -errno.EIO
        if moved != extent.length and len(extent.rows) > 1 and not self._stopped:
            offset = extent.offset
            singles = []
            for row in extent.rows:  # one bad sector must not cost its neighbours
                singles.append(_Extent(extent.op, extent.slab, offset, extent.device, row))
                offset += row.length
            self._queued[extent.rows[0].queue].extendleft(reversed(singles))
            return
        for member, row in enumerate(extent.rows):
            whole = moved == extent.length
            crc = extent.crc[member] if whole and extent.crc else 0
            self._finish(extent.op, extent.slab, row, row.length if whole else min(moved, 0), crc)

    def _finish(self, op: int, slab: int, row: _Row, moved: int, crc: int) -> None:
        count = self._counts[op, self._direct[slab] if op != COPY else 0]
        count[_TRANSFERS] += 1
        count[_BYTES] += max(0, moved)
        count[_ERRORS] += moved < 0
        count[_SHORT] += 0 <= moved < row.length
        self._answer(row, moved, crc, 1)

    def _answer(self, row: _Row, moved: int, crc: int, started: int) -> None:
        self._used[row.queue] -= 1
        self._ready.append((row.tag, moved, crc, started))

    def _cancel(self, wanted: set[int] | None) -> int:
        """Take queued transfers back, all or those with a tag in `wanted`."""
        before = self._cancelled
        for number, queued in enumerate(self._queued):
            kept: deque[_Extent] = deque()
            for extent in queued:
                kept.extend(self._without(extent, wanted))
            self._queued[number] = kept
        return self._cancelled - before

    def _without(self, extent: _Extent, wanted: set[int] | None) -> list[_Extent]:
        """What is left of a queued extent: the stretches between cancelled members."""
        if wanted is not None and not any(row.tag in wanted for row in extent.rows):
            return [extent]
        left: list[_Extent] = []
        offset, joined = extent.offset, False
        for row in extent.rows:
            if wanted is None or row.tag in wanted:
                self._cancelled += 1
                self._answer(row, -errno.ECANCELED, 0, 0)
                joined = False
            elif joined:
                left[-1].rows.append(row)
                left[-1].length += row.length
            else:
                left.append(_Extent(extent.op, extent.slab, offset, extent.device, row))
                joined = True
            offset += row.length
        return left

    def _moving(self) -> bool:
        """Whether bytes or checksums are on their way."""
        return bool(
            any(self._out) or self._copying or self._staging or self._to_stage or self._to_check or self._checks
        )

    def _why(self, error: Exception) -> int:
        self._say(str(error))
        return -errno_of(str(error))

    def _say(self, message: str) -> None:
        """Log each kind of failure once: the results say how many there were."""
        kind = message.rpartition(": ")[2]
        if kind not in self._said and len(self._said) < 64:
            self._said.add(kind)
            log.warning("%s", message)


def configure(threads: int, bounce: int, direct_io: bool) -> None:
    """All of KvikIO's settings that gdskv needs, in one place. They are the process's.

    Parameters
    ----------
    threads
        What the pool must have at least, so that nothing handed over waits for a thread.
    bounce
        Bytes of a bounce buffer, one per thread in compatibility mode: a whole extent goes through in one step.
    direct_io
        Whether compatibility mode uses O_DIRECT, in both directions; KvikIO's default is only for writes.
    """
    import kvikio.defaults as defaults

    wanted: dict[str, Any] = {
        "gds_threshold": 0,  # below it KvikIO moves bytes on the calling thread
        "bounce_buffer_size": bounce,
        "auto_direct_io_read": direct_io or bool(defaults.get("auto_direct_io_read")),
        "auto_direct_io_write": True,
    }
    if threads > int(defaults.get("num_threads")):  # setting it waits for what runs, so only when it must
        wanted["num_threads"] = threads
    defaults.set(wanted)


def _open(slab: Slab) -> Any:
    import kvikio

    try:
        return kvikio.CuFile(f"/proc/self/fd/{slab.fd}", "r+")
    except RuntimeError as error:
        raise OSError(errno_of(str(error)), f"KvikIO cannot open a slab: {error}") from None


def errno_of(message: str) -> int:
    """The errno in what KvikIO says of a failure; 0 for the end of the file, EIO for what has no errno.

    It writes ``POSIX error on pread: <strerror>``, ``CUDA error at: <place>: <name>(<meaning>)`` and
    ``cuFile error: <name>``; of CUDA's errors only the lack of memory has an errno of its own.
    """
    reason = message.strip().rpartition(": ")[2]
    if reason == "EOF":
        return 0
    if "POSIX error: Operation not permitted" in message:
        return errno.EBADF  # KvikIO's words for it
    if "OUT_OF_MEMORY" in message:
        return errno.ENOMEM
    return _ERRNO.get(reason, errno.EIO)
