"""Entries: a key's record, its place in the tree of prefixes, its slots in the tiers, and what becomes of orphans.

No plan is made here: these are the few steps, each of which leaves the table consistent, that plans are made of.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import asked, index, order, slots
from .notes import FILL, note, note_state, tell
from .state import (
    ABSENT,
    C_ADOPTED,
    C_EXPIRED,
    C_FORGOTTEN,
    C_LOST,
    C_ORPHANED,
    C_QUARANTINED,
    COUNTED,
    DEFAULT_PRIORITY,
    DISK,
    FIRST,
    FORGET,
    GRACE_NS,
    HBASE,
    NENTS,
    NHEAP,
    NLEASED,
    NONE,
    NOW,
    NRETAINED,
    NUSED,
    ORPH_HEAD,
    ORPH_TAIL,
    ORPHANS,
    ROOT,
    UNLISTED,
    Arrays,
)

BAD = np.uint32(0xFFFF)  # in SLOT.fails: not to be used again once its holders are gone


@jit
def create(a: Arrays, k0: np.uint64, k1: np.uint64, parent: int, root: bool) -> int:
    """A new entry with no slot yet. There is always a free one: entries outnumber slots."""
    a.m[NENTS] -= 1
    n = a.estack[a.m[NENTS]]
    e = a.e[n]
    e.k0, e.k1 = k0, k1
    e.deadline, e.last, e.priority, e.uses = 0, 0, 0, 0
    e.flags = np.uint32(ROOT) if root else np.uint32(0)
    e.gen += np.uint32(1)
    e.parent = NONE
    for t in range(3):
        e.slot[t] = NONE
        e.state[t] = ABSENT
        a.l[n].kids[t] = 0
    ln = a.l[n]
    ln.own_deadline, ln.own_priority, ln.firm, ln.tenant = 0, 0, 0, 0
    ln.child = ln.next = ln.prev = NONE
    index.insert(a, n)
    asked.made(a, n)
    if parent != NONE:
        adopt(a, parent, n)
    return n


@jit
def adopt(a: Arrays, parent: int, n: int) -> None:
    """Hang entry `n` under its parent."""
    first = a.l[parent].child
    a.e[n].parent = parent
    a.l[n].prev, a.l[n].next = NONE, first
    if first != NONE:
        a.l[first].prev = n
    a.l[parent].child = n
    for t in range(3):
        if a.e[n].slot[t] != NONE:
            a.l[parent].kids[t] += 1


@jit
def relink(a: Arrays, parent: int, n: int) -> None:
    """A chain shows whose child `n` is: an orphan finds its parent again."""
    if parent != NONE and a.e[n].parent == NONE and (a.e[n].flags & np.uint32(ROOT)) == 0:
        adopt(a, parent, n)
        a.c[C_ADOPTED] += 1
        if a.e[n].slot[DISK] != NONE:
            note(a, a.e[n].slot[DISK], FILL)
        for t in range(3):
            g = a.e[n].slot[t]
            if g != NONE and a.s[g].where == FIRST:
                order.touch(a, t, g)


@jit
def leave_parent(a: Arrays, n: int) -> None:
    """Entry `n` hangs under nobody any more."""
    p = a.e[n].parent
    if p == NONE:
        return
    before, after = a.l[n].prev, a.l[n].next
    if before == NONE:
        a.l[p].child = after
    else:
        a.l[before].next = after
    if after != NONE:
        a.l[after].prev = before
    a.l[n].prev = a.l[n].next = NONE
    a.e[n].parent = NONE
    for t in range(3):
        if a.e[n].slot[t] != NONE:
            a.l[p].kids[t] -= 1
            order.child_left(a, t, p)


@jit
def lose_sight(a: Arrays, n: int) -> None:
    """Entry `n` is an orphan: after its grace it leaves first."""
    a.c[C_ORPHANED] += 1
    if a.m[ORPH_TAIL] - a.m[ORPH_HEAD] < ORPHANS and a.m[GRACE_NS] > 0:
        o = a.orph[a.m[ORPH_TAIL] % ORPHANS]
        o.due, o.entry, o.gen = a.m[NOW] + a.m[GRACE_NS], n, a.e[n].gen
        a.m[ORPH_TAIL] += 1
        return
    for t in range(3):
        if a.e[n].slot[t] != NONE:
            order.put_first(a, t, a.e[n].slot[t])


@jit
def _destroy(a: Arrays, n: int) -> None:
    order.uncount(a, n)
    leave_parent(a, n)
    c = a.l[n].child
    while c != NONE:
        after = a.l[c].next
        a.e[c].parent = NONE
        a.l[c].prev = a.l[c].next = NONE
        lose_sight(a, c)
        c = after
    a.l[n].child = NONE
    asked.gone(a, n)
    index.remove(a, n)
    a.e[n].gen += np.uint32(1)
    a.estack[a.m[NENTS]] = n
    a.m[NENTS] += 1


@jit
def attach(a: Arrays, n: int, t: int, g: int, state: int) -> None:
    """Slot `g` of tier `t` now holds, or will hold, the block of entry `n`."""
    a.e[n].slot[t] = g
    a.e[n].state[t] = state
    a.s[g].entry = n
    a.s[g].retry_at = 0
    a.s[g].fails = 0
    a.m[NUSED + t] += 1
    tell(a, g)
    p = a.e[n].parent
    if p != NONE:
        a.l[p].kids[t] += 1


@jit
def detach(a: Arrays, n: int, t: int) -> int:
    """Entry `n` leaves tier `t`; the slot is in nobody's hands and is returned. The last copy takes the entry along."""
    g = a.e[n].slot[t]
    order.delist(a, t, g)
    a.s[g].entry = NONE
    a.e[n].slot[t] = NONE
    a.e[n].state[t] = ABSENT
    a.m[NUSED + t] -= 1
    tell(a, g)
    if t == DISK:
        note(a, g, FILL)
    p = a.e[n].parent
    if p != NONE:
        a.l[p].kids[t] -= 1
        order.child_left(a, t, p)
    if a.e[n].slot[0] == NONE and a.e[n].slot[1] == NONE and a.e[n].slot[2] == NONE:
        _destroy(a, n)
    return g


