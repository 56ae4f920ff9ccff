"""The invariants of a table: counts, lists, leases, tree, index and scoreboard agree. Read-only; runs in every test."""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import index, order
from .checkvalue import check_value
from .moves import writes_disk
from .state import (
    ABSENT,
    BASE,
    CAP,
    COUNTED,
    DEVICE,
    DISK,
    FORGET,
    FREE,
    HBASE,
    HEAP,
    HELD,
    HOST,
    LISTS,
    MARK,
    NBAD,
    NENTS,
    NFREE,
    NHEAP,
    NLEASED,
    NLISTED,
    NONE,
    NOW,
    NREGIONS,
    NRETAINED,
    NUSED,
    NWRITING,
    NXDEF,
    NXFREE,
    QUARANTINED,
    REGION0,
    TAKEN,
    UNLISTED,
    WBASE,
    X_DEFERRED,
    X_FREE,
    XCAP,
    Arrays,
)

WRONG = (
    "",
    "free count differs from the free bits",
    "a free bit disagrees with the slot's state",
    "slot and entry disagree",
    "a slot with no lease stands nowhere in the order",
    "a slot that is leased, free or empty stands in the order",
    "a count of the tier is off",
    "a list is broken",
    "the heap is out of order",
    "an entry is unreachable through the index",
    "an entry in use has no slot",
    "children are miscounted",
    "siblings are broken",
    "a block's parent is not on disk",
    "a parent ranks below its child",
    "a block stands in device and host at once",
    "the scoreboard is off",
    "transfers are miscounted",
    "a mark was left behind",
    "the index holds what is not there",
    "a lease is negative",
    "retained blocks are miscounted",
    "a list by value is broken",
    "what was learned is no count",
    "a shadow cache is broken",
)

BY_VALUE_WRONG = 21  # place in WRONG before those of `check_value`


