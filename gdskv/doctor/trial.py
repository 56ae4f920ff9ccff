"""A trial of a directory: which way its bytes can go, and how fast 64 MiB of them went.

Uses the probe and the POSIX engine; must not know the rest of the node.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import NamedTuple

from gdskv.io.modes import Mode, probe
from gdskv.io.tuning import Threads, measure

__all__ = ["Trial", "trial"]

_BYTES = 64 << 20
_STEP = 2 << 20


class Trial(NamedTuple):
    """What came of it."""

    mode: Mode
    o_direct: bool
    write: float
    """Bytes a second, of host memory, one call of 2 MiB at a time; through the page cache where not `o_direct`."""
    read: float
    threads: Threads
    """What a store would choose for a large directory here."""


def trial(directory: str) -> Trial:
    """Write and read back a file of 64 MiB, which is gone afterwards. OSError where that cannot be."""
    mode = probe(directory)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".gdskv-doctor-") as file, mmap.mmap(-1, _STEP) as step:
        step[:] = os.urandom(_STEP)
        kept = step[:]
        try:
            fd, direct = os.open(file.name, os.O_RDWR | os.O_DIRECT), True
        except OSError:
            fd, direct = os.open(file.name, os.O_RDWR), False
        try:
            start = time.perf_counter()
            for offset in range(0, _BYTES, _STEP):
                if os.pwrite(fd, step, offset) != _STEP:
                    raise OSError(f"a write in {directory} was short")
            os.fsync(fd)
            between = time.perf_counter()
            for offset in range(0, _BYTES, _STEP):
                if os.preadv(fd, [step], offset) != _STEP or step[:] != kept:
                    raise OSError(f"{directory} gave other bytes than were written")
            end = time.perf_counter()
            threads = measure(fd, 0)
        finally:
            os.close(fd)
    return Trial(mode, direct, _BYTES / (between - start), _BYTES / (end - between), threads)
