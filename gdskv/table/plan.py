"""Plans: a whole request at a time, which slots change hands and which transfers follow.

Each plan decides from the calls made so far and nothing else: not from the clock, not from what I/O has finished. Rows
of `tmp` used as scratch: 0 device slots, 1 host slots, 2 entries to spill, 3 disk slots.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import budget, byvalue, entries, index, learn, order, slots
from .asked import again, ask, catch_up, class_made
from .learned import ASKED, REFUSE, REFUSE_SPILL
from .moves import issue
from .notes import note_state, tell
from .state import (
    BASE,
    C_CLEANED,
    C_COMMITTED,
    C_DROPPED_CLEAN,
    C_DROPPED_LAST,
    C_DROPPED_UNWORTHY,
    C_DUPLICATES,
    C_EVICTED,
    C_JOINED,
    C_MATCHED,
    C_OFFLOADS,
    C_ONBOARDS_DISK,
    C_ONBOARDS_HOST,
    C_OVER_BUDGET,
    C_PREFETCHES,
    C_REFUSED_BY_BUDGET,
    C_REFUSED_BY_BUDGET_RETAINED,
    C_REFUSED_BY_VALUE,
    C_REFUSED_PROTECTED,
    C_REJECTED,
    C_RETAINED_WRITES,
    C_SHED_NO_SLOT,
    C_SHED_QUEUE,
    C_SPILLS,
    CALLER_TO_DISK,
    CALLER_TO_HOST,
    CAP,
    CLEAN_NOW,
    CLEAN_WINDOW,
    CLOCK,
    COUNTED,
    DEFAULT_PRIORITY,
    DEVICE,
    DEVICE_TO_DISK,
    DEVICE_TO_HOST,
    DISK,
    DISK_TO_CALLER,
    DISK_TO_DEVICE,
    DISK_TO_HOST,
    FILLING,
    HBASE,
    HOST,
    HOST_TO_CALLER,
    HOST_TO_DEVICE,
    HOST_TO_DISK,
    LISTS,
    MARK,
    NFREE,
    NHEAP,
    NLEASED,
    NLISTED,
    NONE,
    NOW,
    NRETAINED,
    NWRITING,
    NXFREE,
    PROTECT,
    READY,
    RETAINED_LIMIT,
    SPILL,
    SPILL_ALL,
    SPILL_LEARNED,
    SPILL_REUSED,
    TENANT_LIMIT,
    TO_CLEAN,
    UNLISTED,
    WRITE_LIMIT,
    XKEEP,
    Arrays,
)

OK, NO_SLOTS, NO_TRANSFERS = 0, 1, 2
NOT_THESE = -1  # commit: this, less the index of the block whose slot holds other content
_NO_ADDRESS = np.uint64(0)
SOON = 8  # blocks from one that leaves to that for which memory is asked meanwhile
PASS_OVER = 256  # blocks of closed directories that a call looks at in search of one that makes room


@jit
def serving_tier(a: Arrays, n: int) -> int:
    """Best tier that can serve entry `n`, or NONE."""
    if a.e[n].slot[DEVICE] != NONE:
        return DEVICE
    if a.e[n].slot[HOST] != NONE:
        return HOST
    g = a.e[n].slot[DISK]
    if g != NONE and a.s[g].retry_at <= a.m[NOW]:
        return DISK
    return NONE


@jit(inline="always")  # a call would count a reference to the array, with a locked instruction
def _look_ahead(a: Arrays, keys: np.ndarray, i: int, n: int) -> None:
    """Key `i` of `n` is about to be looked up: misses of the cache for those after it shall overlap."""
    if i + index.AHEAD < n:
        index.expect(a, keys[i + index.AHEAD, 0])
    if i + index.AHEAD // 2 < n:
        index.expect_entry(a, keys[i + index.AHEAD // 2, 0])


@jit
def match(a: Arrays, keys: np.ndarray, n: int, ents: np.ndarray, tiers: np.ndarray) -> int:
    """Longest run of keys from the first that can be served; entry and tier of each. Changes nothing."""
    for i in range(n):
        _look_ahead(a, keys, i, n)
        e = index.find(a, keys[i, 0], keys[i, 1])
        if e == NONE or order.forgotten(a, e, a.m[NOW]):
            return i
        if i > 0 and a.e[e].parent != ents[i - 1]:
            return i
        t = serving_tier(a, e)
        if t == NONE:
            return i
        ents[i], tiers[i] = e, t
    return n


@jit
def _touch(a: Arrays, ents: np.ndarray, n: int) -> None:
    for i in range(n - 1, -1, -1):
        e = ents[i]
        a.m[CLOCK] += 1
        a.e[e].uses += np.uint32(1)
        a.e[e].last = a.m[CLOCK]
        note_state(a, e)
        for t in range(3):
            if a.e[e].slot[t] != NONE:
                order.touch(a, t, a.e[e].slot[t])
                tell(a, a.e[e].slot[t])  # what a restart brought back is told of when it is asked for


# ---- to disk


@jit
def _worth(a: Arrays, n: int) -> bool:
    mode = a.m[SPILL]
    if mode == SPILL_ALL or order.retained(a, n):
        return True
    if mode == SPILL_LEARNED:  # as the caller has raised the bar
        return a.l[n].kids[DISK] > 0 or byvalue.over_bar(a, a.w[n].klass, a.w[n].asked, a.e[n].priority)
    return mode == SPILL_REUSED and a.e[n].uses >= 2


@jit
def _gather(a: Arrays, n: int, m: int) -> int:
    """Add entry `n` and those of its ancestors that are not on disk to the `m` entries to spill, root first."""
    depth, p = 0, n
    while p != NONE and a.e[p].slot[DISK] == NONE and (a.e[p].flags & np.uint32(MARK)) == 0:
        if order.orphan(a, p):  # its parent cannot be written first
            return m
        depth += 1
        p = a.e[p].parent
    at, q = m + depth - 1, n
    while q != p:
        a.tmp[2, at] = q
        a.e[q].flags |= np.uint32(MARK)
        at -= 1
        q = a.e[q].parent
    return m + depth


@jit
def _guard(a: Arrays, n: int, t: int, by: int) -> None:
    """Keep entry `n` from being chosen in tier `t` while a child is about to join it there."""
    if n != NONE:
        a.l[n].kids[t] += by
        if by < 0:
            order.child_left(a, t, n)


@jit
def _pop(a: Arrays, t: int) -> int:
    """Choose the next slot to leave; its block stays until `_unpop`, but its parent may be chosen after it."""
    g = order.victim(a, t)
    if g != NONE:
        p = a.e[a.s[g].entry].parent
        if p != NONE:
            _guard(a, p, t, -1)
    return g


@jit
def _unpop(a: Arrays, t: int, n: int) -> None:
    p = a.e[n].parent
    if p != NONE:
        a.l[p].kids[t] += 1


@jit(inline="always")
def _expect_to_go(a: Arrays, n: int) -> None:
    """Entry `n` is about to leave the last tier: have what it is taken out of fetched meanwhile."""
    if a.e[n].slot[DISK] == NONE:
        index.expect(a, a.e[n].k0)
        learn.expect(a, a.e[n].k0)


@jit
def _take_leave(a: Arrays, t: int, n: int) -> None:
    """Entry `n`, chosen by `_pop`, leaves tier `t`; its slot is in the plan's hands."""
    _unpop(a, t, n)
    gen = a.e[n].gen
    entries.detach(a, n, t)
    if a.e[n].gen != gen:
        a.c[C_DROPPED_LAST] += 1


