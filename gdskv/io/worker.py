"""What a worker thread of the POSIX engine does, all of it without the GIL: take a group, move it, pass it on.

Knows descriptors and system calls; must not know who submits, and touches no Python object.
"""

from __future__ import annotations

import errno

import numpy as np

from gdskv._jit import jit
from gdskv.io.atomics import cas, exchange, fetch_add, load_acquire
from gdskv.io.base import COPY, READ, WRITE
from gdskv.io.crc import crc32c_at
from gdskv.io.libc import (
    errno_now,
    fdatasync,
    memcpy,
    monotonic_ns,
    nap,
    preadv,
    pwritev,
    sleep_while_equal,
    wake,
)
from gdskv.io.queues import (
    CANCELLED,
    CLAIMED,
    DONE,
    FINISHED,
    HEAD,
    LAST_READ,
    LINE,
    QUEUED,
    READS,
    SLEEPERS,
    STARTED,
    STOP,
    TAIL,
    TURN,
    WAITING,
    Records,
    Words,
)

__all__ = ["COUNTED", "run"]

COUNTED = ("transfers", "calls", "bytes", "errors", "short")
"""What a worker counts for each path: columns of its row of counters."""
_TRANSFERS, _CALLS, _BYTES, _ERRORS, _SHORT = range(5)

_WHOLE = np.int64(1 << 40)  # bytes: more than any group
# While a lane's reads come, its writes go one at a time and in calls of a third of the largest extent: what a read
# finds before it in the device's own queue is then at most one of these. Smaller calls make the tail of reads little
# shorter and writes much slower, whole extents the other way round. Where many reads are queued a write more is little
# to each, and none at all would let spills starve: then one goes for every four reads (docs/performance.md).
_GENTLE = np.int64(684 << 10)
_GENTLE_NS = 100_000_000
_READS_A_WRITE = 4
_ALL = 1 << 30  # sleepers: wake every one
# Bytes that a worker copies or sums before it sleeps for a moment. The system looks only at its tick, every 4 ms, and
# where processors are few the calling thread would wait as long in the middle of a call. A yield is not enough: a
# caller that never sleeps has had more than its share, so the system would choose the worker again.
_STRIDE = np.int64(1 << 20)
_MOMENT_US = np.int32(1)  # the least; with the system's timer slack about 60 us
_MOMENTS = 20  # that a worker leaves to a call at once: all of them together would be a stall of their own


@jit(nogil=True)
def _after_call(in_call: Words) -> None:
    """Wait, not for long, while a caller is in a call: it goes first."""
    for _ in range(_MOMENTS):
        if load_acquire(in_call, 0) == 0:
            return
        nap(_MOMENT_US)


@jit(nogil=True)
def _breathe(since: int, in_call: Words) -> int:
    """Leave the processor for a moment after a stride of bytes; return how many there are since the last time."""
    if since < _STRIDE:
        return since
    nap(_MOMENT_US)
    _after_call(in_call)
    return 0


@jit(nogil=True)
def _next_group(shared: Words, line: int, ring: Words) -> int:
    """Take the next group of a queue, asleep until there is one; -1 is the end mark."""
    while True:
        head = load_acquire(shared, line + HEAD)
        tail = load_acquire(shared, line + TAIL)
        if head == tail:
            fetch_add(shared, line + SLEEPERS, 1)
            sleep_while_equal(shared, line + TAIL, tail)
            fetch_add(shared, line + SLEEPERS, -1)
            continue
        group = load_acquire(ring, head & (len(ring) - 1))
        if cas(shared, line + HEAD, head, head + 1):  # else another took it, and the slot may hold a later one
            if head + 1 < tail and load_acquire(shared, line + SLEEPERS) > 0:
                wake(shared, line + TAIL, 1)
            return group


@jit(nogil=True)
def _claim(group: int, descriptors: Records, state: Words, link: Words) -> None:
    d = group
    while d >= 0:
        if cas(state, d, QUEUED, CLAIMED):
            descriptors["started"][d] = 1
        d = link[d]


@jit(nogil=True)
def _publish(group: int, shared: Words, state: Words, link: Words) -> None:
    """Put a group on the chain of finished ones, for the owner."""
    last = group
    while True:
        if state[last] == CLAIMED:
            state[last] = DONE
        if link[last] < 0:
            break
        last = link[last]
    finished = len(shared) - LINE + FINISHED
    while True:
        before = load_acquire(shared, finished)
        link[last] = before
        if cas(shared, finished, before, group):
            return


