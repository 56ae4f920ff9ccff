"""The KvikIO engine, with the real KvikIO over the CUDA driver double. Run by test_io_kvikio.py in its own process."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from typing import Any

import crc32c
import numpy as np
import pytest
import test_io_posix
from doubles import DelayEngine, FaultEngine, RecorderEngine
from hostdriver import Driver
from test_io_posix import (  # noqa: F401
    PAGE,
    memory,
    slab,
    test_a_read_sees_what_is_in_the_file_not_what_was_sent,
    test_an_engine_without_files_copies,
    test_close_lets_what_is_queued_finish,
    test_depth_is_bounded_and_a_leading_run_is_accepted,
    test_empty_calls_do_nothing,
    test_memory_is_copied,
    test_what_cannot_be_is_refused_and_its_neighbours_move,
    test_what_is_written_is_read_back_with_its_checksum,
    test_without_checksums_there_are_none,
    transfers,
)

from gdskv.io.base import COPY, NO_SLAB, READ, RESULT, TRANSFER, WRITE
from gdskv.io.kvikio import KvikioEngine
from gdskv.io.kvikio_calls import errno_of
from gdskv.io.posix import drain

test_io_posix.PosixEngine = KvikioEngine  # the tests that are imported build this engine


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    for name in ("fail_alloc", "fail_copy", "fail_late", "delay_us"):
        driver.set(name, 0)


@pytest.fixture(params=["host", "device"])
def where(request, driver, memory) -> Iterator[str]:  # noqa: F811
    """The memory of a test is the host's, or answers as a GPU's."""
    if request.param == "device":
        driver.adopt(memory.base, memory.bytes)
    yield request.param
    if request.param == "device":
        driver.disown(memory.base)


@pytest.fixture
def engine(slab, where, memory, driver) -> Iterator[KvikioEngine]:  # noqa: F811
    engine = KvikioEngine([slab()], device_memory=[(memory.base, memory.bytes)] if where == "device" else [])
    yield engine
    driver.set("delay_us", 0)
    assert engine.close(10)


def copies(driver: Driver) -> np.ndarray:
    """Bytes that the driver copied so far, and its batches of copies: of these two only KvikIO makes the latter."""
    return np.array([driver.count("bytes"), driver.count("batch_copies")])


def moved(results: np.ndarray) -> dict[int, int]:
    return dict(zip(results["tag"].tolist(), results["moved"].tolist(), strict=True))


def test_bytes_and_checksums_are_right_from_either_memory(engine, memory, where, driver):  # noqa: F811
    before, copied = memory.array.copy(), copies(driver)
    driver.set("delay_us", 200)
    pages = list(range(400))
    assert engine.submit(transfers(WRITE, memory, pages)) == 400
    crc = {int(r["tag"]): int(r["crc"]) for r in drain(engine)}
    assert crc == {p: crc32c.crc32c(before[p * PAGE : (p + 1) * PAGE].tobytes()) for p in pages}
    memory.array[: 400 * PAGE] = 0
    engine.submit(transfers(READ, memory, pages))
    assert {int(r["tag"]): int(r["crc"]) for r in drain(engine)} == crc
    assert np.array_equal(memory.array, before)
    through_ours = (2 * 400 * PAGE, 0) if where == "device" else (0, 0)
    assert tuple(copies(driver) - copied) == through_ours, "each byte once in each direction, none by KvikIO itself"


def test_without_checksums_kvikio_itself_copies_to_and_from_the_device(slab, memory, where, driver):  # noqa: F811
    engine = KvikioEngine([slab()], checksums=False)  # it asks the driver for the memory
    before, copied = memory.array.copy(), copies(driver)
    driver.set("delay_us", 200)
    engine.submit(transfers(WRITE, memory, list(range(400))))
    assert moved(drain(engine)) == dict.fromkeys(range(400), PAGE)
    memory.array[: 400 * PAGE] = 0
    engine.submit(transfers(READ, memory, list(range(400))))
    assert moved(drain(engine)) == dict.fromkeys(range(400), PAGE)
    assert np.array_equal(memory.array, before)
    size, batches = copies(driver) - copied
    assert (size, batches >= 2) == ((2 * 400 * PAGE, True) if where == "device" else (0, False))
    assert engine.close(5)


def test_neighbours_move_as_one_extent(engine, memory, where):  # noqa: F811
    engine.submit(transfers(WRITE, memory, list(range(512))))
    assert set(moved(drain(engine)).values()) == {PAGE}
    counters = engine.counters()
    assert engine.path(0) == "kvikio_compat"
    assert counters["write_calls_kvikio_compat"] == 1 and counters["write_transfers_kvikio_compat"] == 512
    engine.submit(transfers(READ, memory, [0, 1, 2, 3], [9, 10, 3, 7]))  # scattered in memory
    drain(engine)
    assert engine.counters()["read_calls_kvikio_compat"] == (3 if where == "host" else 1)
    assert engine.counters()["read_bytes_kvikio_compat"] == 4 * PAGE
    assert engine.counters()["read_bytes_kvikio_direct"] == 0


class Tasks:
    """KvikIO's file, and the bytes that it was told to give to a thread of each call."""

    def __init__(self, file: Any) -> None:
        self.of, self._file = [], file  # type: list[int], Any

    def pread(self, buffer: Any, length: int, offset: int, task: int) -> Any:
        self.of.append(task)
        return self._file.pread(buffer, length, offset, task)

    def pwrite(self, buffer: Any, length: int, offset: int, task: int) -> Any:
        self.of.append(task)
        return self._file.pwrite(buffer, length, offset, task)

    def close(self) -> None:
        self._file.close()


