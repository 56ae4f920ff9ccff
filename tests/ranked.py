"""A leader and its workers for tests: the workers in this process or each in one of its own, with engine memory whose
bytes follow from key and rank, so that every byte that comes back can be checked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import gdskv
from gdskv.ranks import EngineMemory, Landed, Leader, Orders, Report, Worker

TOKENS = 16
LAYERS, HEADS, DIM = 3, 2, 32
LAYER_BYTES = HEADS * TOKENS * 2 * DIM * 4
BLOCK = LAYERS * LAYER_BYTES
BLOCKS = 64  # of the engine's own pool
LAYOUT = gdskv.KVLayout.raw(BLOCK, TOKENS)


def namespace(ranks: int, rank: int) -> gdskv.Namespace:
    return gdskv.Namespace(model="test", tp=ranks, rank=rank)


def chain(doc: int, n: int) -> np.ndarray:
    return gdskv.block_keys(np.arange(n * TOKENS) + doc * 1_000_000, TOKENS)


def payload(key: np.ndarray, rank: int) -> np.ndarray:
    """The bytes that a rank's block of a key must hold."""
    words = np.arange(BLOCK // 8, dtype=np.uint64) * key[0] + key[1] + np.uint64(rank * 7919)
    return words.view(np.uint8)


class Rank:
    """One worker with the engine's memory that it serves: a tensor per layer over one storage, 64-byte aligned."""

    def __init__(self, folder: Path, rank: int, ranks: int, settings: dict[str, Any]) -> None:
        place = folder / f"rank{rank}"
        place.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        storage = torch.zeros(LAYERS * BLOCKS * LAYER_BYTES // 4 + 64)
        start = (-storage.data_ptr() % 64) // 4 + 16
        flat = storage[start : start + LAYERS * BLOCKS * LAYER_BYTES // 4]
        self.layers = flat.view(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)
        config = gdskv.CacheConfig(directories=[place], min_free=0, **settings)
        memory = EngineMemory(list(self.layers), BLOCKS)
        self.worker = Worker(config, LAYOUT, namespace(ranks, rank), memory, rank=rank)
        self.landed: list[Landed] = []
        self.slow = False

    def fill(self, block: int, key: np.ndarray) -> None:
        data = torch.from_numpy(payload(key, self.rank).copy()).view(torch.float32)
        self.layers[:, block] = data.view(LAYERS, HEADS, TOKENS, 2 * DIM)

    def wrong(self, blocks: list[int], keys: np.ndarray) -> int:
        """Blocks that do not hold their key's bytes."""
        found = (self.layers[:, b].contiguous().view(torch.uint8).numpy().reshape(-1) for b in blocks)
        return sum(not np.array_equal(f, payload(k, self.rank)) for f, k in zip(found, keys, strict=True))

    def step(self, orders: Orders) -> Report:
        if not self.slow:
            self.worker.receive(orders)
            self.worker.sources_ready()
        self.landed += self.worker.advance()
        return self.worker.report()

    def take_landed(self) -> list[Landed]:
        landed, self.landed = self.landed, []
        return landed


def serve(pipe: Connection, folder: Path, rank: int, ranks: int, settings: dict[str, Any]) -> None:
    """The life of a rank in a process of its own: messages in, reports out."""
    here = Rank(folder, rank, ranks, settings)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        if name == "step":
            report = here.step(msgspec.msgpack.decode(arguments[0], type=Orders))
            pipe.send(msgspec.msgpack.encode(report))
        elif name == "close":
            pipe.send(here.worker.close())
            return
        elif name == "slow":
            here.slow = arguments[0]
            pipe.send(None)
        else:
            pipe.send(getattr(here, name)(*arguments))


class Process:
    """A rank in another process."""

    def __init__(self, start: str, *arguments: Any) -> None:
        context = multiprocessing.get_context(start)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any) -> Any:
        self.pipe.send((name, *arguments))
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()


class Direct:
    """A rank in this process, messages still as bytes."""

    def __init__(self, *arguments: Any) -> None:
        self.rank = Rank(*arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "step":
            return msgspec.msgpack.encode(self.rank.step(msgspec.msgpack.decode(arguments[0], type=Orders)))
        if name == "close":
            return self.rank.worker.close()
        if name == "slow":
            self.rank.slow = arguments[0]
            return None
        return getattr(self.rank, name)(*arguments)


class Engine:
    """Leader, ranks, and the steps between them. `start`: how processes of their own begin, if they have some."""

    def __init__(
        self, folder: Path, ranks: int, *, start: str = "", host: int = 8, disk: int = 32, **more: Any
    ) -> None:
        slot = LAYOUT.slot_bytes
        self.settings = {"host_bytes": host * slot, "disk_bytes": disk * slot, "io_timeout": 5.0, **more}
        self.folder, self.count, self.start = folder, ranks, start
        self.now = 1.0
        self.leader = self.new_leader()
        self.ranks: list[Any] = [self.new_rank(rank) for rank in range(ranks)]
        self.done: dict[int, gdskv.Done] = {}
        self.missing: set[int] = set()  # ranks that get no messages

    def new_leader(self) -> Leader:
        config = gdskv.CacheConfig(directories=[self.folder], **self.settings)
        return Leader(config, LAYOUT, namespace(self.count, 0), ranks=self.count, now=self.now)

    def new_rank(self, rank: int) -> Any:
        arguments = (self.folder, rank, self.count, self.settings)
        return Process(self.start, *arguments) if self.start else Direct(*arguments)

    def replace(self, rank: int) -> None:
        self.ranks[rank] = self.new_rank(rank)

    def step(self, seconds: float = 0.01) -> None:
        self.now += seconds
        for done in self.leader.poll(now=self.now):
            self.done[done.ticket.id] = done
        message = msgspec.msgpack.encode(self.leader.orders(now=self.now))
        for number, rank in enumerate(self.ranks):
            if number not in self.missing:
                report = msgspec.msgpack.decode(rank.call("step", message), type=Report)
                self.leader.receive(report, now=self.now)

    def until(self, true: Any, steps: int = 3000) -> None:
        for _ in range(steps):
            if true():
                return
            self.step()
            time.sleep(0.001)
        raise AssertionError(f"it does not come to that: {self.leader.stats()}")

    def opened(self) -> None:
        self.until(lambda: self.leader.open)

    def drained(self) -> None:
        def nothing_left() -> bool:
            self.leader.flush()
            return self.leader.idle

        self.until(nothing_left)
        self.step()

    def put(self, doc: int, n: int, first: int = 0, **more: Any) -> gdskv.Done:
        """Compute a document in the engine's blocks from `first` on, and store it."""
        keys = chain(doc, n)
        for i, key in enumerate(keys):
            for rank in self.ranks:
                rank.call("fill", first + i, key)
        taken = self.leader.take(keys, source=range(first, first + n), now=self.now, **more)
        assert taken is not None
        self.until(lambda: taken[0].id in self.done)
        return self.done.pop(taken[0].id)

    def get(self, doc: int, n: int, first: int = 32, start: int = 0) -> int:
        """Load a document; blocks that came, from the first, each of which every rank has checked byte by byte."""
        keys = chain(doc, n)
        self.leader.match(keys, now=self.now)
        load = self.leader.load(keys, start=start, into=range(first, first + n - start), now=self.now)
        failed = set(load.failed.tolist())
        if load.ticket is not None:
            self.until(lambda: load.ticket.id in self.done)
            failed |= set(self.done.pop(load.ticket.id).failed.tolist())
        good = min(failed, default=n - start)
        for number, rank in enumerate(self.ranks):
            if number not in self.missing:
                blocks = list(range(first, first + good))
                assert rank.call("wrong", blocks, keys[start : start + good]) == 0, "wrong bytes"
        return good

    def tiers(self, doc: int, n: int) -> list[int]:
        return self.leader.match(chain(doc, n), now=self.now).tolist()

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError):
                rank.call("close")