@jit
def _drop(a: Arrays, t: int, g: int) -> None:
    """Slot `g`, chosen to leave tier `t`, is free; its block is gone from the tier."""
    n = a.s[g].entry
    gen = a.e[n].gen
    a.c[C_EVICTED + t] += 1
    entries.detach(a, n, t)
    slots.give(a, t, g)
    if a.e[n].gen != gen:
        a.c[C_DROPPED_LAST] += 1


@jit
def _disk_room(a: Arrays, want: int) -> int:
    """Free up to `want` disk slots; how many there are then. Blocks of a closed directory make no room and stay."""
    passed = 0
    while a.m[NFREE + DISK] < want and passed < PASS_OVER and slots.any_open(a, DISK):
        g = order.victim(a, DISK)
        if g == NONE:
            if a.m[PROTECT] != 0 and a.m[NHEAP + DISK] > 0:
                a.c[C_REFUSED_PROTECTED] += want - a.m[NFREE + DISK]
            break
        if slots.is_closed(a, DISK, g):
            order.enlist(a, DISK, g)
            passed += 1
        else:
            _drop(a, DISK, g)
    return min(want, a.m[NFREE + DISK])


@jit
def _disk_room_for(
    a: Arrays, keys: np.ndarray, first: int, n: int, want: int, priority: np.ndarray, ttl: np.ndarray
) -> int:
    """Free disk slots for the missing blocks among those from `first`, up to `want` of them: under a learned admission
    as far as the chain's blocks are worth more than what leaves for them."""
    got = 0
    learned = a.m[SPILL] == SPILL_LEARNED
    for i in range(first, n):
        e = index.find(a, keys[i, 0], keys[i, 1])
        if e != NONE and not order.forgotten(a, e, a.m[NOW]):
            continue
        if got == want:
            break
        if not budget.affords(a, got, ttl[i] > 0):
            a.c[C_REFUSED_BY_BUDGET_RETAINED if ttl[i] > 0 else C_REFUSED_BY_BUDGET] += want - got
            break
        if learned and a.m[NFREE + DISK] <= got and ttl[i] <= 0:
            byvalue.raise_bar(a, DISK, got, REFUSE)
            if not byvalue.over_bar(a, class_made(a, keys[i, 0]), a.lm[ASKED], priority[i]):
                a.c[C_REFUSED_BY_VALUE] += want - got
                break
        if learned and _disk_room(a, got + 1) <= got:
            break
        got += 1
    return got if learned else _disk_room(a, got)


