"""KVStore at random, over an engine that works late, out of order and with faults: what is loaded is right, the memory
of a ticket that is done is the caller's again, and nothing stays behind."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import Fail, FaultEngine, Flip, Short
from faulty import aligned
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, config, payload, trust
from modelled import document
from shuffled import ShuffledEngine
from test_model import IN_MEMORY

import gdskv
from gdskv.io.base import READ
from gdskv.store import Found, Ticket

SIZES = [(1, 1), (1, 0), (0, 1), (4, 0), (0, 8), (4, 16), (8, 8), (2, 32)]
MINE = 0xEE  # what the caller writes into memory that is his again


class Counts:
    """What all runs have seen."""

    def __init__(self) -> None:
        self.steps = self.stored = self.loaded = self.failed = self.cancelled = 0


@pytest.fixture(scope="module")
def counts(summary: list[str]) -> Iterator[Counts]:
    c = Counts()
    yield c
    summary.append(
        f"store at random: {c.steps:,} steps, {c.stored:,} blocks stored, {c.loaded:,} loaded and verified, "
        f"{c.failed:,} reported as failed, {c.cancelled:,} tickets cancelled: 0 wrong bytes"
    )


class Run:
    """A store, and an engine's memory around it."""

    def __init__(self, seed: int, folder: Path, counts: Counts) -> None:
        self.rng, self.counts = random.Random(seed), counts
        host, disk = self.rng.choice(SIZES)
        self.read_faults, self.write_faults = self.rng.choice([0, 0, 0.2]), self.rng.choice([0, 0, 0.1])
        settings = config(
            folder,
            0,
            host,
            disk,
            write_queue=self.rng.choice([2, 4096]),
            read_threads=1,
            write_threads=1,
            policy=self.rng.choice(["lru", "hazard"]),
        )
        self.crooked = host > 0
        self.now = 0.0
        self.kv = gdskv.KVStore(settings, LAYOUT, NAMESPACE, io=self._wrap)
        trust(self.kv)
        self.found: list[tuple[Found, np.ndarray]] = []
        self.stores: dict[int, tuple[Ticket, np.ndarray]] = {}
        self.loads: dict[int, tuple[Ticket, np.ndarray, np.ndarray]] = {}
        self.idle: list[np.ndarray] = []
        self.stored: set[bytes] = set()

    def _wrap(self, engine: Any) -> ShuffledEngine:
        return ShuffledEngine(
            FaultEngine(engine, self._fault), self.rng, self.rng.choice([0, 0.5]), self.rng.choice([2, 4096])
        )

    def _fault(self, transfer: np.void) -> Fail | Short | Flip | None:
        read = int(transfer["op"]) == READ
        if self.rng.random() >= (self.read_faults if read else self.write_faults):
            return None
        return self.rng.choice([Fail(), Short(100), Flip(9)] if read else [Fail(), Fail(28)])

    def chain(self) -> np.ndarray:
        ids = document(self.rng.randrange(10), TOKENS * self.rng.randint(1, 6))
        return gdskv.block_keys(ids, TOKENS, namespace=self.kv.digest)

    def memory(self, n: int) -> np.ndarray:
        if self.crooked and self.rng.random() < 0.3:
            return np.full(n * BLOCK + 8, MINE, np.uint8)[8:].reshape(n, BLOCK)
        return aligned(n)

    # ---- steps

    def store(self) -> None:
        keys = self.chain()
        memory = self.memory(len(keys))
        for i, key in enumerate(keys):
            memory[i] = payload(key)
        wish = self.rng.choice([None, gdskv.Retention(ttl=5), gdskv.Retention(ttl=3, on_expiry="forget")])
        ticket = self.kv.store(keys, source=memory, retention=wish, now=self.now)
        assert ticket.blocks <= len(keys)
        self.counts.stored += ticket.blocks
        self.stored.update(key.tobytes() for key in keys[: ticket.blocks])
        self.stores[ticket.id] = (ticket, memory)

    def match(self) -> None:
        keys = self.chain()
        found = self.kv.match(keys, now=self.now)
        assert all(key.tobytes() in self.stored for key in keys[: found.length])
        self.found.append((found, keys))

    def load(self) -> None:
        if self.found:
            found, keys = self.found.pop(self.rng.randrange(len(self.found)))
            memory = self.memory(max(1, found.length))
            ticket = self.kv.load(found, into=memory, now=self.now)
            if isinstance(ticket, Ticket):
                self.loads[ticket.id] = (ticket, memory, keys)

    def release(self) -> None:
        if self.found:
            self.kv.release(self.found.pop(self.rng.randrange(len(self.found)))[0])

    def cancel(self) -> None:
        under_way = [t[0] for t in [*self.stores.values(), *self.loads.values()]]
        if under_way:
            self.kv.cancel(self.rng.choice(under_way))
            self.counts.cancelled += 1

    def prefetch(self) -> None:
        self.kv.prefetch(self.chain(), now=self.now)

    def tick(self) -> None:
        self.now += self.rng.choice([0.1, 1.1, 6.0])

    def poll(self) -> None:
        for done in self.kv.poll(now=self.now):
            lost = set(done.failed.tolist())
            self.counts.failed += len(lost)
            if done.ticket.id in self.stores:
                _, memory = self.stores.pop(done.ticket.id)
            else:
                ticket, memory, keys = self.loads.pop(done.ticket.id)
                for i in set(range(ticket.blocks)) - lost:
                    assert np.array_equal(memory[i], payload(keys[i])), "wrong bytes"
                    self.counts.loaded += 1
            memory[:] = MINE
            self.idle.append(memory)

    def finish(self) -> None:
        while self.found:
            self.release()
        for _ in range(20_000):
            self.poll()
            if self.kv.idle and not self.stores and not self.loads:
                break
        assert not self.stores and not self.loads, "a ticket is stuck"
        assert all((memory == MINE).all() for memory in self.idle), "bytes moved in memory that was the caller's again"
        s = self.kv.stats()
        assert s["host_leased"] == s["disk_leased"] == s["in_flight"] == s["deferred"] == 0
        assert s["host_free"] + s["host_used"] == s["host_blocks"]
        self.kv.check()


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_calls(seed: int, counts: Counts) -> None:
    with tempfile.TemporaryDirectory(prefix="gdskv-model-", dir=IN_MEMORY or None) as folder:
        run = Run(seed, Path(folder), counts)
        calls = [run.store, run.match, run.load, run.release, run.cancel, run.prefetch, run.tick, run.poll]
        with run.kv:
            for _ in range(300):
                run.rng.choices(calls, [8, 8, 8, 2, 2, 2, 2, 12])[0]()
                run.kv.check()
                counts.steps += 1
            run.finish()
