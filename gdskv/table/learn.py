"""What comes back: how likely a block is to be asked again, learned from a sample of the keys, per class and age.

Time is the count of blocks asked. Knows keys, ages and classes; it must not know tiers, slots or the order of eviction.
"""

from __future__ import annotations

import math

import numpy as np

from gdskv._jit import jit

from .bits import leading_zeros
from .handle import fetch
from .learned import (
    ALL,
    ASKED,
    BINS,
    BUCKETS,
    CLASS_HAND,
    CLASSES,
    LAST,
    MEAN,
    MIDDLE,
    REQUESTS,
    SAMPLES,
    SHIFT,
    SIZES,
    USES,
    WATCH_HAND,
)
from .state import Arrays

WAYS = 8  # places at which a key may be watched; GHOST_WAYS at which it may be remembered
GHOST_WAYS = 4
PRIOR = 5.0  # hits that what is known of the group weighs
KEEP = 0.993  # of what was learned, each time round
TURN = 32  # requests in which each class is valued anew and each watched key's time is counted
MOST_USES = 0xFFFF
YOUNG = 512  # ages up to 2^(1/2) times this are one bucket: a rare return at once says nothing of what a place brings

_0 = np.uint64(0)
_1 = np.uint64(1)
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_EDGES = np.array([0.0] + [YOUNG * 2.0 ** (k / 2) for k in range(1, BUCKETS + 1)])


@jit
def spread(k0: np.uint64) -> np.uint64:
    """A key's own hash for sampling, independent of its place in the index."""
    x = (k0 ^ (k0 >> _32)) * _MIX
    x = (x ^ (x >> _32)) * _MIX
    return x ^ (x >> _32)