@jit
def check(a: Arrays, closed: bool, exclusive: bool) -> int:
    """First invariant that does not hold, as an index into WRONG; 0 if all do.

    `closed`: a parent of a block on disk is there too (holds where no transfer has failed). `exclusive`: no block is in
    device and host at once."""
    n_entries = a.e.shape[0]
    used = np.ones(n_entries, np.bool_)
    for i in range(a.m[NENTS]):
        used[a.estack[i]] = False
    for t in range(3):
        base, cap = a.m[BASE + t], a.m[CAP + t]
        free = leased = listed = held = bad = attached = 0
        for k in range(cap):
            g = base + k
            s = a.s[g]
            bit = (a.fw[a.m[WBASE + t] + (k >> 6)] >> np.uint64(k & 63)) & np.uint64(1)
            if (bit == np.uint64(1)) != (s.state == FREE):
                return 2
            if s.lease < 0:
                return 20
            free += bit == np.uint64(1)
            leased += s.lease > 0
            bad += s.state == QUARANTINED
            if s.wd > s.wi or s.rd > s.ri:
                return 16
            if s.entry != NONE:
                attached += 1
                if s.state != TAKEN or not used[s.entry] or a.e[s.entry].slot[t] != g:
                    return 3
            if s.where != UNLISTED:
                listed += 1
                held += s.where == HELD
                if s.lease > 0 or s.entry == NONE or s.state != TAKEN:
                    return 5
            elif s.state == TAKEN and s.lease == 0:
                return 4
        open_free = all_free = 0
        for r in range(a.m[REGION0 + t], a.m[REGION0 + t] + a.m[NREGIONS + t]):
            all_free += a.rg[r].free
            if a.rg[r].closed == 0:
                open_free += a.rg[r].free
        if free != all_free or open_free != a.m[NFREE + t]:
            return 1
        if (
            leased != a.m[NLEASED + t]
            or listed != a.m[NLISTED + t]
            or bad != a.m[NBAD + t]
            or attached != a.m[NUSED + t]
        ):
            return 6
        walked = held + a.m[NHEAP + t]
        for q in range(LISTS):
            g, before = a.ends[t, q, 0], NONE
            if (g != NONE) != ((a.bits[t, q >> 6] >> np.uint64(q & 63)) & np.uint64(1) == np.uint64(1)):
                return 7
            while g != NONE:
                if a.s[g].where != q or a.s[g].prev != before or walked > listed:
                    return 7
                walked += 1
                before, g = g, a.s[g].next
            if a.ends[t, q, 1] != before:
                return 7
        if walked != listed:
            return 7
        for i in range(a.m[NHEAP + t]):
            g = a.heap[a.m[HBASE + t] + i]
            up = a.heap[a.m[HBASE + t] + ((i - 1) >> 1)] if i else g
            if a.s[g].where != HEAP or a.s[g].pos != i:
                return 8
            if a.e[a.s[up].entry].deadline > a.e[a.s[g].entry].deadline:
                return 8
    wrong = check_value(a)
    if wrong:
        return BY_VALUE_WRONG + wrong
    in_index = 0
    for i in range(a.ix.shape[0]):
        in_index += a.ix[i] != np.uint64(0)
    if in_index != n_entries - a.m[NENTS]:
        return 19
    kids = np.zeros((n_entries, 3), np.int32)
    retained = 0
    for n in range(n_entries):
        if not used[n]:
            continue
        e = a.e[n]
        if index.find(a, e.k0, e.k1) != n:
            return 9
        if e.flags & np.uint32(MARK):
            return 18
        counted = (e.flags & np.uint32(COUNTED)) != 0
        retained += counted
        ends = (e.flags & np.uint32(FORGET)) != 0
        if (counted and e.deadline == 0) or (not counted and not ends and e.deadline > a.m[NOW]):
            return 21
        here = 0
        for t in range(3):
            g = e.slot[t]
            if (g == NONE) != (e.state[t] == ABSENT):
                return 3
            if g != NONE:
                here += 1
                if a.s[g].entry != n:
                    return 3
                if e.parent != NONE:
                    kids[e.parent, t] += 1
        if here == 0:
            return 10
        if exclusive and e.slot[DEVICE] != NONE and e.slot[HOST] != NONE:
            return 15
        p = e.parent
        if p != NONE:
            if not used[p]:
                return 12
            if closed and e.slot[DISK] != NONE and a.e[p].slot[DISK] == NONE:
                return 13
            if order.retained(a, n) and not (order.retained(a, p) and a.e[p].deadline >= e.deadline):
                return 14
            if a.l[p].firm < a.l[n].firm:
                return 14
            if (e.deadline == 0 or e.deadline > a.m[NOW]) and a.e[p].priority < e.priority:
                return 14
        c, before = a.l[n].child, NONE
        while c != NONE:
            if a.e[c].parent != n or a.l[c].prev != before:
                return 12
            before, c = c, a.l[c].next
    for n in range(n_entries):
        if used[n]:
            for t in range(3):
                if kids[n, t] != a.l[n].kids[t]:
                    return 11
    if retained != a.m[NRETAINED] or retained != a.ten.sum():
        return 21
    active = deferred = writing = 0
    writes = np.zeros(a.s.shape[0], np.int64)
    reads = np.zeros(a.s.shape[0], np.int64)
    for x in range(a.m[XCAP]):
        r = a.x[x]
        if r.state == X_FREE:
            continue
        active += 1
        deferred += r.state == X_DEFERRED
        writing += writes_disk(r.kind)
        if r.src != NONE:
            reads[r.src] += 1
        if r.dst != NONE:
            writes[r.dst] += 1
    if active != a.m[XCAP] - a.m[NXFREE] or deferred != a.m[NXDEF] or writing != a.m[NWRITING]:
        return 17
    for g in range(a.s.shape[0]):
        if np.int64(a.s[g].wi) - a.s[g].wd != writes[g] or np.int64(a.s[g].ri) - a.s[g].rd != reads[g]:
            return 16
    return 0
