"""Pages of KV that an engine holds in tensors of its own: where each piece of a block lies in them.

Knows shapes, strides and addresses; must not know what a page holds, nor move anything.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gdskv.errors import LayoutError
from gdskv.io.base import ALIGNMENT
from gdskv.layout import KVLayout

__all__ = ["PIECE", "DevicePages"]

PIECE = np.dtype([("address", "<u8"), ("page", "<u4"), ("unused", "<u4")])
"""One contiguous part of a block: its address in page 0, and which of the block's pages it lies in."""

_AXES = ("layer", "kv", "head", "page", "token", "dim")
_NAMES = 1 << 18  # blocks that can have a name at a time
_MAP_NORESERVE = 0x4000
_GRAINS = (16, 4, 1)  # bytes; what the kernels are compiled for


class DevicePages:
    """The paged KV of an engine, per layer or fused, in any order of axes and with any strides.

    Parameters
    ----------
    layout
        The shape of a block. A block is `tokens_per_block` tokens, so one page or several.
    tensors
        One tensor that holds everything, or several: without an axis ``layer`` one for each layer, without ``kv`` (and
        not MLA) keys and values in turn. All of one shape, with the same strides.
    axes
        The tensors' axes in order, such as ``"kv page token head dim"`` or, fused, ``"page layer kv head token dim"``;
        for MLA ``"page token dim"``.
    stream
        The CUDA stream (its handle; 0 is the default one) on which the engine reads and writes its pages: what was
        started there before a `load` or `store` is let finish before the pages are touched.

    Raises
    ------
    LayoutError
        The tensors do not fit the axes or the layout.
    """

    def __init__(self, layout: KVLayout, tensors: Any, axes: str, *, stream: int = 0) -> None:
        self.layout, self.stream = layout, stream
        self.tensors: list[Any] = list(tensors) if isinstance(tensors, Sequence) else [tensors]
        """Kept, so that the memory stays."""
        device = self.tensors[0].device
        self.on_gpu: bool = device.type == "cuda"
        """Whether torch says that they are on a GPU."""
        self.device: int = device.index or 0
        """The number of the GPU."""
        order = axes.split()
        shape = self._shape(order, axes)
        strides = [s * layout.itemsize for s in self.tensors[0].stride()]
        self.count = shape["page"]
        """Pages."""
        self.pages_per_block = layout.tokens_per_block // shape["token"]
        self.page_stride = strides[order.index("page")]
        """Bytes from a page to the next."""
        self.pieces, self.piece_bytes = self._cut(order, shape, strides)
        """Array of dtype `PIECE`, in the order of a block's bytes, and the bytes of each."""
        whole = int(np.bitwise_or.reduce(self.pieces["address"])) | self.piece_bytes | self.page_stride
        self.grain = next(g for g in _GRAINS if whole % g == 0)
        """Bytes that can be moved at a time: 16, 4 or 1."""

        # Blocks are named by addresses that no memory has, so that they pass where addresses do
        self._reserved = mmap.mmap(-1, _NAMES * ALIGNMENT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, 0)
        self.base: int = np.frombuffer(self._reserved, np.uint8).ctypes.data
        """Names of blocks are from `base` up to `end`."""
        self.end = self.base + _NAMES * ALIGNMENT
        self._rows = np.zeros((_NAMES, self.pages_per_block), np.uint32)
        self._free = np.arange(_NAMES - 1, -1, -1)
        self._n_free = _NAMES

    def _shape(self, order: list[str], axes: str) -> dict[str, int]:
        layout = self.layout
        mla = layout.kind == "mla"
        named = set(order)
        needed = {"page", "token", "dim"} if mla else {"page", "head", "token", "dim"}
        optional = {"layer"} if mla else {"layer", "kv"}
        if len(named) != len(order) or not needed <= named <= needed | optional:
            raise LayoutError(
                f"axes={axes!r} does not name the axes of kind={layout.kind!r}. Name {', '.join(sorted(needed))} once "
                f"each, and {' and '.join(sorted(optional))} where the tensors have them."
            )
        full = {"layer": layout.layers, "kv": 1 if mla else 2, "head": layout.kv_heads, "dim": layout.head_dim}
        wanted = (1 if "layer" in named else full["layer"]) * (1 if "kv" in named else full["kv"])
        if len(self.tensors) != wanted:
            raise LayoutError(f"{len(self.tensors)} tensors for axes={axes!r}. Give {wanted}.")
        first = self.tensors[0]
        for tensor in self.tensors:
            if tuple(tensor.shape) != tuple(first.shape) or tensor.stride() != first.stride():
                raise LayoutError("the tensors differ in shape or strides. Give tensors of one kind.")
            if tensor.element_size() != layout.itemsize:
                raise LayoutError(
                    f"a tensor of {tensor.dtype} does not hold {layout.dtype}. Give tensors of {layout.itemsize} bytes "
                    "a number."
                )
        shape = dict(zip(order, first.shape, strict=False))
        tokens = shape.get("token", 0)
        wrong = [name for name, size in full.items() if name in shape and shape[name] != size]
        if len(first.shape) != len(order) or wrong or not tokens or layout.tokens_per_block % tokens:
            raise LayoutError(
                f"a tensor of shape {tuple(first.shape)} with axes={axes!r} does not fit {layout}. Each axis must have "
                "the layout's size, and tokens_per_block be a multiple of a page's tokens."
            )
        return shape

    def _cut(self, order: list[str], shape: dict[str, int], strides: list[int]) -> tuple[npt.NDArray[np.void], int]:
        layout = self.layout
        stride = dict(zip(order, strides, strict=True))
        sizes = [layout.layers, 1 if layout.kind == "mla" else 2, layout.kv_heads, self.pages_per_block]
        sizes += [shape["token"], layout.head_dim]
        size = layout.itemsize
        if stride["dim"] == size:  # as good as always; else one number is a piece, or less than a row
            size *= sizes.pop()
        several = [count if name not in order else 1 for name, count in zip(_AXES[:2], sizes[:2], strict=True)]
        address: Any = np.array([t.data_ptr() for t in self.tensors], np.uint64).reshape(
            several + [1] * (len(sizes) - 2)
        )
        for axis, (name, count) in enumerate(zip(_AXES, sizes, strict=False)):
            if name in stride and name != "page":
                along = np.arange(count, dtype=np.uint64) * np.uint64(stride[name])
                address = address + along.reshape([-1 if a == axis else 1 for a in range(len(sizes))])
        address = np.broadcast_to(address, sizes)
        while address.ndim and (address.shape[-1] == 1 or (np.diff(address) == size).all()):
            if address.ndim == 4 and address.shape[-1] > 1:
                break  # the next is another page
            size *= address.shape[-1]
            address = address[..., 0]
        pieces = np.zeros(address.shape, PIECE)
        pieces["address"] = address
        if pieces.ndim >= 4:
            pieces["page"] = np.arange(self.pages_per_block).reshape(-1, *[1] * (pieces.ndim - 4))
        return pieces.ravel(), size

    # ---- names

    def name(self, pages: npt.NDArray[Any], blocks: int) -> npt.NDArray[np.uint64]:
        """Give `blocks` blocks names that stand for them until `forget`.

        Parameters
        ----------
        pages
            Integers, shape (blocks or more, pages_per_block), or 1-D where a block is one page.
        """
        rows = pages.reshape(-1, 1) if pages.ndim == 1 else pages
        if rows.ndim != 2 or rows.shape[1] != self.pages_per_block or len(rows) < blocks:
            raise LayoutError(
                f"page numbers of shape {pages.shape} for {blocks} blocks of {self.pages_per_block} pages. Give "
                f"({blocks}, {self.pages_per_block})."
            )
        rows = rows[:blocks]
        if rows.size and (rows.min() < 0 or rows.max() >= self.count):
            raise LayoutError(
                f"page {rows.min() if rows.min() < 0 else rows.max()} is not among {self.count}. Use 0 to "
                f"{self.count - 1}."
            )
        if blocks > self._n_free:
            raise LayoutError(f"{blocks} blocks more than the {_NAMES} that can be on their way. Poll first.")
        self._n_free -= blocks
        names = self._free[self._n_free : self._n_free + blocks]
        self._rows[names] = rows
        return (self.base + names * ALIGNMENT).astype(np.uint64)

    def forget(self, names: npt.NDArray[np.uint64]) -> None:
        """End names; nothing may be on its way to or from those blocks."""
        self._free[self._n_free : self._n_free + len(names)] = (names.astype(np.int64) - self.base) // ALIGNMENT
        self._n_free += len(names)

    def rows(self, names: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """The page numbers of named blocks: (len(names), pages_per_block)."""
        return self._rows[(names.astype(np.int64) - self.base) // ALIGNMENT]

    def named(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """For each address whether it is a name."""
        named: npt.NDArray[np.bool_] = (addresses >= np.uint64(self.base)) & (addresses < np.uint64(self.end))
        return named
