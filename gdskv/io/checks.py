"""Checksums of the members of extents, computed on a thread that never takes the GIL.

Knows extents and host memory; must not know how bytes move.
"""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from gdskv.io.base import COPY, NO_SLAB, RESULT, TRANSFER
from gdskv.io.extents import Extent
from gdskv.io.posix import PosixEngine

__all__ = ["Checks"]


class Checks:
    """A queue of checksums to compute.

    Parameters
    ----------
    most
        How many are with the thread at a time; the rest is kept.
    """

    def __init__(self, most: int) -> None:
        self._engine = PosixEngine([], queue_depth=most)
        self._waiting: deque[tuple[Extent, int, int, int]] = deque()  # extent, member, address, length
        self._out: dict[int, tuple[Extent, int]] = {}
        self._numbers = itertools.count()
        self._room = np.zeros(256, RESULT)

    def add(self, extent: Extent, address: int) -> None:
        """Compute the checksums of its members, whose bytes lie one after the other in host memory."""
        extent.checks = len(extent.rows)
        extent.crc = [0] * len(extent.rows)
        for member, row in enumerate(extent.rows):
            self._waiting.append((extent, member, address, row.length))
            address += row.length

    def send(self) -> None:
        """Hand over what was added."""
        if not self._waiting:
            return
        batch = np.zeros(len(self._waiting), TRANSFER)
        for i, (extent, member, address, length) in enumerate(self._waiting):
            number = next(self._numbers)
            self._out[number] = (extent, member)
            batch[i] = (number, COPY, NO_SLAB, 0, address, address, length)
        taken = self._engine.submit(batch)
        for number in batch["tag"][taken:].tolist():
            del self._out[number]
        for _ in range(taken):
            self._waiting.popleft()

    def poll(self) -> list[Extent]:
        """The extents whose last checksum has come."""
        complete = []
        while self._out and (n := self._engine.poll(self._room)):
            for number, crc in zip(self._room["tag"][:n].tolist(), self._room["crc"][:n].tolist(), strict=True):
                extent, member = self._out.pop(number)
                extent.crc[member] = crc
                extent.checks -= 1
                if extent.checks == 0:
                    complete.append(extent)
        return complete

    def __bool__(self) -> bool:
        return bool(self._out or self._waiting)

    def close(self) -> None:
        """Stop the thread."""
        self._engine.close(1.0)
