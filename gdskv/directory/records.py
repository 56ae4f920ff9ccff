"""The two records of a slot: what fills it (64 bytes, once a fill) and how it stands (32 bytes, at each change).

Each carries a CRC of its own, so a torn or foreign one counts as none. Knows bytes; must not know files or tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdskv._jit import jit
from gdskv.io.crc import crc32c_at

VERSION = 1

# Flags of both records, as the table's journal has them.
PRESENT, IS_ROOT, TO_FORGET, IS_BAD, NOT_KEPT = 1, 2, 4, 8, 16
FILL, STATE = 1, 2

IDENTITY = np.dtype(
    [
        ("k0", "<u8"),
        ("k1", "<u8"),
        ("p0", "<u8"),  # the parent's key; zeros for none
        ("p1", "<u8"),
        ("fill", "<u8"),  # number of this fill over the directory's life; of two records with one key the higher counts
        ("written", "<i8"),  # wall clock, ns
        ("crc", "<u4"),  # CRC-32C of the payload
        ("length", "<u4"),  # bytes of the payload
        ("flags", "<u2"),  # PRESENT: else the slot is free; IS_ROOT, IS_BAD, TO_FORGET as it was at the fill
        ("version", "<u2"),
        ("check", "<u4"),  # CRC-32C of the 60 bytes before, started with the slot's number
    ]
)  # divides a 512-byte sector, so a record never straddles one

STATE_RECORD = np.dtype(
    [
        ("deadline", "<i8"),  # wall clock, ns; 0 = none
        ("last", "<u8"),  # order of use
        ("fill", "<u4"),  # low bits of the fill it belongs to
        ("tenant", "<u4"),  # CRC-32C of its name
        ("uses", "<u2"),
        ("priority", "u1"),
        ("flags", "u1"),  # TO_FORGET, NOT_KEPT
        ("check", "<u4"),
    ]
)

REMEMBERED = np.dtype(
    [
        ("k0", "<u8"),
        ("k1", "<u8"),
        ("p0", "<u8"),
        ("p1", "<u8"),
        ("deadline", "<i8"),  # wall clock, ns; 0 = none
        ("last", "<i8"),
        ("fill", "<u8"),
        ("written", "<i8"),
        ("slot", "<i4"),  # within the directory
        ("crc", "<u4"),
        ("uses", "<u4"),
        ("tenant", "<u4"),
        ("flags", "u1"),
        ("priority", "u1"),
    ],
    align=True,
)

DEFAULT_PRIORITY = 35


@jit
def _check(address: Any, length: int, slot: int) -> np.uint32:
    crc: np.uint32 = np.uint32(crc32c_at(address, length)) ^ np.uint32((slot + 1) * 2654435761 & 0xFFFFFFFF)
    return crc


@jit
def encode(
    changes: np.ndarray,
    n: int,
    first: int,
    fill: int,
    now_to_wall: int,
    wall: int,
    length: int,
    tenants: np.ndarray,
    identities: np.ndarray,
    states: np.ndarray,
) -> int:
    """Bring the records of `n` changed slots up to date. `first`: the directory's first slot in the disk tier.
    `tenants`: CRC of each tenant's name, by the table's numbers. Returns the next fill number."""
    id_at = np.uint64(identities.ctypes.data)
    state_at = np.uint64(states.ctypes.data)
    for i in range(n):
        c = changes[i]
        k = c.slot - first
        if c.what & FILL:
            r = identities[k]
            r.k0, r.k1, r.p0, r.p1 = c.k0, c.k1, c.p0, c.p1
            r.fill, r.written, r.crc, r.length = fill, wall, c.crc, length
            r.flags, r.version = c.flags & (PRESENT | IS_ROOT | IS_BAD | TO_FORGET), VERSION
            fill += 1
            r.check = _check(id_at + np.uint64(64 * k), 60, k)
        s = states[k]
        s.deadline = c.deadline + now_to_wall if c.deadline != 0 else 0
        s.last, s.fill, s.uses = c.last, np.uint32(identities[k].fill & np.uint64(0xFFFFFFFF)), min(c.uses, 65535)
        s.tenant = tenants[c.tenant]
        s.priority, s.flags = c.priority, c.flags & (TO_FORGET | NOT_KEPT)
        s.check = _check(state_at + np.uint64(32 * k), 28, k)
    return fill


@jit
def decode(
    identities: np.ndarray, states: np.ndarray, n: int, length: int, out: np.ndarray
) -> tuple[int, np.uint64, np.int64]:
    """Read `n` slots' records. Those that hold a block, or are out of use, go to `out`. A block whose state is torn or
    of an earlier fill has default retention, or, where it was to be forgotten, is past its deadline, as nobody knows
    that. Returns how many, the highest number of a fill, and the latest time."""
    id_at = np.uint64(identities.ctypes.data)
    state_at = np.uint64(states.ctypes.data)
    found, fill, written = 0, np.uint64(0), np.int64(0)
    for k in range(n):
        r = identities[k]
        if r.version != VERSION or r.check != _check(id_at + np.uint64(64 * k), 60, k):
            continue
        fill, written = max(fill, r.fill), max(written, r.written)
        if r.flags & (PRESENT | IS_BAD) == 0 or (r.flags & PRESENT and r.length != length):
            continue
        o = out[found]
        o.k0, o.k1, o.p0, o.p1 = r.k0, r.k1, r.p0, r.p1
        o.fill, o.written, o.slot, o.crc = r.fill, r.written, k, r.crc
        o.flags = r.flags & (PRESENT | IS_ROOT | IS_BAD)
        o.deadline, o.last, o.uses, o.tenant, o.priority = 0, 0, 1, 0, DEFAULT_PRIORITY
        s = states[k]
        if np.uint64(s.fill) == r.fill & np.uint64(0xFFFFFFFF) and s.check == _check(
            state_at + np.uint64(32 * k), 28, k
        ):
            o.deadline, o.last, o.uses, o.tenant = s.deadline, s.last, s.uses, s.tenant
            o.priority = min(s.priority, 100)
            o.flags = o.flags | (s.flags & (TO_FORGET | NOT_KEPT))
        elif r.flags & TO_FORGET:
            o.deadline, o.flags = 1, o.flags | TO_FORGET
        found += 1
    return found, fill, written


def remembered(
    identities: NDArray[np.void], states: NDArray[np.void], length: int
) -> tuple[NDArray[np.void], int, int]:
    """The blocks, and slots out of use, that records tell of: dtype REMEMBERED, by slot. And the highest number of a
    fill, and the latest wall clock, in any record."""
    out = np.empty(len(identities), REMEMBERED)
    n, fill, written = decode(identities, states, len(identities), length, out)
    return out[:n], int(fill), int(written)


@jit
def sort_out(
    blocks: np.ndarray, capacity: int, first: int, wall: int, now_to_wall: int, freed: np.ndarray
) -> tuple[int, int, int]:
    """Leave what a table is restored from at the head of `blocks`, with slots counted from `first` and deadlines on the
    caller's clock: what stands below `capacity` and is not to be forgotten by now. `freed` gets the slots of others.
    Returns how many of each, and how many were forgotten."""
    n = free = forgotten = 0
    for i in range(len(blocks)):
        b = blocks[i]
        if b.slot >= capacity:
            continue
        lapsed = b.deadline != 0 and b.deadline <= wall
        if b.flags & IS_BAD == 0 and (b.flags & PRESENT == 0 or (lapsed and b.flags & TO_FORGET)):
            forgotten += b.flags & PRESENT != 0
            freed[free] = first + b.slot
            free += 1
            continue
        if lapsed:
            b.priority, b.deadline = min(b.priority, DEFAULT_PRIORITY), 0
        elif b.deadline != 0:
            b.deadline -= now_to_wall
        if b.deadline == 0:
            b.tenant = 0
        b.slot += first
        if n != i:
            blocks[n] = b
        n += 1
    return n, free, forgotten
