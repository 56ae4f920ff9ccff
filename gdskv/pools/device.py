"""The device tier's memory: slots on the configured torch device, which may be the CPU.

Knows a block's shape; must not know what is in a slot or why it moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdskv.errors import ConfigError
from gdskv.layout import KVLayout
from gdskv.pools.memory import Memory, stride_of
from gdskv.units import format_size

if TYPE_CHECKING:
    import torch

__all__ = ["DevicePool"]


class DevicePool:
    """Slots that the model computes on. ``pool[slot]`` is a tensor of ``layout.shape`` in the pool's own memory.

    Parameters
    ----------
    blocks
        Number of slots.
    layout
        The shape and dtype of a block.
    device
        A torch device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. On the CPU torch is imported at the first tensor only.

    Raises
    ------
    ConfigError
        The device does not exist, or has not that much memory.
    """

    def __init__(self, blocks: int, layout: KVLayout, device: str = "cpu") -> None:
        self.layout = layout
        self.blocks = blocks
        self.stride = stride_of(layout.slot_bytes)
        """Bytes from a slot to the next."""
        self.bytes = blocks * self.stride
        """Bytes of all slots."""
        self.device = device
        self._memory: Memory | None = None
        self._bytes: torch.Tensor | None = None  # (bytes,) uint8; on the CPU a view of `_memory`, made when asked for
        if device.partition(":")[0] == "cpu":
            self._memory = Memory(blocks, layout.slot_bytes, "device")
            self.base = self._memory.base
            """Address of slot 0."""
            self.huge = self._memory.huge
            """Whether it is in huge pages; always so on a GPU."""
        else:
            self._bytes = _tensor_on(device, self.bytes)
            self.base = self._bytes.data_ptr()
            self.huge = True

    def address(self, slot: int) -> int:
        """Address of a slot."""
        if not 0 <= slot < self.blocks:
            raise IndexError(f"slot {slot} is not among the device pool's {self.blocks}")
        return self.base + int(slot) * self.stride  # a request's slots are int32, an address is not

    def view(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, (slot_bytes,) uint8, no copy; on the CPU only."""
        if self._memory is None:
            raise TypeError(f"the pool is on {self.device}, which NumPy cannot see: use pool[slot]")
        start = self.address(slot) - self.base
        return self._memory.array[start : start + self.layout.slot_bytes]

    def __getitem__(self, slot: int) -> torch.Tensor:
        if self._bytes is None:
            import torch

            if self._memory is None:
                raise ValueError("the device pool is closed")
            self._bytes = torch.from_numpy(self._memory.array)
        start = self.address(slot) - self.base
        flat = self._bytes[start : start + self.layout.block_bytes]
        return flat.view(self.layout.torch_dtype).view(self.layout.shape)

    def __len__(self) -> int:
        return self.blocks

    def close(self) -> None:
        """Give the memory back, at once or when the last tensor on it is gone. Nothing may move in it any more."""
        self._bytes = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _tensor_on(device: str, size: int) -> Any:
    import torch

    try:
        return torch.empty(size, dtype=torch.uint8, device=torch.device(device))
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"device_bytes={format_size(size)} is more memory than {device} has free. Lower device_bytes."
        ) from None
    except (RuntimeError, AssertionError) as error:  # torch says no more than that, in several ways
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"device={device!r} cannot be used: {why}. Use device='cpu', or a device that exists."
        ) from None
