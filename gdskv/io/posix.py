"""The I/O engine for plain Linux: native threads that never take the GIL, ``preadv``/``pwritev`` and ``memcpy``.

Fulfils :mod:`gdskv.io.base`; must not know blocks, tiers or policy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from gdskv.io import queues, worker
from gdskv.io.base import COPY, READ, RESULT, TRANSFER, WRITE, IOEngine, Results, Slab, Tags, Transfers
from gdskv.io.courtesy import IN_CALL

__all__ = ["READ_THREADS", "WRITE_THREADS", "PosixEngine", "drain"]

READ_THREADS = 8
WRITE_THREADS = 6
NICE = 10
"""Of threads that write and copy. They compute for milliseconds without a pause, and where processors are few the
calling thread would be in a call as long. All
threads are batch jobs to the system besides: none takes the processor from the caller because it was woken."""


class PosixEngine:
    """Moves bytes with threads of its own: some to read and some to write for each lane, and one to copy.

    A thread stays in compiled code from start to end. It sleeps until a transfer comes, and wakes the calling thread
    never: results wait to be polled. All code is compiled, and all threads run, when the constructor returns.

    Parameters
    ----------
    slabs
        The files; they stay open until `close` returned True. Their lanes count from 0.
    checksums
        Compute CRC-32C of every payload, of a read after it and of a write before it.
    read_threads, write_threads
        Of each lane, one number for all or one for each; this many calls in a direction are with the device at once.
        0: `READ_THREADS`, `WRITE_THREADS`.
    queue_depth
        Transfers in flight for each lane and direction, and for copies.
    max_extent
        Bytes. Neighbours are joined up to this much in a call.
    """

    def __init__(
        self,
        slabs: Sequence[Slab],
        *,
        checksums: bool = True,
        read_threads: int | Sequence[int] = 0,
        write_threads: int | Sequence[int] = 0,
        queue_depth: int = 4096,
        max_extent: int = 2 << 20,
    ) -> None:
        lanes = max((slab.lane for slab in slabs), default=-1) + 1
        n_queues = 2 * lanes + 1
        threads = np.ones(n_queues, np.int64)
        for first, asked, default in ((0, read_threads, READ_THREADS), (1, write_threads, WRITE_THREADS)):
            threads[first:-1:2] = np.where(asked, asked, default)
        self._paths = ["direct" if slab.direct else "buffered" for slab in slabs]
        self._slabs = np.array([(s.fd, s.lane, s.direct, s.size) for s in slabs], queues.SLAB)
        self._depth, self._max_extent = queue_depth, max_extent

        capacity = n_queues * queue_depth
        self._own = np.zeros(queues.OWN_WORDS, np.int64)
        self._own[queues.OWN_FREE] = capacity
        self._own[queues.OWN_PENDING] = -1
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._used = np.zeros(n_queues, np.int64)
        self._forming = np.zeros((n_queues, queues.GROUP_WORDS), np.int64)
        self._local = np.zeros(capacity, RESULT)
        self._descriptors = np.zeros(capacity, queues.DESCRIPTOR)
        self._state = np.zeros(capacity, np.int64)
        self._link = np.full(capacity, -1, np.int64)
        self._shared = np.zeros(queues.LINE * (n_queues + lanes + 1), np.int64)
        self._finished = self._shared[-queues.LINE + queues.FINISHED :][:1]
        self._finished[0] = -1
        ring = 1 << (queue_depth + int(threads.max())).bit_length()  # room for every group and for the end marks
        self._rings = np.zeros((n_queues, ring), np.int64)
        self._threads_of = threads
        self._counts = np.zeros((int(threads.sum()), 2, len(worker.COUNTED)), np.int64)
        self._kinds: list[int] = []
        self._threads: list[threading.Thread] = []
        self._stopped = False

        self._compile(checksums)
        for queue in range(n_queues):
            kind = COPY if queue == n_queues - 1 else (READ, WRITE)[queue % 2]
            for _ in range(threads[queue]):
                self._start(kind, queue, checksums)
        while self._shared[-queues.LINE + queues.STARTED] < len(self._threads):
            time.sleep(0.0005)
        # A forgotten engine must not keep its threads, and none may run compiled code while the interpreter ends
        self._finalizer = weakref.finalize(self, _let_go, threads, self._shared, self._rings, self._threads)

    def submit(self, transfers: Transfers) -> int:
        if self._stopped:
            return 0
        return queues.submit(
            np.ascontiguousarray(transfers, TRANSFER),
            self._slabs,
            self._depth,
            self._max_extent,
            self._own,
            self._free,
            self._used,
            self._forming,
            self._shared,
            self._rings,
            self._descriptors,
            self._state,
            self._link,
        )

    def poll(self, out: Results) -> int:
        own = self._own
        if self._finished[0] < 0 and own[queues.OWN_PENDING] < 0 and own[queues.OWN_LOCAL] == 0:
            return 0  # nothing is new: a look, and no call
        return queues.poll(
            out, own, self._free, self._used, self._shared, self._descriptors, self._state, self._link, self._local
        )

    def cancel(self, tags: Tags) -> int:
        return self._cancel(np.unique(np.asarray(tags, np.int64)), everything=False)

    @property
    def in_flight(self) -> int:
        return int(self._own[queues.OWN_IN_FLIGHT])

    def counters(self) -> dict[str, int]:
        totals = {
            "refused": int(self._own[queues.OWN_REFUSED]),
            "cancelled": int(self._own[queues.OWN_CANCELLED]),
            "read_threads": int(self._threads_of[:-1:2].sum()),
            "write_threads": int(self._threads_of[1:-1:2].sum()),
        }
        for kind, name in ((READ, "read"), (WRITE, "write"), (COPY, "copy")):
            counts = self._counts[np.array(self._kinds) == kind].sum(axis=0)
            for path, suffix in enumerate(("_posix_direct", "_posix_buffered") if kind != COPY else ("",)):
                for column, what in enumerate(worker.COUNTED):
                    totals[f"{name}_{what}{suffix}"] = int(counts[path, column])
        return totals

    def path(self, slab: int) -> str:
        return self._paths[slab]

    def close(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._stopped and self._moving() and time.monotonic() < end:
            time.sleep(0.001)
        if not self._stopped:
            self._stopped = True
            self._cancel(np.zeros(0, np.int64), everything=True)
            queues.stop(self._threads_of, self._shared, self._rings)
        # Workers that have nothing to do are gone in no time, also with a timeout of 0
        end = max(end, time.monotonic() + 0.1)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _moving(self) -> bool:
        """Whether a worker holds or will take a transfer."""
        state = self._state
        return bool(((state == queues.QUEUED) | (state == queues.CLAIMED)).any())

    def _cancel(self, tags: Tags, *, everything: bool) -> int:
        return queues.cancel(tags, everything, self._own, self._descriptors, self._state, self._local)

    def _start(self, kind: int, queue: int, checksums: bool) -> None:
        run = self._worker(kind, queue, self._counts[len(self._threads)], checksums)
        target = partial(_behind_others, run, 0 if kind == READ else NICE)
        thread = threading.Thread(target=target, name=f"gdskv-io-{queue}", daemon=True)
        self._kinds.append(kind)
        self._threads.append(thread)
        thread.start()

    def _worker(self, kind: int, queue: int, counts: npt.NDArray[np.int64], checksums: bool) -> Callable[[], None]:
        return partial(
            worker.run,
            kind,
            queue,
            len(self._used),
            self._shared,
            self._rings[queue],
            self._descriptors,
            self._state,
            self._link,
            np.zeros((queues.MAX_PIECES, 2), np.int64),
            counts,
            checksums,
            IN_CALL,
        )

    def _compile(self, checksums: bool) -> None:
        """Run every function once, so that no request waits for the compiler (1 to 10 s where nothing is cached)."""
        queues.stop(self._threads_of, self._shared, self._rings)
        for queue in range(len(self._used)):
            for _ in range(self._threads_of[queue]):
                self._worker(COPY, queue, self._counts[0], checksums)()
        self._shared[-queues.LINE + queues.STOP] = 0
        self._shared[-queues.LINE + queues.STARTED] = 0
        self.submit(np.zeros(0, TRANSFER))
        self._cancel(np.zeros(0, np.int64), everything=True)
        queues.poll(
            np.zeros(0, RESULT),
            self._own,
            self._free,
            self._used,
            self._shared,
            self._descriptors,
            self._state,
            self._link,
            self._local,
        )


def _behind_others(run: Callable[[], None], nice: int) -> None:
    """Run in this thread, as a batch job and at most at this priority; on Linux both are a thread's own."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if os.getpriority(os.PRIO_PROCESS, 0) < nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    run()


def _let_go(
    threads_of: npt.NDArray[np.int64],
    shared: npt.NDArray[np.int64],
    rings: npt.NDArray[np.int64],
    threads: list[threading.Thread],
) -> None:
    queues.stop(threads_of, shared, rings)
    end = time.monotonic() + 0.5
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def drain(engine: IOEngine, timeout: float = 60.0) -> Results:
    """Poll until nothing is in flight and return all results; for tools and tests, never for a scheduler."""
    out = np.zeros(max(1, engine.in_flight), RESULT)
    n = 0
    end = time.monotonic() + timeout
    while engine.in_flight:
        n += engine.poll(out[n:])
        if time.monotonic() > end:
            raise TimeoutError(f"{engine.in_flight} transfers did not end within {timeout} s")
        time.sleep(0.0001)
    return out[:n]
