"""The scoreboard: transfers are planned in order and start when what they depend on is done.

A plan gives slots new owners at once; bytes follow. A transfer waits until the writes of its source, and the writes and
reads of its destination, that were issued before it are done. It depends on earlier ones only, so there is no circle.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

from . import entries
from .notes import FILL, STATE, note, tell
from .state import (
    C_BAD_PAYLOADS,
    C_FAILED_COPIES,
    C_FAILED_READS,
    C_FAILED_WRITES,
    C_STALE,
    C_TRANSIENT,
    CALLER_TO_DISK,
    CALLER_TO_HOST,
    CHECKS,
    DEVICE,
    DEVICE_TO_DISK,
    DEVICE_TO_HOST,
    DISK,
    DISK_TO_CALLER,
    DISK_TO_DEVICE,
    DISK_TO_HOST,
    FILLING,
    HOST,
    HOST_TO_DEVICE,
    HOST_TO_DISK,
    NBADROWS,
    NLAUNCHED,
    NONE,
    NOW,
    NWRITING,
    NXDEF,
    NXFREE,
    QUARANTINE_AFTER,
    READY,
    RETRY_NS,
    UNVERIFIED,
    X_DEFERRED,
    X_FREE,
    X_LAUNCHED,
    XCAP,
    Arrays,
)

ECANCELED = 125
EIO = 5


@jit
def reads_disk(kind: int) -> bool:
    """Does a transfer of this kind read a disk slot?"""
    return kind == DISK_TO_DEVICE or kind == DISK_TO_HOST or kind == DISK_TO_CALLER


@jit
def writes_disk(kind: int) -> bool:
    """Does a transfer of this kind write a disk slot?"""
    return kind == HOST_TO_DISK or kind == DEVICE_TO_DISK or kind == CALLER_TO_DISK


@jit
def issue(a: Arrays, kind: int, src: int, dst: int, n: int, address: np.uint64, ticket: int, index: int) -> None:
    """Plan a transfer for entry `n`; there must be a free one."""
    a.m[NXFREE] -= 1
    x = a.xstack[a.m[NXFREE]]
    r = a.x[x]
    r.kind, r.src, r.dst, r.entry, r.gen = kind, src, dst, n, a.e[n].gen
    r.address, r.ticket, r.index, r.cancelled = address, ticket, index, 0
    if src != NONE:
        r.w_src = a.s[src].wi
        a.s[src].ri += np.uint32(1)
    if dst != NONE:
        r.w_dst, r.r_dst = a.s[dst].wi, a.s[dst].ri
        a.s[dst].wi += np.uint32(1)
        r.w_no = a.s[dst].wi
    if writes_disk(kind):
        a.m[NWRITING] += 1
    r.state = X_DEFERRED
    a.xdef[a.m[NXDEF]] = x
    a.m[NXDEF] += 1


@jit
def _current(a: Arrays, n: int, gen: np.uint32, t: int, g: int) -> bool:
    return a.e[n].gen == gen and a.e[n].slot[t] == g


@jit
def _finish(a: Arrays, x: int, ok: bool, transient: bool, lied: bool) -> None:
    r = a.x[x]
    kind, src, dst, n, gen = r.kind, r.src, r.dst, r.entry, r.gen
    w_no = r.w_no
    if src != NONE:
        a.s[src].rd += np.uint32(1)
    if dst != NONE:
        a.s[dst].wd += np.uint32(1)
    if writes_disk(kind):
        a.m[NWRITING] -= 1
    r.state = X_FREE
    a.xstack[a.m[NXFREE]] = x
    a.m[NXFREE] += 1

    if dst != NONE:
        if kind == DISK_TO_DEVICE or kind == HOST_TO_DEVICE:
            t = DEVICE
        elif kind == DEVICE_TO_HOST or kind == DISK_TO_HOST or kind == CALLER_TO_HOST:
            t = HOST
        else:
            t = DISK
        mine = _current(a, n, gen, t, dst) and a.s[dst].wi == w_no
        if ok:
            if mine:
                a.e[n].state[t] = READY
                tell(a, dst)
                if t == DISK:
                    note(a, dst, FILL | STATE)
        else:
            a.s[dst].bad_w = w_no
            if mine:
                if t == DISK:
                    entries.lose_tree(a, n, DISK)
                else:
                    entries.lose(a, n, t, False)
    if ok:
        if reads_disk(kind) and _current(a, n, gen, DISK, src):
            a.s[src].fails = 0
        return
    if writes_disk(kind):
        a.c[C_FAILED_WRITES] += 1
    elif reads_disk(kind):
        a.c[C_FAILED_READS] += 1
        if lied:
            a.c[C_BAD_PAYLOADS] += 1
        if (lied or transient) and _current(a, n, gen, DISK, src):
            s = a.s[src]
            if lied and s.fails & np.uint32(UNVERIFIED):  # its record is older than its bytes: a crash came between
                a.c[C_STALE] += 1
                entries.lose(a, n, DISK, False)
                return
            if not lied and s.retry_at > a.m[NOW]:
                return  # reads that were under way together met one and the same error
            tries = (s.fails & np.uint32(~UNVERIFIED & 0xFFFFFFFF)) + np.uint32(1)
            s.fails = (s.fails & np.uint32(UNVERIFIED)) | tries
            if lied or tries >= QUARANTINE_AFTER:
                entries.lose(a, n, DISK, True)
            else:
                a.c[C_TRANSIENT] += 1
                s.retry_at = a.m[NOW] + (a.m[RETRY_NS] << np.int64(tries - np.uint32(1)))
    else:
        a.c[C_FAILED_COPIES] += 1


@jit
def launch(a: Arrays, room: int, out: np.ndarray, failed: np.ndarray, done: np.ndarray, at_once: bool) -> int:
    """Write the transfers that may start now to `out`, at most `room`, in order of issue; with `at_once` all, for
    somebody who keeps a scoreboard of his own. One whose source never arrived, or that was cancelled, fails here; if it
    belongs to a ticket, that is told as in `complete`, the number of rows in `badrows`."""
    n = kept = bad = 0
    total = a.m[NXDEF]
    for i in range(total):
        x = a.xdef[i]
        r = a.x[x]
        ok = n < room
        if ok and not at_once and r.src != NONE:
            ok = a.s[r.src].wd >= r.w_src
        if ok and not at_once and r.dst != NONE:
            ok = a.s[r.dst].wd >= r.w_dst and a.s[r.dst].rd >= r.r_dst
        if not ok:
            a.xdef[kept] = x
            kept += 1
        elif r.cancelled or (r.src != NONE and r.w_src != 0 and a.s[r.src].bad_w == r.w_src):
            if r.ticket != NONE:
                failed[bad, 0], failed[bad, 1] = r.ticket, r.index
                done[r.ticket] += 1
                bad += 1
            _finish(a, x, False, False, False)
        else:
            r.state = X_LAUNCHED
            a.m[NLAUNCHED] += 1
            out[n] = x
            n += 1
    a.m[NXDEF] = kept
    a.m[NBADROWS] = bad
    return n


@jit
def complete(
    a: Arrays, results: np.ndarray, count: int, lengths: np.ndarray, failed: np.ndarray, done: np.ndarray
) -> int:
    """Take in `count` RESULT records of the I/O engine. Of the transfers that belong to a ticket, `failed` gets
    [ticket, index] rows and `done[ticket]` grows; returns the number of rows."""
    bad = 0
    for i in range(count):
        x = results[i].tag
        r = a.x[x]
        kind, ticket, index = r.kind, r.ticket, r.index
        moved = results[i].moved
        ok = moved == lengths[kind]
        lied = False
        if ok and a.m[CHECKS] != 0:
            if writes_disk(kind):
                a.s[r.dst].crc = results[i].crc
            elif reads_disk(kind) and results[i].crc != a.s[r.src].crc:
                ok, lied = False, True
        a.m[NLAUNCHED] -= 1
        _finish(a, x, ok, not ok and not lied and moved != -ECANCELED, lied)
        if ticket != NONE:
            done[ticket] += 1
            if not ok:
                failed[bad, 0], failed[bad, 1] = ticket, index
                bad += 1
    return bad


@jit
def cancel(a: Arrays, ticket: int, out: np.ndarray) -> int:
    """Mark the deferred transfers of a ticket as cancelled and list its launched ones in `out`; returns how many."""
    n = 0
    for x in range(a.m[XCAP]):
        r = a.x[x]
        if r.state != X_FREE and r.ticket == ticket:
            if r.state == X_DEFERRED:
                r.cancelled = 1
            else:
                out[n] = x
                n += 1
    return n


@jit
def landed(a: Arrays, slots: np.ndarray, need_w: np.ndarray, need_r: np.ndarray, start: int, n: int) -> int:
    """First of a request's blocks, from `start`, whose slot may not be used yet; `n` if there is none."""
    for i in range(start, n):
        s = a.s[slots[i]]
        if s.wd < need_w[i] or s.rd < need_r[i]:
            return i
    return n


@jit
def lost(a: Arrays, slots: np.ndarray, need_w: np.ndarray, n: int, out: np.ndarray) -> int:
    """Which of a request's first `n` blocks did not arrive; indices go to `out`."""
    k = 0
    for i in range(n):
        if need_w[i] != 0 and a.s[slots[i]].bad_w == need_w[i]:
            out[k] = i
            k += 1
    return k


@jit
def abandon(a: Arrays, slots: np.ndarray, need_w: np.ndarray, need_r: np.ndarray, n: int, out: np.ndarray) -> int:
    """Wait no longer for those of a request's `n` device slots that may not be used yet; their indices go to `out`.
    What a read should have brought there is found elsewhere, or not at all for a while; the lease stays."""
    k = 0
    for i in range(n):
        s = a.s[slots[i]]
        if s.wd >= need_w[i] and s.rd >= need_r[i]:
            continue
        out[k] = i
        k += 1
        e = s.entry
        if e != NONE and a.e[e].state[DEVICE] == FILLING:
            g = a.e[e].slot[DISK]
            if g != NONE:
                a.s[g].retry_at = a.m[NOW] + a.m[RETRY_NS]
            entries.detach(a, e, DEVICE)
    return k
