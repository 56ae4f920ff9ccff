"""How compiled code takes the arrays of a table: as one pointer, to a row of addresses and lengths.

Numba passes an array as seven values, so a tuple of the table's arrays as more than a hundred, to each small function:
that cost fifteen times the run time and several times the compile time of this. Knows nothing of what is in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import NativeValue, infer_getattr, intrinsic, lower_getattr_generic, models, register_model, unbox
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype
from numpy.typing import DTypeLike, NDArray

LENGTH = -1  # in a shape: known when the table is made


class Field(NamedTuple):
    """An array that compiled code may take by name."""

    name: str
    dtype: DTypeLike
    shape: tuple[int, ...]


class Handle(types.Type):
    """Numba's type of an object whose `address` is that of its `row_of` these fields."""

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.fields = fields
        super().__init__(name=f"Handle({fields})")  # equal fields, equal type: what code on disk is found by

    def array_type(self, at: int) -> Any:
        """Numba's type of a field."""
        field = self.fields[at]
        return types.Array(from_dtype(np.dtype(field.dtype)), len(field.shape), "C")

    def find(self, name: str) -> int:
        """Place of a field, or -1."""
        return next((i for i, field in enumerate(self.fields) if field.name == name), -1)

    def row_of(self, holder: object) -> NDArray[np.int64]:
        """Address and length of each field's array, which must stay alive and in place as long as the row is used."""
        row = np.empty((len(self.fields), 2), np.int64)
        for at, field in enumerate(self.fields):
            array = getattr(holder, field.name)
            fits = len(array.shape) == len(field.shape) and all(
                want in (LENGTH, got) for want, got in zip(field.shape, array.shape, strict=True)
            )
            if array.dtype != field.dtype or not fits or not array.flags.carray:
                raise TypeError(f"{field.name} is {array.dtype}{array.shape}, declared {field.dtype}{field.shape}")
            row[at] = array.ctypes.data, array.shape[field.shape.index(LENGTH)] if LENGTH in field.shape else 0
        return row


@register_model(Handle)
class _Model(models.OpaqueModel):
    """A bare pointer, which owns nothing."""


@infer_getattr
class _Attributes(AttributeTemplate):
    key = Handle

    def generic_resolve(self, handle: Handle, name: str) -> Any:
        at = handle.find(name)
        return None if at < 0 else handle.array_type(at)


@lower_getattr_generic(Handle)
def _getattr(context: Any, builder: Any, handle: Handle, value: Any, name: str) -> Any:
    at = handle.find(name)
    field = handle.fields[at]
    intp = ir.IntType(64)
    row = builder.bitcast(value, intp.as_pointer())
    never_changes = builder.module.add_metadata([])

    def word(i: int) -> Any:
        loaded = builder.load(cgutils.gep_inbounds(builder, row, i))
        loaded.set_metadata("invariant.load", never_changes)  # so it is loaded once, whatever is stored meanwhile
        return loaded

    array = context.make_array(handle.array_type(at))(context, builder)
    shape = [word(2 * at + 1) if length == LENGTH else intp(length) for length in field.shape]
    strides: list[Any] = []
    step = intp(np.dtype(field.dtype).itemsize)
    for length in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, length)
    populate_array(
        array,
        data=builder.inttoptr(word(2 * at), array.data.type),
        shape=cgutils.pack_array(builder, shape, intp),
        strides=cgutils.pack_array(builder, strides, intp),
        itemsize=intp(np.dtype(field.dtype).itemsize),
        meminfo=None,
    )
    return array._getvalue()


@unbox(Handle)
def _unbox(handle: Handle, holder: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(holder, "address")
    pointer = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(pointer, is_error=c.pyapi.c_api_error())


def _fetch(typing: Any, array: Any, i: Any) -> Any:
    """``fetch(array, i)``: have the cache line of a 1-D array's element brought in, without waiting for it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(prefetch, [address, number(0), number(3), number(1)])  # for reading, to keep, data
        return context.get_dummy_value()

    return types.void(array, i), code


fetch: Any = intrinsic(_fetch)
