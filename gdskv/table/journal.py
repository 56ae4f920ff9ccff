"""What has changed on the disk tier since it was last told, to be remembered; and a table made from what is remembered.

Knows nothing of files: a change goes out as plain numbers and comes back the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gdskv._jit import jit

from . import asked, entries, index, order, slots
from .notes import BUSY, FILL, STATE, note
from .state import (
    BASE,
    C_RECOVERED,
    CAP,
    CLOCK,
    DISK,
    FORGET,
    JHEAD,
    JTAIL,
    NBAD,
    NONE,
    NUSED,
    QUARANTINED,
    READY,
    ROOT,
    TAKEN,
    TELLS,
    UNVERIFIED,
    Arrays,
)

# Flags of a CHANGE.
PRESENT, IS_ROOT, TO_FORGET, IS_BAD, NOT_KEPT = 1, 2, 4, 8, 16  # NOT_KEPT: the deadline is for forgetting alone

CHANGE = np.dtype(
    [
        ("k0", "<u8"),
        ("k1", "<u8"),
        ("p0", "<u8"),  # the parent's key; zeros for a root or an orphan
        ("p1", "<u8"),
        ("deadline", "<i8"),  # own, ns on the table's clock; 0 = none
        ("last", "<i8"),
        ("slot", "<i4"),  # within the disk tier
        ("crc", "<u4"),  # of the payload
        ("uses", "<u4"),
        ("what", "u1"),  # FILL | STATE
        ("flags", "u1"),
        ("priority", "u1"),  # own
        ("tenant", "<u2"),
    ],
    align=True,
)


@jit
def drain(a: Arrays, most: int, out: np.ndarray) -> int:
    """Up to `most` changes, into `out`; each slot is busy until `written`. Slots still busy keep their place."""
    n = 0
    waiting = a.m[JTAIL] - a.m[JHEAD]
    for _ in range(min(waiting, 2 * most)):
        if n == most:
            break
        k = a.jr[a.m[JHEAD] % a.m[CAP + DISK]]
        a.m[JHEAD] += 1
        f = a.jf[k]
        if f & BUSY:
            a.jr[a.m[JTAIL] % a.m[CAP + DISK]] = k
            a.m[JTAIL] += 1
            continue
        a.jf[k] = BUSY
        _describe(a, k, f, out[n])
        n += 1
    return n


@jit
def _describe(a: Arrays, k: int, what: int, o: Any) -> None:
    s = a.s[a.m[BASE + DISK] + k]
    n = s.entry
    o.slot, o.what, o.flags = k, what, 0
    o.k0 = o.k1 = o.p0 = o.p1 = np.uint64(0)
    o.deadline = o.last = 0
    o.crc = o.uses = np.uint32(0)
    o.priority = o.tenant = 0
    if s.state == QUARANTINED:
        o.flags = IS_BAD
    elif s.state == TAKEN and n != NONE and a.e[n].state[DISK] == READY:
        e = a.e[n]
        o.k0, o.k1 = e.k0, e.k1
        if e.parent != NONE:
            o.p0, o.p1 = a.e[e.parent].k0, a.e[e.parent].k1
        o.crc, o.uses, o.last = s.crc, e.uses, e.last
        o.deadline, o.priority, o.tenant = a.l[n].own_deadline, a.l[n].own_priority, a.l[n].tenant
        flags = PRESENT
        if e.flags & np.uint32(ROOT):
            flags |= IS_ROOT
        if e.flags & np.uint32(FORGET):
            flags |= TO_FORGET
            if o.deadline == 0:
                flags |= NOT_KEPT
            o.deadline = e.deadline  # a descendant's, if that is later
        o.flags = flags


@jit
def written(a: Arrays, k: int, what: int, ok: bool) -> None:
    """The record of slot `k` is written, or is to be written again."""
    f = a.jf[k] & ~BUSY
    a.jf[k] = f
    if not ok:
        note(a, a.m[BASE + DISK] + k, what)


@jit
def all_written(a: Arrays, slots: np.ndarray) -> None:
    """The records of `slots` are written."""
    for i in range(len(slots)):
        written(a, slots[i], 0, True)


@jit
def record_again(a: Arrays, slots: np.ndarray) -> None:
    """The records of `slots` are to be written anew."""
    for i in range(len(slots)):
        note(a, a.m[BASE + DISK] + slots[i], FILL | STATE)


@jit
def restore(a: Arrays, blocks: np.ndarray, by_use: np.ndarray) -> int:
    """Make the disk tier from remembered blocks; how many came back. Their payloads are believed only once read. Of two
    with one key the later fill counts; a block without its parent waits as an orphan. `by_use` lists the blocks from
    the least recently used on. Row 0 of `tmp` has which of them an entry was made from."""
    base = a.m[BASE + DISK]
    n = len(blocks)
    back = 0
    tells, a.m[TELLS] = a.m[TELLS], 0  # each is told of when it is asked for
    for i in range(n):
        if i + index.AHEAD < n:
            index.expect(a, blocks[i + index.AHEAD].k0)
        c = blocks[i]
        g = base + c.slot
        slots.claim(a, DISK, g)
        if c.flags & IS_BAD:
            a.s[g].state = QUARANTINED
            a.m[NBAD + DISK] += 1
            continue
        e = index.find(a, c.k0, c.k1)
        if e == NONE:
            e = entries.create(a, c.k0, c.k1, NONE, (c.flags & IS_ROOT) != 0)
            back += 1
        elif blocks[a.tmp[0, e]].fill > c.fill:
            slots.give(a, DISK, g)
            continue
        else:
            older = a.e[e].slot[DISK]
            a.s[older].entry = NONE
            a.m[NUSED + DISK] -= 1
            slots.give(a, DISK, older)
        a.tmp[0, e] = i
        entries.attach(a, e, DISK, g, READY)
        a.s[g].crc = c.crc
        a.s[g].fails = UNVERIFIED
        a.e[e].uses, a.e[e].last = c.uses, c.last
        a.m[CLOCK] = max(a.m[CLOCK], c.last + 1)
        a.e[e].flags = np.uint32(ROOT) if c.flags & IS_ROOT else np.uint32(0)
        keep = (c.flags & NOT_KEPT) == 0
        entries.set_retention(a, e, c.priority, c.deadline, keep, (c.flags & TO_FORGET) != 0, True)
    before = NONE
    for i in range(n):
        c = blocks[i]
        e = a.s[base + c.slot].entry
        if e != NONE and a.e[e].flags & np.uint32(ROOT) == 0 and (c.p0 != 0 or c.p1 != 0):
            p = before  # most often
            if p == NONE or a.e[p].k0 != c.p0 or a.e[p].k1 != c.p1:
                p = index.find(a, c.p0, c.p1)
            if p != NONE and p != e:
                entries.adopt(a, p, e)
        before = e
    _cut_circles(a, blocks, n)
    asked.resume(a, n)
    for j in range(n):
        c = blocks[by_use[j]]
        e = a.s[base + c.slot].entry
        if e == NONE:
            continue
        asked.restored(a, e, n - j)
        order.enlist(a, DISK, base + c.slot)
        if order.orphan(a, e):
            entries.lose_sight(a, e)
        _lift(a, e, np.int64(c.tenant))
    a.c[C_RECOVERED] += back
    a.m[TELLS] = tells
    return back


@jit
def _cut_circles(a: Arrays, changes: np.ndarray, n: int) -> None:
    """Parents come from a file: a chain of them that runs in a circle is broken open, and its blocks are orphans. Walks
    from each block up to a block that is known to be sound."""
    base = a.m[BASE + DISK]
    seen = np.zeros(a.e.shape[0], np.int32)  # number of the walk; -1 = sound
    for i in range(n):
        e = a.s[base + changes[i].slot].entry
        q = e
        while q != NONE and seen[q] == 0:
            seen[q] = i + 1
            q = a.e[q].parent
        if q != NONE and seen[q] == i + 1:
            entries.leave_parent(a, q)
        q = e
        while q != NONE and seen[q] == i + 1:
            seen[q] = -1
            q = a.e[q].parent


@jit
def _lift(a: Arrays, n: int, tenant: int) -> None:
    entries.raise_to(a, n, a.l[n].own_priority, a.l[n].own_deadline, tenant)
    p = a.e[n].parent
    while p != NONE and a.l[p].firm < a.l[n].firm:
        a.l[p].firm = a.l[n].firm
        p = a.e[p].parent
    p = a.e[n].parent
    priority, deadline = a.e[n].priority, a.e[n].deadline if order.retained(a, n) else 0
    while p != NONE and entries.raise_to(a, p, priority, deadline, tenant):
        p = a.e[p].parent
