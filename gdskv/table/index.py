"""From a block key to its entry: open addressing with linear probes, and deletion that leaves no tombstones.

Keys are digests, so their low bits are the hash. Knows only the arrays of the table.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from .state import NONE, Arrays

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_1 = np.uint64(1)


@jit
def find(a: Arrays, k0: np.uint64, k1: np.uint64) -> int:
    """Entry of a key, or NONE."""
    mask = np.uint64(a.ix.shape[0] - 1)
    tag = k1 >> _32
    i = k0 & mask
    while True:
        v = a.ix[i]
        if v == np.uint64(0):
            return NONE
        if (v >> _32) == tag:
            n = np.int64(v & _LOW) - 1
            if a.e[n].k0 == k0 and a.e[n].k1 == k1:
                return n
        i = (i + _1) & mask


@jit
def insert(a: Arrays, n: int) -> None:
    """Make entry `n` findable by the key in its record; the key must not be there yet."""
    mask = np.uint64(a.ix.shape[0] - 1)
    i = a.e[n].k0 & mask
    while a.ix[i] != np.uint64(0):
        i = (i + _1) & mask
    a.ix[i] = ((a.e[n].k1 >> _32) << _32) | np.uint64(n + 1)


@jit
def remove(a: Arrays, n: int) -> None:
    """Take entry `n` out and move up what stood behind it, so that probes stay as short as if it had never been."""
    mask = np.uint64(a.ix.shape[0] - 1)
    i = a.e[n].k0 & mask
    while np.int64(a.ix[i] & _LOW) != n + 1:
        i = (i + _1) & mask
    j = i
    while True:
        j = (j + _1) & mask
        v = a.ix[j]
        if v == np.uint64(0):
            break
        home = a.e[np.int64(v & _LOW) - 1].k0 & mask
        if ((j - home) & mask) >= ((j - i) & mask):  # its probe passes the hole
            a.ix[i] = v
            i = j
    a.ix[i] = np.uint64(0)
