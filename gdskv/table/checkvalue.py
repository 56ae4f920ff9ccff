"""The invariants of the lists by value, of what is learned and of the shadows. Read-only; part of `check`."""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from .learned import ASKED, BINS, BUCKETS, CLASSES, S_CAP, S_FIRST, S_FREE, S_LRU, SAMPLES
from .state import BASE, BY_VALUE, CAP, FIRST, LEARNS, LISTS, NONE, Arrays


@jit
def lists_by_value(a: Arrays, t: int) -> bool:
    """Do the lists by value of tier `t` hold every block that may leave, once, and no other?"""
    standing = 0
    for q in range(LISTS):
        row = t * LISTS + q
        for k in range(BINS):
            g, before = a.be[row, k, 0], NONE
            if (g != NONE) != ((a.bb[row] >> np.uint64(k)) & np.uint64(1) == np.uint64(1)):
                return False
            while g != NONE:
                b = a.b[g]
                if b.where != q * BINS + k or b.prev != before or a.s[g].where != q or q <= FIRST:
                    return False
                if b.klass != a.w[a.s[g].entry].klass or standing > a.m[CAP + t]:
                    return False
                standing += 1
                before, g = g, b.next
            if a.be[row, k, 1] != before:
                return False
    for g in range(a.m[BASE + t], a.m[BASE + t] + a.m[CAP + t]):
        standing -= a.b[g].where != NONE
        if a.s[g].where > FIRST and a.l[a.s[g].entry].kids[t] == 0 and a.b[g].where == NONE:
            return False
    return standing == 0


@jit
def counts(a: Arrays) -> bool:
    """Are what was counted and valued numbers that can be, and the watched keys no later than now?"""
    if a.m[LEARNS] == 0:
        return True
    for c in range(CLASSES):
        for k in range(BUCKETS):
            if not (a.lh[c, k] >= 0.0 and a.lx[c, k] >= 0.0 and a.lv[c, k] >= 0.0) or a.lb[c, k] >= BINS:
                return False
    for i in range(SAMPLES):
        w = a.lw[i]
        if w.last > a.lm[ASKED] or w.klass >= CLASSES or (w.key != np.uint64(0) and w.paid > a.lm[ASKED] - w.last):
            return False
    return True


@jit
def shadows(a: Arrays) -> bool:
    """Does each shadow hold what its lists and its hash buckets say, and every block's parent?"""
    for m in range(a.sm.shape[0]):
        first, cap = a.sm[m, S_FIRST], a.sm[m, S_CAP]
        free, b = 0, a.sm[m, S_FREE]
        while b != NONE and free <= cap:
            if a.sb[b].used != 0:
                return False
            free += 1
            b = a.sb[b].same
        recent, before, b = 0, NONE, a.se[m, BINS, 0]
        while b != NONE and recent <= cap:
            s = a.sb[b]
            if s.used != 1 or s.before != before or (s.parent != NONE and a.sb[s.parent].used != 1):
                return False
            if a.sm[m, S_LRU] == 0 and (s.kids == 0) != (s.where != NONE):
                return False
            recent += 1
            before, b = b, s.after
        hashed = 0
        for i in range(2 * first, 2 * (first + cap)):
            b = a.sx[i]
            while b != NONE and hashed <= cap:
                hashed += 1
                b = a.sb[b].same
        if free + recent != cap or hashed != recent:
            return False
        listed = 0
        for q in range(BINS):
            b = a.se[m, q, 0]
            while b != NONE and listed <= cap:
                if a.sb[b].where != q:
                    return False
                listed += 1
                b = a.sb[b].next
        if a.sm[m, S_LRU] != 0 and listed != 0:
            return False
    return True


@jit
def check_value(a: Arrays) -> int:
    """0 if all holds; else 1 for the lists by value, 2 for what was counted, 3 for the shadows."""
    for t in range(3):
        if a.m[BY_VALUE + t] != 0 and not lists_by_value(a, t):
            return 1
    if not counts(a):
        return 2
    return 0 if shadows(a) else 3
