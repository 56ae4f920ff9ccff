"""System calls for Numba code, taken from libc by symbol, so that compiled code can be cached and needs no GIL.

Knows the system's calling conventions only; must not know what is moved.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from gdskv._jit import jit
from gdskv.io.atomics import load_i32

__all__ = [
    "errno_now",
    "fdatasync",
    "memcpy",
    "monotonic_ns",
    "nap",
    "preadv",
    "pwritev",
    "sleep_while_equal",
    "wake",
]

_FUTEX = {"x86_64": 202}.get(platform.machine(), 98)  # 98: aarch64, riscv64 and later ports
_FUTEX_WAIT_PRIVATE = 128
_FUTEX_WAKE_PRIVATE = 129
_CLOCK_MONOTONIC = 1


def _libc(name: str, result: Any, *arguments: Any) -> Any:
    return types.ExternalFunction(name, result(*arguments))


_int, _long, _size, _pointer = types.int32, types.int64, types.uint64, types.uint64

preadv = _libc("preadv", _long, _int, _pointer, _int, _long)
"""``preadv(fd, vectors, count, offset)``; ``vectors`` is the address of `count` pairs (address, length)."""
pwritev = _libc("pwritev", _long, _int, _pointer, _int, _long)
"""``pwritev(fd, vectors, count, offset)``."""
memcpy = _libc("memcpy", _pointer, _pointer, _pointer, _size)
"""``memcpy(target, source, length)``."""
fdatasync = _libc("fdatasync", _int, _int)
"""``fdatasync(fd)``: what was written to the file survives a power cut."""
nap = _libc("usleep", _int, _int)
"""``usleep(us)``. Unlike ``sched_yield``, it lets a thread go first that has had more than its share."""
_errno_location = _libc("__errno_location", _pointer)
_clock_gettime = _libc("clock_gettime", _int, _int, _pointer)
_syscall = _libc("syscall", _long, _long, _pointer, _long, _long, _pointer, _pointer, _long)


@jit
def errno_now() -> int:
    """Why the thread's last call failed."""
    return load_i32(_errno_location())


@jit
def monotonic_ns(scratch: npt.NDArray[np.int64]) -> int:
    """Nanoseconds of the monotonic clock; `scratch` holds two words of the calling thread."""
    _clock_gettime(_CLOCK_MONOTONIC, scratch.ctypes.data)
    return scratch[0] * 1_000_000_000 + scratch[1]


@jit
def sleep_while_equal(words: npt.NDArray[np.int64], index: int, seen: int) -> None:
    """Sleep until `wake` is called on ``words[index]``; return at once if it is not `seen` any more.

    Can return early. Compares the low 32 bits, so a word must not gain exactly 2**32 between look and sleep.
    """
    _syscall(_FUTEX, words.ctypes.data + 8 * index, _FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF, 0, 0, 0)


@jit
def wake(words: npt.NDArray[np.int64], index: int, count: int) -> None:
    """Wake up to `count` threads that sleep on ``words[index]``: exactly as many as there is work for."""
    _syscall(_FUTEX, words.ctypes.data + 8 * index, _FUTEX_WAKE_PRIVATE, count, 0, 0, 0)
