"""What moves as one call: transfers that are neighbours on disk, joined; and taking one of them apart again.

Knows offsets and addresses only; must not know KvikIO, nor what becomes of an extent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdskv._jit import jit
from gdskv.io.base import ALIGNMENT, COPY, READ, WRITE, Transfers

__all__ = ["BAD", "DEVICE", "MAX_STRETCHES", "OURS", "PLAIN", "Extent", "Row", "sort"]

MAX_STRETCHES = 32
"""Copies between the memory of an extent and its buffer: each is a call of the calling thread."""

PLAIN, OURS, DEVICE, BAD = range(4)
"""What `sort` finds: for the POSIX engine, which also refuses what cannot be; for KvikIO, or a copy, and the driver
must be asked for the memory; for KvikIO in memory of a GPU; in memory of a GPU, and no whole pages."""


class Row(NamedTuple):
    """One transfer."""

    tag: int
    queue: int
    address: int
    length: int


class Extent:
    """Neighbours on disk that move as one call, and how far it has come."""

    __slots__ = (
        "buffer", "buffered", "checks", "crc", "device", "ended", "event", "full", "future", "length", "moved",
        "offset", "op", "rows", "slab", "stretches",
    )  # fmt: skip

    def __init__(self, op: int, slab: int, offset: int, device: bool, buffered: bool, row: Row) -> None:
        self.op, self.slab, self.offset, self.device = op, slab, offset, device
        self.buffered = buffered  # its bytes pass through a buffer in host memory: its memory may be in several pieces
        self.length = row.length
        self.rows = [row]
        self.stretches = [(row.address, row.length)]  # its memory, neighbours joined
        self.crc: list[int] = []
        self.future: Any = None  # of KvikIO, or the exception that it raised at once
        self.event: Any = None  # a copy between its memory and its buffer
        self.ended = False
        self.full = False  # takes no other transfer in
        self.moved = 0  # bytes, or -errno
        self.checks = 0  # checksums that are still to come
        self.buffer = 0  # address; 0: none

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return self.rows[0].address

    def join(self, op: int, slab: int, offset: int, device: bool, row: Row, most: int) -> bool:
        """Take a transfer in, if it goes on where this ends and both come to `most` bytes at most."""
        if (
            self.full
            or slab != self.slab
            or offset != self.offset + self.length
            or op != self.op
            or device != self.device
            or self.length + row.length > most
        ):
            return False
        address, length = self.stretches[-1]
        if address + length == row.address:
            self.stretches[-1] = (address, length + row.length)
        elif self.buffered and len(self.stretches) < MAX_STRETCHES:
            self.stretches.append((row.address, row.length))
        else:
            return False
        self.rows.append(row)
        self.length += row.length
        return True

    def alone(self) -> Iterator[tuple[int, Extent]]:
        """Each member as an extent of its own, with its number."""
        offset = self.offset
        for number, row in enumerate(self.rows):
            yield number, Extent(self.op, self.slab, offset, self.device, self.buffered, row)
            offset += row.length

    def without(self, tags: set[int] | None) -> tuple[list[Extent], list[Row]]:
        """What is left when members with a tag in `tags` are taken out (None: all), and those members."""
        if tags is not None and not any(row.tag in tags for row in self.rows):
            return [self], []
        left: list[Extent] = []
        gone: list[Row] = []
        for number, single in self.alone():
            row = self.rows[number]
            if tags is None or row.tag in tags:
                gone.append(row)
            elif not left or not left[-1].join(self.op, self.slab, single.offset, self.device, row, self.length):
                left.append(single)
        return left, gone


@jit
def sort(
    batch: Transfers,
    slabs: npt.NDArray[np.int64],
    memory: npt.NDArray[np.int64],
    queues: npt.NDArray[np.int64],
    kinds: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Find the queue of each transfer and its kind; how many are `PLAIN`, how many `OURS`, and the longest of all.

    Parameters
    ----------
    batch
        (n,) `TRANSFER`.
    slabs
        (k, 3): lane, whether direct, bytes.
    memory
        (m, 2): address and bytes of memory of a GPU.
    queues, kinds
        (n,) int64, filled. Of a lane two queues, of reads and of writes; the last is of copies.
    """
    copies = plain = ours = longest = 0
    for i in range(len(slabs)):
        copies = max(copies, 2 * slabs[i, 0] + 2)
    for i in range(len(batch)):
        op, slab, length = batch["op"][i], batch["slab"][i], batch["length"][i]
        queues[i], kinds[i] = copies, PLAIN
        longest = max(longest, np.int64(length))
        plain += 1
        if length <= 0:
            continue
        if op == COPY:
            kinds[i] = OURS
            plain -= 1
            ours += 1
            continue
        if (op != READ and op != WRITE) or slab < 0 or slab >= len(slabs):
            continue
        offset, address = batch["offset"][i], np.int64(batch["address"][i])
        if offset < 0 or length > slabs[slab, 2] or offset > slabs[slab, 2] - length:
            continue
        device = False
        for k in range(len(memory)):
            device |= memory[k, 0] <= address < memory[k, 0] + memory[k, 1]
        whole = (offset | length) & (ALIGNMENT - 1) == 0 and not (slabs[slab, 1] and address & (ALIGNMENT - 1))
        if whole:
            queues[i] = 2 * slabs[slab, 0] + op
            kinds[i] = DEVICE if device else OURS
            plain -= 1
            ours += not device
        elif device:
            kinds[i] = BAD
            plain -= 1
    return plain, ours, longest
