"""What has come to be served, and what is served no more, since it was last asked: for those who route requests by it.

Compares what each changed slot holds with what was told of it, so nothing is told twice and nothing is left out,
however long nobody asks. Blocks that come back at a restart are told of when they are first asked for.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from .state import BASE, DISK, NONE, READY, THEAD, TTAIL, Arrays

EVENT = np.dtype(
    [
        ("k0", "<u8"),
        ("k1", "<u8"),
        ("tier", "u1"),  # 0 device, 1 host, 2 disk
        ("stored", "u1"),  # 1: from now on served from there; 0: no more
    ],
    align=True,
)


@jit
def drain(a: Arrays, out: np.ndarray) -> int:
    """All events since the last call, into `out`, which has room for two a queued slot: those that went before those
    that came, as a block may have changed its slot. Returns how many."""
    n = 0
    for i in range(a.m[THEAD], a.m[TTAIL]):
        g = a.tq[i % len(a.tq)]
        told = a.tl[g]
        if told.known and not _serves(a, g, told.k0, told.k1):
            told.known = 0
            _put(a, g, 0, out, n)
            n += 1
    for i in range(a.m[THEAD], a.m[TTAIL]):
        g = a.tq[i % len(a.tq)]
        told = a.tl[g]
        told.queued = 0
        e = a.s[g].entry
        if e != NONE and not told.known and _serves(a, g, a.e[e].k0, a.e[e].k1):
            told.k0, told.k1, told.known = a.e[e].k0, a.e[e].k1, 1
            _put(a, g, 1, out, n)
            n += 1
    a.m[THEAD] = a.m[TTAIL]
    return n


@jit
def _tier(a: Arrays, g: int) -> int:
    t = DISK
    while g < a.m[BASE + t]:
        t -= 1
    return t


@jit
def _serves(a: Arrays, g: int, k0: np.uint64, k1: np.uint64) -> bool:
    """Does slot `g` hold that key's block, all of it?"""
    e = a.s[g].entry
    if e == NONE:
        return False
    t = _tier(a, g)
    return a.e[e].slot[t] == g and a.e[e].state[t] == READY and a.e[e].k0 == k0 and a.e[e].k1 == k1


@jit
def _put(a: Arrays, g: int, stored: int, out: np.ndarray, n: int) -> None:
    event, told = out[n], a.tl[g]
    event.k0, event.k1, event.tier, event.stored = told.k0, told.k1, _tier(a, g), stored
