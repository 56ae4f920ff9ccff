"""Shadow caches: small tables of a sample of the keys, which show what other sizes and another order would hit.

A miniature simulation (Waldspurger et al., ATC 2017) with the spatial sampling of SHARDS (FAST 2015): a cache of `c`
blocks and the keys of one hash in `s` behave as `c * s` blocks and all keys. Here a hit needs the whole prefix.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import learn
from .learned import (
    ASKED,
    BINS,
    HAND,
    LEAD,
    MOVES,
    OWN,
    REFUSE,
    REQUESTS,
    RIVAL,
    S_ASKED,
    S_CAP,
    S_FIRST,
    S_FREE,
    S_HAND,
    S_HITS,
    S_LRU,
    SHADOW_KEYS,
    SPAN,
    TRUST,
)
from .state import NONE, Arrays

RECENT = BINS  # the list of a shadow's blocks by last use, after those by value
WARM_UP = 64  # requests before anything is decided by value
FORGET = 1 / 8192  # of the lead, per sampled block asked
BEHIND = -0.03  # lead, in hits per block asked, at which the order by value is given up; it comes back at 0

_1 = np.uint64(1)


@jit
def _add(a: Arrays, m: int, q: int, b: int, head: bool) -> None:
    s = a.sb[b]
    s.where = q
    if head:
        other = a.se[m, q, 0]
        s.prev, s.next = NONE, other
        if other == NONE:
            a.se[m, q, 1] = b
        else:
            a.sb[other].prev = b
        a.se[m, q, 0] = b
    else:
        other = a.se[m, q, 1]
        s.prev, s.next = other, NONE
        if other == NONE:
            a.se[m, q, 0] = b
        else:
            a.sb[other].next = b
        a.se[m, q, 1] = b


@jit
def _cut(a: Arrays, m: int, b: int) -> None:
    s = a.sb[b]
    q = s.where
    if q == NONE:
        return
    if s.prev == NONE:
        a.se[m, q, 0] = s.next
    else:
        a.sb[s.prev].next = s.next
    if s.next == NONE:
        a.se[m, q, 1] = s.prev
    else:
        a.sb[s.next].prev = s.prev
    s.where = NONE


@jit
def _newest(a: Arrays, m: int, b: int) -> None:
    tail = a.se[m, RECENT, 1]
    a.sb[b].before, a.sb[b].after = tail, NONE
    if tail == NONE:
        a.se[m, RECENT, 0] = b
    else:
        a.sb[tail].after = b
    a.se[m, RECENT, 1] = b


@jit
def _not_newest(a: Arrays, m: int, b: int) -> None:
    s = a.sb[b]
    if s.before == NONE:
        a.se[m, RECENT, 0] = s.after
    else:
        a.sb[s.before].after = s.after
    if s.after == NONE:
        a.se[m, RECENT, 1] = s.before
    else:
        a.sb[s.after].before = s.before


@jit
def _bucket(a: Arrays, m: int, h: np.uint64) -> int:
    return 2 * a.sm[m, S_FIRST] + np.int64((h >> np.uint64(24)) % np.uint64(2 * a.sm[m, S_CAP]))


@jit
def _find(a: Arrays, m: int, h: np.uint64) -> int:
    b = a.sx[_bucket(a, m, h)]
    while b != NONE and a.sb[b].key != h:
        b = a.sb[b].same
    return b


@jit
def _evict(a: Arrays, m: int, b: int) -> None:
    _cut(a, m, b)
    _not_newest(a, m, b)
    s = a.sb[b]
    i = _bucket(a, m, s.key)
    if a.sx[i] == b:
        a.sx[i] = s.same
    else:
        c = a.sx[i]
        while a.sb[c].same != b:
            c = a.sb[c].same
        a.sb[c].same = s.same
    s.used = 0
    s.same = a.sm[m, S_FREE]
    a.sm[m, S_FREE] = b
    p = s.parent
    if p != NONE:
        a.sb[p].kids -= 1
        if a.sb[p].kids == 0 and a.sb[p].used == 1 and a.sm[m, S_LRU] == 0:
            _add(a, m, learn.bin_of(a, a.sb[p].klass, a.lm[ASKED] - a.sb[p].last), p, True)


@jit
def _worst(a: Arrays, m: int) -> int:
    """Next block to leave by value, or NONE."""
    now, moves, q = a.lm[ASKED], 0, 0
    while q < BINS:
        b = a.se[m, q, 0]
        if b == NONE:
            q += 1
            continue
        right = learn.bin_of(a, a.sb[b].klass, now - a.sb[b].last)
        if right <= q or moves == MOVES:
            return b
        moves += 1
        _cut(a, m, b)
        _add(a, m, right, b, False)
    return NONE


@jit
def _room(a: Arrays, m: int, klass: int) -> bool:
    """Have a free place in shadow `m` for a block of a class, if it is worth one."""
    if a.sm[m, S_FREE] != NONE:
        return True
    if a.sm[m, S_LRU]:
        b = a.se[m, RECENT, 0]
    else:
        b = _worst(a, m)
        if b != NONE and learn.value(a, klass, 0) <= REFUSE * learn.value(a, a.sb[b].klass, a.lm[ASKED] - a.sb[b].last):
            return False
    if b == NONE:
        return False
    _evict(a, m, b)
    return True


@jit
def _ask(a: Arrays, m: int, n: int) -> int:
    """A request asks shadow `m` for `n` sampled keys of one chain; how many of them it hits."""
    now = a.lm[ASKED]
    found, parent = 0, NONE
    while found < n:
        b = _find(a, m, a.sk[found])
        if b == NONE:
            break
        _cut(a, m, b)
        _not_newest(a, m, b)
        a.sb[b].used = 2
        a.sp[found] = b
        parent = b
        found += 1
    have = found
    while have < n and _room(a, m, a.sc[have]):
        b = a.sm[m, S_FREE]
        s = a.sb[b]
        a.sm[m, S_FREE] = s.same
        i = _bucket(a, m, a.sk[have])
        s.key, s.same, s.kids, s.parent, s.where, s.used = a.sk[have], a.sx[i], 0, parent, NONE, 2
        a.sx[i] = b
        if parent != NONE:
            a.sb[parent].kids += 1
        a.sp[have] = b
        parent = b
        have += 1
    for i in range(have - 1, -1, -1):
        b = a.sp[i]
        s = a.sb[b]
        s.used, s.last, s.klass = 1, now, a.sc[i]
        _newest(a, m, b)
        if s.kids == 0 and a.sm[m, S_LRU] == 0:
            _add(a, m, learn.bin_of(a, s.klass, 0), b, False)
    if a.sm[m, S_LRU] == 0:
        _look_again(a, m, HAND * n)
    a.sm[m, S_HITS] += found
    a.sm[m, S_ASKED] += n
    return found


@jit
def _look_again(a: Arrays, m: int, n: int) -> None:
    for _ in range(n):
        a.sm[m, S_HAND] = (a.sm[m, S_HAND] + 1) % a.sm[m, S_CAP]
        b = a.sm[m, S_FIRST] + a.sm[m, S_HAND]
        s = a.sb[b]
        if s.used == 1 and s.where != NONE:
            q = learn.bin_of(a, s.klass, a.lm[ASKED] - s.last)
            if q != s.where:
                _cut(a, m, b)
                _add(a, m, q, b, False)


@jit
def sample(a: Arrays, h: np.uint64, klass: int, n: int) -> int:
    """Take a key into the sample of its request, which holds `n`, if its hash says so; how many it holds then."""
    if (h >> np.uint64(40)) & ((_1 << np.uint64(a.sh[0])) - _1) != np.uint64(0) or n == SHADOW_KEYS:
        return n
    a.sk[n], a.sc[n] = h, klass
    return n + 1


@jit
def ask(a: Arrays, n: int) -> None:
    """A request has been asked, of which `n` keys are in the sample. Where there are two orders, the shadow that leads
    over the last thousands of blocks says which of them is trusted."""
    if n == 0:
        return
    own = other = 0
    for m in range(a.sm.shape[0]):
        found = _ask(a, m, n)
        if m == OWN:
            own = found
        elif m == RIVAL:
            other = found
    if a.sm.shape[0] > RIVAL:
        keep = max(0.0, 1.0 - FORGET * n)
        a.lf[LEAD] = (a.lf[LEAD] + own - other) * keep
        a.lf[SPAN] = (a.lf[SPAN] + n) * keep
        if a.lm[TRUST]:
            a.lm[TRUST] = a.lf[LEAD] >= BEHIND * a.lf[SPAN]
        elif a.lm[REQUESTS] >= WARM_UP:
            a.lm[TRUST] = a.lf[LEAD] >= 0.0
