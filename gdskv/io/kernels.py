"""Gather and scatter on the GPU: the kernels of ``kernels.cu``, compiled at first use, and what a launch needs.

Knows pieces, pages and extents; must not know slots, transfers or files. Importable without CuPy and CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdskv.errors import ConfigError
from gdskv.io.crc import byte_tables, crc32c, past, zeros_tables
from gdskv.io.cuda import CopyStream, Cuda

if TYPE_CHECKING:
    from gdskv.pools.pages import DevicePages

__all__ = ["NAMES", "OPTIONS", "THREADS", "Job", "Mover", "load", "source"]

THREADS = 256
"""Threads of a block of the grid; as in the source, like what follows."""
_UNIT = 16  # bytes
_HALVINGS = 8
_ROUNDS = 16  # units of a thread: a chunk of 64 KiB is one block of the grid, so that small batches fill a GPU too
NAMES = tuple(f"{way}_{grain}" for way in ("gather", "scatter") for grain in (16, 4, 1))
"""The kernels: direction, and bytes that move at a time on the side of the pages."""
OPTIONS = ("-std=c++17",)
"""What NVRTC is told."""


class Job(ctypes.Structure):
    """The kernels' one parameter. Addresses, then sizes in bytes."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("pieces", "pages", "extents", "tables", "factors", "sums")),
        ("page_stride", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("piece_bytes", "pages_per_block", "bytes", "extent_bytes", "rounds")),
        ("unused", ctypes.c_uint32),
    )


def source() -> str:
    """The kernels' CUDA C++."""
    return files("gdskv.io").joinpath("kernels.cu").read_text(encoding="utf-8")


def load(device: int) -> dict[str, int]:
    """Compile the kernels for a GPU, or take them from CuPy's cache on disk; their function handles by name.

    Raises
    ------
    ConfigError
        CuPy is not installed, or cannot compile.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"pages on a GPU need CuPy to compile kernels: {error}. Install gdskv[gds-cu12].") from None
    try:
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=source(), options=OPTIONS)
            _modules.append(module)  # unloaded with its last reference, and the handles with it
            return {name: int(module.get_function(name).kernel.ptr) for name in NAMES}
    except Exception as error:  # CuPy raises what its parts raise
        raise ConfigError(f"the kernels cannot be compiled for GPU {device}: {error}") from None


_modules: list[Any] = []


class Plan:
    """All that is the same in every launch for some pages: sizes, chunks, and the tables of checksums."""

    def __init__(self, pages: DevicePages, extent_bytes: int, checksums: bool) -> None:
        units = -(-extent_bytes // _UNIT)
        self.rounds = min(_ROUNDS, -(-units // THREADS))
        self.chunks = -(-units // (THREADS * self.rounds))
        chunk = THREADS * self.rounds * _UNIT
        self.tables = np.concatenate([byte_tables(_UNIT), zeros_tables(THREADS * _UNIT)])
        halves = [past((THREADS >> level + 1) * _UNIT) for level in range(_HALVINGS)]
        after = [past((self.chunks - 1 - c) * chunk) for c in range(self.chunks)]
        self.factors = np.array([*halves, *after], np.uint32)
        self.zeros = crc32c(np.zeros(extent_bytes, np.uint8))
        """The checksum of no bits set: initial value and final inversion."""
        self.checksums = checksums
        self.job = Job(
            page_stride=pages.page_stride,
            piece_bytes=pages.piece_bytes,
            pages_per_block=pages.pages_per_block,
            bytes=pages.layout.block_bytes,
            extent_bytes=extent_bytes,
            rounds=self.rounds,
        )

    def crc(self, sums: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The extents' CRC-32C from their chunks' sums, (blocks, chunks)."""
        crc: npt.NDArray[np.uint32] = np.bitwise_xor.reduce(sums, axis=1) ^ np.uint32(self.zeros)
        return crc