def test_an_extent_is_cut_while_threads_would_idle(engine, memory, where):  # noqa: F811
    tasks = engine._files[0] = Tasks(engine._files[0])
    before = memory.array.copy()
    crc = crc32c.crc32c(before[: 500 * PAGE].tobytes())
    batch = transfers(WRITE, memory, [0])
    batch["length"] = 500 * PAGE  # in three pieces, the last of which is shorter
    engine.submit(batch)
    assert [(r["moved"], r["crc"]) for r in drain(engine)] == [(500 * PAGE, crc)]
    batch["op"] = READ
    memory.array[:] = 0
    engine.submit(batch)
    assert [(r["moved"], r["crc"]) for r in drain(engine)] == [(500 * PAGE, crc)]
    assert np.array_equal(memory.array[: 500 * PAGE], before[: 500 * PAGE])
    assert tasks.of == [167 * PAGE] * 2
    engine.submit(transfers(READ, memory, [p for p in range(512) if p % 128 < 127]))  # four extents that end apart
    assert {r["moved"] for r in drain(engine)} == {PAGE}
    assert tasks.of[2:] == [127 * PAGE] * 4  # below a megabyte there is nothing to cut


def test_a_cut_extent_whose_end_is_missing_is_short_there_alone(slab, memory, where, driver):  # noqa: F811
    engine = KvikioEngine([slab(pages=450)._replace(size=1024 * PAGE)])
    engine.submit(transfers(WRITE, memory, list(range(450))))
    drain(engine)
    tasks = engine._files[0] = Tasks(engine._files[0])
    engine.submit(transfers(READ, memory, list(range(512))))
    results = moved(drain(engine))
    assert tasks.of[0] == 128 * PAGE
    assert [results[i] for i in range(512)] == [PAGE] * 450 + [0] * 62
    assert engine.close(5)


def test_a_transfer_longer_than_the_buffers_is_refused_on_a_gpu(slab, memory, where, driver):  # noqa: F811
    engine = KvikioEngine([slab()], max_extent=8 * PAGE, largest=16 * PAGE)
    before = memory.array.copy()
    batch = transfers(WRITE, memory, [0, 100, 200])
    batch["length"] = np.array([64, 16, 8]) * PAGE
    engine.submit(batch)
    results = {int(r["tag"]): (int(r["moved"]), int(r["crc"])) for r in drain(engine)}
    crc = {i: crc32c.crc32c(before[p * PAGE : (p + n) * PAGE].tobytes()) for i, p, n in ((1, 100, 16), (2, 200, 8))}
    assert [results[i] for i in (1, 2)] == [(16 * PAGE, crc[1]), (8 * PAGE, crc[2])]
    assert results[0][0] == (64 * PAGE if where == "host" else -errno.EINVAL)
    assert engine.counters()["refused"] == (where == "device")
    assert engine.close(5)


