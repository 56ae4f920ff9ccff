"""Buffers in pinned host memory through which memory of a GPU passes, and the copies between both.

Knows extents and the CUDA driver; must not know files.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from gdskv.io import cuda
from gdskv.io.base import READ
from gdskv.io.extents import Extent

__all__ = ["Bounce"]

_HUGE = 2 << 20  # bytes of a huge page: a drive takes an extent in it as one piece instead of one for every 4 KiB


class Bounce:
    """Buffers, some for reads and some for writes, so that neither waits for the other's; and a stream for each.

    Parameters
    ----------
    device
        Number of the GPU.
    counts
        Buffers for reads and for writes.
    size
        Bytes of each.
    """

    def __init__(self, driver: cuda.Cuda, device: int, counts: tuple[int, int], size: int) -> None:
        mapping = mmap.mmap(-1, sum(counts) * size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_DONTFORK)  # a child must not take over pages in which a drive writes
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        start = -whole.ctypes.data % _HUGE
        self._cuda, self._memory = driver, whole[start : start + sum(counts) * size]
        base = self._memory.ctypes.data
        split = base + counts[READ] * size
        self._free = (
            list(range(base, split, size)),
            list(range(split, split + counts[1] * size, size)),
        )
        self._streams = [cuda.CopyStream(driver, device, count) for count in counts]
        with self._streams[0]:
            self._pinned = driver.pin(base, len(self._memory))

    def room(self, op: int) -> bool:
        """Whether there is a buffer for a read or a write."""
        return bool(self._free[op])

    def take(self, extent: Extent) -> None:
        """Give it a buffer."""
        extent.buffer = self._free[extent.op].pop()

    def release(self, extent: Extent) -> None:
        """Take its buffer back, if it has one; no copy may run."""
        if extent.buffer:
            self._free[extent.op].append(extent.buffer)
            extent.buffer = 0

    def fill(self, extent: Extent) -> None:
        """Start to copy its memory to its buffer. OSError when CUDA refuses; what had started ends with its `event`."""
        self._copy(extent, to_memory=False)

    def empty(self, extent: Extent) -> None:
        """Start to copy its buffer to its memory; likewise."""
        self._copy(extent, to_memory=True)

    def _copy(self, extent: Extent, *, to_memory: bool) -> None:
        stream, at, started, error = self._streams[extent.op], extent.buffer, 0, None
        try:
            for address, length in extent.stretches:
                stream.copy(*((address, at) if to_memory else (at, address)), length)
                at += length
                started += 1
        except OSError as refusal:
            error = refusal
        if started:
            extent.event = stream.mark()  # the buffer is free when what had started has ended
        if error is not None:
            raise error

    def done(self, extent: Extent) -> bool:
        """Whether its copies have ended. OSError when one failed."""
        try:
            if not self._streams[extent.op].done(extent.event):
                return False
        except OSError:
            extent.event = None
            raise
        extent.event = None
        return True

    def close(self) -> None:
        """Give all memory back; no copy may run."""
        if self._pinned:
            with self._streams[0]:
                self._cuda.unpin(self._memory.ctypes.data)
        for stream in self._streams:
            stream.close()
