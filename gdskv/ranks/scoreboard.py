"""A rank's own scoreboard: which orders may start, and what each slot of this rank holds.

The order of the leader's plan is the order in which orders arrive, so a rank keeps it without asking the others: an
order waits for the earlier writes of its source and the earlier writes and reads of its destination, here.
"""

from __future__ import annotations

import errno

import numpy as np

from gdskv._jit import jit

NONE = -1
FREE, WAITING, STARTED, GIVEN_UP = 0, 1, 2, 3  # GIVEN_UP: told so already, and keeps its place in the line

OWN_SLOT = np.dtype(
    [
        ("k0", "<u8"),  # what the last good write put there; 0, 0 = nothing to serve
        ("k1", "<u8"),
        ("wi", "<u4"),  # writes and reads of the slot that were ordered, and that are done
        ("wd", "<u4"),
        ("ri", "<u4"),
        ("rd", "<u4"),
        ("bad_w", "<u4"),  # number of the last write that failed
        ("crc", "<u4"),
    ],
    align=True,
)

JOB = np.dtype(
    [
        ("address", "<u8"),
        ("k0", "<u8"),
        ("k1", "<u8"),
        ("moved", "<i8"),  # bytes so far, or -errno
        ("serial", "<i8"),  # place in the line
        ("src", "<i4"),
        ("dst", "<i4"),
        ("ticket", "<i4"),
        ("index", "<i4"),
        ("kind", "<i4"),
        ("left", "<i4"),  # pieces under way
        ("w_src", "<u4"),
        ("w_dst", "<u4"),
        ("r_dst", "<u4"),
        ("w_no", "<u4"),
        ("crc", "<u4"),
        ("state", "<u4"),
        ("again", "<u4"),  # 1: failed once and is with the device again
    ],
    align=True,
)


@jit
def enter(orders: np.ndarray, serial: int, jobs: np.ndarray, slots: np.ndarray) -> None:
    """Put orders into the line, each at the place of its tag."""
    for i in range(len(orders)):
        o = orders[i]
        j = jobs[o.tag]
        j.address, j.k0, j.k1 = o.address, o.k0, o.k1
        j.src, j.dst, j.ticket, j.index, j.kind = o.src, o.dst, o.ticket, o.index, o.kind
        j.moved, j.left, j.crc, j.again, j.state, j.serial = 0, 0, 0, 0, WAITING, serial + i
        j.w_src = j.w_dst = j.r_dst = j.w_no = 0
        if o.src != NONE:
            j.w_src = slots[o.src].wi
            slots[o.src].ri += np.uint32(1)
        if o.dst != NONE:
            j.w_dst, j.r_dst = slots[o.dst].wi, slots[o.dst].ri
            slots[o.dst].wi += np.uint32(1)
            j.w_no = slots[o.dst].wi


@jit
def startable(
    line: np.ndarray, jobs: np.ndarray, slots: np.ndarray, from_engine: int, ready: int, out: np.ndarray
) -> tuple[int, int]:
    """Take out of the line what may start, into the head of `out`, and what cannot any more, into its end, with the
    reason in `moved`. Orders of kind `from_engine` start up to the serial number `ready` only: the engine's blocks are
    not computed yet beyond. Returns how many of each; those left move to the head of `line`."""
    go = no = kept = 0
    for i in range(len(line)):
        tag = line[i]
        j = jobs[tag]
        may = j.kind != from_engine or j.serial < ready or j.state == GIVEN_UP
        if may and j.src != NONE:
            may = slots[j.src].wd >= j.w_src
        if may and j.dst != NONE:
            may = slots[j.dst].wd >= j.w_dst and slots[j.dst].rd >= j.r_dst
        if not may:
            line[kept] = tag
            kept += 1
            continue
        why = 0
        if j.state == GIVEN_UP:
            why = errno.ECANCELED
        elif j.src != NONE and j.w_src != 0 and slots[j.src].bad_w == j.w_src:
            why = errno.ECANCELED  # its source never arrived
        elif j.src != NONE and (slots[j.src].k0 != j.k0 or slots[j.src].k1 != j.k1):
            why = errno.ESTALE
        if why == 0:
            j.state = STARTED
            if j.dst != NONE:
                slots[j.dst].k0 = slots[j.dst].k1 = np.uint64(0)
            out[go] = tag
            go += 1
        else:
            j.moved = -why
            no += 1
            out[len(out) - no] = tag
    return go, no


@jit
def finish(jobs: np.ndarray, tag: int, slots: np.ndarray, ok: bool, crc: int) -> None:
    """An order is done: its source and its destination are free for the next."""
    job = jobs[tag]
    if job.src != NONE:
        slots[job.src].rd += np.uint32(1)
    if job.dst != NONE:
        s = slots[job.dst]
        s.wd += np.uint32(1)
        if ok:
            s.k0, s.k1, s.crc = job.k0, job.k1, np.uint32(crc)
        else:
            s.bad_w = job.w_no
    job.state = FREE