@jit
def lease(a: Arrays, t: int, g: int) -> None:
    """Hold a slot: it is not chosen to leave."""
    if a.s[g].lease == 0:
        order.delist(a, t, g)
        a.m[NLEASED + t] += 1
    a.s[g].lease += 1


@jit
def put_away(a: Arrays, t: int, g: int, bad: bool) -> None:
    """A slot in nobody's hands is free again, or out of use for good."""
    if bad:
        slots.quarantine(a, t, g)
        a.c[C_QUARANTINED] += 1
    else:
        slots.give(a, t, g)


@jit
def lose_quietly(a: Arrays, n: int, t: int) -> None:
    """Entry `n`, which has another copy, leaves tier `t` and its slot is free."""
    g = detach(a, n, t)
    if a.s[g].lease == 0:
        slots.give(a, t, g)


@jit
def lose(a: Arrays, n: int, t: int, provably_bad: bool) -> None:
    """The copy of entry `n` in tier `t` is gone. Its slot is free at once (the scoreboard holds back what would write
    into it too early), stays with those who hold it, or, with a medium that lies, is never used again."""
    g = detach(a, n, t)
    a.c[C_LOST] += 1
    if a.s[g].lease == 0:
        put_away(a, t, g, provably_bad)
    elif provably_bad:
        a.s[g].fails = BAD


@jit
def lose_tree(a: Arrays, n: int, t: int) -> None:
    """The copy of entry `n` in tier `t` never came to be: what stands below it in that tier goes with it, so that a
    block on disk always has its parent there."""
    while a.e[n].slot[t] != NONE:
        d = n
        while a.l[d].kids[t] > 0:  # down to a leaf of the tier
            c = a.l[d].child
            while a.e[c].slot[t] == NONE:
                c = a.l[c].next
            d = c
        last = d == n
        lose(a, d, t, False)
        if last:
            return


@jit
def forget(a: Arrays, n: int) -> None:
    """Drop entry `n` from every tier."""
    a.c[C_FORGOTTEN] += 1
    gen = a.e[n].gen
    for t in range(3):
        if a.e[n].gen == gen and a.e[n].slot[t] != NONE:
            lose(a, n, t, False)


