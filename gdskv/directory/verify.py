"""Reads payloads back and compares them with their records, as fast as asked and no faster.

Knows a slab's file and the records; writes nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gdskv.directory.records import PRESENT
from gdskv.io.crc import crc32c_at
from gdskv.pools.disk import SLAB_HEADER

EXTENT = 4 << 20  # bytes of a read, at most


def verify(
    fd: int,
    blocks: NDArray[np.void],
    slot_bytes: int,
    *,
    rate: float = 0.0,
    step: Callable[[int], None] | None = None,
) -> NDArray[np.bool_]:
    """Which blocks hold what their records say.

    Parameters
    ----------
    fd : int
        The slab, open for reading.
    blocks : ndarray, dtype REMEMBERED
        In order of their slots, which count within the slab. Those that are not PRESENT count as good.
    slot_bytes : int
    rate : float
        Bytes per second at most; 0: as fast as the device gives them.
    step : callable, optional
        Told how many blocks were read.
    """
    good = np.ones(len(blocks), np.bool_)
    there = np.flatnonzero(blocks["flags"] & PRESENT)
    most = max(1, EXTENT // slot_bytes)
    begun = time.monotonic()
    bytes_read = 0
    with mmap.mmap(-1, most * slot_bytes) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        at = 0
        while at < len(there):
            n = 1
            first = int(blocks["slot"][there[at]])
            while n < most and at + n < len(there) and int(blocks["slot"][there[at + n]]) == first + n:
                n += 1
            got = _read(fd, memory, n * slot_bytes, SLAB_HEADER + first * slot_bytes)
            for k in range(n):
                crc = crc32c_at(np.uint64(address + k * slot_bytes), slot_bytes)
                good[there[at + k]] = got >= (k + 1) * slot_bytes and int(crc) == int(blocks["crc"][there[at + k]])
            at += n
            bytes_read += n * slot_bytes
            if step is not None:
                step(n)
            if rate > 0 and (ahead := bytes_read / rate - (time.monotonic() - begun)) > 0:
                time.sleep(ahead)
    return good


def _read(fd: int, memory: mmap.mmap, length: int, offset: int) -> int:
    """Bytes read from the start of a range; one that cannot be read at all is 0 long."""
    with memoryview(memory) as view:
        try:
            return os.preadv(fd, [view[:length]], offset)
        except OSError:
            return 0
