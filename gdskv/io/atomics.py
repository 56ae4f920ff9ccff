"""Words of memory that threads share: atomic int64 in arrays, and loads from plain addresses, for Numba code.

Knows machine instructions only; must not know what the words mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _numba_intrinsic

__all__ = [
    "cas",
    "exchange",
    "fetch_add",
    "intrinsic",
    "load_acquire",
    "load_i32",
    "load_u8",
    "load_u64",
    "store_release",
]

_BYTES = 8


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic``, with a type that checkers take for a function of whatever arguments."""
    return _numba_intrinsic(function)  # type: ignore[no-any-return, unused-ignore]


def _word(context: Any, builder: Any, array_type: Any, array: Any, index_type: Any, index: Any) -> Any:
    """Pointer to element `index` of a 1-D contiguous int64 array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [context.cast(builder, index, index_type, types.intp)])


def _check(array: Any, *integers: Any) -> bool:
    return (
        isinstance(array, types.Array)
        and (array.dtype, array.ndim, array.layout) == (types.int64, 1, "C")
        and all(isinstance(i, types.Integer) for i in integers)
    )


@intrinsic
def load_acquire(typingctx: Any, array: Any, index: Any) -> Any:
    """``array[index]``; what its writer did before its `store_release` is visible afterwards."""
    if not _check(array, index):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        return builder.load_atomic(pointer, "acquire", _BYTES)

    return types.int64(array, index), codegen


@intrinsic
def store_release(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index] = value``, not before what this thread wrote earlier."""
    if not _check(array, index, value):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        word = context.cast(builder, args[2], signature.args[2], types.int64)
        builder.store_atomic(word, pointer, "release", _BYTES)
        return context.get_dummy_value()

    return types.void(array, index, value), codegen


def _read_modify_write(operation: str) -> Callable[..., Any]:
    def typer(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
        if not _check(array, index, value):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _word(context, builder, signature.args[0], args[0], signature.args[1], args[1])
            word = context.cast(builder, args[2], signature.args[2], types.int64)
            return builder.atomic_rmw(operation, pointer, word, "acq_rel")

        return types.int64(array, index, value), codegen

    return typer


fetch_add = intrinsic(_read_modify_write("add"))
"""``fetch_add(array, index, value)``: add, and return what was there before."""
exchange = intrinsic(_read_modify_write("xchg"))
"""``exchange(array, index, value)``: store, and return what was there before."""


@intrinsic
def cas(typingctx: Any, array: Any, index: Any, expected: Any, new: Any) -> Any:
    """Compare and swap: store `new` and return True if ``array[index]`` is `expected`; else return False."""
    if not _check(array, index, expected, new):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        old, word = (context.cast(builder, args[i], signature.args[i], types.int64) for i in (2, 3))
        return builder.extract_value(builder.cmpxchg(pointer, old, word, "acq_rel", "acquire"), 1)

    return types.boolean(array, index, expected, new), codegen


def _load(kind: Any, bits: int) -> Callable[..., Any]:
    def typer(typingctx: Any, address: Any) -> Any:
        if not isinstance(address, types.Integer):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = context.cast(builder, args[0], signature.args[0], types.uint64)
            return builder.load(builder.inttoptr(word, ir.IntType(bits).as_pointer()), align=1)

        return kind(address), codegen

    return typer


load_u8 = intrinsic(_load(types.uint8, 8))
"""``load_u8(address)``: the byte at an address."""
load_i32 = intrinsic(_load(types.int32, 32))
"""``load_i32(address)``: the 4 bytes from an address on, which need not be aligned."""
load_u64 = intrinsic(_load(types.uint64, 64))
"""``load_u64(address)``: the 8 bytes from an address on, which need not be aligned."""
