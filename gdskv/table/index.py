"""From a block key to its entry: open addressing with linear probes, and deletion that leaves no tombstones.

A probe's value says where it belongs, so that only a hit reads an entry. Knows only the arrays of the table.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from .handle import fetch
from .state import NONE, Arrays

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_1 = np.uint64(1)
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads keys that are not digests, such as small numbers
AHEAD = 16  # keys from asking for a line of the index until it is used; half of that for an entry


@jit
def _tag(k0: np.uint64) -> np.uint64:
    """32 bits, of which the low ones are where a key belongs and the rest tell it from its neighbours."""
    return (k0 * _ODD) >> _32


@jit
def find(a: Arrays, k0: np.uint64, k1: np.uint64) -> int:
    """Entry of a key, or NONE."""
    mask = np.uint64(a.ix.shape[0] - 1)
    tag = _tag(k0)
    i = tag & mask
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
def expect(a: Arrays, k0: np.uint64) -> None:
    """A key will be asked for soon: have its line of the index fetched meanwhile."""
    fetch(a.ix, _tag(k0) & np.uint64(a.ix.shape[0] - 1))


@jit
def expect_entry(a: Arrays, k0: np.uint64) -> None:
    """The same for its entry, once the line of the index is there."""
    v = a.ix[_tag(k0) & np.uint64(a.ix.shape[0] - 1)]
    if v != np.uint64(0):
        fetch(a.e, (v & _LOW) - _1)


@jit
def insert(a: Arrays, n: int) -> None:
    """Make entry `n` findable by the key in its record; the key must not be there yet."""
    mask = np.uint64(a.ix.shape[0] - 1)
    tag = _tag(a.e[n].k0)
    i = tag & mask
    while a.ix[i] != np.uint64(0):
        i = (i + _1) & mask
    a.ix[i] = (tag << _32) | np.uint64(n + 1)


@jit
def remove(a: Arrays, n: int) -> None:
    """Take entry `n` out and move up what stood behind it, so that probes stay as short as if it had never been."""
    mask = np.uint64(a.ix.shape[0] - 1)
    i = _tag(a.e[n].k0) & mask
    while np.int64(a.ix[i] & _LOW) != n + 1:
        i = (i + _1) & mask
    j = i
    while True:
        j = (j + _1) & mask
        v = a.ix[j]
        if v == np.uint64(0):
            break
        if ((j - (v >> _32)) & mask) >= ((j - i) & mask):  # its probe passes the hole
            a.ix[i] = v
            i = j
    a.ix[i] = np.uint64(0)
