"""Who leaves a tier first: orphans and forgotten blocks, then by priority, then by the order among equals; blocks with
a live deadline last, earliest first; children before parents.

The order among equals is by last use, as `enlist` and `touch` keep it, and beside it by value (see `byvalue`), where a
tier has both. Reads no clock.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import byvalue
from .bits import trailing_zeros
from .state import (
    COUNTED,
    DISK,
    FIRST,
    FORGET,
    HBASE,
    HEAP,
    HELD,
    NHEAP,
    NLISTED,
    NONE,
    NOW,
    NRETAINED,
    PROTECT,
    ROOT,
    UNLISTED,
    Arrays,
)

_0 = np.uint64(0)
_1 = np.uint64(1)


@jit
def _append(a: Arrays, t: int, q: int, g: int) -> None:
    tail = a.ends[t, q, 1]
    a.s[g].prev, a.s[g].next, a.s[g].where = tail, NONE, q
    if tail == NONE:
        a.ends[t, q, 0] = g
        a.bits[t, q >> 6] |= _1 << np.uint64(q & 63)
    else:
        a.s[tail].next = g
    a.ends[t, q, 1] = g
    byvalue.place(a, t, g, False)


@jit
def _prepend(a: Arrays, t: int, q: int, g: int) -> None:
    head = a.ends[t, q, 0]
    a.s[g].prev, a.s[g].next, a.s[g].where = NONE, head, q
    if head == NONE:
        a.ends[t, q, 1] = g
        a.bits[t, q >> 6] |= _1 << np.uint64(q & 63)
    else:
        a.s[head].prev = g
    a.ends[t, q, 0] = g
    byvalue.place(a, t, g, True)


@jit
def _unchain(a: Arrays, t: int, g: int) -> None:
    byvalue.remove(a, t, g)
    q = a.s[g].where
    before, after = a.s[g].prev, a.s[g].next
    if before == NONE:
        a.ends[t, q, 0] = after
    else:
        a.s[before].next = after
    if after == NONE:
        a.ends[t, q, 1] = before
    else:
        a.s[after].prev = before
    if a.ends[t, q, 0] == NONE:
        a.bits[t, q >> 6] &= ~(_1 << np.uint64(q & 63))


@jit
def _earlier(a: Arrays, g: int, h: int) -> bool:
    e, f = a.s[g].entry, a.s[h].entry
    if a.e[e].deadline != a.e[f].deadline:
        return a.e[e].deadline < a.e[f].deadline
    return a.e[e].last < a.e[f].last


@jit
def _heap_set(a: Arrays, base: int, i: int, g: int) -> None:
    a.heap[base + i] = g
    a.s[g].pos = i


@jit
def _sift(a: Arrays, base: int, n: int, i: int) -> None:
    g = a.heap[base + i]
    while i > 0:
        p = (i - 1) >> 1
        if not _earlier(a, g, a.heap[base + p]):
            break
        _heap_set(a, base, i, a.heap[base + p])
        i = p
    while True:
        k = 2 * i + 1
        if k >= n:
            break
        if k + 1 < n and _earlier(a, a.heap[base + k + 1], a.heap[base + k]):
            k += 1
        if not _earlier(a, a.heap[base + k], g):
            break
        _heap_set(a, base, i, a.heap[base + k])
        i = k
    _heap_set(a, base, i, g)


@jit
def _heap_push(a: Arrays, t: int, g: int) -> None:
    base, n = a.m[HBASE + t], a.m[NHEAP + t]
    a.heap[base + n] = g
    a.m[NHEAP + t] = n + 1
    a.s[g].where = HEAP
    _sift(a, base, n + 1, n)


@jit
def _heap_drop(a: Arrays, t: int, g: int) -> None:
    base, n = a.m[HBASE + t], a.m[NHEAP + t] - 1
    i = a.s[g].pos
    last = a.heap[base + n]
    a.m[NHEAP + t] = n
    a.heap[base + n] = NONE
    a.s[g].pos = NONE
    if last != g:
        _heap_set(a, base, i, last)
        _sift(a, base, n, i)


@jit
def orphan(a: Arrays, n: int) -> bool:
    """Has entry `n` lost the parent without which it cannot be reached?"""
    return a.e[n].parent == NONE and (a.e[n].flags & np.uint32(ROOT)) == 0


@jit
def forgotten(a: Arrays, n: int, now: int) -> bool:
    """Has entry `n` passed a deadline at which it was to be forgotten?"""
    d = a.e[n].deadline
    return d != 0 and d <= now and (a.e[n].flags & np.uint32(FORGET)) != 0


@jit
def retained(a: Arrays, n: int) -> bool:
    """Is entry `n` to be kept until a deadline that has not passed? A deadline alone does not say so: one that found no
    room in the budget only says when the block is forgotten."""
    return a.e[n].deadline > a.m[NOW] and (a.e[n].flags & np.uint32(COUNTED)) != 0


@jit
def list_of(a: Arrays, n: int) -> int:
    """Where a block of entry `n` stands in the order: HEAP, FIRST or the list of its priority."""
    if retained(a, n):
        return HEAP
    if forgotten(a, n, a.m[NOW]):
        return FIRST
    return 1 + a.e[n].priority


@jit
def uncount(a: Arrays, n: int) -> None:
    """Entry `n` is no longer retained: its place in the budget is free."""
    if a.e[n].flags & np.uint32(COUNTED):
        a.e[n].flags &= ~np.uint32(COUNTED)
        a.m[NRETAINED] -= 1
        a.ten[a.l[n].tenant] -= 1


@jit
def lapse(a: Arrays, n: int) -> None:
    """The deadline of entry `n` has passed under "demote": what remains is the priority that no deadline bounds."""
    ln = a.l[n]
    ln.own_priority, ln.own_deadline = min(ln.own_priority, ln.firm), 0
    a.e[n].priority, a.e[n].deadline = ln.firm, 0
    uncount(a, n)


@jit
def settle(a: Arrays, n: int) -> None:
    """The deadline of entry `n` has passed under "demote": in every tier it stands where its last use puts it."""
    moved = 0
    for t in range(3):
        g = a.e[n].slot[t]
        if g != NONE and (a.s[g].where == HEAP or a.s[g].where >= 0):
            if a.s[g].where == HEAP:
                _heap_drop(a, t, g)
            else:
                _unchain(a, t, g)
            moved |= 1 << t
    lapse(a, n)
    for t in range(3):
        if moved & (1 << t):
            q = list_of(a, n)
            head = a.ends[t, q, 0]
            if head != NONE and a.e[a.s[head].entry].last > a.e[n].last:
                _prepend(a, t, q, a.e[n].slot[t])
            else:
                _append(a, t, q, a.e[n].slot[t])


@jit
def enlist(a: Arrays, t: int, g: int) -> None:
    """Put a slot with no lease where its entry belongs, as the most recently used."""
    n = a.s[g].entry
    d = a.e[n].deadline
    if d != 0 and d <= a.m[NOW] and (a.e[n].flags & np.uint32(FORGET)) == 0:
        settle(a, n)
    q = list_of(a, n)
    if q == HEAP:
        _heap_push(a, t, g)
    else:
        _append(a, t, q, g)
    a.m[NLISTED + t] += 1


@jit
def enlist_head(a: Arrays, t: int, g: int) -> None:
    """The same, as the next of its class to leave."""
    q = list_of(a, a.s[g].entry)
    if q == HEAP:
        _heap_push(a, t, g)
    else:
        _prepend(a, t, q, g)


@jit
def delist(a: Arrays, t: int, g: int) -> None:
    """Take a slot out of the order, if it stands there."""
    w = a.s[g].where
    if w == UNLISTED:
        return
    if w == HEAP:
        _heap_drop(a, t, g)
    elif w >= 0:
        _unchain(a, t, g)
    a.s[g].where = UNLISTED
    a.s[g].prev = a.s[g].next = NONE
    a.m[NLISTED + t] -= 1


@jit
def touch(a: Arrays, t: int, g: int) -> None:
    """Make a slot the most recently used of its class. Touch a chain from its last block to its first, so that a
    parent is always more recent than its children."""
    if a.s[g].where != UNLISTED:
        delist(a, t, g)
        enlist(a, t, g)


@jit
def put_first(a: Arrays, t: int, g: int) -> None:
    """Let a listed slot leave before all others."""
    w = a.s[g].where
    if w == UNLISTED:
        return
    if w == HEAP:
        _heap_drop(a, t, g)
    elif w >= 0:
        _unchain(a, t, g)
    _append(a, t, FIRST, g)


@jit
def child_left(a: Arrays, t: int, parent: int) -> None:
    """A parent that was passed over because of its children may leave once the last of them has."""
    g = a.e[parent].slot[t]
    if g == NONE or a.l[parent].kids[t] != 0:
        return
    if a.s[g].where == HELD:
        enlist_head(a, t, g)
    else:
        byvalue.place(a, t, g, True)


@jit
def victim(a: Arrays, t: int) -> int:
    """Take the next slot to leave out of the order and return it, or NONE."""
    found = aside = NONE
    if byvalue.trusted(a, t) and a.ends[t, FIRST, 0] == NONE:
        found = byvalue.worst(a, t)
        if found != NONE:
            delist(a, t, found)
            return found
    while True:
        if a.bits[t, 0] != _0:
            q = trailing_zeros(a.bits[t, 0])
            g = a.ends[t, q, 0]
        elif a.bits[t, 1] != _0:
            q = 64 + trailing_zeros(a.bits[t, 1])
            g = a.ends[t, q, 0]
        elif a.m[NHEAP + t] > 0:
            q = HEAP
            g = a.heap[a.m[HBASE + t]]
            if t == DISK and a.m[PROTECT] != 0 and a.e[a.s[g].entry].deadline > a.m[NOW]:
                break
        else:
            break
        n = a.s[g].entry
        if a.l[n].kids[t] == 0:
            delist(a, t, g)
            found = g
            break
        if q == HEAP:  # its children are leased; it must not miss its deadline, so it goes back afterwards
            _heap_drop(a, t, g)
            a.s[g].next = aside
            aside = g
            continue
        if q == FIRST:  # its descendants go before it, and ahead of everything else
            c = a.l[n].child
            while c != NONE:
                h = a.e[c].slot[t]
                if h != NONE and a.s[h].where != FIRST:
                    put_first(a, t, h)
                c = a.l[c].next
        _unchain(a, t, g)
        a.s[g].where = HELD
        a.s[g].prev = a.s[g].next = NONE
    while aside != NONE:
        g, aside = aside, a.s[aside].next
        a.s[g].next = NONE
        _heap_push(a, t, g)
    return found