def test_a_copy_may_have_either_end_on_the_device(engine, memory, where, driver):  # noqa: F811
    driver.set("delay_us", 500)
    host = np.zeros(100 * PAGE, np.uint8)
    batch = np.zeros(100, TRANSFER)
    batch["tag"], batch["op"], batch["slab"], batch["length"] = np.arange(100), COPY, NO_SLAB, PAGE
    batch["address"] = memory.base + np.arange(100) * PAGE
    batch["target"] = host.ctypes.data + np.arange(100) * PAGE
    assert engine.submit(batch) == 100
    assert moved(drain(engine)) == dict.fromkeys(range(100), PAGE)
    assert np.array_equal(host, memory.array[: 100 * PAGE])
    assert engine.counters()["copy_bytes_device"] == (100 * PAGE if where == "device" else 0)


@pytest.mark.parametrize("fault", ["fail_copy", "fail_late"])
def test_a_cuda_fault_fails_a_transfer_and_no_other(engine, memory, where, driver, fault):  # noqa: F811
    if where == "host":
        pytest.skip("nothing of host memory passes through CUDA")
    engine.submit(transfers(WRITE, memory, [0, 10, 20]))
    crc = {int(r["tag"]): int(r["crc"]) for r in drain(engine)}
    for n in (1, 2, 3):
        driver.set(fault, n)
        engine.submit(transfers(READ, memory, [0, 10, 20], [100, 110, 120]))
        results = drain(engine)
        assert len(results) == 3
        for r in results:
            assert r["moved"] == -errno.EIO or (r["moved"] == PAGE and r["crc"] == crc[int(r["tag"])])
        driver.set(fault, 0)
    assert engine.counters()["read_errors_kvikio_compat"] >= 3
    engine.submit(transfers(READ, memory, [0, 10, 20], [100, 110, 120]))
    assert moved(drain(engine)) == dict.fromkeys(range(3), PAGE)


def test_a_fault_in_an_extent_costs_one_member(engine, memory, where, driver):  # noqa: F811
    if where == "host":
        pytest.skip("nothing of host memory passes through CUDA")
    driver.set("fail_copy", 2)  # the extent, and one of its members alone
    engine.submit(transfers(READ, memory, list(range(8))))
    assert sorted(moved(drain(engine)).values()) == [-errno.EIO] + [PAGE] * 7


def test_the_end_of_the_file_is_short(slab, memory):  # noqa: F811
    engine = KvikioEngine([slab(pages=4)._replace(size=64 * PAGE)])
    engine.submit(transfers(READ, memory, [2, 3, 4, 5]))
    assert moved(drain(engine)) == {0: PAGE, 1: PAGE, 2: 0, 3: 0}
    assert engine.counters()["read_short_kvikio_compat"] == 2
    assert engine.close(5)


def test_no_call_waits_for_a_slow_device(engine, memory, where, driver):  # noqa: F811
    if where == "host":
        pytest.skip("host memory is not slow here")
    driver.set("delay_us", 300_000)
    out = np.zeros(64, RESULT)
    longest, start = 0.0, time.perf_counter()
    engine.submit(transfers(READ, memory, list(range(0, 60, 2))))
    while time.perf_counter() - start < 0.2:
        before = time.perf_counter()
        assert engine.poll(out) == 0
        longest = max(longest, time.perf_counter() - before)
    assert longest < 0.15
    driver.set("delay_us", 0)
    assert len(drain(engine)) == 30


def test_what_was_not_handed_over_can_be_cancelled(engine, memory, where, driver):  # noqa: F811
    driver.set("delay_us", 20_000)
    reads = transfers(READ, memory, list(range(0, 200, 2)))
    assert engine.submit(reads) == 100
    cancelled = engine.cancel(np.arange(100))
    assert cancelled == 100 - 8, "eight are out"
    assert engine.cancel(np.arange(100)) == 0
    results = drain(engine)
    assert sorted(results["moved"].tolist()) == [-errno.ECANCELED] * cancelled + [PAGE] * 8
    assert set(results["started"][results["moved"] < 0].tolist()) == {0}
    assert engine.counters()["cancelled"] == cancelled
    engine.submit(transfers(READ, memory, list(range(0, 40, 2))))
    engine.submit(transfers(READ, memory, list(range(100, 110)), tag=100))
    assert engine.cancel(np.array([103, 104])) == 2, "out of the middle of an extent"
    results = moved(drain(engine))
    assert [results[100 + i] == PAGE for i in range(10)] == [i not in (3, 4) for i in range(10)]


