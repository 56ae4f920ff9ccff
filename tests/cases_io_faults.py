"""The POSIX engine over system calls that fail, stop half-way and hang. Run by test_io_faults.py in its own process.

`preadv` and `pwritev` are Python functions here, put before those of libc while the engine's code is linked; so what
runs is the real worker, and what it calls does what a test says.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import crc32c
import numpy as np
import pytest
from llvmlite import binding

from gdskv.io.base import READ, RESULT, TRANSFER, WRITE, Slab, Transfers
from gdskv.io.posix import WRITE_THREADS, PosixEngine, drain
from gdskv.pools.memory import Memory

PAGE = 4096
SLOTS = 1024

_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, use_errno=True)


class Calls:
    """What `preadv` and `pwritev` do now. Each test sets what it needs."""

    def __init__(self) -> None:
        self.before: Callable[[int, int, int], int | None] = lambda op, offset, length: None
        """Gets op, offset and length of each call: None lets it happen, a number of bytes cuts it, -errno fails it."""
        self.log: list[tuple[int, int, int]] = []

    def call(self, op: int, fd: int, vectors: int, count: int, offset: int) -> int:
        words = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(vectors)).reshape(count, 2)
        length = int(words[:, 1].sum())
        self.log.append((op, offset, length))
        answer = self.before(op, offset, length)
        if answer is not None and answer < 0:
            ctypes.set_errno(-answer)
            return -1
        left = length if answer is None else answer
        done = 0
        for address, size in words.tolist():
            part = (ctypes.c_char * min(size, left - done)).from_address(address)
            done += os.preadv(fd, [part], offset + done) if op == READ else os.pwritev(fd, [part], offset + done)
        return done


CALLS = Calls()
_KEPT = {}  # ctypes functions must outlive their last call
for _op, _name in ((READ, "preadv"), (WRITE, "pwritev")):
    _KEPT[_name] = _SIGNATURE(lambda fd, vectors, count, offset, op=_op: CALLS.call(op, fd, vectors, count, offset))
    binding.add_symbol(_name, ctypes.cast(_KEPT[_name], ctypes.c_void_p).value)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(SLOTS, PAGE, "host")
    memory.array[:] = np.random.default_rng(0).integers(0, 256, len(memory.array), dtype=np.uint8)
    yield memory
    memory.close()


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    path = tmp_path / "slab"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, SLOTS * PAGE, dtype=np.uint8).tobytes())
    fd = os.open(path, os.O_RDWR)
    yield Slab(fd, 0, False, SLOTS * PAGE)
    os.close(fd)


@pytest.fixture
def calls() -> Iterator[Calls]:
    CALLS.before, CALLS.log = (lambda op, offset, length: None), []
    yield CALLS
    CALLS.before = lambda op, offset, length: None


class Gate:
    """Holds calls of one direction until it is opened."""

    def __init__(self, calls: Calls, op: int) -> None:
        self.op, self.open, self.held, self.most = op, threading.Event(), 0, 0
        self._lock = threading.Lock()
        calls.before = self.pass_through

    def pass_through(self, op: int, offset: int, length: int) -> None:
        if op == self.op:
            with self._lock:
                self.held += 1
                self.most = max(self.most, self.held)
            self.open.wait(60)
            with self._lock:
                self.held -= 1

    def wait_for(self, held: int) -> None:
        end = time.monotonic() + 30
        while self.held < held:
            assert time.monotonic() < end
            time.sleep(0.001)


def transfers(op: int, memory: Memory, pages: list[int], tag: int = 0) -> Transfers:
    out = np.zeros(len(pages), TRANSFER)
    out["tag"] = tag + np.arange(len(pages))
    out["op"] = op
    out["offset"] = np.array(pages, np.int64) * PAGE
    out["address"] = memory.base + np.array(pages, np.int64) * PAGE
    out["length"] = PAGE
    return out


def moved(results: np.ndarray) -> dict[int, int]:
    return dict(zip(results["tag"].tolist(), results["moved"].tolist(), strict=True))


def holds(memory: Memory, slab: Slab, page: int) -> bool:
    return memory.array[page * PAGE :][:PAGE].tobytes() == os.pread(slab.fd, PAGE, page * PAGE)


@pytest.mark.parametrize("op", [READ, WRITE])
@pytest.mark.parametrize("most", [1, 1000, 4096, 5000, 12289])
def test_what_stops_half_way_goes_on(slab, memory, calls, op, most):
    calls.before = lambda _op, offset, length: min(length, most)
    engine = PosixEngine([slab])
    pages = [0, 1] if most == 1 else list(range(20))
    engine.submit(transfers(op, memory, pages))
    results = drain(engine)
    assert set(results["moved"]) == {PAGE}
    for result in results:
        page = int(result["tag"])
        assert holds(memory, slab, page)
        assert result["crc"] == crc32c.crc32c(memory.array[page * PAGE :][:PAGE].tobytes())
    assert len(calls.log) == -(-len(pages) * PAGE // most)
    assert engine.close(5)


def test_an_interrupted_call_is_repeated(slab, memory, calls):
    left = [5]

    def interrupt(op: int, offset: int, length: int) -> int | None:
        left[0] -= 1
        return -errno.EINTR if left[0] >= 0 else None

    calls.before = interrupt
    engine = PosixEngine([slab])
    engine.submit(transfers(READ, memory, [1, 2, 3]))
    assert set(drain(engine)["moved"]) == {PAGE}
    assert len(calls.log) == 6
    assert engine.close(5)


@pytest.mark.parametrize(("op", "why"), [(READ, errno.EIO), (WRITE, errno.EIO), (WRITE, errno.ENOSPC)])
def test_one_bad_page_costs_no_other(slab, memory, calls, op, why):
    calls.before = lambda _op, offset, length: -why if offset <= 5 * PAGE < offset + length else None
    engine = PosixEngine([slab])
    engine.submit(transfers(op, memory, list(range(10))))
    results = drain(engine)
    assert moved(results) == {i: -why if i == 5 else PAGE for i in range(10)}
    assert results["crc"][results["tag"] == 5] == 0
    assert all(holds(memory, slab, i) for i in range(10) if i != 5)
    assert len(calls.log) == 1 + 10
    assert engine.close(5)


def test_an_error_after_half_of_a_page_is_an_error(slab, memory, calls):
    calls.before = lambda op, offset, length: 2048 if offset == 0 else -errno.EIO
    engine = PosixEngine([slab])
    engine.submit(transfers(READ, memory, [0]))
    assert moved(drain(engine)) == {0: -errno.EIO}
    calls.before = lambda op, offset, length: 2048 if offset == 0 else 0
    engine.submit(transfers(READ, memory, [0]))
    assert moved(drain(engine)) == {0: 2048}, "the end of the file: short"
    assert engine.close(5)


def test_cancel_takes_what_has_not_started(slab, memory, calls):
    gate = Gate(calls, READ)
    engine = PosixEngine([slab], read_threads=1)
    engine.submit(transfers(READ, memory, [0, 1]))
    gate.wait_for(1)
    engine.submit(transfers(READ, memory, [10, 11, 12, 13, 14], tag=10))
    engine.submit(transfers(READ, memory, [20, 30], tag=20))
    assert engine.cancel(np.array([0, 1, 11, 12, 20, 21, 99])) == 4, "0 and 1 have started"
    out = np.zeros(16, RESULT)
    n = engine.poll(out)
    assert moved(out[:n]) == {11: -errno.ECANCELED, 12: -errno.ECANCELED, 20: -errno.ECANCELED, 21: -errno.ECANCELED}
    assert not out["started"][:n].any(), "their results are there at once, whatever the device does"
    assert engine.in_flight == 5
    assert engine.cancel(np.array([11, 20])) == 0, "they are no more"
    gate.open.set()
    assert moved(drain(engine)) == {0: PAGE, 1: PAGE, 10: PAGE, 13: PAGE, 14: PAGE}
    assert [offset // PAGE for _, offset, _ in calls.log] == [0, 10, 13], "the rest of the group still goes"
    assert engine.counters()["cancelled"] == 4
    assert engine.close(5)


def test_cancelled_transfers_count_in_the_depth_until_a_worker_passed_them(slab, memory, calls):
    gate = Gate(calls, READ)
    engine = PosixEngine([slab], read_threads=1, queue_depth=16)
    engine.submit(transfers(READ, memory, [0]))
    gate.wait_for(1)
    assert engine.submit(transfers(READ, memory, list(range(100, 140, 2)), tag=1)) == 15
    assert engine.cancel(np.arange(1, 16)) == 15
    out = np.zeros(32, RESULT)
    assert engine.poll(out) == 15 and engine.in_flight == 1
    assert engine.submit(transfers(READ, memory, [5])) == 0
    gate.open.set()
    assert len(drain(engine)) == 1
    while engine.submit(transfers(READ, memory, [5])) == 0:
        engine.poll(out)
    assert moved(drain(engine)) == {0: PAGE}
    assert engine.close(5)


def test_reads_are_not_held_behind_writes(slab, memory, calls):
    gate = Gate(calls, WRITE)
    engine = PosixEngine([slab])
    engine.submit(transfers(WRITE, memory, list(range(0, 1000, 2))))
    gate.wait_for(WRITE_THREADS)
    engine.submit(transfers(READ, memory, list(range(1, 100, 2)), tag=5000))
    out = np.zeros(1000, RESULT)
    n = 0
    end = time.monotonic() + 30
    while n < 50:
        n += engine.poll(out[n:])
        assert time.monotonic() < end
        time.sleep(0.001)
    assert out["tag"][:n].min() >= 5000
    gate.open.set()
    drain(engine)
    assert gate.most == WRITE_THREADS, "writes with the device at once: the threads for them"
    assert engine.close(5)


@pytest.mark.parametrize(("reads", "writers"), [(1, 1), (7, 1), (16, 4)])
def test_writes_are_few_while_reads_come(slab, memory, calls, reads, writers):
    gate = Gate(calls, READ)
    engine = PosixEngine([slab], read_threads=16, write_threads=6)
    engine.submit(transfers(READ, memory, [1023 - 2 * i for i in range(reads)], tag=-reads))
    gate.wait_for(reads)
    most, writing, lock = [0], [0], threading.Lock()

    def before(op: int, offset: int, length: int) -> None:
        gate.pass_through(op, offset, length)
        if op == WRITE:
            with lock:
                writing[0] += 1
                most[0] = max(most[0], writing[0])
            end = time.monotonic() + 5
            while most[0] < writers and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.002)
            with lock:
                writing[0] -= 1

    calls.before = before
    pages = [page for page in range(960) if page % 240]  # four groups of neighbours
    engine.submit(transfers(WRITE, memory, pages, tag=1))
    out = np.zeros(1024, RESULT)
    n = 0
    while n < len(pages):
        n += engine.poll(out[n:])
        time.sleep(0.001)
    assert set(out["moved"][:n]) == {PAGE}, "they do go on"
    assert most[0] == writers
    largest = max(length for op, _, length in calls.log if op == WRITE)
    assert largest < 1 << 20 if writers == 1 else largest == 239 * PAGE
    gate.open.set()
    drain(engine)
    assert engine.close(5)


@pytest.mark.parametrize("op", [READ, WRITE])
def test_close_is_bounded_whatever_the_device_does(slab, memory, calls, op):
    gate = Gate(calls, op)
    engine = PosixEngine([slab], read_threads=2, write_threads=2)
    engine.submit(transfers(op, memory, list(range(0, 100, 2))))
    gate.wait_for(2)
    start = time.monotonic()
    assert engine.close(0.2) is False
    assert time.monotonic() - start < 5
    out = np.zeros(100, RESULT)
    n = engine.poll(out)
    assert n == 48 and set(out["moved"][:n]) == {-errno.ECANCELED}
    assert engine.in_flight == 2
    assert engine.close(0) is False
    before = len(calls.log)
    gate.open.set()
    assert engine.close(10) is True
    results = drain(engine)
    assert len(results) == 2
    assert op == WRITE or set(results["crc"]) == {0}, "memory is not looked at any more"
    assert len(calls.log) == before, "no call after the end"
