"""How transfers travel between the owner thread and the workers of an engine: rings one way, a chain of results back.

Holds the arrays' meaning and the owner's side of them; must not know what a worker does with a transfer.

A queue is a ring of groups, many workers taking from it: one for each lane and direction, and one for copies. A group
is a chain of descriptors, through `link`, that may move as one call. Workers put finished groups on one chain that
the owner takes as a whole, so there is one place to look at. Nobody takes a lock; the owner makes one system call per
queue in `submit`, to wake as many workers as there are groups, and none anywhere else.
"""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import numpy.typing as npt

from gdskv._jit import jit
from gdskv.io.atomics import cas, exchange, fetch_add, load_acquire, store_release
from gdskv.io.base import ALIGNMENT, COPY, READ, WRITE
from gdskv.io.libc import wake

__all__ = ["DESCRIPTOR", "MAX_PIECES", "SLAB", "cancel", "poll", "stop", "submit"]

MAX_PIECES = 256
"""Transfers in a group. The system takes 1,024 vectors in a call."""

DESCRIPTOR = np.dtype(
    [  # written by the owner before it publishes the group, and by the one worker that claimed it until it is done
        ("tag", "<i8"),
        ("offset", "<i8"),
        ("address", "<i8"),
        ("target", "<i8"),
        ("length", "<i8"),
        ("moved", "<i8"),
        ("fd", "<i4"),
        ("queue", "<i4"),
        ("path", "<i4"),  # 0 direct, 1 buffered
        ("crc", "<u4"),
        ("started", "<u4"),
        ("unused", "<u4"),
    ]
)

SLAB = np.dtype([("fd", "<i8"), ("lane", "<i8"), ("direct", "<i8"), ("size", "<i8")])

# States of a descriptor, each a word that owner and workers exchange
FREE, QUEUED, CLAIMED, CANCELLED, DONE = range(5)

# Words shared by owner and workers, in lines of 16: queue `q` has line `q`, then each lane has one, then the rest.
# A line is two of the processor's, because it fetches pairs.
LINE = 16
HEAD, TAIL, SLEEPERS = 0, 8, 9  # of a queue: groups taken, by any worker; groups given, by the owner; idle workers
# Of a lane: read groups queued or moving; when the last ended; writers whose turn it is; those that wait for theirs
READS, LAST_READ, TURN, WAITING = 0, 1, 2, 3
FINISHED, STOP, STARTED = 0, 8, 9  # of the engine: chain of finished descriptors; 1 = let go; workers that run

# Words of the owner alone
OWN_FREE, OWN_PENDING, OWN_LOCAL, OWN_IN_FLIGHT, OWN_REFUSED, OWN_CANCELLED, OWN_WORDS = range(7)

# What the owner remembers of the last group in a queue while it forms a batch
LAST, GROUP_SLAB, END, BYTES, PIECES, NEW_TAIL, GROUP_WORDS = range(7)

Words = npt.NDArray[np.int64]
Records = npt.NDArray[Any]


