"""How many threads a drive wants, found out by reading and writing a stretch of it with more and more of them.

Uses plain calls on one file; must not know engines, slots or blocks.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

__all__ = ["AREA", "Threads", "measure"]

AREA = 64 << 20
"""Bytes that are written over and read."""
COUNTS = (2, 4, 8, 16)
PIECE = 256 << 10
ROUNDS = 3
SECONDS = 0.02
"""Of a trial of one count in one direction; it also ends when it has passed over the area once."""
ENOUGH = 0.9
"""Of the best bandwidth: the fewest threads that reach it are chosen, since each costs the caller some processor."""


class Threads(NamedTuple):
    """What was measured, and chosen by it."""

    read: int
    write: int
    read_speed: dict[int, float]
    """Bytes per second by number of threads."""
    write_speed: dict[int, float]


def measure(fd: int, offset: int) -> Threads:
    """Choose numbers of threads for a drive.

    Parameters
    ----------
    fd
        A file open for reading and writing, with or without O_DIRECT. `AREA` bytes of it are written over.
    offset
        Where they start; aligned to 4096.

    Raises
    ------
    OSError
        A call failed or was short.
    """
    with mmap.mmap(-1, AREA) as memory, memoryview(memory) as view:
        parts = [view[at : at + PIECE] for at in range(0, AREA, PIECE)]
        reads: Callable[[int], int] = lambda k: os.preadv(fd, [parts[k]], offset + k * PIECE)  # noqa: E731
        writes: Callable[[int], int] = lambda k: os.pwritev(fd, [parts[k]], offset + k * PIECE)  # noqa: E731
        try:
            _speed(writes, max(COUNTS), float("inf"))  # the first write into preallocated space costs more
            speeds = [dict.fromkeys(COUNTS, 0.0) for _ in range(2)]
            for _ in range(ROUNDS):
                for n in COUNTS:
                    for speed, call in zip(speeds, (reads, writes), strict=True):
                        speed[n] = max(speed[n], _speed(call, n, SECONDS))
        finally:
            for part in parts:
                part.release()
    return Threads(choose(speeds[0]), choose(speeds[1]), *speeds)


def choose(speeds: dict[int, float]) -> int:
    """The fewest threads that come close to the best."""
    best = max(speeds.values())
    return min(n for n, speed in speeds.items() if speed >= ENOUGH * best)


def _speed(call: Callable[[int], int], threads: int, seconds: float) -> float:
    """Bytes per second of `threads` that take piece after piece."""
    pieces, begin = count(), threading.Barrier(threads + 1)
    moved, errors = [0] * threads, list[OSError]()

    def work(i: int) -> None:
        begin.wait()
        while (k := next(pieces)) < AREA // PIECE and time.perf_counter() < end:
            try:
                got = call(k)
                if got != PIECE:
                    raise OSError(f"a transfer of {PIECE} bytes moved {got}")
            except OSError as error:
                errors.append(error)
                return
            moved[i] += got

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    start = time.perf_counter()
    end = start + seconds
    begin.wait()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(moved) / (time.perf_counter() - start)