@jit
def bucket(age: int) -> int:
    """Bucket of an age."""
    octave = 63 - leading_zeros(np.uint64(max(age, YOUNG) // YOUNG))
    if 2 * octave >= BUCKETS:
        return BUCKETS - 1
    return 2 * octave + (age >= _EDGES[2 * octave + 1])


@jit
def size_of(new: int) -> int:
    """Step of the size of a request with `new` blocks never seen."""
    return min(SIZES - 1, int(1.5 * math.log2(new + 1.0)))


@jit
def class_of(uses: int, size: int, bit: bool, last: bool) -> int:
    """Class of a block that was asked `uses` times before, in a request of a size. `bit`: of a new block, that it
    stands behind a known prefix; of another, that it is one of the two deepest found."""
    if last and uses == 0:
        return LAST
    u = uses if uses < 2 else (2 if uses < 4 else 3)
    return (u * SIZES + size) * 2 + bit


@jit
def _ghosts(a: Arrays, h: np.uint64) -> int:
    """First of the places at which a key with this hash may be remembered."""
    return np.int64(h & np.uint64(a.lg.shape[0] // GHOST_WAYS - 1)) * GHOST_WAYS  # as many as a power of 2


@jit
def expect(a: Arrays, k0: np.uint64) -> None:
    """What is remembered of a key will be asked for soon: have it fetched meanwhile."""
    fetch(a.lg, _ghosts(a, spread(k0)))


@jit
def _count(a: Arrays, klass: int, since: int, until: int) -> None:
    """A block of a class was waited for from one age to another."""
    if until <= since:
        return
    at, end = float(since), float(until)
    for k in range(bucket(since), BUCKETS):
        edge = min(end, _EDGES[k + 1]) if k < BUCKETS - 1 else end
        a.lx[klass, k] += edge - at
        at = edge
        if at >= end:
            return


@jit
def watch(a: Arrays, h: np.uint64, klass: int) -> None:
    """A key with this hash is asked: if it is followed, count what it waited for, and that it came back."""
    if h & ((_1 << np.uint64(a.lm[SHIFT])) - _1) != _0:
        return
    first = np.int64((h >> np.uint64(20)) % np.uint64(SAMPLES // WAYS)) * WAYS
    place = first
    found = False
    for i in range(first, first + WAYS):
        if a.lw[i].key == h:
            place, found = i, True
            break
        if a.lw[i].last < a.lw[place].last:
            place = i
    w = a.lw[place]
    now = a.lm[ASKED]
    if w.key != _0:
        age = now - w.last
        _count(a, w.klass, w.paid, age)
        if found:
            a.lh[w.klass, bucket(age)] += 1.0
    w.key, w.last, w.paid, w.klass = h, now, 0, klass


@jit
def recall(a: Arrays, k0: np.uint64) -> int:
    """What is remembered of a key that is not there: uses << 8 | class; 0 if nothing is."""
    h = spread(k0)
    first = _ghosts(a, h)
    tag = h >> _32
    for i in range(first, first + GHOST_WAYS):
        if a.lg[i] >> _32 == tag:
            return np.int64(a.lg[i] & _LOW)
    return 0


@jit
def remember(a: Arrays, h: np.uint64, uses: int, klass: int) -> None:
    """Remember uses and class of a key that is not there, by its hash; the one of its neighbours remembered longest is
    forgotten."""
    first = _ghosts(a, h)
    tag = h >> _32
    i = first
    while i < first + GHOST_WAYS - 1 and a.lg[i] >> _32 != tag:
        i += 1
    while i > first:
        a.lg[i] = a.lg[i - 1]
        i -= 1
    a.lg[first] = (tag << _32) | np.uint64(min(uses, MOST_USES) << 8 | klass)


@jit
def _group(klass: int) -> int:
    return klass // (2 * SIZES) if klass < LAST else USES


@jit
def _revalue(a: Arrays, klass: int) -> None:
    """Value of a class at each age: over all holding times the best ratio of expected hits to expected block-time (a
    Gittins index), from hazards that are shrunk to those of the use group, and these to those of all."""
    group = _group(klass)
    mean = a.lf[MEAN]
    hit, wait, stay = np.zeros(BUCKETS), np.zeros(BUCKETS), np.zeros(BUCKETS)
    end = np.zeros(BUCKETS, np.int64)
    for k in range(BUCKETS - 1, -1, -1):
        rate = 0.0
        if a.ls[ALL, 1, k] > 0.0:
            rate = a.ls[ALL, 0, k] / a.ls[ALL, 1, k]
        if rate > 0.0:
            rate = (a.ls[group, 0, k] + PRIOR) / (a.ls[group, 1, k] + PRIOR / rate)
            rate = (a.lh[klass, k] + PRIOR) / (a.lx[klass, k] + PRIOR / rate)
        width = _EDGES[k + 1] - _EDGES[k]
        p = 1.0 - math.exp(-rate * width)
        h, t, s, e = p, (p / rate if rate > 1e-15 else width), 1.0 - p, k + 1
        while e < BUCKETS and hit[e] * t > h * wait[e]:  # the stretch that follows is better: hold through it
            h, t, s, e = h + s * hit[e], t + s * wait[e], s * stay[e], end[e]
        hit[k], wait[k], stay[k], end[k] = h, t, s, e
        worth = h / t
        a.lv[klass, k] = worth
        q = MIDDLE + math.floor(4.0 * math.log2(worth / mean)) if worth > 0.0 else 0.0
        a.lb[klass, k] = int(min(BINS - 1.0, max(0.0, q)))


@jit
def sum_groups(a: Arrays) -> None:
    """Sum what was learned over the groups of classes and over all."""
    a.ls[:] = 0.0
    for c in range(CLASSES):
        g = _group(c)
        for k in range(BUCKETS):
            a.ls[g, 0, k] += a.lh[c, k]
            a.ls[g, 1, k] += a.lx[c, k]
            if g != USES - 1:  # a few blocks that every request asks for say nothing of the others
                a.ls[ALL, 0, k] += a.lh[c, k]
                a.ls[ALL, 1, k] += a.lx[c, k]
    hits, time = a.ls[ALL, 0].sum(), a.ls[ALL, 1].sum()
    if hits > 0.0 and time > 0.0:
        a.lf[MEAN] = hits / time


@jit
def turn(a: Arrays) -> None:
    """A request has been asked: go on with counting the time of the watched and with valuing the classes. Each comes up
    once in TURN requests."""
    a.lm[REQUESTS] += 1
    now = a.lm[ASKED]
    some = SAMPLES // TURN
    for i in range(a.lm[WATCH_HAND], a.lm[WATCH_HAND] + some):
        w = a.lw[i]
        if w.key != _0:
            _count(a, w.klass, w.paid, now - w.last)
            w.paid = now - w.last
    a.lm[WATCH_HAND] = (a.lm[WATCH_HAND] + some) % SAMPLES
    at = a.lm[CLASS_HAND]
    if at == 0:
        sum_groups(a)
    a.lm[CLASS_HAND] = (at + 1) % TURN
    for c in range(at * CLASSES // TURN, (at + 1) * CLASSES // TURN):
        _revalue(a, c)
        for k in range(BUCKETS):
            a.lh[c, k] *= KEEP
            a.lx[c, k] *= KEEP


@jit
def value(a: Arrays, klass: int, age: int) -> float:
    """Expected hits per block-time of a block of this class and age."""
    return a.lv[klass, bucket(age)]


@jit
def bin_of(a: Arrays, klass: int, age: int) -> int:
    """The same on the scale by which blocks are listed."""
    return a.lb[klass, bucket(age)]


@jit
def age_of(a: Arrays, asked: int) -> int:
    """Blocks asked since; `asked` is the low half of that time."""
    return (a.lm[ASKED] - asked) & 0xFFFFFFFF
