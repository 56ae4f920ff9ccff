"""The order among equals by value: of each priority, the blocks without children in the tier stand in lists by what
they are expected to bring, the least first. It stands beside the order by last use, so either can be followed.

Knows slots and values; what a value is, `learn` says. Reads no clock.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import learn
from .bits import trailing_zeros
from .learned import BAR, BINS, HAND, MEAN, MOVES, PER_NS, PRICE, TRUST
from .state import BARS_PRIORITY, BASE, BY_VALUE, CAP, DEFAULT_PRIORITY, FIRST, LISTS, NFREE, NONE, Arrays

_0 = np.uint64(0)
_1 = np.uint64(1)


@jit
def _add(a: Arrays, t: int, where: int, g: int, head: bool) -> None:
    row, q = t * LISTS + where // BINS, where % BINS
    b = a.b[g]
    b.where = where
    if head:
        other = a.be[row, q, 0]
        b.prev, b.next = NONE, other
        if other == NONE:
            a.be[row, q, 1] = g
        else:
            a.b[other].prev = g
        a.be[row, q, 0] = g
    else:
        other = a.be[row, q, 1]
        b.prev, b.next = other, NONE
        if other == NONE:
            a.be[row, q, 0] = g
        else:
            a.b[other].next = g
        a.be[row, q, 1] = g
    a.bb[row] |= _1 << np.uint64(q)


@jit
def remove(a: Arrays, t: int, g: int) -> None:
    """Take slot `g` out of its list by value, if it stands in one."""
    if a.m[BY_VALUE + t] == 0 or a.b[g].where == NONE:
        return
    b = a.b[g]
    row, q = t * LISTS + b.where // BINS, b.where % BINS
    if b.prev == NONE:
        a.be[row, q, 0] = b.next
    else:
        a.b[b.prev].next = b.next
    if b.next == NONE:
        a.be[row, q, 1] = b.prev
    else:
        a.b[b.next].prev = b.prev
    if a.be[row, q, 0] == NONE:
        a.bb[row] &= ~(_1 << np.uint64(q))
    b.where = NONE


@jit
def place(a: Arrays, t: int, g: int, head: bool) -> None:
    """Slot `g` stands in a list of its priority: if it has no children in the tier it may leave, and gets a place by
    value. A parent whose last child has left goes to the head, the others to the tail."""
    if a.m[BY_VALUE + t] == 0:
        return
    n = a.s[g].entry
    if a.s[g].where <= FIRST or a.l[n].kids[t] != 0 or a.b[g].where != NONE:
        return
    a.b[g].asked, a.b[g].klass = a.w[n].asked, a.w[n].klass
    q = learn.bin_of(a, a.w[n].klass, learn.age_of(a, a.w[n].asked))
    _add(a, t, a.s[g].where * BINS + q, g, head)


@jit
def place_again(a: Arrays, n: int) -> None:
    """Entry `n` is of another class and age than before: let its slots stand where they should."""
    for t in range(3):
        g = a.e[n].slot[t]
        if g != NONE and a.m[BY_VALUE + t] != 0 and a.b[g].where != NONE:
            remove(a, t, g)
            place(a, t, g, False)


@jit
def worst(a: Arrays, t: int) -> int:
    """The slot that is to leave next by value, or NONE: of the lowest priority the least worth. It stays listed."""
    moves = 0
    for word in range(2):
        filled = a.bits[t, word] & ~(_1 << np.uint64(FIRST)) if word == 0 else a.bits[t, word]
        while filled != _0:
            q = 64 * word + trailing_zeros(filled)
            filled &= filled - _1
            row = t * LISTS + q
            while a.bb[row] != _0:
                k = trailing_zeros(a.bb[row])
                g = a.be[row, k, 0]
                if a.l[a.s[g].entry].kids[t] != 0:  # a child has come since; it is placed again once that has left
                    remove(a, t, g)
                    continue
                right = learn.bin_of(a, a.b[g].klass, learn.age_of(a, a.b[g].asked))
                if right <= k or moves == MOVES:
                    return g
                moves += 1
                remove(a, t, g)
                _add(a, t, q * BINS + right, g, False)
    return NONE


@jit
def look_again(a: Arrays, t: int, n: int) -> None:
    """Values change with age: let the next slots of the tier, so many for `n` blocks asked, stand where they should."""
    cap = a.m[CAP + t]
    if a.m[BY_VALUE + t] == 0 or cap == 0:
        return
    for _ in range(min(HAND * n, cap)):
        a.hand[t] = a.hand[t] + 1 if a.hand[t] + 1 < cap else 0
        g = a.m[BASE + t] + a.hand[t]
        where = a.b[g].where
        if where != NONE:
            q = learn.bin_of(a, a.b[g].klass, learn.age_of(a, a.b[g].asked))
            if q != where % BINS:
                remove(a, t, g)
                _add(a, t, where - where % BINS + q, g, False)


@jit
def trusted(a: Arrays, t: int) -> bool:
    """Is tier `t` ordered by value at present?"""
    return a.m[BY_VALUE + t] != 0 and a.lm[TRUST] != 0


@jit
def raise_bar(a: Arrays, t: int, spoken_for: int, factor: float) -> None:
    """Set what a block must be worth to enter tier `t`, of whose free slots so many are spoken for: more than what
    leaves next there by a factor, and no less in priority."""
    a.m[BARS_PRIORITY], a.lf[BAR] = NONE, 0.0
    if not trusted(a, t):
        return
    least = a.lf[PRICE] * a.lf[MEAN] if a.lf[PER_NS] > 0.0 else 0.0
    if least > 0.0:
        a.m[BARS_PRIORITY], a.lf[BAR] = DEFAULT_PRIORITY, least
    if a.m[NFREE + t] > spoken_for or a.ends[t, FIRST, 0] != NONE:
        return
    g = worst(a, t)
    if g != NONE:
        a.m[BARS_PRIORITY] = a.s[g].where - 1
        a.lf[BAR] = max(least, factor * learn.value(a, a.b[g].klass, learn.age_of(a, a.b[g].asked)))


@jit
def over_bar(a: Arrays, klass: int, asked: int, priority: int) -> bool:
    """Is a block of this class, age and priority worth its place?"""
    if priority != a.m[BARS_PRIORITY]:
        return priority > a.m[BARS_PRIORITY]
    return learn.value(a, klass, learn.age_of(a, asked)) > a.lf[BAR]
