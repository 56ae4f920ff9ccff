"""Keep an engine busy and say how long it took: what benches of the disk tier are made of.

Uses the contract only, so that it runs on any engine; must not know what a figure is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle

import numpy as np
import numpy.typing as npt

from gdskv.io.base import READ, RESULT, TRANSFER, WRITE, IOEngine, Transfers

__all__ = ["busy_pause", "idle_pause", "latencies", "stream"]

WRITE_BATCH = 2 << 20
"""Bytes of writes that `latencies` submits at a time."""


def idle_pause() -> None:
    """Between polls: leave the processor to others."""
    time.sleep(0.0002)


def busy_pause() -> None:
    """Between polls: a stretch of Python, about as long, that holds the GIL like an engine's scheduler."""
    total = 0
    for i in range(4000):
        total += i * i


def stream(
    engine: IOEngine,
    ops: tuple[int, ...],
    slab: int,
    area: tuple[int, int],
    address: int,
    total: int,
    *,
    start: int = 0,
    piece: int = 2 << 20,
    extent: int = 2 << 20,
    depth: int = 16,
    pause: Callable[[], None] = idle_pause,
) -> float:
    """Read or write an area of a slab, around and around, with `depth` extents in flight.

    Parameters
    ----------
    ops
        READ, WRITE, or both, which then take turns.
    area
        Where it begins and ends, bytes; at least one extent.
    address
        Memory of ``depth * extent`` bytes.
    total
        Bytes to move; rounded up to whole extents.
    start
        Bytes from the beginning of the area to the first extent.
    piece
        Bytes of a transfer. The pieces of an extent are neighbours on disk and submitted together.
    pause
        Called between two polls.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    OSError
        A transfer did not move all its bytes.
    """
    pieces = extent // piece
    batch = np.zeros(pieces, TRANSFER)
    batch["slab"], batch["length"] = slab, piece
    steps = np.arange(pieces) * piece
    turns, (first, end) = cycle(ops), area
    out = np.zeros(depth * pieces, RESULT)
    idle, left = list(range(depth)), np.zeros(depth, np.int64)
    to_submit = to_finish = -(-total // extent)
    offset = first + start if first + start + extent <= end else first
    begin = time.perf_counter()
    while to_finish:
        while idle and to_submit:
            lane = idle.pop()
            batch["op"], batch["tag"] = next(turns), lane
            batch["offset"], batch["address"] = offset + steps, address + lane * extent + steps
            left[lane] = pieces
            _submit_all(engine, batch)
            to_submit -= 1
            offset = offset + extent if offset + 2 * extent <= end else first
        n = engine.poll(out)
        if n == 0:
            pause()
            continue
        _check(out[:n], piece)
        done = np.bincount(out["tag"][:n], minlength=depth)
        left -= done
        ended = np.flatnonzero((done > 0) & (left == 0)).tolist()
        idle += ended
        to_finish -= len(ended)
    return time.perf_counter() - begin


def latencies(
    engine: IOEngine,
    slab: int,
    area: tuple[int, int],
    address: int,
    count: int,
    *,
    length: int = 64 << 10,
    gap: float = 0.0,
    writes: int = 0,
    seed: int = 0,
) -> tuple[npt.NDArray[np.float64], float]:
    """Read single blocks at random places, one at a time, and say how long each took from submit to poll.

    Parameters
    ----------
    area
        Where it begins and ends in the slab, bytes. With `writes`, its second half is written and its first is read.
    address
        Memory of ``length + writes * WRITE_BATCH`` bytes.
    gap
        Seconds from one read's end to the next one's start.
    writes
        Batches of writes that are kept in flight meanwhile; 0: an idle disk.

    Returns
    -------
    seconds
        (count,) float64.
    written
        Bytes per second that were written meanwhile.
    """
    first, end = area
    middle = first + (end - first) // 2 // length * length
    readable = (middle if writes else end) - first
    places = first + np.random.default_rng(seed).integers(0, readable // length, count) * length
    read = np.zeros(1, TRANSFER)
    read["tag"], read["op"], read["slab"], read["length"], read["address"] = -1, READ, slab, length, address
    pieces = WRITE_BATCH // length
    batch = np.zeros(pieces, TRANSFER)
    batch["op"], batch["slab"], batch["length"] = WRITE, slab, length
    steps = np.arange(pieces) * length
    out = np.zeros(1 + writes * pieces, RESULT)
    idle, left = list(range(writes)), np.zeros(writes, np.int64)
    taken = np.zeros(count)
    k, offset, written, reading = 0, middle, 0, False
    begin = asked = time.perf_counter()
    next_read = begin
    while k < count:
        while idle:
            lane = idle.pop()
            memory = address + length + lane * WRITE_BATCH
            batch["tag"], batch["offset"], batch["address"] = lane, offset + steps, memory + steps
            left[lane] = pieces
            _submit_all(engine, batch)
            offset = offset + WRITE_BATCH if offset + 2 * WRITE_BATCH <= end else middle
        if not reading and time.perf_counter() >= next_read:
            read["offset"] = places[k]
            asked = time.perf_counter()
            _submit_all(engine, read)
            reading = True
        n = engine.poll(out)
        if n == 0:
            continue
        now = time.perf_counter()
        _check(out[:n], length)
        tags = out["tag"][:n]
        if reading and (tags == -1).any():
            taken[k] = now - asked
            k, reading, next_read = k + 1, False, now + gap
        tags = tags[tags >= 0]
        if len(tags):
            written += len(tags) * length
            done = np.bincount(tags, minlength=writes)
            left -= done
            idle += np.flatnonzero((done > 0) & (left == 0)).tolist()
    seconds = time.perf_counter() - begin
    while engine.in_flight:
        engine.poll(out)
        idle_pause()
    return taken, written / seconds


def _submit_all(engine: IOEngine, batch: Transfers) -> None:
    accepted = engine.submit(batch)
    if accepted < len(batch):
        raise ValueError(f"the engine took {accepted} of {len(batch)} transfers: lower the depth, or raise queue_depth")


def _check(results: npt.NDArray[np.void], length: int) -> None:
    wrong = results["moved"][results["moved"] != length]
    if len(wrong):
        moved = int(wrong[0])
        raise OSError(-moved if moved < 0 else 0, f"a transfer of {length} bytes moved {moved}")