@jit
def _to_disk(a: Arrays, m: int) -> int:
    """Plan writes of the `m` gathered entries, root first, so that a block's parent is on disk before it. Returns how
    many found room; the rest is shed and counted."""
    if m == 0:
        return 0
    room = a.m[WRITE_LIMIT] - a.m[NWRITING]
    want = unaffordable = 0
    for i in range(m):
        n = a.tmp[2, i]
        a.e[n].flags &= ~np.uint32(MARK)
        kept = order.retained(a, n)
        if want == i and unaffordable == 0 and budget.affords(a, want, kept):
            # Best effort up to the limit, retained blocks up to twice that.
            want += i < room or (kept and i < room + a.m[WRITE_LIMIT])
        elif want + unaffordable == i:
            unaffordable += 1
            a.c[C_REFUSED_BY_BUDGET_RETAINED if kept else C_REFUSED_BY_BUDGET] += 1
    a.c[C_SHED_QUEUE] += m - want - unaffordable
    a.c[C_SHED_QUEUE] += max(0, want - max(0, a.m[NXFREE] - a.m[XKEEP]))
    want = min(want, max(0, a.m[NXFREE] - a.m[XKEEP]))
    for i in range(want):
        _guard(a, a.e[a.tmp[2, i]].parent, DISK, 1)
    got = _disk_room(a, want)
    a.c[C_SHED_NO_SLOT] += want - got
    slots.take(a, DISK, got, a.tmp[3], 0)
    for i in range(got):
        n, g = a.tmp[2, i], a.tmp[3, i]
        h = a.e[n].slot[HOST]
        entries.attach(a, n, DISK, g, FILLING)
        if h != NONE:
            issue(a, HOST_TO_DISK, h, g, n, _NO_ADDRESS, NONE, 0)
        else:
            issue(a, DEVICE_TO_DISK, a.e[n].slot[DEVICE], g, n, _NO_ADDRESS, NONE, 0)
    for i in range(got - 1, -1, -1):
        order.enlist(a, DISK, a.tmp[3, i])
    for i in range(want):
        _guard(a, a.e[a.tmp[2, i]].parent, DISK, -1)
    a.c[C_SPILLS] += got
    budget.spend(a, got)
    return got


# ---- to host


