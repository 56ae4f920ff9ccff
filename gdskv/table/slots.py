"""Free slots of each tier: a bit a slot, in two levels, handed out in runs of neighbours.

A prompt's consecutive blocks should be neighbours on disk, so that they move as one extent.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from .bits import trailing_zeros
from .state import (
    BASE,
    CAP,
    FREE,
    NBAD,
    NFREE,
    NONE,
    NREGIONS,
    QUARANTINED,
    REGION0,
    SBASE,
    STRIPE,
    TAKEN,
    TURN,
    WBASE,
    Arrays,
)

_63 = np.int64(63)
_0 = np.uint64(0)
_1 = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
GOOD_RUN = 32  # a run this long is taken without looking for a longer one
LOOKS = 64  # runs looked at before the longest of them is taken


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
        return (w << 6) + trailing_zeros(v)
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
    w = (q << 6) + trailing_zeros(v)
    return (w << 6) + trailing_zeros(a.fw[wbase + w])


@jit
def _next_taken(a: Arrays, t: int, start: int, limit: int) -> int:
    """End of the free run that holds `start`, at most `limit`."""
    wbase = a.m[WBASE + t]
    i = start
    while i < limit:
        v = ~a.fw[wbase + (i >> 6)] & (_ALL << np.uint64(i & _63))
        if v != _0:
            return min(limit, ((i >> 6) << 6) + trailing_zeros(v))
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
def _take_from(a: Arrays, t: int, r: int, want: int, out: np.ndarray, at: int) -> int:
    """Take up to `want` slots of region `r`, in runs as long as can be had; how many it were. Looks at a bounded number
    of runs, from where the last one ended."""
    base = a.m[BASE + t]
    rg = a.rg[r]
    want = min(want, rg.free)
    got, single = 0, NONE  # where LOOKS - 1 runs from the cursor on end that are all of one slot
    while got < want:
        need = want - got
        best, length = rg.first, 0
        if single != NONE:  # one more look says whether all are still alike
            i = _next_free(a, t, single)
            end = _next_taken(a, t, i, min(rg.end, i + need)) if i < rg.end else i
            single = NONE
            if end - i == 1:
                best, length, single = _next_free(a, t, rg.cursor), 1, end
            elif end > i:
                best, length = i, end - i
        begun, wrapped = rg.cursor, False
        for look in range(LOOKS if length == 0 else 0):
            i = _next_free(a, t, rg.cursor)
            if i >= rg.end:
                if rg.cursor == rg.first:
                    break
                rg.cursor, wrapped = rg.first, True
                continue
            if wrapped and i >= begun:  # around
                break
            end = _next_taken(a, t, i, min(rg.end, i + need))
            if end - i > length:
                best, length = i, end - i
            if length >= need or length >= GOOD_RUN:
                break
            rg.cursor = end
            if look == LOOKS - 1 and length == 1 and not wrapped:
                single = end
        for i in range(best, best + length):
            _mark_taken(a, t, i)
            out[at + got] = base + i
            got += 1
        rg.cursor = best + length
    rg.free -= want
    a.m[NFREE + t] -= want
    return want


@jit
def take(a: Arrays, t: int, want: int, out: np.ndarray, at: int) -> int:
    """Take `want` free slots (there must be that many); global slot numbers go to `out[at:]`. Cut over at most `stripe`
    regions at a time, each piece long enough to move as one extent, beginning with another region each time."""
    regions = a.m[NREGIONS + t]
    if regions == 1:
        return _take_from(a, t, a.m[REGION0 + t], want, out, at)
    parts = min(a.m[STRIPE], regions)
    piece = max(GOOD_RUN, (want + parts - 1) // parts)
    got = 0
    while got < want:
        r = a.m[REGION0 + t] + a.m[TURN + t] % regions
        a.m[TURN + t] += 1
        if a.rg[r].closed == 0:
            got += _take_from(a, t, r, min(piece, want - got), out, at + got)
    return got


@jit
def _region(a: Arrays, t: int, slot: int) -> int:
    r = a.m[REGION0 + t]
    while slot >= a.rg[r].end:
        r += 1
    return r


@jit
def give(a: Arrays, t: int, g: int) -> None:
    """Give slot `g` (global number) back."""
    slot = g - a.m[BASE + t]
    w = a.m[WBASE + t] + (slot >> 6)
    a.fw[w] |= _1 << np.uint64(slot & _63)
    a.fs[a.m[SBASE + t] + (slot >> 12)] |= _1 << np.uint64((slot >> 6) & _63)
    a.s[g].state = FREE
    rg = a.rg[_region(a, t, slot)]
    rg.free += 1
    if rg.closed == 0:
        a.m[NFREE + t] += 1


@jit
def claim(a: Arrays, t: int, g: int) -> None:
    """Take one particular free slot, as a recovery does."""
    slot = g - a.m[BASE + t]
    _mark_taken(a, t, slot)
    a.rg[_region(a, t, slot)].free -= 1
    a.m[NFREE + t] -= 1


@jit
def close_region(a: Arrays, t: int, k: int, closed: bool) -> None:
    """Stop, or begin again, to hand out the free slots of region `k`. Blocks in it are served all the same."""
    rg = a.rg[a.m[REGION0 + t] + k]
    if rg.closed != closed:
        rg.closed = closed
        a.m[NFREE + t] += -rg.free if closed else rg.free


@jit
def is_closed(a: Arrays, t: int, g: int) -> bool:
    """Does slot `g` stand in a closed region?"""
    return a.rg[_region(a, t, g - a.m[BASE + t])].closed != 0


@jit
def any_open(a: Arrays, t: int) -> bool:
    """Is there a region that is not closed?"""
    for r in range(a.m[REGION0 + t], a.m[REGION0 + t] + a.m[NREGIONS + t]):
        if a.rg[r].closed == 0:
            return True
    return False


@jit
def quarantine(a: Arrays, t: int, g: int) -> None:
    """Keep slot `g`, whose medium has returned wrong bytes, out of use."""
    a.s[g].state = QUARANTINED
    a.m[NBAD + t] += 1
