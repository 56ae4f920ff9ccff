"""Staging buffers on the GPU: allocated once, made known to cuFile once, and the stream that fills and empties them.

Knows memory only; must not know what passes through.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from gdskv.errors import ConfigError
from gdskv.io.base import ALIGNMENT
from gdskv.io.cuda import CopyStream, Cuda
from gdskv.units import format_size

__all__ = ["LAUNCHES", "Staging", "bar1_bytes"]

log = logging.getLogger(__name__)

LAUNCHES = 16
"""Gathers and scatters in flight."""


class Staging:
    """Buffers on a GPU, allocated once, made known to cuFile once, and the stream on which they are filled and emptied.

    Parameters
    ----------
    cuda, device
        The driver, and the GPU's number.
    buffer_bytes
        Of one buffer, a multiple of 4096: a slot of the disk tier.
    total_bytes
        Of all; at most half of what the GPU shows on PCIe (BAR1), through which drives reach it.

    Raises
    ------
    ConfigError
        That is less than two buffers, or more memory than the GPU has free.
    """

    def __init__(self, cuda: Cuda, device: int, buffer_bytes: int, total_bytes: int) -> None:
        gpus = cuda.gpus()
        window = bar1_bytes(gpus[device].bus) if device < len(gpus) else None
        if window is not None and total_bytes > window // 2:
            log.warning(
                "staging_bytes=%s is cut to half of the GPU's BAR1, %s",
                format_size(total_bytes),
                format_size(window // 2),
            )
            total_bytes = window // 2
        self.buffers = total_bytes // buffer_bytes
        if self.buffers < 2:
            raise ConfigError(
                f"staging_bytes={format_size(total_bytes)} is less than two blocks of {format_size(buffer_bytes)}. "
                f"Set staging_bytes to at least {2 * buffer_bytes}."
            )
        self.buffer_bytes = buffer_bytes
        self.bytes = self.buffers * buffer_bytes
        self.stream = CopyStream(cuda, device, LAUNCHES)
        self._cuda = cuda
        try:
            with self.stream:
                self._allocated = cuda.allocate(self.bytes + ALIGNMENT)
        except OSError as error:
            self.stream.close()
            raise ConfigError(
                f"staging_bytes={format_size(self.bytes)} cannot be had on the GPU: {error}. Lower staging_bytes."
            ) from None
        self.base = -(-self._allocated // ALIGNMENT) * ALIGNMENT
        """Address of buffer 0, a multiple of 4096."""
        self._call_kvikio("memory_register")

    def close(self) -> None:
        """Give the memory back. Nothing may move in it any more."""
        self._call_kvikio("memory_deregister")
        with self.stream:
            self._cuda.free(self._allocated)
        self.stream.close()

    def _call_kvikio(self, name: str) -> None:
        """Where cuFile refuses to register memory it still moves bytes, by way of a buffer of its own."""
        import kvikio.buffer

        with self.stream:
            try:
                getattr(kvikio.buffer, name)(_Array(self._allocated, self.bytes))
            except RuntimeError as error:
                log.warning("cuFile, %s of the staging buffers: %s", name, error)


class _Array:
    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}


def bar1_bytes(bus: str, root: str = "/") -> int | None:
    """Bytes of a GPU's memory that other devices on PCIe can reach (BAR1); None where the system does not say.

    Parameters
    ----------
    bus
        PCI address such as ``0000:3b:00.0``.
    root
        Where the system's files lie.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = Path(root, "sys/bus/pci/devices", bus, "resource").read_text(encoding="ascii").splitlines()[1]
        first, last = (int(word, 16) for word in line.split()[:2])
        return last - first + 1 if last > first else None
    return None
