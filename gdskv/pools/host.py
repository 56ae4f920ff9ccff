"""The host tier's memory: page-aligned slots, pinned for the GPU where there is one.

Knows addresses; must not know what is in a slot or why it moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gdskv.errors import ConfigError
from gdskv.pools.memory import Memory
from gdskv.units import format_size

__all__ = ["HostPool"]

_CHUNK = 64 << 30  # bytes; larger registrations at once fail on some drivers


class HostPool:
    """Slots in host memory.

    Parameters
    ----------
    blocks, slot_bytes
        Number of slots and bytes of each; slots start at multiples of 4 KiB.
    pin
        Lock the memory and make it known to the CUDA driver, so that copies to and from a GPU need no staging.

    Raises
    ------
    ConfigError
        The memory is not to be had, or cannot be pinned.
    """

    def __init__(self, blocks: int, slot_bytes: int, *, pin: bool = False) -> None:
        self._memory = Memory(blocks, slot_bytes, "host")
        self.blocks = blocks
        self.stride = self._memory.stride
        """Bytes from a slot to the next."""
        self.base = self._memory.base
        """Address of slot 0."""
        self.bytes = self._memory.bytes
        """Bytes of all slots."""
        self.huge = self._memory.huge
        """Whether it is in huge pages."""
        self.pinned = False
        if pin:
            try:
                _register(self.base, self.bytes)
            except BaseException:
                self._memory.close()
                raise
            self.pinned = True

    def address(self, slot: int) -> int:
        """Address of a slot."""
        if not 0 <= slot < self.blocks:
            raise IndexError(f"slot {slot} is not among the host pool's {self.blocks}")
        return self.base + int(slot) * self.stride  # a request's slots are int32, an address is not

    def view(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, (slot_bytes,) uint8, no copy."""
        start = self.address(slot) - self.base
        return self._memory.array[start : start + self._memory.slot_bytes]

    def close(self) -> None:
        """Give the memory back. Nothing may move in it any more."""
        if self.pinned:
            _unregister(self.base, self.bytes)
            self.pinned = False
        self._memory.close()


def _register(base: int, size: int) -> None:
    """Pin memory for CUDA, in chunks; on failure what was pinned is let go."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("the host pool cannot be pinned: torch finds no CUDA device. Use device='cpu'.")
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for start in range(0, size, _CHUNK):
        why = int(runtime.cudaHostRegister(base + start, min(_CHUNK, size - start), 0))
        if why != 0:
            _unregister(base, start)
            raise ConfigError(
                f"host_bytes={format_size(size)} cannot be pinned: CUDA error {why} at {format_size(start)}. "
                "Lower host_bytes, or raise the limit of locked memory (ulimit -l)."
            )


def _unregister(base: int, size: int) -> None:
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for start in range(0, size, _CHUNK):
        runtime.cudaHostUnregister(base + start)