@jit
def submit(
    transfers: Records,
    slabs: Records,
    depth: int,
    max_extent: int,
    own: Words,
    free: Words,
    used: Words,
    forming: Words,
    shared: Words,
    rings: Words,
    descriptors: Records,
    state: Words,
    link: Words,
) -> int:
    """Queue the leading transfers for which there is room, join neighbours into groups, and wake workers."""
    copies = len(used) - 1
    mask = rings.shape[1] - 1
    for queue in range(len(used)):
        forming[queue, LAST] = -1
        forming[queue, NEW_TAIL] = shared[LINE * queue + TAIL]
    accepted = 0
    for i in range(len(transfers)):
        op, slab = transfers["op"][i], transfers["slab"][i]
        offset, length = transfers["offset"][i], transfers["length"][i]
        address, target = np.int64(transfers["address"][i]), np.int64(transfers["target"][i])
        good = length > 0 or (length == 0 and op == WRITE)  # a write of no bytes flushes its slab
        queue = copies
        if op == READ or op == WRITE:
            good = good and 0 <= slab < len(slabs) and 0 <= offset <= slabs["size"][slab] - length
            if good:
                queue = 2 * slabs["lane"][slab] + op
                good = slabs["direct"][slab] == 0 or (offset | address | length) & (ALIGNMENT - 1) == 0
        else:
            good = good and op == COPY
        if used[queue] == depth:
            break

        own[OWN_FREE] -= 1
        d = free[own[OWN_FREE]]
        used[queue] += 1
        own[OWN_IN_FLIGHT] += 1
        accepted += 1
        descriptors["tag"][d] = transfers["tag"][i]
        descriptors["queue"][d] = queue
        descriptors["crc"][d] = 0
        descriptors["started"][d] = 0
        if not good:
            descriptors["moved"][d] = -errno.EINVAL
            state[d] = DONE
            link[d] = own[OWN_PENDING]
            own[OWN_PENDING] = d
            own[OWN_REFUSED] += 1
            continue
        descriptors["offset"][d] = offset
        descriptors["address"][d] = address
        descriptors["target"][d] = target
        descriptors["length"][d] = length
        descriptors["moved"][d] = 0
        descriptors["fd"][d] = -1 if op == COPY else slabs["fd"][slab]
        descriptors["path"][d] = 0 if op == COPY else 1 - slabs["direct"][slab]
        link[d] = -1
        state[d] = QUEUED

        group = forming[queue]
        if (
            op != COPY
            and group[LAST] >= 0
            and length > 0
            and group[BYTES] > 0
            and group[GROUP_SLAB] == slab
            and group[END] == offset
            and group[BYTES] + length <= max_extent
            and group[PIECES] < MAX_PIECES
        ):
            link[group[LAST]] = d
            group[BYTES] += length
            group[PIECES] += 1
        else:  # nobody sees it before the tail moves
            rings[queue, group[NEW_TAIL] & mask] = d
            group[NEW_TAIL] += 1
            group[GROUP_SLAB] = slab
            group[BYTES] = length
            group[PIECES] = 1
        group[LAST] = d
        group[END] = offset + length

    for queue in range(len(used)):
        line = LINE * queue
        new = forming[queue, NEW_TAIL] - shared[line + TAIL]
        if new == 0:
            continue
        if queue < copies and queue % 2 == READ:
            fetch_add(shared, LINE * (len(used) + queue // 2) + READS, new)
        exchange(shared, line + TAIL, forming[queue, NEW_TAIL])  # a whole barrier: a worker goes to sleep or sees it
        if load_acquire(shared, line + SLEEPERS) > 0:
            wake(shared, line + TAIL, 1)
    return accepted


@jit
def poll(
    out: Records,
    own: Words,
    free: Words,
    used: Words,
    shared: Words,
    descriptors: Records,
    state: Words,
    link: Words,
    local: Records,
) -> int:
    """Hand over results, those of `cancel` first, and take the descriptors back."""
    finished = len(shared) - LINE + FINISHED
    n = 0
    while own[OWN_LOCAL] > 0 and n < len(out):
        own[OWN_LOCAL] -= 1
        out[n] = local[own[OWN_LOCAL]]
        n += 1
    d = own[OWN_PENDING]
    while own[OWN_LOCAL] == 0:  # else `out` is full, and a descriptor must not be free before its result is out
        if d < 0:
            if load_acquire(shared, finished) < 0:
                break
            d = exchange(shared, finished, -1)
        if state[d] != CANCELLED:
            if n == len(out):
                break
            out["tag"][n] = descriptors["tag"][d]
            out["moved"][n] = descriptors["moved"][d]
            out["crc"][n] = descriptors["crc"][d]
            out["started"][n] = descriptors["started"][d]
            n += 1
        state[d] = FREE
        free[own[OWN_FREE]] = d
        own[OWN_FREE] += 1
        used[descriptors["queue"][d]] -= 1
        d = link[d]
    own[OWN_PENDING] = d
    own[OWN_IN_FLIGHT] -= n
    return n


@jit
def cancel(tags: Words, everything: bool, own: Words, descriptors: Records, state: Words, local: Records) -> int:
    """Cancel what no worker has claimed and is in `tags` (sorted), or everything that no worker has claimed.

    The result is there at once. The descriptor stays in its group until a worker passes it on.
    """
    held = len(state) - own[OWN_FREE]
    cancelled = 0
    for d in range(len(state)):
        if held == 0:
            break
        now = load_acquire(state, d)
        if now == FREE:
            continue
        held -= 1
        if now != QUEUED:
            continue
        tag = descriptors["tag"][d]
        if not everything:
            at = np.searchsorted(tags, tag)
            if at == len(tags) or tags[at] != tag:
                continue
        if cas(state, d, QUEUED, CANCELLED):
            result = own[OWN_LOCAL]
            local["tag"][result] = tag
            local["moved"][result] = -errno.ECANCELED
            own[OWN_LOCAL] += 1
            own[OWN_CANCELLED] += 1
            cancelled += 1
    return cancelled


@jit
def stop(workers: Words, shared: Words, rings: Words) -> None:
    """Let workers go: no new call, and an end mark behind what is queued for each of the `workers` of a queue."""
    mask = rings.shape[1] - 1
    store_release(shared, len(shared) - LINE + STOP, 1)
    for lane in range(len(workers), len(shared) // LINE - 1):
        wake(shared, LINE * lane + TURN, 1 << 30)
    for queue in range(len(workers)):
        tail = shared[LINE * queue + TAIL]
        for i in range(workers[queue]):
            rings[queue, (tail + i) & mask] = -1
        store_release(shared, LINE * queue + TAIL, tail + workers[queue])
        wake(shared, LINE * queue + TAIL, workers[queue])