@jit
def _host_room(a: Arrays, want: int, clean_later: bool) -> int:
    """Have up to `want` host slots in nobody's hands, in row 1. What leaves for them is on disk, or written there. What
    would leave next is written too: now, or after the next request is released."""
    if a.m[CAP + HOST] == 0 or want == 0:
        return 0
    free = min(want, a.m[NFREE + HOST])
    slots.take(a, HOST, free, a.tmp[1], 0)
    got, m = free, 0
    byvalue.raise_bar(a, DISK, 0, REFUSE_SPILL)
    while got < want:
        g = _pop(a, HOST)
        if g == NONE:
            break
        a.tmp[1, got] = g
        got += 1
        n = a.s[g].entry
        if a.e[n].slot[DISK] != NONE:
            a.c[C_DROPPED_CLEAN] += 1
        elif a.m[CAP + DISK] > 0:
            if _worth(a, n):
                m = _gather(a, n, m)
            else:
                a.c[C_DROPPED_UNWORTHY] += 1
    _to_disk(a, m)
    for i in range(free, got):
        if i + SOON < got:
            _expect_to_go(a, a.s[a.tmp[1, i + SOON]].entry)
        _take_leave(a, HOST, a.s[a.tmp[1, i]].entry)
    a.c[C_EVICTED + HOST] += got - free
    if got > free:
        most = 2 * (got - free) + 8
        if clean_later:
            a.m[TO_CLEAN] += most
        else:
            _clean(a, most)
    return got


@jit
def _clean(a: Arrays, most: int) -> None:
    """Write the host blocks that will leave next, so that they can leave at once: at most `most` of the first
    `clean_window` in the order of eviction."""
    if a.m[CAP + DISK] == 0:
        return
    byvalue.raise_bar(a, DISK, 0, REFUSE_SPILL)
    seen = m = 0
    for q in range(LISTS):
        if (a.bits[HOST, q >> 6] >> np.uint64(q & 63)) & np.uint64(1) == np.uint64(0):
            continue
        g = a.ends[HOST, q, 0]
        while g != NONE and seen < a.m[CLEAN_WINDOW] and m < most:
            n = a.s[g].entry
            if a.e[n].slot[DISK] == NONE and _worth(a, n):
                m = _gather(a, n, m)
            seen += 1
            g = a.s[g].next
        if seen >= a.m[CLEAN_WINDOW] or m >= most:
            break
    a.c[C_CLEANED] += _to_disk(a, m)


@jit
def advance(a: Arrays, now: int) -> None:
    """Let the table's time be `now`, ns; it never steps back. First what calls before have put off is done, so that
    it is the same whichever call comes next."""
    catch_up(a)
    if a.m[CLEAN_NOW] > 0:
        most = a.m[CLEAN_NOW]
        a.m[CLEAN_NOW] = 0
        _clean(a, most)
    if now > a.m[NOW]:
        a.m[NOW] = now
        budget.fill(a)


@jit
def flush(a: Arrays, t: int, most: int) -> int:
    """Write the blocks that only tier `t` holds to disk, the most valuable first, at most `most`; how many."""
    byvalue.raise_bar(a, DISK, 0, REFUSE_SPILL)
    m = 0
    for i in range(a.m[NHEAP + t]):
        n = a.s[a.heap[a.m[HBASE + t] + i]].entry
        if m < most and a.e[n].slot[DISK] == NONE:
            m = _gather(a, n, m)
    for g in range(a.m[BASE + t], a.m[BASE + t] + a.m[CAP + t]):  # in use, or waiting for children: in no list
        n = a.s[g].entry
        if n != NONE and m < most and a.s[g].where < 0 and a.e[n].slot[DISK] == NONE and _worth(a, n):
            m = _gather(a, n, m)
    for q in range(LISTS - 1, -1, -1):
        g = a.ends[t, q, 1]
        while g != NONE and m < most:
            n = a.s[g].entry
            if a.e[n].slot[DISK] == NONE and _worth(a, n):
                m = _gather(a, n, m)
            g = a.s[g].prev
    return _to_disk(a, m)


# ---- from device


