"""Free slots of each tier: a bit a slot, in two levels, handed out in runs of neighbours.

A prompt's consecutive blocks should be neighbours on disk, so that they move as one extent.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from .state import BASE, CAP, CURSOR, FREE, NBAD, NFREE, QUARANTINED, SBASE, TAKEN, WBASE, Arrays

_63 = np.int64(63)
_0 = np.uint64(0)
_1 = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
GOOD_RUN = 32  # a run this long is taken without looking for a longer one
LOOKS = 64  # runs looked at before the longest of them is taken


@jit
def _trailing_zeros(v: np.uint64) -> int:
    n = 0
    if v & np.uint64(0xFFFFFFFF) == _0:
        n += 32
        v >>= np.uint64(32)
    if v & np.uint64(0xFFFF) == _0:
        n += 16
        v >>= np.uint64(16)
    if v & np.uint64(0xFF) == _0:
        n += 8
        v >>= np.uint64(8)
    if v & np.uint64(0xF) == _0:
        n += 4
        v >>= np.uint64(4)
    if v & np.uint64(0x3) == _0:
        n += 2
        v >>= np.uint64(2)
    if v & _1 == _0:
        n += 1
    return n


@jit
def _next_free(a: Arrays, t: int, start: int) -> int:
    """First free slot of the tier at or after `start`, or the capacity if there is none."""
    cap = a.m[CAP + t]
    if start >= cap:
        return cap
    wbase, sbase = a.m[WBASE + t], a.m[SBASE + t]
    w = start >> 6
    v = a.fw[wbase + w] & (_ALL << np.uint64(start & _63))
    if v != _0:
        return (w << 6) + _trailing_zeros(v)
    words = (cap + 63) >> 6
    w += 1
    if w >= words:
        return cap
    q = w >> 6
    v = a.fs[sbase + q] & (_ALL << np.uint64(w & _63))
    sums = (words + 63) >> 6
    while v == _0:
        q += 1
        if q >= sums:
            return cap
        v = a.fs[sbase + q]
    w = (q << 6) + _trailing_zeros(v)
    return (w << 6) + _trailing_zeros(a.fw[wbase + w])


@jit
def _next_taken(a: Arrays, t: int, start: int, limit: int) -> int:
    """End of the free run that holds `start`, at most `limit`."""
    wbase = a.m[WBASE + t]
    i = start
    while i < limit:
        v = ~a.fw[wbase + (i >> 6)] & (_ALL << np.uint64(i & _63))
        if v != _0:
            return min(limit, ((i >> 6) << 6) + _trailing_zeros(v))
        i = ((i >> 6) + 1) << 6
    return limit


@jit
def _mark_taken(a: Arrays, t: int, slot: int) -> None:
    w = a.m[WBASE + t] + (slot >> 6)
    a.fw[w] &= ~(_1 << np.uint64(slot & _63))
    if a.fw[w] == _0:
        q = slot >> 12
        a.fs[a.m[SBASE + t] + q] &= ~(_1 << np.uint64((slot >> 6) & _63))
    a.s[a.m[BASE + t] + slot].state = TAKEN


@jit
def take(a: Arrays, t: int, want: int, out: np.ndarray, at: int) -> int:
    """Take `want` free slots (there must be that many) in runs as long as can be had; global slot numbers go to
    `out[at:]`. Looks at a bounded number of runs, from where the last one ended."""
    cap, base = a.m[CAP + t], a.m[BASE + t]
    got = 0
    while got < want:
        need = want - got
        cursor = a.m[CURSOR + t]
        best, length = -1, 0
        for _ in range(LOOKS):
            i = _next_free(a, t, cursor)
            if i >= cap:
                if cursor == 0:
                    break
                cursor = 0
                continue
            end = _next_taken(a, t, i, min(cap, i + need))
            if end - i > length:
                best, length = i, end - i
            if length >= need or length >= GOOD_RUN:
                break
            cursor = end
        for i in range(best, best + length):
            _mark_taken(a, t, i)
            out[at + got] = base + i
            got += 1
        a.m[CURSOR + t] = best + length
    a.m[NFREE + t] -= want
    return got


@jit
def give(a: Arrays, t: int, g: int) -> None:
    """Give slot `g` (global number) back."""
    slot = g - a.m[BASE + t]
    w = a.m[WBASE + t] + (slot >> 6)
    a.fw[w] |= _1 << np.uint64(slot & _63)
    a.fs[a.m[SBASE + t] + (slot >> 12)] |= _1 << np.uint64((slot >> 6) & _63)
    a.s[g].state = FREE
    a.m[NFREE + t] += 1


@jit
def quarantine(a: Arrays, t: int, g: int) -> None:
    """Keep slot `g`, whose medium has returned wrong bytes, out of use."""
    a.s[g].state = QUARANTINED
    a.m[NBAD + t] += 1
