"""The contract of an I/O engine: a batch of transfers goes in, a result per transfer comes out.

States the contract only; must not know what a block, a tier or a policy is, nor how an engine moves bytes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "ALIGNMENT",
    "COPY",
    "NO_SLAB",
    "READ",
    "RESULT",
    "TRANSFER",
    "WRITE",
    "IOEngine",
    "Results",
    "Slab",
    "Tags",
    "Transfers",
]

READ = 0
"""Disk to memory: ``length`` bytes at ``offset`` of ``slab`` land at ``address``."""
WRITE = 1
"""Memory to disk: ``length`` bytes at ``address`` go to ``offset`` of ``slab``. No bytes: what was written to the slab
before survives a power cut once this is done (``fdatasync``)."""
COPY = 2
"""Memory to memory: ``length`` bytes at ``address`` go to ``target``; ``slab`` is `NO_SLAB`. Onto themselves: nothing
moves, and the result holds their checksum."""

NO_SLAB = -1

ALIGNMENT = 4096
"""Bytes. Address, offset and length of a transfer on a direct slab are multiples of it."""

TRANSFER = np.dtype(
    [
        ("tag", "<i8"),  # the caller's name for the transfer; comes back in the result
        ("op", "<i4"),  # READ, WRITE or COPY
        ("slab", "<i4"),  # index in the engine's slabs
        ("offset", "<i8"),  # bytes from the start of the slab
        ("address", "<u8"),  # the memory side; of a COPY the source
        ("target", "<u8"),  # of a COPY the destination
        ("length", "<i8"),  # bytes
    ]
)

RESULT = np.dtype(
    [
        ("tag", "<i8"),
        ("moved", "<i8"),  # bytes, or -errno; fewer bytes than `length` is a failure too
        ("crc", "<u4"),  # CRC-32C of the payload of a whole READ or WRITE; else 0, and with checksums off
        ("started", "<u4"),  # 1 when the transfer reached the device, 0 when it was refused or cancelled before
    ]
)

Transfers = npt.NDArray[np.void]
"""1-D array of dtype `TRANSFER`."""
Results = npt.NDArray[np.void]
"""1-D array of dtype `RESULT`."""
Tags = npt.NDArray[np.int64]
"""1-D array of int64."""


class Slab(NamedTuple):
    """One file of a disk pool as an engine sees it."""

    fd: int
    """Open for reading and writing, with ``O_DIRECT`` exactly if `direct`. Belongs to the pool."""
    lane: int
    """Which queue it uses: the index of its directory. Slabs of one device share a lane."""
    direct: bool
    size: int
    """Bytes. A transfer that reaches beyond is refused."""


class IOEngine(Protocol):
    """Moves bytes between memory and slabs, and between memory and memory.

    Only one thread, the owner, calls these methods, and none of them waits for a device (`close` waits for a bounded
    time). Buffers handed in, and the slabs, stay valid until the result of the transfer was polled. Queued writes never
    hold back a read. Results come in any order.
    """

    def submit(self, transfers: Transfers) -> int:
        """Hand over a batch.

        Returns
        -------
        int
            How many were accepted: a leading run of `transfers`. It ends before the first one whose queue (one per
            lane and direction, and one for copies) is full; submit the rest after a `poll`.

        A transfer that cannot be (unknown slab or op, outside the slab, misaligned on a direct slab) is accepted and
        its result is ``-EINVAL``. Neighbours in the batch (same op and slab, one starting where the one before ends)
        may move as one call; each still has its own result.
        """
        ...

    def poll(self, out: Results) -> int:
        """Fill the head of `out` with results not handed over yet and return their number; no syscall, no lock."""
        ...

    def cancel(self, tags: Tags) -> int:
        """Cancel those that have not started and return their number; their result, by `poll`, is ``-ECANCELED``."""
        ...

    @property
    def in_flight(self) -> int:
        """Transfers accepted whose result was not polled yet."""
        ...

    def counters(self) -> dict[str, int]:
        """Totals since the start, by direction and path, as in ``read_bytes_posix_direct``.

        For each path the number of ``transfers``, system ``calls``, ``bytes``, ``errors`` and ``short`` ones; besides
        these ``refused`` and ``cancelled``, and how many ``read_threads`` and ``write_threads`` there are.
        """
        ...

    def path(self, slab: int) -> str:
        """``"direct"`` or ``"buffered"``: how the bytes of a slab move."""
        ...

    def close(self, timeout: float) -> bool:
        """Let transfers finish for at most `timeout` seconds, then cancel what has not started, and stop.

        Returns
        -------
        bool
            True when nothing moves any more. False when a device still holds a transfer: then the slabs and the
            buffers must stay open and mapped. Results can be polled after either; a second call waits again.
        """
        ...
