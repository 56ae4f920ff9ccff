"""A request has asked for a chain of keys: what is learned from it, what its blocks are worth from now on.

Noted once a request, before its blocks are touched; taken up before the next decision. Changes no tier; what it
costs is bounded by the chain's length.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import budget, byvalue, index, learn, shadow
from .learned import ASKED, FOUND, NOTES, PUT_OFF, SAME_KEY, SAME_LENGTH, SAMPLED
from .state import LEARNS, NONE, Arrays

_LOW = np.int64(0xFFFFFFFF)


@jit
def again(a: Arrays, keys: np.ndarray, n: int) -> bool:
    """Is this the chain that was asked just before? An engine that asks until it has room is one request."""
    last = np.int64(keys[n - 1, 0]) if n > 0 else 0
    same = a.lm[SAME_KEY] == last and a.lm[SAME_LENGTH] == n
    a.lm[SAME_KEY], a.lm[SAME_LENGTH] = last, n
    return same


@jit
def _learn(a: Arrays, keys: np.ndarray, n: int, ents: np.ndarray, found: int) -> None:
    """Learn from a request for `n` keys, of which the first `found` were there. `ents` gets the entries of all, or `~`
    the uses that are remembered of a key without one."""
    new, behind = 0, found >= 2
    for i in range(n):
        if i + index.AHEAD < n:
            index.expect(a, keys[i + index.AHEAD, 0])
            learn.expect(a, keys[i + index.AHEAD, 0])
        e = index.find(a, keys[i, 0], keys[i, 1])
        uses = np.int64(a.w[e].uses) if e != NONE else learn.recall(a, keys[i, 0]) >> 8
        ents[i] = e if e != NONE else ~uses
        if i >= found:
            new += uses == 0
            behind |= i == 1 and uses > 0
    size = learn.size_of(new)
    for i in range(n):
        e, h = ents[i], learn.spread(keys[i, 0])
        uses = np.int64(a.w[e].uses) if e >= 0 else ~e
        if uses == 0:
            klass = learn.class_of(0, size, behind and i >= 2, i == n - 1)
        else:
            klass = learn.class_of(uses, size, found - 2 <= i < found, False)
        uses = min(uses + 1, learn.MOST_USES)
        if e >= 0:
            a.w[e].asked = a.lm[ASKED] & _LOW
            a.w[e].uses, a.w[e].klass = uses, klass
            if i >= found:
                byvalue.place_again(a, e)
        else:
            learn.remember(a, h, uses, klass)
        learn.watch(a, h, klass)
        a.lm[SAMPLED] = shadow.sample(a, h, klass, a.lm[SAMPLED])
    for i in range(found - 1, -1, -1):
        if ents[i] >= 0:
            byvalue.place_again(a, ents[i])


@jit
def _take_up(a: Arrays, keys: np.ndarray, ents: np.ndarray) -> None:
    n = a.lm[PUT_OFF]
    if a.m[LEARNS] != 0:
        _learn(a, keys, n, ents, a.lm[FOUND])
        learn.turn(a)
    else:
        for i in range(n):
            a.lm[SAMPLED] = shadow.sample(a, learn.spread(keys[i, 0]), 0, a.lm[SAMPLED])
    shadow.ask(a, a.lm[SAMPLED])
    for t in range(3):
        byvalue.look_again(a, t, n)
    a.lm[PUT_OFF] = a.lm[SAMPLED] = 0


@jit
def catch_up(a: Arrays) -> None:
    """Learn what `ask` has put off, because its caller waits."""
    if a.lm[PUT_OFF] != 0:
        _take_up(a, a.nk, a.ne)


@jit
def ask(a: Arrays, keys: np.ndarray, n: int, ents: np.ndarray, found: int) -> None:
    """`n` keys are asked, of which the first `found` can be had, as the entries `ents`. Those after them are scratch.
    All that follows from it is put off, unless there are more keys than can be noted."""
    if n == 0:
        return
    catch_up(a)
    a.lm[ASKED] += n
    budget.haggle(a)
    a.lm[PUT_OFF], a.lm[FOUND] = n, found
    if n > NOTES:
        _take_up(a, keys, ents)
    else:
        a.nk[:n] = keys[:n]


@jit
def class_made(a: Arrays, k0: np.uint64) -> int:
    """Class that a block of this key gets when it is made."""
    known = learn.recall(a, k0)
    return known & 0xFF if known else learn.class_of(0, learn.size_of(1), False, False)


@jit
def made(a: Arrays, n: int) -> None:
    """Entry `n` is new: what is known of its key."""
    if a.m[LEARNS] == 0:
        return
    a.w[n].asked = a.lm[ASKED] & _LOW
    a.w[n].uses = max(1, learn.recall(a, a.e[n].k0) >> 8)
    a.w[n].klass = class_made(a, a.e[n].k0)


@jit
def gone(a: Arrays, n: int) -> None:
    """Entry `n` is about to go: its key is remembered for a while."""
    if a.m[LEARNS] != 0:
        learn.remember(a, learn.spread(a.e[n].k0), np.int64(a.w[n].uses), np.int64(a.w[n].klass))


@jit
def resume(a: Arrays, n: int) -> None:
    """`n` blocks come from an earlier process: time begins after their uses."""
    a.lm[ASKED] = max(a.lm[ASKED], n)


@jit
def restored(a: Arrays, n: int, rank: int) -> None:
    """Entry `n` comes from an earlier process, which has counted its uses; `rank` blocks were used since."""
    if a.m[LEARNS] != 0:
        a.w[n].asked = (a.lm[ASKED] - rank) & _LOW
        a.w[n].uses = min(max(1, np.int64(a.e[n].uses)), learn.MOST_USES)
        a.w[n].klass = learn.class_of(np.int64(a.w[n].uses) - 1, learn.size_of(1), False, False)
