"""``EngineMemory``: where the blocks of an engine's own pool lie in its memory.

Knows addresses only; must not import the engine, nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdskv.errors import LayoutError

__all__ = ["EngineMemory"]


class EngineMemory:
    """Blocks in pieces: the bytes of block `b` are those of each segment at ``base + b * stride``, one after the other.

    Parameters
    ----------
    tensors : iterable of torch.Tensor
        One per layer, in the order in which a block's bytes are kept. Tensors over the same memory count once.
    blocks : int
        Blocks of the pool. It must be the size of one of the first two axes of each tensor, or divide it: then a block
        is some neighbours along that axis.

    Raises
    ------
    LayoutError
        A tensor has no such axis, or what lies between two blocks is not all of one block's bytes.
    """

    def __init__(self, tensors: Iterable[Any], blocks: int) -> None:
        self.blocks = blocks
        self.tensors = list(tensors)
        """Kept, so that their memory stays."""
        rows: dict[tuple[int, int], int] = {}
        self.shapes: list[str] = []
        """Per tensor, its geometry in words, for the namespace."""
        for tensor in self.tensors:
            self.shapes.append(f"{tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())}")
            for base, stride, length in _segments(tensor, blocks):
                rows[base, stride] = length
        if not rows:
            raise LayoutError("the engine's pool has no tensors. Register its KV caches first.")
        self.base: NDArray[np.uint64] = np.array([base for base, _ in rows], np.uint64)
        self.stride: NDArray[np.uint64] = np.array([stride for _, stride in rows], np.uint64)
        self.length: NDArray[np.int64] = np.array(list(rows.values()), np.int64)
        self._place()

    def _place(self) -> None:
        self.offset: NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.length)[:-1]]).astype(np.int64)
        """Of each segment within a block."""

    @classmethod
    def of_regions(cls, regions: Iterable[tuple[int, int, int]], blocks: int) -> EngineMemory:
        """Return the memory of an engine that names base, stride and bytes of each segment itself.

        Raises
        ------
        LayoutError
            There is no segment, or the blocks of one overlap.
        """
        self = cls.__new__(cls)
        self.blocks, self.tensors, self.shapes = blocks, [], []
        rows = list(regions)
        for base, stride, length in rows:
            if not 0 < length <= stride:
                raise LayoutError(
                    f"a region at {base:#x} has {length} bytes every {stride}. Give what the engine says."
                )
            self.shapes.append(f"{length} bytes every {stride}")
        if not rows:
            raise LayoutError("the engine's pool has no regions. Register its KV caches first.")
        table = np.array(rows, np.uint64)
        self.base, self.stride, self.length = table[:, 0].copy(), table[:, 1].copy(), table[:, 2].astype(np.int64)
        self._place()
        return self

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all its segments."""
        return int(self.length.sum())


def _segments(tensor: Any, blocks: int) -> list[tuple[int, int, int]]:
    """Base address, stride and length in bytes of the pieces that each block of a tensor has."""
    size = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(s * size for s in tensor.stride())
    first = range(min(2, len(shape)))
    axes = [a for a in first if shape[a] == blocks] or [a for a in first if shape[a] and shape[a] % blocks == 0]
    if not axes:
        raise LayoutError(f"a KV tensor of shape {shape} has no axis of {blocks} blocks among its first two.")
    axis = axes[-1] if len(axes) == 2 and shape[0] == 2 else axes[0]
    stride, parts = strides[axis], shape[axis] // blocks
    outer = [a for a in range(len(shape)) if a != axis and strides[a] > stride and shape[a] > 1]
    length, dense = size, True
    for a in sorted((a for a in range(len(shape)) if a != axis and a not in outer), key=lambda a: (strides[a], -a)):
        dense &= shape[a] == 1 or strides[a] == length
        length *= shape[a]
    if not dense or length > stride:
        raise LayoutError(
            f"a KV tensor of shape {shape} and strides {tuple(tensor.stride())} does not hold the bytes of a block "
            "together. Use a layout in which a block's tokens are contiguous."
        )
    bases = [int(tensor.data_ptr())]
    for a in outer:
        bases = [base + i * strides[a] for base in bases for i in range(shape[a])]
    if length == stride:  # the parts of a block are neighbours in memory
        return [(base, stride * parts, length * parts) for base in bases]
    return [(base + i * stride, stride * parts, length) for base in bases for i in range(parts)]