@jit
def _device_room(a: Arrays, want: int) -> bool:
    """Have `want` device slots in nobody's hands, in row 0. What leaves for them moves to host, or to disk where there
    is no room in host. All or nothing."""
    free = min(want, a.m[NFREE + DEVICE])
    slots.take(a, DEVICE, free, a.tmp[0], 0)
    got = free
    while got < want:
        g = _pop(a, DEVICE)
        if g == NONE:
            break
        a.tmp[0, got] = g
        got += 1
    if got < want:
        for i in range(got - 1, free - 1, -1):
            _unpop(a, DEVICE, a.s[a.tmp[0, i]].entry)
            order.enlist_head(a, DEVICE, a.tmp[0, i])
            a.m[NLISTED + DEVICE] += 1
        for i in range(free):
            slots.give(a, DEVICE, a.tmp[0, i])
        return False
    there = _host_room(a, want - free, True)
    for i in range(there):
        d, h = a.tmp[0, free + i], a.tmp[1, i]
        n = a.s[d].entry
        entries.attach(a, n, HOST, h, FILLING)
        _take_leave(a, DEVICE, n)
        order.enlist(a, HOST, h)
        issue(a, DEVICE_TO_HOST, d, h, n, _NO_ADDRESS, NONE, 0)
    a.c[C_OFFLOADS] += there
    byvalue.raise_bar(a, DISK, 0, REFUSE_SPILL)
    m = 0
    for i in range(free + there, want):
        n = a.s[a.tmp[0, i]].entry
        if a.e[n].slot[DISK] == NONE and a.m[CAP + DISK] > 0:
            if _worth(a, n):
                m = _gather(a, n, m)
            else:
                a.c[C_DROPPED_UNWORTHY] += 1
    _to_disk(a, m)
    for i in range(free + there, want):
        if i + SOON < want:
            _expect_to_go(a, a.s[a.tmp[0, i + SOON]].entry)
        _take_leave(a, DEVICE, a.s[a.tmp[0, i]].entry)
    a.c[C_EVICTED + DEVICE] += want - free
    return True


@jit
def begin(
    a: Arrays,
    keys: np.ndarray,
    n: int,
    total: int,
    ents: np.ndarray,
    tiers: np.ndarray,
    out: np.ndarray,
    need_w: np.ndarray,
    need_r: np.ndarray,
    result: np.ndarray,
) -> int:
    """Match `n` keys and lease a device slot for each of `total` blocks: those found are brought there, the others are
    the caller's to fill. `out` gets slots, `need_w` and `need_r` what `landed` waits for, `result[0]` the matched
    length. Answers OK, or why not; then nothing has changed but recency."""
    found = match(a, keys, n, ents, tiers)
    result[0] = found
    on_device = 0
    for i in range(found):
        if tiers[i] == DEVICE:
            on_device += 1
        entries.lease(a, tiers[i], a.e[ents[i]].slot[tiers[i]])
    want = total - on_device
    why = OK
    a.m[XKEEP] = 2 * want  # spills leave these to the request itself
    if a.m[NXFREE] < a.m[XKEEP]:
        why = NO_TRANSFERS
    elif a.m[NFREE + DEVICE] + a.m[NLISTED + DEVICE] < want or not _device_room(a, want):
        why = NO_SLOTS
    a.m[XKEEP] = 0
    if why != OK:
        a.c[C_REJECTED] += 1
        for i in range(found - 1, -1, -1):
            entries.unlease(a, tiers[i], a.e[ents[i]].slot[tiers[i]])
        return why
    ask(a, keys, n, ents, found)
    _touch(a, ents, found)
    j = 0
    for i in range(total):
        if i < found and tiers[i] == DEVICE:
            d = a.e[ents[i]].slot[DEVICE]
            a.c[C_MATCHED + DEVICE] += 1
            need_r[i] = 0
            if a.e[ents[i]].state[DEVICE] == FILLING:
                a.c[C_JOINED] += 1
        else:
            d = a.tmp[0, j]
            j += 1
            a.s[d].lease = 1
            a.m[NLEASED + DEVICE] += 1
            need_r[i] = a.s[d].ri
            if i < found:
                _onboard(a, ents[i], tiers[i], d)
        out[i] = d
        need_w[i] = a.s[d].wi
    for i in range(found - 1, -1, -1):
        if tiers[i] == DISK:
            entries.unlease(a, DISK, a.e[ents[i]].slot[DISK])
    return OK


@jit
def _onboard(a: Arrays, n: int, t: int, d: int) -> None:
    g = a.e[n].slot[t]
    a.c[C_MATCHED + t] += 1
    entries.attach(a, n, DEVICE, d, FILLING)
    if t == DISK:
        a.c[C_ONBOARDS_DISK] += 1
        issue(a, DISK_TO_DEVICE, g, d, n, _NO_ADDRESS, NONE, 0)
    else:  # the device's copy is the only one in memory
        a.c[C_ONBOARDS_HOST] += 1
        issue(a, HOST_TO_DEVICE, g, d, n, _NO_ADDRESS, NONE, 0)
        a.s[g].lease -= 1
        if a.s[g].lease == 0:
            a.m[NLEASED + HOST] -= 1
        entries.detach(a, n, HOST)
        if a.s[g].lease == 0:
            slots.give(a, HOST, g)


