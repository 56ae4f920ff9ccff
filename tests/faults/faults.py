"""What the fault suites share: a workload, a check of every block that a directory brings back, and the books."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, payload, trust

import gdskv
from gdskv.table import DISK

BOOKS: dict[str, Counter[str]] = {}
"""Per kind of fault: how many were injected, blocks that came back, were found out, were served wrong."""
NOTES: list[str] = []
"""What ran in which way, for the summary."""


def book(kind: str, **counts: int) -> None:
    """Add to the books of a kind of fault."""
    BOOKS.setdefault(kind, Counter()).update(counts)


class Audit(NamedTuple):
    """What became of the blocks that a directory's records told of."""

    right: set[tuple[int, int]]
    """Keys of blocks that were served, and were right."""
    refused: int
    """Blocks that were found out to be stale or broken, and were a miss."""
    wrong: int


def settings(*directories: Path, disk: int = 48, **more: object) -> gdskv.CacheConfig:
    """A small cache, whose slots change hands often."""
    values: dict[str, object] = {
        "device_bytes": 8 * BLOCK,
        "host_bytes": 8 * BLOCK,
        "disk_bytes": disk * BLOCK,
        "directories": directories,
        "min_free": 0,
        "read_threads": 1,
        "write_threads": 2,
    }
    return gdskv.CacheConfig(**(values | more))


def work(engine: Engine, rng: np.random.Generator, requests: int | None = None, docs: int = 24) -> None:
    """Serve random requests, some retained, for ever unless told how many."""
    served = 0
    while requests is None or served < requests:
        served += 1
        retention = None
        if rng.random() < 0.3:
            ttl = float(rng.integers(1, 50))
            retention = gdskv.Retention(ttl=ttl, priority=int(rng.integers(0, 101)), tenant=str(rng.integers(3)))
        engine.run(int(rng.integers(docs)), int(rng.integers(1, 9)) * TOKENS, retention=retention)
        if rng.random() < 0.1:
            engine.kv.prefetch(np.arange(8 * TOKENS) + int(rng.integers(docs)) * 1_000_000, now=engine.now)


def keys_on_disk(store: gdskv.KVStore) -> np.ndarray:
    """Keys of all blocks that the disk tier holds, shape (n, 2)."""
    e = store.table.arrays.e
    there = e[e["slot"][:, DISK] >= 0]
    return np.stack([there["k0"], there["k1"]], axis=1)


def audit(store: gdskv.KVStore, now: float = 0.0) -> Audit:
    """Load every block on disk, one by one, and compare it with what its key must hold."""
    keys = keys_on_disk(store)
    memory = np.frombuffer(_aligned(max(1, len(keys)) * BLOCK), np.uint8).reshape(-1, BLOCK)
    tickets = {}
    for i, key in enumerate(keys):
        found = store.match(key[None], now=now)
        if found.length:
            ticket = store.load(found, into=memory[i : i + 1], now=now)
            assert not isinstance(ticket, gdskv.Rejected)
            tickets[ticket.id] = i
    right, refused, wrong = set(), 0, 0
    end = time.monotonic() + 60
    while tickets:
        for done in store.poll(now=now):
            i = tickets.pop(done.ticket.id)
            if len(done.failed):
                refused += 1
            elif np.array_equal(memory[i], payload(keys[i])):
                right.add((int(keys[i][0]), int(keys[i][1])))
            else:
                wrong += 1
        assert time.monotonic() < end, store.stats()
    return Audit(right, refused, wrong)


def _aligned(size: int) -> memoryview:
    import mmap

    return memoryview(mmap.mmap(-1, size))


def open_store(config: gdskv.CacheConfig, namespace: gdskv.Namespace = NAMESPACE, **more: object) -> gdskv.KVStore:
    """The host and disk tiers of `settings`, at the wall clock of all suites."""
    return gdskv.KVStore(config, LAYOUT, namespace, wall=1000.0, **more)


def open_engine(config: gdskv.CacheConfig, **more: object) -> Engine:
    """A manager and the engine that drives it."""
    engine = Engine(gdskv.BlockManager(config, LAYOUT, NAMESPACE, wall=1000.0, **more), check=False)
    trust(engine.kv.store)
    return engine


def die(store: gdskv.KVStore) -> None:
    """Leave the files as a killed process would."""
    store._open = False
    store.io.close(5.0)
    if store.ledger is not None:
        store.ledger.abandon()
    store._close_pools()
