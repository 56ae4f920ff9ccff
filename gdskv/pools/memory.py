"""Memory of our own for a pool: one anonymous mapping cut into slots, page-aligned, in huge pages where they are had.

Knows the operating system's memory calls; must not know what a slot holds.
"""

from __future__ import annotations

import contextlib
import errno
import mmap

import numpy as np
import numpy.typing as npt

from gdskv.errors import ConfigError
from gdskv.io.base import ALIGNMENT
from gdskv.units import format_size

__all__ = ["Memory", "stride_of"]

_HUGE = 2 << 20  # bytes of a huge page, on x86-64 and on Arm with pages of 4 KiB


def stride_of(slot_bytes: int) -> int:
    """Bytes from a slot to the next: `slot_bytes` rounded up to 4 KiB."""
    return -(-slot_bytes // ALIGNMENT) * ALIGNMENT


def _available() -> int:
    """Bytes that can be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


class Memory:
    """A private mapping of `blocks` slots that a forked child does not get.

    The memory is reserved here and comes to be page by page at first use. Memory of an allocator would be shared with
    a child until either writes, and direct I/O into such pages can land in the wrong one of them.

    Parameters
    ----------
    blocks
        Number of slots.
    slot_bytes
        Bytes of a slot. Slots start at multiples of 4 KiB.
    what
        The pool, for messages.

    Raises
    ------
    ConfigError
        There is not that much memory.
    """

    def __init__(self, blocks: int, slot_bytes: int, what: str) -> None:
        self.blocks = blocks
        self.slot_bytes = slot_bytes
        self.stride = stride_of(slot_bytes)
        self.bytes = blocks * self.stride
        available = _available()
        if self.bytes > available:
            raise ConfigError(
                f"{what}_bytes={format_size(self.bytes)} does not fit: {format_size(available)} of memory is free. "
                f"Lower {what}_bytes."
            )
        try:
            self._mapping = mmap.mmap(-1, self.bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise ConfigError(
                f"{what}_bytes={format_size(self.bytes)} is refused by the system. Lower {what}_bytes, or raise the "
                "limit (ulimit -v, vm.overcommit_memory)."
            ) from error
        self._mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        start = -whole.ctypes.data % _HUGE  # a huge page needs an address that is a multiple of its size
        self.array: npt.NDArray[np.uint8] = whole[start : start + self.bytes]
        """All bytes of the pool: (blocks * stride,) uint8."""
        self.base: int = self.array.ctypes.data
        """Address of slot 0."""
        self.huge = self.bytes >= _HUGE and self._first_page_is_huge()
        """Whether the kernel gives huge pages for it: tried on the first."""

    def _first_page_is_huge(self) -> bool:
        self.array[0] = 0
        here = False
        with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="ascii") as lines:
            for line in lines:
                name, _, rest = line.partition(" ")
                if "-" in name and not name.endswith(":"):
                    low, high = (int(x, 16) for x in name.split("-"))
                    here = low <= self.base < high
                elif here and name == "AnonHugePages:":
                    return int(rest.split()[0]) > 0
        return False

    def close(self) -> None:
        """Give the memory back; at once, or when the last view of it is gone."""
        self.array = np.zeros(0, np.uint8)
        with contextlib.suppress(BufferError):  # somebody holds a view; the mapping ends with it
            self._mapping.close()
