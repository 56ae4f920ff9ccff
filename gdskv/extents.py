"""From planned transfers to what an I/O engine is handed: addresses, slabs, offsets, lengths.

Knows the table's transfer records and the engine's; decides nothing.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit
from gdskv.io.base import COPY, NO_SLAB, READ, WRITE
from gdskv.pools.disk import SLAB_HEADER
from gdskv.table.state import (
    CALLER_TO_DISK,
    CALLER_TO_HOST,
    DEVICE_TO_DISK,
    DEVICE_TO_HOST,
    DISK_TO_CALLER,
    DISK_TO_DEVICE,
    DISK_TO_HOST,
    HOST_TO_CALLER,
    HOST_TO_DEVICE,
    HOST_TO_DISK,
)

KINDS = 10
OPS = np.zeros(KINDS, np.int64)
OPS[[DEVICE_TO_HOST, HOST_TO_DEVICE, HOST_TO_CALLER, CALLER_TO_HOST]] = COPY
OPS[[DISK_TO_DEVICE, DISK_TO_HOST, DISK_TO_CALLER]] = READ
OPS[[HOST_TO_DISK, DEVICE_TO_DISK, CALLER_TO_DISK]] = WRITE


@jit
def _memory(slot: int, pools: np.ndarray) -> np.uint64:
    row = 0 if slot < pools[1, 0] else 1
    address: np.uint64 = np.uint64(pools[row, 1] + (slot - pools[row, 0]) * pools[row, 2])
    return address


@jit
def describe(
    ids: np.ndarray,
    n: int,
    records: np.ndarray,
    ops: np.ndarray,
    lengths: np.ndarray,
    pools: np.ndarray,
    slabs: np.ndarray,
    first: int,
    others: np.ndarray,
    writes: np.ndarray,
) -> int:
    """Describe `n` transfers: writes in `writes`, the others in `others`; returns how many are not writes.

    `pools`: [device, host] rows of first slot, base address, stride. `slabs`: first disk slot of each slab, and the
    end. `first`: number of the first disk slot among all slots."""
    split = 0
    for i in range(n):
        r = records[ids[i]]
        op = ops[r.kind]
        if op == WRITE:
            o = writes[i - split]
        else:
            o = others[split]
            split += 1
        o.tag, o.op, o.length = ids[i], op, lengths[r.kind]
        o.slab, o.offset, o.target = NO_SLAB, 0, np.uint64(0)
        if op == COPY:
            o.address = _memory(r.src, pools) if r.src >= 0 else r.address
            o.target = _memory(r.dst, pools) if r.dst >= 0 else r.address
            continue
        disk, memory = (r.dst, r.src) if op == WRITE else (r.src, r.dst)
        k = disk - first
        slab = 0
        while k >= slabs[slab + 1]:
            slab += 1
        o.slab = slab
        o.offset = SLAB_HEADER + (k - slabs[slab]) * lengths[r.kind]
        o.address = _memory(memory, pools) if memory >= 0 else r.address
    return split
