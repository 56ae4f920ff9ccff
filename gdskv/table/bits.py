"""Bits of a word counted in one instruction, which Numba has no name for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["leading_zeros", "trailing_zeros"]


def _trailing(typing: Any, word: Any) -> Any:
    """``trailing_zeros(word)``: zeros below the lowest bit of a uint64 that is set; 64 if none is."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return (types.int64(types.uint64), code) if word == types.uint64 else None


def _leading(typing: Any, word: Any) -> Any:
    """``leading_zeros(word)``: zeros above the highest bit of a uint64 that is set; 64 if none is."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return (types.int64(types.uint64), code) if word == types.uint64 else None


trailing_zeros: Any = intrinsic(_trailing)
leading_zeros: Any = intrinsic(_leading)