@jit
def _retain(
    a: Arrays, ents: np.ndarray, n: int, priority: np.ndarray, ttl: np.ndarray, forget: bool, tenant: int
) -> None:
    """Take in what is wished for each block, and lift its ancestors to it: effective priority and deadline of a block
    are never below a child's. New blocks become used."""
    most, until, firm = 0, 0, 0
    for i in range(n - 1, -1, -1):
        e = ents[i]
        fresh = a.e[e].last == 0
        if fresh:
            a.m[CLOCK] += 1
            a.e[e].last = a.m[CLOCK]
        keep = ttl[i] > 0
        deadline = 0
        if ttl[i] != 0:
            deadline = a.m[NOW] + (ttl[i] if keep else ~ttl[i])
        entries.set_retention(a, e, priority[i], deadline, keep, forget, fresh)
        firm = max(firm, a.l[e].firm)
        a.l[e].firm = firm
        most = max(most, a.l[e].own_priority, a.e[e].priority)
        until = max(until, a.l[e].own_deadline)
        if order.retained(a, e):
            until = max(until, a.e[e].deadline)
        entries.raise_to(a, e, most, until, tenant)


@jit
def _admit(
    a: Arrays, keys: np.ndarray, n: int, priority: np.ndarray, ttl: np.ndarray, forget: bool, tenant: int
) -> None:
    """Hold the request's retained blocks within the budget and the tenant's share of it: from the first block on as far
    as it reaches, since a block is retained with its ancestors. The rest is not retained, and is counted; its ttl `x`
    becomes `~x`, which is negative, where the block shall be forgotten all the same, and else 0; the priority that
    came with it is cut to the default."""
    last = n - 1
    while last >= 0 and ttl[last] <= 0:
        last -= 1
    room = min(a.m[RETAINED_LIMIT] - a.m[NRETAINED], a.m[TENANT_LIMIT] - a.ten[tenant])
    for i in range(last + 1):
        e = index.find(a, keys[i, 0], keys[i, 1])
        if e != NONE and (a.e[e].flags & np.uint32(COUNTED)):
            continue
        if room <= 0:
            for j in range(i, last + 1):
                if ttl[j] > 0:
                    a.c[C_OVER_BUDGET] += 1
                    ttl[j] = ~ttl[j] if forget else 0
                    priority[j] = min(priority[j], DEFAULT_PRIORITY)
            return
        room -= 1


@jit
def _write_soon(a: Arrays, ents: np.ndarray, n: int) -> None:
    """Write blocks with a live deadline without waiting for their eviction: what was promised survives this process. So
    too a block whose own copy was lost and that has come back, under children that are still on disk."""
    if a.m[CAP + DISK] == 0:
        return
    m = 0
    for i in range(n):
        e = ents[i]
        if a.e[e].slot[DISK] == NONE and (order.retained(a, e) or a.l[e].kids[DISK] > 0):
            m = _gather(a, e, m)
    a.c[C_RETAINED_WRITES] += _to_disk(a, m)


@jit
def _enter(a: Arrays, k0: np.uint64, k1: np.uint64, parent: int, root: bool) -> int:
    """Entry of a key; made if need be."""
    e = index.find(a, k0, k1)
    if e != NONE and order.forgotten(a, e, a.m[NOW]):
        entries.forget(a, e)
        e = NONE
    if e == NONE:
        e = entries.create(a, k0, k1, parent, root)
        a.e[e].uses = np.uint32(1)
    else:
        entries.relink(a, parent, e)
    return e