def test_a_read_does_not_stand_behind_writes(engine, memory, where, driver):  # noqa: F811
    if where == "host":
        pytest.skip("host memory is not slow here")
    engine.submit(transfers(WRITE, memory, list(range(0, 400, 2))))
    engine.submit(transfers(READ, memory, [1], tag=1000))
    order = []
    out = np.zeros(8, RESULT)
    while engine.in_flight:
        order += out["tag"][: engine.poll(out)].tolist()
    assert order.index(1000) < 100


def test_a_flush_and_odd_sizes_go_past_kvikio(slab, memory):  # noqa: F811
    odd = slab()
    buffered = odd._replace(fd=os.open(f"/proc/self/fd/{odd.fd}", os.O_RDWR), direct=False)
    engine = KvikioEngine([buffered], records=[buffered])
    batch = transfers(WRITE, memory, [0, 1, 2])
    batch["length"] = [0, 100, PAGE]
    batch["slab"] = [0, 0, 1]
    engine.submit(batch)
    assert moved(drain(engine)) == {0: 0, 1: 100, 2: PAGE}
    assert engine.counters()["write_transfers_posix_buffered"] == 3
    assert engine.counters()["write_transfers_kvikio_compat"] == 0
    assert engine.path(1) == "buffered"
    assert engine.close(5)
    os.close(buffered.fd)


def test_close_answers_in_time_when_the_device_hangs(slab, memory, driver):  # noqa: F811
    driver.adopt(memory.base, memory.bytes)
    engine = KvikioEngine([slab()], device_memory=[(memory.base, memory.bytes)])
    driver.set("delay_us", 1_000_000)
    engine.submit(transfers(READ, memory, list(range(0, 100, 2))))
    before = time.monotonic()
    assert engine.close(0.1) is False
    assert time.monotonic() - before < 0.8
    driver.set("delay_us", 0)
    assert engine.submit(transfers(READ, memory, [1])) == 0
    assert engine.close(30) is True
    results = drain(engine)
    assert len(results) == 50 and set(results["moved"].tolist()) == {PAGE, -errno.ECANCELED}
    driver.disown(memory.base)


def test_in_direct_mode_another_thread_hands_over(slab, memory, driver):  # noqa: F811
    # No GPU here: the engine is told "direct", so that its way through the other thread is walked
    driver.adopt(memory.base, memory.bytes)
    engine = KvikioEngine([slab()], direct=[True], device_memory=[(memory.base, memory.bytes)])
    engine.submit(transfers(WRITE, memory, list(range(0, 100, 2))))
    engine.submit(transfers(READ, memory, list(range(0, 100, 2)), tag=100))
    assert set(drain(engine)["moved"].tolist()) == {PAGE}
    assert engine.path(0) == "kvikio_direct" and engine.counters()["read_bytes_kvikio_direct"] == 50 * PAGE
    assert engine.close(5)
    driver.disown(memory.base)


@pytest.mark.parametrize(
    "wrap", [RecorderEngine, lambda e: DelayEngine(e, 0.001), lambda e: FaultEngine(e, lambda t: None)]
)
def test_a_wrapped_engine_keeps_the_contract(engine, memory, wrap):  # noqa: F811
    wrapped = wrap(engine)
    before = memory.array[: 64 * PAGE].copy()
    assert wrapped.submit(transfers(WRITE, memory, list(range(64)))) == wrapped.in_flight == 64
    assert moved(drain(wrapped)) == dict.fromkeys(range(64), PAGE)
    memory.array[: 64 * PAGE] = 0
    wrapped.submit(transfers(READ, memory, list(range(64))))
    assert moved(drain(wrapped)) == dict.fromkeys(range(64), PAGE)
    assert np.array_equal(memory.array[: 64 * PAGE], before) and wrapped.in_flight == 0


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("KvikIO failure at: a.hpp:1: POSIX error on pread: EOF", 0),
        ("KvikIO failure at: a.hpp:1: POSIX error on pwrite: No space left on device", errno.ENOSPC),
        ("KvikIO failure at: a.hpp:1: POSIX error on pread: Input/output error", errno.EIO),
        ("KvikIO failure at: a.hpp:1: POSIX error: Operation not permitted", errno.EBADF),
        ("CUDA error at: a.hpp:251: CUDA_ERROR_OUT_OF_MEMORY(out of memory)", errno.ENOMEM),
        ("cuFile error at: a.cpp:1: GPUDirect Storage not supported on current file", errno.EIO),
    ],
)
def test_what_kvikio_says_becomes_an_errno(message, code):
    assert errno_of(message) == code