@jit
def unlease(a: Arrays, t: int, g: int) -> None:
    """End a hold. The last one puts the slot back into the order, or among the free ones if it holds no block."""
    a.s[g].lease -= 1
    if a.s[g].lease == 0:
        a.m[NLEASED + t] -= 1
        n = a.s[g].entry
        if n == NONE:
            put_away(a, t, g, a.s[g].fails == BAD)
        else:
            order.enlist(a, t, g)
            if order.forgotten(a, n, a.m[NOW]):
                forget(a, n)


@jit
def expire(a: Arrays, n: int) -> None:
    """The deadline of entry `n` has passed."""
    if (a.e[n].flags & np.uint32(FORGET)) != 0:
        forget(a, n)
    else:
        a.c[C_EXPIRED] += 1
        order.settle(a, n)
        note_state(a, n)


@jit
def sweep(a: Arrays, budget: int) -> int:
    """Act on deadlines and graces that have passed, at most `budget` of each kind and tier; returns how many."""
    done = 0
    for t in range(3):
        for _ in range(budget):
            if a.m[NHEAP + t] == 0:
                break
            n = a.s[a.heap[a.m[HBASE + t]]].entry
            if a.e[n].deadline > a.m[NOW]:
                break
            expire(a, n)
            done += 1
    for _ in range(budget):
        if a.m[ORPH_HEAD] == a.m[ORPH_TAIL]:
            break
        o = a.orph[a.m[ORPH_HEAD] % ORPHANS]
        if o.due > a.m[NOW]:
            break
        a.m[ORPH_HEAD] += 1
        done += 1
        if a.e[o.entry].gen == o.gen and order.orphan(a, o.entry):
            for t in range(3):
                if a.e[o.entry].slot[t] != NONE:
                    order.put_first(a, t, a.e[o.entry].slot[t])
    return done


@jit
def set_retention(a: Arrays, n: int, priority: int, deadline: int, keep: bool, forget_it: bool, fresh: bool) -> None:
    """What a commit wishes for entry `n`. Wishes of several requests meet here: the higher priority counts, a deadline
    only moves away, and the block is forgotten only if every wish for it said so. A priority above the default that
    came with a deadline ends with it. Without `keep`, where the budget had no room, a deadline says when the block is
    forgotten and no more."""
    ln, e = a.l[n], a.e[n]
    firm = priority if deadline == 0 else min(priority, DEFAULT_PRIORITY)
    ends = forget_it and deadline != 0
    if fresh:
        ln.own_priority, ln.own_deadline, ln.firm = priority, deadline if keep else 0, firm
        e.deadline = 0
        if ends:
            e.flags |= np.uint32(FORGET)
    else:
        ln.own_priority = max(ln.own_priority, priority)
        if keep:
            ln.own_deadline = max(ln.own_deadline, deadline)
        ln.firm = max(ln.firm, firm)
        if not ends:
            e.flags &= ~np.uint32(FORGET)
    if (e.flags & np.uint32(COUNTED)) == 0:
        e.deadline = max(e.deadline, deadline) if (e.flags & np.uint32(FORGET)) != 0 else 0
    note_state(a, n)


@jit
def raise_to(a: Arrays, n: int, priority: int, deadline: int, tenant: int) -> bool:
    """Lift the effective priority and deadline of entry `n`, in whatever order of eviction it stands. A block that was
    not retained before is charged to `tenant`; one that was stays with whom it was charged to. False if `n` was not
    lower before."""
    e = a.e[n]
    counted = (e.flags & np.uint32(COUNTED)) != 0
    if priority <= e.priority and (deadline <= a.m[NOW] or (counted and deadline <= e.deadline)):
        return False
    listed = 0
    for t in range(3):
        g = e.slot[t]
        if g != NONE and a.s[g].where != UNLISTED:
            order.delist(a, t, g)
            listed |= 1 << t
    e.priority = max(e.priority, priority)
    if deadline > a.m[NOW]:
        e.deadline = max(e.deadline, deadline) if counted else deadline
        if not counted:
            e.flags |= np.uint32(COUNTED)
            a.l[n].tenant = tenant
            a.m[NRETAINED] += 1
            a.ten[tenant] += 1
    for t in range(3):
        if listed & (1 << t):
            order.enlist(a, t, e.slot[t])
    return True