@jit
def commit(
    a: Arrays,
    keys: np.ndarray,
    held: np.ndarray,
    n: int,
    priority: np.ndarray,
    ttl: np.ndarray,
    forget: bool,
    tenant: int,
    ents: np.ndarray,
) -> int:
    """The first `n` blocks of a request, in the device slots `held` that it leases, are computed: they become findable
    and their time starts. Blocks with a deadline are written to disk soon. Returns how many were new."""
    catch_up(a)
    for i in range(n):
        e = a.s[held[i]].entry
        if e != NONE and (a.e[e].k0 != keys[i, 0] or a.e[e].k1 != keys[i, 1]):
            return NOT_THESE - i
    _admit(a, keys, n, priority, ttl, forget, tenant)
    new = 0
    parent = NONE
    for i in range(n):
        _look_ahead(a, keys, i, n)
        d = held[i]
        e = _enter(a, keys[i, 0], keys[i, 1], parent, i == 0)
        have = a.e[e].slot[DEVICE]
        if have == NONE:
            entries.attach(a, e, DEVICE, d, READY)
            a.s[d].bad_w = 0
            new += 1
            h = a.e[e].slot[HOST]
            if h != NONE:
                entries.lose_quietly(a, e, HOST)
        elif have != d:
            a.c[C_DUPLICATES] += 1
        ents[i] = e
        parent = e
    a.c[C_COMMITTED] += new
    _retain(a, ents, n, priority, ttl, forget, tenant)
    _write_soon(a, ents, n)
    return new


@jit
def release(a: Arrays, held: np.ndarray, n: int) -> None:
    """End a request's hold on its device slots; the first block ends up the most recently used. Host blocks that are to
    be written ahead of need are written when time goes on, because a request that begins waits and nobody does then."""
    for i in range(n - 1, -1, -1):
        entries.unlease(a, DEVICE, held[i])
    a.m[CLEAN_NOW] += a.m[TO_CLEAN]
    a.m[TO_CLEAN] = 0


@jit
def prefetch(a: Arrays, keys: np.ndarray, n: int, most: int, ents: np.ndarray, tiers: np.ndarray) -> int:
    """Bring blocks that are on disk alone to host, at most `most`; returns how many are on their way."""
    found = match(a, keys, n, ents, tiers)
    want = 0
    for i in range(found):
        entries.lease(a, tiers[i], a.e[ents[i]].slot[tiers[i]])
        if tiers[i] == DISK and want < most:
            want += 1
    got = 0
    a.m[XKEEP] = want
    if a.m[NXFREE] >= want:
        got = _host_room(a, want, False)
    a.m[XKEEP] = 0
    k = 0
    for i in range(found):
        if tiers[i] == DISK and k < got:
            h = a.tmp[1, k]
            entries.attach(a, ents[i], HOST, h, FILLING)
            issue(a, DISK_TO_HOST, a.e[ents[i]].slot[DISK], h, ents[i], _NO_ADDRESS, NONE, 0)
            k += 1
    for i in range(found - 1, -1, -1):
        if tiers[i] == DISK and a.e[ents[i]].slot[HOST] != NONE:
            order.enlist(a, HOST, a.e[ents[i]].slot[HOST])
        entries.unlease(a, tiers[i], a.e[ents[i]].slot[tiers[i]])
    a.c[C_PREFETCHES] += got
    return got


# ---- under somebody else's device pool


@jit
def ask_only(a: Arrays, keys: np.ndarray, n: int, ents: np.ndarray, tiers: np.ndarray, result: np.ndarray) -> int:
    """Match for a request that asks for all `n` keys, whatever becomes of it. `result[0]` says whether it is another
    than the last one."""
    found = match(a, keys, n, ents, tiers)
    result[0] = not again(a, keys, n)
    if result[0]:
        ask(a, keys, n, ents, found)
    return found


@jit
def find(a: Arrays, keys: np.ndarray, n: int, ents: np.ndarray, tiers: np.ndarray, held: np.ndarray, asks: bool) -> int:
    """Match and lease what was found, each block in the tier that will serve it. `asks`: it is a request's first call,
    with all that it asks for."""
    found = match(a, keys, n, ents, tiers)
    if asks and not again(a, keys, n):
        ask(a, keys, n, ents, found)
    _touch(a, ents, found)
    for i in range(found):
        g = a.e[ents[i]].slot[tiers[i]]
        held[i] = g
        a.c[C_MATCHED + tiers[i]] += 1
        entries.lease(a, tiers[i], g)
    return found


@jit
def leave(a: Arrays, tiers: np.ndarray, held: np.ndarray, n: int) -> None:
    """End the leases of `find`."""
    for i in range(n - 1, -1, -1):
        entries.unlease(a, tiers[i], held[i])


