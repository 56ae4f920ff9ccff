"""What leader and workers say to each other: plain messages, arrays as bytes.

Knows numbers only. All ranks get the same orders; each answers with reports of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["ORDER", "RESULT", "Hello", "Orders", "Report", "pack", "unpack"]

ORDER = np.dtype(
    [
        ("address", "<u8"),  # the engine's number of a block, where one end of the transfer is the engine's memory
        ("k0", "<u8"),  # key of the block: a rank serves bytes under this key only
        ("k1", "<u8"),
        ("tag", "<i4"),  # the leader's name for the transfer, free again once every rank has answered
        ("kind", "<i4"),  # as in the table: HOST_TO_DISK, ...
        ("src", "<i4"),  # slot over all tiers, or NONE; the same on every rank
        ("dst", "<i4"),
        ("ticket", "<i4"),  # NONE where nobody waits for it
        ("index", "<i4"),  # block within the ticket
    ]
)

RESULT = np.dtype(
    [
        ("tag", "<i4"),
        ("lied", "<u4"),  # 1: bytes came, and not those that were written
        ("moved", "<i8"),  # bytes, or -errno
    ]
)


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a rank holds when it opens its files: the leader takes up what all ranks have alike."""

    rank: int
    epoch: int
    """Of this opening; no two are equal. Orders name it, so none meant for an earlier one is carried out."""
    wall: int
    """ns; the wall clock, or the latest time in the records if that is later."""
    host_blocks: int
    directories: list[int]
    """Disk slots of each."""
    next_fill: int
    """Above the number of every fill that its records know."""
    blocks: bytes
    """Of dtype REMEMBERED, with slots over all directories, tenants by the place in `tenants`, and deadlines on the
    wall clock."""
    again: bytes
    """int32 disk slots whose records are to be written anew."""
    tenants: list[str]
    why: list[str]
    """Per directory that came back empty or in part: which, and why."""
    learned: bytes | None = b""
    """Of rank 0 alone: what it keeps of an earlier leader's table. None: it keeps what cannot be used."""


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks shall do, in this order."""

    number: int
    """Counts up by one; a rank that misses one has lost its place."""
    epochs: list[int]
    """Of each rank; others do not act. Empty while the leader waits for hellos."""
    retired: list[int] = []
    """Epochs that are over: such a rank opens its files again and says hello."""
    forget: bool = False
    """And clears them first."""
    wall: int = 0
    fill: int = 0
    """Numbers of fills start here at least, so that they stay the same on all ranks."""
    settled: bool = False
    """Nothing is under way or to be told beyond this: who ends here ends cleanly."""
    transfers: bytes = b""
    """Of dtype ORDER."""
    cancelled: bytes = b""
    """int64 tags: do not start these any more."""
    changes: bytes = b""
    """Of dtype CHANGE, deadlines on the wall clock: records to be written."""
    tenants: dict[int, str] = {}
    """Numbers that records use from here on."""
    learned: bytes = b""
    """What the leader's table has learned of reuse, every so often: for rank 0 to keep. At most 91 KiB."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What has become of it on one rank since its last report."""

    rank: int
    epoch: int
    number: int
    """Of the latest orders seen."""
    results: bytes = b""
    """Of dtype RESULT."""
    written: bytes = b""
    """int32 disk slots whose records are written."""
    unwritten: bytes = b""
    """Those whose records could not be."""
    hello: Hello | None = None
    """Until orders come for its epoch."""
    counters: dict[str, int] = {}


def pack(array: NDArray[Any]) -> bytes:
    """An array's bytes."""
    return array.tobytes()


def unpack(data: bytes, dtype: DTypeLike) -> NDArray[Any]:
    """The array again; may be written."""
    return np.frombuffer(bytearray(data), dtype)