@jit(nogil=True)
def _stretch(first: int, pieces: int, descriptors: Records, state: Words, link: Words) -> tuple[int, int]:
    """How many claimed members stand gapless from `first` on (at most `pieces`), and their bytes."""
    total = descriptors["length"][first]
    count = 1
    d = link[first]
    while d >= 0 and count < pieces and state[d] == CLAIMED:
        if descriptors["offset"][d] != descriptors["offset"][first] + total:
            break
        total += descriptors["length"][d]
        count += 1
        d = link[d]
    return count, total


@jit(nogil=True)
def _gather(first: int, skip: int, most: int, total: int, descriptors: Records, link: Words, vectors: Words) -> int:
    """Fill `vectors` with the memory of bytes `skip` to min(`skip` + `most`, `total`) of a stretch; return how many."""
    n = 0
    d = first
    end = min(skip + most, total)
    start = 0
    while start < end:
        length = descriptors["length"][d]
        low, high = max(start, skip), min(start + length, end)
        if low < high:
            address = descriptors["address"][d] + low - start
            if n > 0 and vectors[n - 1, 0] + vectors[n - 1, 1] == address:
                vectors[n - 1, 1] += high - low
            else:
                vectors[n, 0] = address
                vectors[n, 1] = high - low
                n += 1
        start += length
        d = link[d]
    return n


@jit(nogil=True)
def _reads_come(shared: Words, lane: int, clock: Words) -> bool:
    if load_acquire(shared, lane + READS) > 0:
        return True
    return monotonic_ns(clock) - load_acquire(shared, lane + LAST_READ) < _GENTLE_NS


