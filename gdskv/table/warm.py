"""Compile, or load, all that a table runs while requests are served, so that none of them waits for it.

Makes each call once on tables of a few slots; keep it in step with ``BlockTable``.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .blocktable import BlockTable, Rejection
from .journal import CHANGE


@cache
def warm(result: np.dtype[np.void]) -> None:
    """Have every function of a table ready, once a process.

    Takes 0.2 s, or half a minute of one core where no compiled code is kept on disk.

    Parameters
    ----------
    result
        What the I/O engine's results are made of, with the fields tag, moved and crc.
    """
    keys = np.array([[1, 1], [2, 2]], np.uint64)
    priority, ttl, addresses = np.full(2, 35, np.uint8), np.zeros(2, np.int64), np.zeros(2, np.uint64)
    ids, results, lengths = np.empty(8, np.int32), np.zeros(8, result), np.zeros(16, np.int64)

    table = BlockTable(2, 2, 4, transfers=64, events=True)
    table.remember()
    table.advance(1)
    table.match(keys)
    begun = table.begin(keys, 2)
    assert not isinstance(begun, Rejection)
    table.landed(begun, 0)
    table.lost(begun)
    table.abandon(begun)
    table.commit(keys, begun.slots, priority, ttl, False)
    table.release(begun.slots)
    table.flush(4)
    table.prefetch(keys, 1)
    n, _ = table.launch(8, ids)
    results["tag"][:n] = ids[:n]
    table.complete(results, n, lengths)
    changes = np.zeros(8, CHANGE)
    slots = changes["slot"][: table.changes(changes)].astype(np.int32)
    table.all_written(slots)
    table.record_again(slots)
    table.written(0, 3, True)
    table.close_directory(0, False)
    table.events()

    table = BlockTable(0, 2, 4, transfers=64)
    table.store(keys, addresses, priority, ttl, False, 0)
    table.ask(keys)
    table.learned()
    entries, tiers, held = table.find(keys)
    table.load(entries, tiers, held, addresses[: len(held)], 1)
    table.leave(tiers, held)
    table.cancel(1)