class Mover:
    """Launches gathers and scatters on a stream, several of them in flight.

    Parameters
    ----------
    cuda, stream, kernels
        The driver, where to launch, and function handles by name.
    pages
        Where blocks lie.
    extent_bytes
        Bytes of an extent, a multiple of 16 and at least a block's. Behind the block a gather writes zeros.
    checksums
        Whether CRC-32C of the extents is computed too.
    launches, blocks
        Launches in flight, and blocks of each, at most.

    Raises
    ------
    OSError
        The GPU has no memory for the tables, or does not take them.
    """

    def __init__(
        self,
        cuda: Cuda,
        stream: CopyStream,
        kernels: dict[str, int],
        pages: DevicePages,
        extent_bytes: int,
        *,
        checksums: bool,
        launches: int,
        blocks: int,
    ) -> None:
        self._cuda, self._stream, self._pages = cuda, stream, pages
        self._gather, self._scatter = (kernels[f"{way}_{pages.grain}"] for way in ("gather", "scatter"))
        self._plan = plan = Plan(pages, extent_bytes, checksums)
        self.blocks = blocks
        self._free = list(range(launches))
        # A launch's part of memory, the same on the host (pinned) and on the GPU: extents, pages, sums
        self._split = (8 * blocks, 4 * blocks * pages.pages_per_block, 4 * blocks * plan.chunks)
        self._stride = -(-sum(self._split) // 256) * 256
        constant = [pages.pieces.view(np.uint8), plan.tables.view(np.uint8).ravel(), plan.factors.view(np.uint8)]
        starts = [launches * self._stride]
        for array in constant:
            starts.append(starts[-1] + -(-array.nbytes // 256) * 256)
        with stream:
            self._device = cuda.allocate(starts[-1])
            try:
                self._host = cuda.allocate_host(starts[-1])
            except OSError:
                cuda.free(self._device)
                raise
        self._view = np.ctypeslib.as_array((ctypes.c_uint8 * starts[-1]).from_address(self._host))
        for start, array in zip(starts, constant, strict=False):
            self._view[start : start + array.nbytes] = array
        try:
            stream.copy(self._device + starts[0], self._host + starts[0], starts[-1] - starts[0])
            stream.wait()
        except OSError:
            self.close()
            raise
        plan.job.pieces = self._device + starts[0]
        plan.job.tables = self._device + starts[1] if checksums else 0
        plan.job.factors = self._device + starts[2]

    @property
    def room(self) -> int:
        """Launches that can start now."""
        return len(self._free)

    def launch(self, gather: bool, extents: npt.NDArray[np.uint64], pages: npt.NDArray[np.uint32]) -> int:
        """Start one: pages to extents (`gather`) or back; nothing is waited for.

        Returns
        -------
        int
            Its number, for `crc` and `end`, once an event recorded after it was reached. OSError when CUDA refuses.
        """
        number = self._free.pop()
        start, n = number * self._stride, len(extents)
        a, b = self._split[:2]
        self._view[start : start + 8 * n] = extents.view(np.uint8)
        self._view[start + a : start + a + pages.nbytes] = np.ascontiguousarray(pages).view(np.uint8).ravel()
        job = Job.from_buffer_copy(self._plan.job)
        job.extents, job.pages, job.sums = (self._device + start + x for x in (0, a, a + b))
        try:
            self._stream.copy(self._device + start, self._host + start, a + pages.nbytes)
            self._stream.launch(self._gather if gather else self._scatter, (self._plan.chunks, n), THREADS, job)
            if self._plan.checksums:
                sums = start + a + b
                self._stream.copy(self._host + sums, self._device + sums, 4 * n * self._plan.chunks)
        except OSError:
            with contextlib.suppress(OSError):
                self._stream.wait()  # what was started of it must not meet the next user of this memory
            self._free.append(number)
            raise
        return number

    def crc(self, number: int, blocks: int) -> npt.NDArray[np.uint32]:
        """The checksums of a launch's extents; zeros without checksums."""
        if not self._plan.checksums:
            return np.zeros(blocks, np.uint32)
        start = number * self._stride + self._split[0] + self._split[1]
        sums = self._view[start : start + 4 * blocks * self._plan.chunks].view(np.uint32)
        return self._plan.crc(sums.reshape(blocks, -1))

    def end(self, number: int) -> None:
        """A launch is over: its part of memory is free."""
        self._free.append(number)

    def close(self) -> None:
        """Give memory back. Nothing may be in flight."""
        with self._stream:
            self._cuda.free(self._device)
            self._cuda.free_host(self._host)
