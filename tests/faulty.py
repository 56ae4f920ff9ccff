"""For tests that choose what goes wrong and when: faults by kind of transfer, and transfers held until let go."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from doubles import Fail, FaultEngine, Flip, RecorderEngine, Short
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, tokens

import gdskv
from gdskv.io.base import COPY, READ, RESULT, TRANSFER, WRITE, IOEngine, Results, Tags, Transfers

__all__ = ["COPY", "READ", "WRITE", "Bench", "HoldEngine"]

PAYLOADS = 0  # slab of the blocks; the later ones hold records


class HoldEngine:
    """Keeps transfers of the operations in `held` until `let` is called, as a device does that takes its time."""

    def __init__(self, inner: IOEngine) -> None:
        self.inner = inner
        self.held: set[int] = set()
        self._kept: list[np.void] = []
        self._done: deque[np.void] = deque()

    def hold(self, *ops: int) -> None:
        """Keep transfers of these operations from now on."""
        self.held.update(ops)

    def let(self, *ops: int) -> None:
        """Let them go, and those to come; all without arguments."""
        self.held.difference_update(ops or (READ, WRITE, COPY))

    def waiting(self, op: int) -> int:
        """Transfers kept."""
        return sum(int(t["op"]) == op for t in self._kept)

    def submit(self, transfers: Transfers) -> int:
        if not self.held and not self._kept:
            return self.inner.submit(transfers)
        self._kept.extend(transfers.copy())
        self._release()
        return len(transfers)

    def _release(self) -> None:
        free = [t for t in self._kept if int(t["op"]) not in self.held]
        if free:
            accepted = self.inner.submit(np.array(free, TRANSFER))
            gone = {int(t["tag"]) for t in free[:accepted]}
            self._kept = [t for t in self._kept if int(t["tag"]) not in gone]

    def poll(self, out: Results) -> int:
        self._release()
        n = min(len(out), len(self._done))
        for i in range(n):
            out[i] = self._done.popleft()
        return n + self.inner.poll(out[n:])

    def cancel(self, tags: Tags) -> int:
        wanted = set(np.asarray(tags).tolist())
        dropped = [t for t in self._kept if int(t["tag"]) in wanted]
        self._kept = [t for t in self._kept if int(t["tag"]) not in wanted]
        self._done.extend(np.array((t["tag"], -errno.ECANCELED, 0, 0), RESULT)[()] for t in dropped)
        return len(dropped) + self.inner.cancel(tags)

    @property
    def in_flight(self) -> int:
        return self.inner.in_flight + len(self._kept) + len(self._done)

    def counters(self) -> dict[str, int]:
        return self.inner.counters()

    def path(self, slab: int) -> str:
        return self.inner.path(slab)

    def close(self, timeout: float) -> bool:
        self.let()
        self._release()
        return self.inner.close(timeout)


class Bench:
    """A manager, or a store, with an engine that fails and waits as told, and records."""

    def __init__(self, folder: Path, *, store: bool = False, wall: float | None = None, **settings: Any) -> None:
        self._faults: list[tuple[int, int, Fail | Short | Flip]] = []
        self._again: dict[int, Fail | Short | Flip] = {}
        self.folder = folder
        if store:
            settings.setdefault("device", 0)
        self._config = config(folder, **settings)
        kind = gdskv.KVStore if store else gdskv.BlockManager
        self.done: list[gdskv.store.Done] = []
        self.kv: Any = kind(self._config, LAYOUT, NAMESPACE, io=self._wrap, wall=wall)
        self.engine = Engine(self.kv)

    def _wrap(self, engine: Any) -> Any:
        self.recorder = RecorderEngine(engine)
        self.hold = HoldEngine(FaultEngine(self.recorder, self._rule))
        return self.hold

    def _rule(self, transfer: np.void) -> Fail | Short | Flip | None:
        if int(transfer["slab"]) > PAYLOADS:
            return None
        if int(transfer["op"]) == READ and int(transfer["tag"]) in self._again:
            return self._again.pop(int(transfer["tag"]))
        for i, (op, times, fault) in enumerate(self._faults):
            if op == int(transfer["op"]) and times:
                self._faults[i] = (op, times - 1, fault)
                if op == READ and not isinstance(fault, Flip):  # such a read is tried once more
                    self._again[int(transfer["tag"])] = fault
                return fault
        return None

    def fail(self, op: int, fault: Fail | Short | Flip, times: int = 1) -> None:
        """The next transfers of payloads by this operation go wrong, reads at their second try as well."""
        self._faults.append((op, times, fault))

    def mend(self) -> None:
        """Nothing goes wrong any more."""
        self._faults = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.mend()
        self.hold.let()
        self.kv.close()

    @property
    def stats(self) -> dict[str, int]:
        return dict(self.kv.stats())

    def tick(self, seconds: float = 1.0) -> None:
        """Time goes by."""
        self.engine.now += seconds
        self.kv.poll(now=self.engine.now)

    @property
    def store(self) -> gdskv.KVStore:
        """The store, alone or under the manager."""
        return self.kv if isinstance(self.kv, gdskv.KVStore) else self.kv.store

    def poll(self) -> None:
        """One poll; tickets that are done go to `done`."""
        self.done += self.kv.poll(now=self.engine.now) or []

    def polls(self, n: int = 30) -> None:
        """Polls enough for whatever can land to land."""
        for _ in range(n):
            self.poll()
            time.sleep(0.001)

    def drain(self) -> None:
        """Poll until nothing is in flight."""
        for _ in range(20_000):
            self.poll()
            if self.store.idle:
                return
            time.sleep(0.0002)
        raise AssertionError(f"transfers are stuck: {self.stats}")

    def finished(self) -> gdskv.store.Done:
        """The one ticket that is done once everything has landed."""
        self.drain()
        (done,), self.done = self.done, []
        return done

    def to_disk(self, doc: int, blocks: int) -> None:
        """Let a document be on disk alone."""
        self.engine.run(doc, blocks * TOKENS)
        other = 1000
        while sum(self.found(doc, blocks)[:2]):
            self.engine.run(other, self.kv.sizing.device_blocks * TOKENS)
            other += 1
        self.drain()
        assert self.found(doc, blocks).disk == blocks * TOKENS

    def found(self, doc: int, blocks: int) -> gdskv.manager.Matched:
        """What a request for the document would find."""
        return self.kv.match(tokens(doc, blocks * TOKENS), now=self.engine.now)

    def settled(self) -> None:
        """Everything lands; then nothing may be leased or lost."""
        self.mend()
        self.hold.let()
        self.drain()
        self.kv.check()
        s = self.stats
        for tier in ("device", "host", "disk"):
            assert s[f"{tier}_leased"] == 0, s
            if tier == "disk" and s.get("directories_read_only"):
                continue  # its free slots are not on offer until it is tried again
            assert s[f"{tier}_free"] + s[f"{tier}_used"] + s[f"{tier}_bad"] == s[f"{tier}_blocks"], s


def slab(folder: Path) -> Path:
    """The file of the blocks."""
    (file,) = (p for p in Path(folder).rglob("blocks.slab"))
    return file


def aligned(n: int) -> np.ndarray:
    """Memory for `n` blocks that direct I/O takes."""
    raw = np.zeros(n * BLOCK + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + n * BLOCK].reshape(n, BLOCK)


def disk_offset(store: gdskv.KVStore, doc: int, index: int) -> int:
    """Where in that file a block of a document lies."""
    keys = gdskv.block_keys(tokens(doc, (index + 1) * TOKENS), TOKENS, namespace=NAMESPACE.digest(LAYOUT))
    entry = store.table.match(keys)[0][index]
    slot = int(store.table.arrays.e["slot"][entry, 2]) - store.table.base(2)
    return int(store.disk_pool.locate(slot)[1])


def rewrite(folder: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Change the file of the blocks behind the store's back."""
    with open(slab(folder), "r+b") as file:
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)


def read_block(folder: Path, offset: int) -> bytes:
    """A block of that file."""
    with open(slab(folder), "rb") as file:
        file.seek(offset)
        return file.read(BLOCK)