@jit
def load(
    a: Arrays,
    ents: np.ndarray,
    tiers: np.ndarray,
    held: np.ndarray,
    addresses: np.ndarray,
    n: int,
    ticket: int,
    gone: np.ndarray,
) -> int:
    """Plan the reads of found blocks into the caller's memory. Blocks lost since go to `gone`; returns how many."""
    k = 0
    for i in range(n):
        g = held[i]
        if g == NONE or a.s[g].entry != ents[i]:
            gone[k] = i
            k += 1
        elif tiers[i] == DISK:
            issue(a, DISK_TO_CALLER, g, NONE, ents[i], addresses[i], ticket, i)
        else:
            issue(a, HOST_TO_CALLER, g, NONE, ents[i], addresses[i], ticket, i)
    return k


@jit
def store(
    a: Arrays,
    keys: np.ndarray,
    addresses: np.ndarray,
    n: int,
    priority: np.ndarray,
    ttl: np.ndarray,
    forget: bool,
    tenant: int,
    ticket: int,
    ents: np.ndarray,
    result: np.ndarray,
) -> int:
    """Take blocks of the caller's memory in, those that are not there yet, as far as there is room for a leading run.
    `result[0]` gets the transfers planned; returns how many of the `n` blocks are cached when these are done."""
    catch_up(a)
    _admit(a, keys, n, priority, ttl, forget, tenant)
    known = own = 0
    while known < n:
        e = index.find(a, keys[known, 0], keys[known, 1])
        if e == NONE or order.forgotten(a, e, a.m[NOW]):
            break
        g = a.e[e].slot[HOST]
        own += g != NONE and a.s[g].where != UNLISTED
        known += 1
    top = HOST if a.m[CAP + HOST] > 0 else DISK
    missing = 0
    for i in range(known, n):
        e = index.find(a, keys[i, 0], keys[i, 1])
        missing += e == NONE or order.forgotten(a, e, a.m[NOW])
    last = index.find(a, keys[known - 1, 0], keys[known - 1, 1]) if known > 0 else NONE
    got = 0
    a.m[XKEEP] = missing
    if a.m[NXFREE] >= missing:
        # Where host has no room besides for it, the chain's own beginning goes to disk; where that cannot be, it stays.
        there = a.m[CAP + DISK] > 0 and (
            a.m[SPILL] == SPILL_ALL
            or (a.m[SPILL] == SPILL_LEARNED and (a.m[NFREE + DISK] >= own or not byvalue.trusted(a, DISK)))
        )
        stay = not there or a.m[NFREE + HOST] + a.m[NLISTED + HOST] - own >= missing
        if stay:
            _guard(a, last, HOST, 1)
        _guard(a, last, DISK, 1)
        if top == HOST:
            got = _host_room(a, missing, False)
        else:
            want = min(missing, max(0, a.m[WRITE_LIMIT] - a.m[NWRITING]))
            got = _disk_room_for(a, keys, known, n, want, priority, ttl)
            slots.take(a, DISK, got, a.tmp[1], 0)
        if stay:
            _guard(a, last, HOST, -1)
        _guard(a, last, DISK, -1)
    parent, k, i = NONE, 0, 0
    while i < n:
        e = index.find(a, keys[i, 0], keys[i, 1])
        if (e == NONE or order.forgotten(a, e, a.m[NOW])) and k == got:
            break
        e = _enter(a, keys[i, 0], keys[i, 1], parent, i == 0)
        if a.e[e].slot[HOST] == NONE and a.e[e].slot[DISK] == NONE:
            g = a.tmp[1, k]
            k += 1
            entries.attach(a, e, top, g, FILLING)
            issue(a, CALLER_TO_HOST if top == HOST else CALLER_TO_DISK, NONE, g, e, addresses[i], ticket, i)
        ents[i] = e
        parent = e
        i += 1
    for j in range(k, got):
        slots.give(a, top, a.tmp[1, j])
    for j in range(i - 1, -1, -1):
        g = a.e[ents[j]].slot[top]
        if g != NONE and a.s[g].where == UNLISTED and a.s[g].lease == 0:
            order.enlist(a, top, g)
        elif j < known:
            for t in range(HOST, DISK + 1):
                if a.e[ents[j]].slot[t] != NONE:
                    order.touch(a, t, a.e[ents[j]].slot[t])
    _retain(a, ents, i, priority, ttl, forget, tenant)
    a.m[XKEEP] = 0
    _write_soon(a, ents, i)
    if top == DISK:
        budget.spend(a, k)
    a.c[C_COMMITTED] += k
    a.c[C_SHED_NO_SLOT] += missing - k if missing > k else 0
    result[0] = k
    return i