@jit(nogil=True)
def _await_turn(shared: Words, lane: int, clock: Words) -> int:
    """Before a write: while its lane's reads come, take a turn and return the bytes to write in it; 0 when none do."""
    while load_acquire(shared, len(shared) - LINE + STOP) == 0 and _reads_come(shared, lane, clock):
        reads = load_acquire(shared, lane + READS)
        writers = load_acquire(shared, lane + TURN)
        if writers >= max(1, reads // _READS_A_WRITE):
            fetch_add(shared, lane + WAITING, 1)
            sleep_while_equal(shared, lane + TURN, writers)
            fetch_add(shared, lane + WAITING, -1)
        elif cas(shared, lane + TURN, writers, writers + 1):
            return _GENTLE if reads < 2 * _READS_A_WRITE else _WHOLE
    if load_acquire(shared, lane + WAITING) > 0:
        wake(shared, lane + TURN, _ALL)  # no reads come any more: all may go
    return 0


@jit(nogil=True)
def _end_turn(shared: Words, lane: int) -> None:
    fetch_add(shared, lane + TURN, -1)  # a whole barrier, as in `submit`
    if load_acquire(shared, lane + WAITING) > 0:
        wake(shared, lane + TURN, 1)


@jit(nogil=True)
def _call(
    kind: int,
    first: int,
    total: int,
    shared: Words,
    lane: int,
    descriptors: Records,
    link: Words,
    vectors: Words,
    clock: Words,
    counts: Words,
) -> tuple[int, int]:
    """Move a stretch, as often as it takes; return the bytes moved and why no more (0: the end of the file)."""
    fd, offset = descriptors["fd"][first], descriptors["offset"][first]
    moved = 0
    if total == 0:
        counts[_CALLS] += 1
        return 0, errno_now() if fdatasync(fd) < 0 else 0
    while moved < total:
        turn = _await_turn(shared, lane, clock) if kind == WRITE else 0
        if load_acquire(shared, len(shared) - LINE + STOP) != 0:
            if turn > 0:
                _end_turn(shared, lane)
            return moved, errno.ECANCELED
        most = turn if turn > 0 else _WHOLE
        n = _gather(first, moved, most, total, descriptors, link, vectors)
        if kind == READ:
            done = preadv(fd, vectors.ctypes.data, n, offset + moved)
        else:
            done = pwritev(fd, vectors.ctypes.data, n, offset + moved)
        why = errno_now() if done < 0 else 0
        if turn > 0:
            _end_turn(shared, lane)
        counts[_CALLS] += 1
        if done > 0:
            moved += done
        elif done == 0:
            return moved, 0
        elif why != errno.EINTR:
            return moved, why
    return moved, 0


@jit(nogil=True)
def _settle(
    kind: int,
    first: int,
    count: int,
    moved: int,
    why: int,
    descriptors: Records,
    link: Words,
    checksums: bool,
    in_call: Words,
) -> int:
    """Give each member its bytes, in order, and its checksum; return how many are whole."""
    whole = since = 0
    d = first
    for _ in range(count):
        length = descriptors["length"][d]
        got = max(0, min(length, moved))
        moved -= got
        if got == length and (length > 0 or why == 0):
            whole += 1
            descriptors["moved"][d] = got
            if kind == READ and checksums:
                descriptors["crc"][d] = crc32c_at(descriptors["address"][d], length)
                since = _breathe(since + length, in_call)
        else:
            descriptors["moved"][d] = -why if why != 0 else got
        d = link[d]
    return whole


@jit(nogil=True)
def _move(
    kind: int,
    group: int,
    shared: Words,
    lane: int,
    descriptors: Records,
    state: Words,
    link: Words,
    vectors: Words,
    clock: Words,
    counts: Words,
    checksums: bool,
    in_call: Words,
) -> None:
    """Read or write what is claimed of a group."""
    stopping = len(shared) - LINE + STOP
    if kind == WRITE and checksums:
        since = 0
        _after_call(in_call)
        d = group
        while d >= 0 and load_acquire(shared, stopping) == 0:
            if state[d] == CLAIMED:
                descriptors["crc"][d] = crc32c_at(descriptors["address"][d], descriptors["length"][d])
                since = _breathe(since + descriptors["length"][d], in_call)
            d = link[d]
    pieces = len(vectors)
    d = group
    while d >= 0:
        if load_acquire(state, d) == CANCELLED:
            d = link[d]
            continue
        count, total = _stretch(d, pieces, descriptors, state, link)
        moved, why = _call(kind, d, total, shared, lane, descriptors, link, vectors, clock, counts)
        look = checksums and load_acquire(shared, stopping) == 0  # after a stop the memory may be gone
        whole = _settle(kind, d, count, moved, why, descriptors, link, look, in_call)
        for _ in range(whole):
            d = link[d]
        if whole < count:
            if count > 1 and load_acquire(shared, stopping) == 0:
                pieces = 1  # one bad sector must not cost its neighbours: the rest of the group goes one by one
            else:
                for _ in range(count - whole):
                    d = link[d]


@jit(nogil=True)
def _copy(group: int, descriptors: Records, state: Words, link: Words, counts: Words, in_call: Words) -> None:
    since = 0
    d = group
    while d >= 0:
        if state[d] == CLAIMED:
            length = descriptors["length"][d]
            if descriptors["target"][d] == descriptors["address"][d]:
                descriptors["crc"][d] = crc32c_at(descriptors["address"][d], length)
            else:
                memcpy(descriptors["target"][d], descriptors["address"][d], length)
            descriptors["moved"][d] = length
            counts[_CALLS] += 1
            since = _breathe(since + length, in_call)
        d = link[d]


@jit(nogil=True)
def _count(kind: int, group: int, descriptors: Records, state: Words, link: Words, counts: Words) -> None:
    d = group
    while d >= 0:
        if state[d] == CLAIMED:
            moved = descriptors["moved"][d]
            counts[_TRANSFERS] += 1
            counts[_BYTES] += max(0, moved)
            counts[_ERRORS] += moved < 0
            counts[_SHORT] += 0 <= moved < descriptors["length"][d]
            if kind == WRITE and moved < descriptors["length"][d]:
                descriptors["crc"][d] = 0
        d = link[d]


@jit(nogil=True)
def run(
    kind: int,
    queue: int,
    queues: int,
    shared: Words,
    ring: Words,
    descriptors: Records,
    state: Words,
    link: Words,
    vectors: Words,
    counts: Words,
    checksums: bool,
    in_call: Words,
) -> None:
    """Serve a queue until its end mark.

    Parameters
    ----------
    kind
        READ, WRITE or COPY.
    queue, queues
        The queue served, and how many there are.
    vectors
        (MAX_PIECES, 2) int64 of this worker: address and length of each piece of a call.
    counts
        (2, len(COUNTED)) int64 of this worker: by path, direct and buffered. It alone writes them.
    in_call
        The word of :mod:`gdskv.io.courtesy`.
    """
    clock = np.zeros(2, np.int64)
    lane = LINE * (queues + queue // 2)
    fetch_add(shared, len(shared) - LINE + STARTED, 1)
    while True:
        group = _next_group(shared, LINE * queue, ring)
        if group < 0:
            return
        _claim(group, descriptors, state, link)
        counted = counts[descriptors["path"][group]]
        if kind == COPY:
            _copy(group, descriptors, state, link, counted, in_call)
        else:
            _move(kind, group, shared, lane, descriptors, state, link, vectors, clock, counted, checksums, in_call)
        _count(kind, group, descriptors, state, link, counted)
        if kind == READ:
            exchange(shared, lane + LAST_READ, monotonic_ns(clock))
            fetch_add(shared, lane + READS, -1)
        _publish(group, shared, state, link)
