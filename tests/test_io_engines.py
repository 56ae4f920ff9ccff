"""Engines that do not move bytes, or wrap one that does, keep the contract; and so do the words that threads share."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import numpy as np
import pytest
from doubles import DelayEngine, Fail, FaultEngine, Flip, RecorderEngine, Short, StuckEngine

from gdskv.io import measure
from gdskv.io.atomics import cas, exchange, fetch_add, load_acquire, store_release
from gdskv.io.base import COPY, READ, RESULT, TRANSFER, WRITE, IOEngine, Slab, Transfers
from gdskv.io.null import NullEngine
from gdskv.io.posix import PosixEngine, drain
from gdskv.pools.memory import Memory

PAGE = 4096
SLOTS = 64


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(SLOTS, PAGE, "host")
    memory.array[:] = np.random.default_rng(0).integers(0, 256, len(memory.array), dtype=np.uint8)
    yield memory
    memory.close()


@pytest.fixture
def posix(tmp_path: Path) -> Iterator[PosixEngine]:
    path = tmp_path / "slab"
    path.write_bytes(bytes(SLOTS * PAGE))
    fd = os.open(path, os.O_RDWR)
    engine = PosixEngine([Slab(fd, 0, False, SLOTS * PAGE)], queue_depth=64)
    yield engine
    assert engine.close(10)
    os.close(fd)


def transfers(op: int, memory: Memory, pages: range | list[int], tag: int = 0) -> Transfers:
    out = np.zeros(len(pages), TRANSFER)
    out["tag"] = tag + np.arange(len(pages))
    out["op"] = op
    out["offset"] = np.array(pages) * PAGE
    out["address"] = memory.base + np.array(pages) * PAGE
    out["length"] = PAGE
    return out


def moved(results: np.ndarray) -> dict[int, int]:
    return dict(zip(results["tag"].tolist(), results["moved"].tolist(), strict=True))


WRAPPERS: dict[str, Callable[[IOEngine], IOEngine]] = {
    "none": lambda engine: engine,
    "recorder": RecorderEngine,
    "delay": lambda engine: DelayEngine(engine, 0.001),
    "fault": lambda engine: FaultEngine(engine, lambda transfer: None),
    "stuck": lambda engine: StuckEngine(engine, stuck=False),
    "nested": lambda engine: DelayEngine(FaultEngine(RecorderEngine(engine), lambda transfer: None), 0.0),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_engine_keeps_the_contract(posix, memory, wrap):
    engine = WRAPPERS[wrap](posix)
    before = memory.array.copy()
    assert engine.submit(transfers(WRITE, memory, range(SLOTS))) == SLOTS
    assert engine.in_flight == SLOTS
    assert engine.submit(transfers(WRITE, memory, range(4), tag=100)) == 0, "bounded"
    assert moved(drain(engine)) == dict.fromkeys(range(SLOTS), PAGE)
    assert engine.in_flight == 0
    memory.array[:] = 0
    assert engine.submit(transfers(READ, memory, range(SLOTS))) == SLOTS
    assert moved(drain(engine)) == dict.fromkeys(range(SLOTS), PAGE)
    assert (memory.array == before).all()
    assert engine.path(0) == "buffered"
    assert engine.counters()["read_bytes_posix_buffered"] == SLOTS * PAGE
    out = np.zeros(2, RESULT)
    engine.submit(transfers(READ, memory, range(3)))
    seen = []
    while len(seen) < 3:
        n = engine.poll(out)
        seen += out["tag"][:n].tolist()
    assert sorted(seen) == [0, 1, 2]
    assert engine.close(5)


def test_the_null_engine_succeeds_at_the_next_poll():
    engine = NullEngine(queue_depth=8)
    batch = np.zeros(10, TRANSFER)
    batch["tag"], batch["length"] = np.arange(10), 100
    batch["op"] = [READ, WRITE, COPY, READ, WRITE, COPY, READ, WRITE, COPY, READ]
    assert engine.submit(batch) == 8
    assert engine.in_flight == 8
    assert engine.cancel(np.arange(8)) == 0
    out = np.zeros(5, RESULT)
    assert engine.poll(out) == 5 and out["tag"].tolist() == [0, 1, 2, 3, 4] and set(out["moved"]) == {100}
    assert engine.submit(batch[8:]) == 2
    assert engine.poll(out) == 5 and out["tag"].tolist() == [5, 6, 7, 8, 9]
    assert engine.poll(out) == 0 and engine.in_flight == 0
    assert engine.counters()["read_transfers_null"] == 4 and engine.counters()["copy_bytes_null"] == 300
    assert engine.close(0)


def test_a_recorder_keeps_what_was_accepted_and_what_came_back(posix, memory):
    engine = RecorderEngine(posix)
    batch = transfers(WRITE, memory, list(range(SLOTS)) * 2)
    assert engine.submit(batch) == SLOTS
    drain(engine)
    assert (engine.transfers == batch[:SLOTS]).all()
    assert sorted(int(r["tag"]) for r in engine.results) == list(range(SLOTS))


def test_a_delay_holds_results_back(posix, memory):
    now = [0.0]
    engine = DelayEngine(posix, 0.5, clock=lambda: now[0])
    engine.submit(transfers(WRITE, memory, range(3)))
    out = np.zeros(8, RESULT)
    while posix.in_flight:
        assert engine.poll(out) == 0
    assert engine.in_flight == 3
    now[0] = 0.49
    assert engine.poll(out) == 0
    now[0] = 0.51
    assert engine.poll(out[:2]) == 2 and engine.poll(out) == 1 and engine.in_flight == 0


def test_faults_are_what_the_rule_says(posix, memory):
    faults = {1: Fail(), 2: Fail(errno.ENOSPC), 5: Short(100), 6: Flip(17)}
    engine = FaultEngine(posix, lambda transfer: faults.get(int(transfer["tag"])))
    good = memory.array.copy()
    posix.submit(transfers(WRITE, memory, range(10)))
    crc = {int(r["tag"]): int(r["crc"]) for r in drain(posix)}
    assert engine.submit(transfers(READ, memory, range(10))) == 10
    results = drain(engine)
    expected = dict.fromkeys(range(10), PAGE) | {1: -errno.EIO, 2: -errno.ENOSPC, 5: 100}
    assert moved(results) == expected
    assert engine.faults == 4
    wrong = {int(r["tag"]) for r in results if r["moved"] == PAGE and r["crc"] != crc[int(r["tag"])]}
    assert wrong == {6}
    assert np.flatnonzero(memory.array != good).tolist() == [6 * PAGE + 17]


def test_faults_keep_a_leading_run(posix, memory):
    engine = FaultEngine(posix, lambda transfer: Fail() if transfer["tag"] in (10, 80) else None)
    batch = transfers(WRITE, memory, list(range(SLOTS)) * 2)
    accepted = engine.submit(batch)
    assert accepted == SLOTS + 1, "64 places, and one that failed before it took any"
    results = moved(drain(engine))
    assert sorted(results) == list(range(accepted)) and results[10] == -errno.EIO


def test_a_stuck_device_holds_everything_until_it_is_released(posix, memory):
    engine = StuckEngine(posix)
    assert engine.submit(transfers(WRITE, memory, range(10))) == 10
    out = np.zeros(16, RESULT)
    assert engine.poll(out) == 0 and engine.in_flight == 10
    assert engine.cancel(np.arange(10)) == 0
    assert StuckEngine(posix, queue_depth=4).submit(transfers(WRITE, memory, range(10))) == 4
    engine.release()
    assert len(drain(engine)) == 10
    engine.stuck = True
    engine.submit(transfers(WRITE, memory, range(2)))
    assert engine.close(0) is False


def test_benches_move_what_they_say(posix, memory):
    engine, area = RecorderEngine(posix), (PAGE, SLOTS * PAGE)
    for pause in (measure.idle_pause, measure.busy_pause):
        seconds = measure.stream(
            engine, (WRITE,), 0, area, memory.base, 200 * PAGE, piece=PAGE, extent=4 * PAGE, depth=8, pause=pause
        )
        assert seconds > 0
    assert engine.transfers["length"].sum() == 2 * 200 * PAGE
    assert np.unique(engine.transfers["offset"]).tolist() == list(range(PAGE, 61 * PAGE, PAGE))
    engine = RecorderEngine(posix)
    measure.stream(engine, (READ, WRITE), 0, area, memory.base, 6 * PAGE, start=3 * PAGE, piece=PAGE, extent=PAGE)
    assert engine.transfers["op"].tolist() == 3 * [READ, WRITE]
    assert engine.transfers["offset"].tolist() == list(range(4 * PAGE, 10 * PAGE, PAGE))
    taken, written = measure.latencies(posix, 0, area, memory.base, 20, length=PAGE)
    assert taken.shape == (20,) and (taken > 0).all() and written == 0


def test_benches_do_not_hide_a_failure(posix, memory):
    engine = FaultEngine(posix, lambda transfer: Fail() if transfer["offset"] == 8 * PAGE else None)
    with pytest.raises(OSError, match="moved -5"):
        measure.stream(engine, (READ,), 0, (0, SLOTS * PAGE), memory.base, 64 * PAGE, piece=PAGE, extent=PAGE, depth=4)
    drain(engine)


@numba.njit(nogil=True)
def _add(words: np.ndarray, times: int) -> None:
    for _ in range(times):
        fetch_add(words, 0, 1)
        while True:
            now = load_acquire(words, 1)
            if cas(words, 1, now, now + 2):
                break
        while exchange(words, 2, 1) == 1:  # a lock
            pass
        words[3] += 1
        store_release(words, 2, 0)


def test_words_that_threads_share_lose_nothing():
    words = np.zeros(4, np.int64)
    _add(words, 0)
    threads = [threading.Thread(target=_add, args=(words, 20_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert words.tolist() == [80_000, 160_000, 0, 80_000]
