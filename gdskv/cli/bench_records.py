"""What records of the disk tier cost: blocks go to disk through a ``KVStore`` with its journal on and off, in turn.

Part of ``gdskv bench io``. Knows the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from gdskv.cli.benchlib import Result

if TYPE_CHECKING:
    from gdskv.store import KVStore

__all__ = ["records"]

BLOCK = 128 << 10
CHAIN = 256  # blocks of one store
MOVED = 1 << 30  # bytes of a run


def records(directory: Path, rounds: int, step: Callable[[int], None]) -> list[Result]:
    """Bandwidth of spills with records of what is where, beside the same without."""
    import numpy as np

    from gdskv import CacheConfig, KVLayout, KVStore, Namespace
    from gdskv.pools.device import DevicePool
    from gdskv.table.state import JOURNAL

    layout = KVLayout.raw(BLOCK)
    source = DevicePool(2 * CHAIN, layout)
    place = directory / "records"  # its own: the capacity of a directory counts all namespaces in it
    place.mkdir()
    config = CacheConfig(disk_bytes=2 * MOVED, directories=(place,), policy="lru")  # which takes every block
    rates: dict[bool, list[float]] = {True: [], False: []}
    try:
        with KVStore(config, layout, Namespace(model="bench")) as store:
            dice = np.random.default_rng(5)
            run(store, source, dice, 2 * MOVED)  # every slot is written once
            for _ in range(rounds):
                for with_records in (True, False):
                    store.table.arrays.m[JOURNAL] = with_records
                    rates[with_records].append(run(store, source, dice, MOVED))
                store.table.arrays.m[JOURNAL] = 1
                step(1)
    finally:
        source.close()
    share = median(a / b for a, b in zip(rates[True], rates[False], strict=True))
    return [Result("spill 128KiB with records", median(rates[True]), "GB/s", median(rates[False]), "without", share)]


def run(store: KVStore, source: object, dice: object, moved: int) -> float:
    """Store fresh chains, two at a time, until `moved` bytes are on disk; GB/s."""
    import numpy as np

    addresses = source.base + np.arange(2 * CHAIN, dtype=np.uint64) * np.uint64(source.stride)  # type: ignore[attr-defined]
    halves = [addresses[:CHAIN], addresses[CHAIN:]]
    chains = -(-moved // (CHAIN * BLOCK))
    tickets: dict[int, int] = {}
    free, done, begun = [0, 1], 0, 0
    start = time.perf_counter()
    while done < chains or not store.idle:
        while free and begun < chains:
            half = free.pop()
            keys = dice.integers(1, 1 << 63, (CHAIN, 2), np.uint64)  # type: ignore[attr-defined]
            ticket = store.store(keys, source=halves[half], now=0.0)
            if ticket.blocks != CHAIN:
                raise RuntimeError(f"{CHAIN - ticket.blocks} of {CHAIN} blocks were shed")
            tickets[ticket.id] = half
            begun += 1
        ended = store.poll(now=0.0)
        for end in ended:
            free.append(tickets.pop(end.ticket.id))
            done += 1
        if not ended:
            time.sleep(0.0002)
    return chains * CHAIN * BLOCK / (time.perf_counter() - start) / 1e9
