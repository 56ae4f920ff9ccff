"""CRC-32C (Castagnoli) of memory, callable from code without the GIL and from Python.

Knows addresses and lengths only; must not know what the bytes are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types

from gdskv._jit import jit
from gdskv.io.atomics import intrinsic, load_u8, load_u64

__all__ = [
    "HARDWARE",
    "byte_tables",
    "crc32c",
    "crc32c_at",
    "crc32c_bytes",
    "crc32c_table_at",
    "past",
    "zeros_tables",
]

HARDWARE = bool(dict(binding.get_host_cpu_features()).get("sse4.2", False))
"""Whether this processor computes CRC-32C itself (SSE 4.2). Tables do it otherwise, about 20 times slower."""

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reflected

# The instruction takes 3 cycles and one can start per cycle, so three streams run at once and are joined afterwards
# (Mark Adler, https://stackoverflow.com/a/17646775). Long runs keep the cost of joining small, short ones the tail.
_LONG = 1024
_SHORT = 256
# Bytes that are fetched ahead of need. Two rounds of long runs, each line once: 17 GB/s of memory that no cache holds,
# where the processor's own prefetching of three streams gives 12.
_AHEAD = 6 * _LONG


def byte_tables(count: int) -> npt.NDArray[np.uint32]:
    """(count, 256): effect of one byte that `count` - 1 or fewer bytes follow, by how many do ("slicing")."""
    tables = np.zeros((count, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = (row >> np.uint32(1)) ^ (np.uint32(_POLYNOMIAL) * (row & np.uint32(1)))
    tables[0] = row
    for i in range(1, count):
        tables[i] = row[tables[i - 1] & 0xFF] ^ (tables[i - 1] >> np.uint32(8))
    return tables


def zeros_tables(length: int) -> npt.NDArray[np.uint32]:
    """(4, 256): effect on a CRC, byte by byte of it, of `length` zero bytes that follow; `length` a power of two."""
    step = _BYTES[0]
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)  # images of the 32 bits: a linear map, as a matrix
    columns = step[columns & 0xFF] ^ (columns >> np.uint32(8))  # after one zero byte
    for _ in range(length.bit_length() - 1):  # map twice: twice the zero bytes
        bits = (columns[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        columns = np.bitwise_xor.reduce(np.where(bits == 1, columns[None, :], np.uint32(0)), axis=1)
    tables = np.zeros((4, 256), np.uint32)
    values = np.arange(256)
    for byte in range(4):
        for bit in range(8):
            tables[byte] ^= np.where(values >> bit & 1, columns[8 * byte + bit], 0).astype(np.uint32)
    return tables


_BYTES = byte_tables(8)
_ZEROS_LONG = zeros_tables(_LONG)
_ZEROS_SHORT = zeros_tables(_SHORT)


def past(length: int) -> int:
    """What a CRC is multiplied by for `length` bytes that follow: x^(8 * length) modulo the polynomial; bit 31 is x^0.

    Of a CRC without initial value and final inversion, which is linear; so parts can be summed up in any order.
    """
    factor, square = 1 << 31, 1 << 23  # x^0, x^8
    while length:
        if length & 1:
            factor = _multiply(factor, square)
        square = _multiply(square, square)
        length >>= 1
    return factor


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@intrinsic
def _crc_u64(typingctx: Any, crc: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        u64 = ir.IntType(64)
        function = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), ir.FunctionType(u64, (u64, u64)))
        return builder.call(function, args)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def _prefetch(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (pointer, i32, i32, i32))
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        builder.call(function, (builder.inttoptr(args[0], pointer), i32(0), i32(3), i32(1)))  # read, keep, data
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


@jit(inline="always")
def _past_zeros(tables: npt.NDArray[np.uint32], crc: int) -> int:
    return np.uint64(
        tables[0, crc & np.uint64(0xFF)]
        ^ tables[1, (crc >> np.uint64(8)) & np.uint64(0xFF)]
        ^ tables[2, (crc >> np.uint64(16)) & np.uint64(0xFF)]
        ^ tables[3, (crc >> np.uint64(24)) & np.uint64(0xFF)]
    )


@jit
def _three_streams(crc: int, address: int, run: int, tables: npt.NDArray[np.uint32]) -> int:
    second, third = np.uint64(0), np.uint64(0)
    run = np.uint64(run)
    for line in range(np.uint64(0), run, np.uint64(64)):
        _prefetch(address + line + np.uint64(_AHEAD))  # beyond the end of the memory it does nothing
        _prefetch(address + line + run + np.uint64(_AHEAD))
        _prefetch(address + line + run + run + np.uint64(_AHEAD))
        for word in range(8):
            at = address + line + np.uint64(8 * word)
            crc = _crc_u64(crc, load_u64(at))
            second = _crc_u64(second, load_u64(at + run))
            third = _crc_u64(third, load_u64(at + run + run))
    return np.uint64(_past_zeros(tables, np.uint64(_past_zeros(tables, crc) ^ second)) ^ third)


@jit
def _hardware(address: int, length: int) -> int:
    crc = np.uint64(0xFFFFFFFF)
    left = np.int64(length)
    while left >= 3 * _LONG:
        crc = _three_streams(crc, address, _LONG, _ZEROS_LONG)
        address += np.uint64(3 * _LONG)
        left -= 3 * _LONG
    while left >= 3 * _SHORT:
        crc = _three_streams(crc, address, _SHORT, _ZEROS_SHORT)
        address += np.uint64(3 * _SHORT)
        left -= 3 * _SHORT
    while left >= 8:
        crc = _crc_u64(crc, load_u64(address))
        address += np.uint64(8)
        left -= 8
    for i in range(left):
        low = (crc ^ np.uint64(load_u8(address + np.uint64(i)))) & np.uint64(0xFF)
        crc = (crc >> np.uint64(8)) ^ np.uint64(_BYTES[0, low])
    return np.uint32(crc ^ np.uint64(0xFFFFFFFF))


@jit
def crc32c_table_at(address: int, length: int) -> int:
    """`crc32c_at` by tables, for processors without the instruction."""
    address = np.uint64(address)
    crc = np.uint64(0xFFFFFFFF)
    left = np.int64(length)
    byte = np.uint64(0xFF)
    while left >= 8:
        word = load_u64(address) ^ crc
        crc = np.uint64(0)
        for i in range(8):
            crc ^= np.uint64(_BYTES[7 - i, (word >> np.uint64(8 * i)) & byte])
        address += np.uint64(8)
        left -= 8
    for i in range(left):
        low = (crc ^ np.uint64(load_u8(address + np.uint64(i)))) & byte
        crc = (crc >> np.uint64(8)) ^ np.uint64(_BYTES[0, low])
    return np.uint32(crc ^ np.uint64(0xFFFFFFFF))


@jit
def crc32c_at(address: int, length: int) -> int:
    """CRC-32C of `length` bytes from `address` on, as uint32.

    The memory must be mapped; nothing checks it. Little-endian processors only.
    """
    if HARDWARE:
        return _hardware(np.uint64(address), np.int64(length))
    return crc32c_table_at(np.uint64(address), np.int64(length))


def crc32c(data: npt.NDArray[np.uint8]) -> int:
    """CRC-32C of a contiguous array's bytes."""
    if not data.flags.c_contiguous:
        raise ValueError("crc32c takes a contiguous array: pass numpy.ascontiguousarray(data)")
    return int(crc32c_at(data.ctypes.data, data.nbytes))


def crc32c_bytes(data: bytes) -> int:
    """CRC-32C of a bytes object."""
    return crc32c(np.frombuffer(data, np.uint8))
