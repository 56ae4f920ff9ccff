"""The POSIX engine on real files, with O_DIRECT where the file system has it."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import crc32c
import numpy as np
import pytest

from gdskv.io import queues, worker
from gdskv.io.base import COPY, NO_SLAB, READ, RESULT, TRANSFER, WRITE, Slab, Transfers
from gdskv.io.posix import PosixEngine, drain
from gdskv.pools.memory import Memory

PAGE = 4096
SLOTS = 1024


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(SLOTS, PAGE, "host")
    memory.array[:] = np.random.default_rng(0).integers(0, 256, len(memory.array), dtype=np.uint8)
    yield memory
    memory.close()


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Callable[..., Slab]]:
    """Return a function that makes a slab of SLOTS pages."""
    opened = []

    def make(lane: int = 0, pages: int = SLOTS) -> Slab:
        path = tmp_path / f"slab{len(opened)}"
        path.write_bytes(bytes(pages * PAGE))
        try:
            fd, direct = os.open(path, os.O_RDWR | os.O_DIRECT), True
        except OSError:
            fd, direct = os.open(path, os.O_RDWR), False
        opened.append(fd)
        return Slab(fd, lane, direct, pages * PAGE)

    yield make
    for fd in opened:
        os.close(fd)


@pytest.fixture
def engine(slab: Callable[..., Slab]) -> Iterator[PosixEngine]:
    engine = PosixEngine([slab()])
    yield engine
    assert engine.close(10)


def transfers(
    op: int, memory: Memory, pages: list[int], slots: list[int] | None = None, slab: int = 0, tag: int = 0
) -> Transfers:
    """One transfer of a page for each of `pages` of the slab and `slots` of the memory."""
    out = np.zeros(len(pages), TRANSFER)
    out["tag"] = tag + np.arange(len(pages))
    out["op"] = op
    out["slab"] = slab
    out["offset"] = np.array(pages, np.int64) * PAGE
    out["address"] = memory.base + np.array(pages if slots is None else slots, np.int64) * PAGE
    out["length"] = PAGE
    return out


def test_what_is_written_is_read_back_with_its_checksum(engine, memory):
    pages = list(range(0, 500, 3)) + list(range(500, 512))
    assert engine.submit(transfers(WRITE, memory, pages)) == len(pages)
    written = drain(engine)
    assert set(written["moved"]) == {PAGE} and set(written["started"]) == {1}
    crc = dict(zip(written["tag"].tolist(), written["crc"].tolist(), strict=True))
    assert crc == {i: crc32c.crc32c(memory.array[p * PAGE : (p + 1) * PAGE].tobytes()) for i, p in enumerate(pages)}

    assert engine.submit(transfers(READ, memory, pages, [p + 512 for p in pages])) == len(pages)
    read = drain(engine)
    assert dict(zip(read["tag"].tolist(), read["crc"].tolist(), strict=True)) == crc
    for p in pages:
        assert (memory.array[p * PAGE :][:PAGE] == memory.array[(p + 512) * PAGE :][:PAGE]).all()


def test_a_read_sees_what_is_in_the_file_not_what_was_sent(engine, memory, slab, tmp_path):
    engine.submit(transfers(WRITE, memory, [7]))
    (good,) = drain(engine)
    file = tmp_path / "slab0"
    with file.open("r+b") as f:
        f.seek(7 * PAGE + 100)
        byte = f.read(1)[0]
        f.seek(7 * PAGE + 100)
        f.write(bytes([byte ^ 1]))
        f.flush()
        os.fsync(f.fileno())
    engine.submit(transfers(READ, memory, [7], [8]))
    (read,) = drain(engine)
    assert read["moved"] == PAGE and read["crc"] != good["crc"]


def test_neighbours_move_in_one_call(engine, memory):
    engine.submit(transfers(WRITE, memory, list(range(100))))
    drain(engine)
    # Neighbours on disk, scattered in memory; then a gap; then backwards
    engine.submit(transfers(READ, memory, [*range(32), 40, 41, 60, 59, 58], [(7 * i) % 64 + 200 for i in range(37)]))
    assert set(drain(engine)["moved"]) == {PAGE}
    for i in range(32):
        assert (memory.array[i * PAGE :][:PAGE] == memory.array[((7 * i) % 64 + 200) * PAGE :][:PAGE]).all()
    counters = engine.counters()
    path = engine.path(0)
    assert counters[f"write_calls_posix_{path}"] == 1 and counters[f"write_transfers_posix_{path}"] == 100
    assert counters[f"read_calls_posix_{path}"] == 1 + 1 + 3 and counters[f"read_transfers_posix_{path}"] == 37
    assert counters[f"read_bytes_posix_{path}"] == 37 * PAGE


def test_an_extent_ends_at_its_limits(slab, memory):
    engine = PosixEngine([slab(), slab()], max_extent=16 * PAGE)
    batch = np.concatenate(
        [transfers(WRITE, memory, list(range(64))), transfers(WRITE, memory, list(range(8)), slab=1)]
    )
    engine.submit(batch)
    assert len(drain(engine)) == 72
    assert sum(v for k, v in engine.counters().items() if k.startswith("write_calls")) == 4 + 1
    assert engine.close(5)
    engine = PosixEngine([slab()], max_extent=1 << 30)
    engine.submit(transfers(WRITE, memory, list(range(1000))))  # pieces of a call are limited too
    assert set(drain(engine)["moved"]) == {PAGE}
    assert sum(v for k, v in engine.counters().items() if k.startswith("write_calls")) == 4
    assert engine.close(5)


def test_interleaved_lanes_are_joined_too(slab, memory):
    engine = PosixEngine([slab(0), slab(1)])
    batch = np.zeros(64, TRANSFER)
    batch[0::2] = transfers(WRITE, memory, list(range(32)), slab=0)
    batch[1::2] = transfers(WRITE, memory, list(range(32)), slab=1, tag=100)
    engine.submit(batch)
    assert len(drain(engine)) == 64
    assert sum(v for k, v in engine.counters().items() if k.startswith("write_calls")) == 2
    assert engine.close(5)


def test_memory_is_copied(engine, memory):
    batch = np.zeros(300, TRANSFER)
    batch["tag"] = np.arange(300)
    batch["op"], batch["slab"], batch["length"] = COPY, NO_SLAB, PAGE
    batch["address"] = memory.base + np.arange(300) * PAGE
    batch["target"] = memory.base + (np.arange(300) + 500) * PAGE
    assert engine.submit(batch) == 300
    results = drain(engine)
    assert set(results["moved"]) == {PAGE} and sorted(results["tag"]) == list(range(300))
    assert (memory.array[: 300 * PAGE] == memory.array[500 * PAGE : 800 * PAGE]).all()
    assert engine.counters()["copy_bytes"] == 300 * PAGE


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": 3},
        {"op": -1},
        {"slab": 1},
        {"slab": -1},
        {"offset": -PAGE},
        {"offset": SLOTS * PAGE},
        {"offset": (SLOTS - 1) * PAGE, "length": 2 * PAGE},
        {"offset": 2**62},
        {"length": 0},
        {"length": -PAGE},
        {"length": 2**62},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_its_neighbours_move(engine, memory, wrong):
    batch = transfers(READ, memory, [0, 1, 2])
    for field, value in wrong.items():
        batch[field][1] = value
    assert engine.submit(batch) == 3
    results = {int(r["tag"]): (int(r["moved"]), int(r["started"])) for r in drain(engine)}
    assert results == {0: (PAGE, 1), 1: (-errno.EINVAL, 0), 2: (PAGE, 1)}
    assert engine.counters()["refused"] == 1


@pytest.mark.parametrize("field", ["offset", "address", "length"])
def test_misalignment_is_refused_on_a_direct_slab_only(slab, memory, field):
    direct = slab()
    if not direct.direct:
        pytest.skip("the file system has no O_DIRECT")
    buffered = direct._replace(fd=os.open(f"/proc/self/fd/{direct.fd}", os.O_RDWR), direct=False)
    engine = PosixEngine([direct, buffered])
    assert (engine.path(0), engine.path(1)) == ("direct", "buffered")
    for number, expected in ((0, -errno.EINVAL), (1, PAGE - 512 if field == "length" else PAGE)):
        batch = transfers(READ, memory, [1], slab=number)
        batch[field] = batch[field] - np.array(512, batch.dtype[field])
        engine.submit(batch)
        assert [int(r["moved"]) for r in drain(engine)] == [expected]
    assert engine.close(5)
    os.close(buffered.fd)


def test_without_checksums_there_are_none(slab, memory):
    engine = PosixEngine([slab()], checksums=False)
    engine.submit(transfers(WRITE, memory, [1, 2]))
    engine.submit(transfers(READ, memory, [5, 6]))
    assert set(drain(engine)["crc"]) == {0}
    assert engine.close(5)


def test_errors_come_as_results(slab, memory):
    good = slab()
    beyond = slab(pages=4)._replace(size=SLOTS * PAGE)  # the file is shorter than the slab says
    engine = PosixEngine([good, good._replace(fd=-1), beyond])
    engine.submit(transfers(READ, memory, [0, 1], slab=1))
    assert [int(r["moved"]) for r in drain(engine)] == [-errno.EBADF] * 2
    engine.submit(transfers(READ, memory, [2, 3, 4, 5], slab=2))
    results = {int(r["tag"]): (int(r["moved"]), int(r["crc"]) != 0) for r in drain(engine)}
    assert results == {0: (PAGE, True), 1: (PAGE, True), 2: (0, False), 3: (0, False)}
    counters = engine.counters()
    path = engine.path(0)
    assert counters[f"read_errors_posix_{path}"] == 2 and counters[f"read_short_posix_{path}"] == 2
    assert engine.close(5)


def test_depth_is_bounded_and_a_leading_run_is_accepted(slab, memory):
    engine = PosixEngine([slab(0), slab(1)], queue_depth=16)
    writes = transfers(WRITE, memory, list(range(40)))
    assert engine.submit(writes) == 16
    assert engine.in_flight == 16
    assert engine.submit(writes[16:]) == 0, "results that were not polled still count"
    # Each direction and each lane has its own depth
    assert engine.submit(transfers(READ, memory, list(range(10)), tag=100)) == 10
    assert engine.submit(transfers(WRITE, memory, list(range(10)), slab=1, tag=200)) == 10
    mixed = np.concatenate([transfers(READ, memory, [1], slab=1), writes[16:17], transfers(READ, memory, [2], slab=1)])
    assert engine.submit(mixed) == 1
    assert len(drain(engine)) == 37
    assert engine.submit(writes[16:]) == 16
    assert len(drain(engine)) == 16
    assert engine.close(5)


def test_poll_fills_what_it_is_given(engine, memory):
    engine.submit(transfers(READ, memory, list(range(10))))
    while engine.counters()[f"read_transfers_posix_{engine.path(0)}"] < 10:
        time.sleep(0.001)
    time.sleep(0.01)
    out = np.zeros(4, RESULT)
    assert [engine.poll(out[:0]), engine.poll(out), engine.poll(out), engine.poll(out), engine.poll(out)] == [
        0,
        4,
        4,
        2,
        0,
    ]
    assert engine.in_flight == 0


def test_nothing_is_compiled_after_the_constructor(engine, memory):
    compiled = [queues.submit, queues.poll, queues.cancel, queues.stop, worker.run]
    before = [len(function.signatures) for function in compiled]
    for op in (WRITE, READ):
        engine.submit(transfers(op, memory, [1, 2, 9])[:2])
        engine.cancel(np.array([0, 5]))
        drain(engine)
    assert [len(function.signatures) for function in compiled] == before


def test_empty_calls_do_nothing(engine):
    assert engine.submit(np.zeros(0, TRANSFER)) == 0
    assert engine.poll(np.zeros(8, RESULT)) == 0
    assert engine.cancel(np.zeros(0, np.int64)) == 0
    assert engine.cancel(np.array([1, 2, 3])) == 0


def test_an_engine_without_files_copies(memory):
    engine = PosixEngine([])
    batch = np.zeros(1, TRANSFER)
    batch["op"], batch["slab"], batch["length"] = COPY, NO_SLAB, PAGE
    batch["address"], batch["target"] = memory.base, memory.base + PAGE
    assert engine.submit(batch) == 1
    assert [int(r["moved"]) for r in drain(engine)] == [PAGE]
    assert engine.close(5)


def test_close_lets_what_is_queued_finish(slab, memory):
    engine = PosixEngine([slab()])
    assert engine.submit(transfers(WRITE, memory, list(range(0, 1000, 2)))) == 500
    assert engine.close(30)
    assert engine.submit(transfers(WRITE, memory, [1])) == 0
    assert set(drain(engine)["moved"]) == {PAGE}
    assert engine.close(0), "closing twice is harmless"


def test_its_threads_stand_behind_the_caller(slab, memory):
    """Batch jobs, which take no processor from the caller by waking; those that write and copy at nice 10."""
    engine = PosixEngine([slab()], read_threads=3, write_threads=2)
    tasks = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("gdskv-io")]
    assert len(tasks) >= 3 + 2 + 1
    ours = tasks[-6:]
    assert {os.sched_getscheduler(task) for task in ours} == {os.SCHED_BATCH}
    assert [os.getpriority(os.PRIO_PROCESS, task) for task in ours] == [0, 0, 0, 10, 10, 10]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER and os.getpriority(os.PRIO_PROCESS, 0) == 0
    assert engine.counters()["read_threads"] == 3 and engine.counters()["write_threads"] == 2
    assert engine.close(5)


def test_each_lane_may_have_its_own_number_of_threads(slab, memory):
    engine = PosixEngine([slab(0), slab(1)], read_threads=[1, 0], write_threads=[2, 3])
    assert engine.counters()["read_threads"] == 1 + 8 and engine.counters()["write_threads"] == 2 + 3
    assert engine.submit(transfers(WRITE, memory, [0, 5])) == 2
    assert engine.submit(transfers(READ, memory, [3], slab=1, tag=7)) == 1
    assert set(drain(engine)["moved"]) == {PAGE}
    assert engine.close(5)


def test_a_forgotten_engine_leaves_no_threads(slab):
    before = threading.active_count()
    engine = PosixEngine([slab()])
    assert threading.active_count() > before
    del engine
    gc.collect()
    assert threading.active_count() == before


def test_100_000_transfers_leave_counters_and_memory_flat(slab, memory):
    engine = PosixEngine([slab(), slab(1)], queue_depth=512)
    out = np.zeros(256, RESULT)
    rng = np.random.default_rng(3)
    peak = []
    done = {READ: 0, WRITE: 0, COPY: 0}
    cancelled = 0
    for round_ in range(10):
        for _ in range(100):
            batch = transfers(0, memory, rng.integers(0, 500, 100).tolist(), rng.integers(0, 1000, 100).tolist())
            batch["op"] = rng.integers(0, 3, 100)
            batch["slab"] = rng.integers(0, 2, 100)
            copies = batch["op"] == COPY
            batch["slab"][copies] = NO_SLAB
            batch["target"][copies] = memory.base + rng.integers(0, 1000, copies.sum()) * PAGE
            batch["op"][batch["op"] == WRITE] = WRITE
            sent = 0
            while sent < 100:
                sent += engine.submit(batch[sent:])
                if rng.random() < 0.05:
                    engine.cancel(batch["tag"][:sent])
                n = engine.poll(out)
                cancelled += int((out["moved"][:n] == -errno.ECANCELED).sum())
            for op in done:
                done[op] += int((batch["op"] == op).sum())
        results = drain(engine)
        cancelled += int((results["moved"] == -errno.ECANCELED).sum())
        if round_ >= 4:
            peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert engine.in_flight == 0
    while engine.poll(out) or engine._own[0] != len(engine._free):  # descriptors of cancelled ones come back too
        time.sleep(0.001)
    counters = engine.counters()
    moved = sum(v for k, v in counters.items() if "transfers" in k)
    assert cancelled == counters["cancelled"]
    assert moved + cancelled == sum(done.values()) == 100_000
    assert sorted(engine._free.tolist()) == list(range(len(engine._free)))
    assert not engine._used.any()
    assert peak[-1] - peak[0] < 8 << 10, "KiB"
    assert engine.close(5)
