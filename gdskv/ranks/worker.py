"""``Worker``: what one rank holds and moves. It carries out orders and reports; it decides nothing.

Holds host memory, slabs, records and an I/O engine. Serves a slot only under the key that it wrote or found there.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.config import CacheConfig
from gdskv.directory import superblock
from gdskv.errors import ConfigError
from gdskv.extents import OPS
from gdskv.io.base import COPY, NO_SLAB, READ, RESULT, TRANSFER, WRITE, IOEngine
from gdskv.io.choice import open_engine
from gdskv.layout import KVLayout, Namespace
from gdskv.ledger import Ledger
from gdskv.pools.disk import SLAB_HEADER, DiskPool
from gdskv.pools.host import HostPool
from gdskv.ranks import scoreboard
from gdskv.ranks.memory import EngineMemory
from gdskv.ranks.messages import ORDER, Hello, Orders, Report, pack, unpack
from gdskv.ranks.messages import RESULT as OUTCOME
from gdskv.ranks.records import RECORDS, Slots
from gdskv.store import Wrap
from gdskv.table import CHANGE
from gdskv.table.state import CALLER_TO_HOST, DISK_TO_HOST, HOST_TO_CALLER, HOST_TO_DISK

__all__ = ["Landed", "Worker"]

ROUND = 512  # results taken in at a time
KINDS = (HOST_TO_CALLER, CALLER_TO_HOST, DISK_TO_HOST, HOST_TO_DISK)


class Landed(NamedTuple):
    """One block of a ticket for which nothing moves in the engine's memory any more."""

    ticket: int
    address: int
    """The engine's number of the block."""
    ok: bool


class Worker:
    """Pools, files and I/O engine of one rank.

    One thread calls it: `receive` whatever the leader says, `advance` often, and send each `report`. Make it in the
    process that uses it: it opens files and threads.

    Parameters
    ----------
    config : CacheConfig
        With `host_bytes`: every block passes through host memory. Sizes are this rank's.
    layout : KVLayout
    namespace : Namespace
        This rank's.
    memory : EngineMemory
        The engine's own pool; `layout.block_bytes` a block.
    rank : int
    wrap : callable, optional
        Wraps the I/O engine, as tests do.

    Raises
    ------
    ConfigError, DirectoryError, DirectoryBusy
    """

    def __init__(
        self,
        config: CacheConfig,
        layout: KVLayout,
        namespace: Namespace,
        memory: EngineMemory,
        *,
        rank: int = 0,
        wrap: Wrap | None = None,
    ) -> None:
        self.config, self.layout, self.namespace, self.memory, self.rank = config, layout, namespace, memory, rank
        self.digest = namespace.digest(layout)
        sizing = config.sizing(layout)
        if not sizing.host_blocks:
            raise ConfigError(
                f"host_bytes={config.host_bytes} holds no block of {layout.slot_bytes} bytes, and every block passes "
                "through host memory. Set host_bytes to some blocks at least."
            )
        if memory.block_bytes != layout.block_bytes:
            raise ConfigError(
                f"the engine's blocks have {memory.block_bytes} bytes and the layout's {layout.block_bytes}. "
                "Give the layout of this engine's pool."
            )
        self._wrap = wrap
        self._pieces = len(memory.base)
        self._host = HostPool(sizing.host_blocks, layout.slot_bytes, pin=config.device.startswith("cuda"))
        self._results = np.zeros(ROUND, RESULT)
        self._pool: DiskPool | None = None
        self._ledger: Ledger | None = None
        self._counters = {"disagreed": 0, "reopened": -1, "reads_again": 0}
        self._closed = False
        try:
            self._open()
        except BaseException:
            self._close_files()
            self._host.close()
            raise

    # ---- opening

    def _open(self) -> None:
        """Open files and I/O engine anew; what was in host memory counts for nothing."""
        c = self.config
        self.epoch = int.from_bytes(os.urandom(7), "little") | 1
        self._counters["reopened"] += 1
        self._number = 0
        self._started = False
        self._settled = True
        self._over: bool | None = None  # set: this epoch has ended and no order is carried out; True: nor kept on disk
        self._slots = Slots(learns=self.rank == 0)
        blocks, directories, fill, wall = np.zeros(0, np.void), [], 0, time.time_ns()
        why: tuple[str, ...] = ()
        if c.disk_bytes:
            places = c.places(self.namespace.rank)
            self._pool = DiskPool(places, c.disk_bytes, self.layout.slot_bytes, self.digest, c.min_free)
            self._ledger = Ledger(
                self._pool,
                self.namespace.fields(self.layout),
                self.digest,
                now=None,
                wall=wall,
                checksums=c.checksums,
                durable=c.durability == "fsync",
                verify=c.verify == "all",
            )
        self.io = self._engine()
        host = self._host.blocks
        disk = self._pool.blocks if self._pool is not None else 0
        self._own = np.zeros(host + disk, scoreboard.OWN_SLOT)
        self._jobs = np.zeros(4096, scoreboard.JOB)
        self._line = np.zeros(0, np.int32)
        self._serial = self._ready = 0
        self._with_engine = 0
        self._again: deque[int] = deque()
        self._to_submit: deque[NDArray[Any]] = deque()
        self._outcomes: list[tuple[int, int, int]] = []
        self._landed: list[Landed] = []
        if self._ledger is not None and self._pool is not None:
            self._ledger.recover(self._slots)
            blocks, fill, wall = self._slots.blocks, self._ledger.next_fill, self._ledger.wall
            directories = [d.blocks for d in self._pool.directories]
            why = self._ledger.recovered.why
            self._firsts = np.array([*self._pool.first_slot, disk], np.int64)
            at = host + blocks["slot"].astype(np.int64)
            for name in ("k0", "k1", "crc"):
                self._own[name][at] = blocks[name]
        self.hello = Hello(
            self.rank,
            self.epoch,
            wall,
            host,
            directories,
            fill,
            pack(blocks),
            pack(self._slots.again),
            list(self._slots.tenants),
            list(why),
            None if self._ledger is not None and self._ledger.learned_discarded else self._slots.learned(),
        )

    def _engine(self) -> IOEngine:
        slabs, records, paths = [], [], []
        if self._pool is not None and self._ledger is not None:
            slabs, records = self._pool.slabs, self._ledger.slabs()
            paths = [d.path for d in self._pool.directories]
        threads = self._ledger.threads if self._ledger is not None else list
        engine, self.modes = open_engine(self.config, slabs, records, paths, None, threads)
        return self._wrap(engine) if self._wrap is not None else engine

    def _close_files(self) -> None:
        if self._ledger is not None:
            self._ledger.abandon()
        if self._pool is not None:
            self._pool.close()
        self._pool = self._ledger = None

    def _reopen(self, forget: bool) -> None:
        """Once nothing moves: start over, with what the files hold, or with nothing."""
        self.io.close(0.0)
        if self._ledger is not None and self._pool is not None:
            self._ledger.close(self._slots, clean=False, counters=self.io.counters())
            if forget:
                for info in self._pool.directories:  # without its superblock nothing of a namespace is believed
                    (info.path / self.digest.hex() / superblock.NAME).unlink(missing_ok=True)
            self._pool.close()
        self._pool = self._ledger = None
        self._open()

    # ---- messages

    def receive(self, orders: Orders) -> bool:
        """Take the leader's orders in; nothing starts before `advance`. False: they are not for this rank as it is, and
        nothing of them will be done."""
        if self.epoch in orders.retired:
            self._over = orders.forget
            return False
        if self._over is not None or len(orders.epochs) <= self.rank or orders.epochs[self.rank] != self.epoch:
            return False  # for an earlier opening: what it says of slots does not hold here
        if not self._started:
            self._started, self._number = True, orders.number - 1
            if self._ledger is not None:
                self._ledger.next_fill = orders.fill
        if orders.number <= self._number:
            return False  # said twice
        if orders.number != self._number + 1:
            self._over = False  # something was lost on the way: start over
            return False
        self._number, self._settled = orders.number, orders.settled
        if orders.tenants and self._ledger is not None:
            self._ledger.number_tenants(orders.tenants)
        if orders.transfers:
            self._enter(unpack(orders.transfers, ORDER))
        if orders.cancelled:
            self.give_up(unpack(orders.cancelled, np.int64))
        if orders.changes:
            self._change(unpack(orders.changes, CHANGE))
        if orders.learned and self._slots.learns and self._ledger is not None:
            self._slots.learn_from(orders.learned)
            self._ledger.save_learned(self._slots)
        return True

    def _enter(self, batch: NDArray[Any]) -> None:
        top = int(batch["tag"].max())
        if top >= len(self._jobs):
            more = np.zeros(max(2 * len(self._jobs), top + 1), scoreboard.JOB)
            more[: len(self._jobs)] = self._jobs
            self._jobs = more
        scoreboard.enter(batch, self._serial, self._jobs, self._own)
        self._serial += len(batch)
        self._line = np.concatenate([self._line, batch["tag"]])

    def _change(self, changes: NDArray[Any]) -> None:
        """Records as the leader wants them, with this rank's checksums; of a block that is not here, none."""
        own = self._own[self._host.blocks + changes["slot"].astype(np.int64)]
        other = (changes["flags"] & 1 != 0) & ((own["k0"] != changes["k0"]) | (own["k1"] != changes["k1"]))
        self._counters["disagreed"] += int(other.sum())
        changes["flags"][other] = 0
        changes["crc"] = own["crc"]
        self._slots.batches.append(changes)

    def report(self) -> Report:
        """What has become of the orders since the last report."""
        outcomes = np.array(self._outcomes, OUTCOME)
        written, unwritten = np.array(self._slots.done, np.int32), np.array(self._slots.failed, np.int32)
        self._outcomes, self._slots.done, self._slots.failed = [], [], []
        hello = self.hello if not self._started and self._over is None else None
        counters = dict(self._counters) | {f"io_{k}": v for k, v in self.io.counters().items()}
        return Report(
            self.rank, self.epoch, self._number, pack(outcomes), pack(written), pack(unwritten), hello, counters
        )

    # ---- moving

    def sources_ready(self) -> None:
        """The engine has computed the blocks that orders so far are to be taken from."""
        self._ready = self._serial

    @property
    def serial(self) -> int:
        """Orders taken in so far; see `sources_ready_up_to`."""
        return self._serial

    def sources_ready_up_to(self, serial: int) -> None:
        """As `sources_ready`, for the orders taken in when `serial` was read."""
        self._ready = max(self._ready, serial)

    def advance(self) -> list[Landed]:
        """Take in what has landed and start what may start. What of tickets has come to an end since the last call."""
        if self._closed:
            return []
        if self._over is not None and not self.io.in_flight:
            self._end_all()
            landed, self._landed = self._landed, []
            self._reopen(self._over)
            return landed
        more = True
        while more:
            n = self._take_in()
            if self._over is None:
                self._start()
            self._submit()
            more = n == ROUND
        landed, self._landed = self._landed, []
        return landed

    def _end_all(self) -> None:
        for tag in np.flatnonzero(self._jobs["state"] != scoreboard.FREE).tolist():
            self._end(tag, -errno.ECANCELED, 0)

    def _take_in(self) -> int:
        n = self.io.poll(self._results)
        if not n:
            return 0
        results = self._results[:n]
        records = results["tag"] >= RECORDS
        if records.any() and self._ledger is not None:
            self._ledger.finish(self._slots, results[records])
        results = results[~records]
        tags, piece = np.divmod(results["tag"], self._pieces)
        jobs = self._jobs
        copies = OPS[jobs["kind"][tags]] == COPY
        expected = np.where(copies, self.memory.length[piece], self.layout.slot_bytes)
        short = results["moved"] != expected
        jobs["crc"][tags[~copies]] = results["crc"][~copies]
        np.subtract.at(jobs["left"], tags, 1)
        for tag, moved in zip(tags[short].tolist(), results["moved"][short].tolist(), strict=True):
            jobs["moved"][tag] = min(moved, -errno.EIO) if moved >= 0 else moved
        done = np.unique(tags)
        done = done[jobs["left"][done] == 0]
        for tag, moved, crc in zip(
            done.tolist(), jobs["moved"][done].tolist(), jobs["crc"][done].tolist(), strict=True
        ):
            self._end(tag, moved, crc)
        return n

    def _end(self, tag: int, moved: int, crc: int) -> None:
        """An order has come to its end: `moved` is 0, or -errno."""
        job = self._jobs[tag]
        kind, ticket = int(job["kind"]), int(job["ticket"])
        started = job["state"] == scoreboard.STARTED
        if started and kind == DISK_TO_HOST and moved < 0 and moved != -errno.ECANCELED and not job["again"]:
            job["again"], job["moved"] = 1, 0
            self._counters["reads_again"] += 1
            self._describe(np.array([tag], np.int32))
            return
        lied = bool(
            moved == 0 and kind == DISK_TO_HOST and self.config.checksums and crc != self._own["crc"][job["src"]]
        )
        if ticket != scoreboard.NONE and job["state"] != scoreboard.GIVEN_UP:
            self._landed.append(Landed(ticket, int(job["address"]), moved == 0))
        scoreboard.finish(self._jobs, tag, self._own, moved == 0 and not lied, crc)
        self._outcomes.append((tag, lied, moved))

    def _start(self) -> None:
        if len(self._line):
            out = np.empty(len(self._line), np.int32)
            go, no = scoreboard.startable(self._line, self._jobs, self._own, CALLER_TO_HOST, self._ready, out)
            self._line = self._line[: len(out) - go - no]
            for tag in out[len(out) - no :][::-1].tolist():
                self._end(tag, int(self._jobs["moved"][tag]), 0)
            if go:
                self._describe(out[:go])
        if self._ledger is not None:
            while self._slots.batches:
                writes = self._ledger.collect(self._slots, time.time_ns())
                if len(writes):
                    self._to_submit.append(writes.copy())
            writes = self._ledger.collect(self._slots, time.time_ns())  # what makes records durable
            if len(writes):
                self._to_submit.append(writes.copy())

    def _describe(self, tags: NDArray[np.int32]) -> None:
        """Say what the I/O engine is to do for orders that start."""
        jobs = self._jobs[tags]
        ops = OPS[jobs["kind"]]
        memory = self.memory
        for op in (COPY, READ, WRITE):
            chosen = ops == op
            part, names = jobs[chosen], tags[chosen].astype(np.int64)
            if not len(part):
                continue
            host = np.where(part["kind"] == HOST_TO_CALLER, part["src"], part["dst"])
            if op == WRITE:
                host = part["src"]
            address = (self._host.base + host.astype(np.int64) * self._host.stride).astype(np.uint64)
            pieces = self._pieces if op == COPY else 1
            out = np.zeros((len(part), pieces), TRANSFER)
            out["op"], out["slab"] = op, NO_SLAB
            out["tag"] = names[:, None] * self._pieces + np.arange(pieces)
            if op == COPY:
                theirs = memory.base[None, :] + part["address"][:, None] * memory.stride[None, :]
                ours = address[:, None] + memory.offset.astype(np.uint64)[None, :]
                load = (part["kind"] == HOST_TO_CALLER)[:, None]
                out["address"], out["target"] = np.where(load, ours, theirs), np.where(load, theirs, ours)
                out["length"] = memory.length
            else:
                disk = (part["src"] if op == READ else part["dst"]).astype(np.int64) - self._host.blocks
                slab = np.searchsorted(self._firsts, disk, "right") - 1
                out["slab"] = slab[:, None]
                out["offset"] = (SLAB_HEADER + (disk - self._firsts[slab]) * self.layout.slot_bytes)[:, None]
                out["address"], out["length"] = address[:, None], self.layout.slot_bytes
            self._jobs["left"][names] = pieces
            self._to_submit.append(out.reshape(-1))

    def _submit(self) -> None:
        held: list[NDArray[Any]] = []
        while self._to_submit:
            batch = self._to_submit.popleft()
            n = self.io.submit(batch)
            if n < len(batch):
                held.append(batch[n:])  # its queue is full; those behind it may use another
        self._to_submit.extend(held)

    def give_up(self, tags: NDArray[np.int64]) -> None:
        """Do not start these any more. Their tickets learn it at once, as nothing will move for them."""
        launched = []
        for tag in tags.tolist():
            job = self._jobs[tag] if tag < len(self._jobs) else None
            if job is None:
                continue
            if job["state"] == scoreboard.WAITING:
                job["state"] = scoreboard.GIVEN_UP
                if job["ticket"] != scoreboard.NONE:
                    self._landed.append(Landed(int(job["ticket"]), int(job["address"]), False))
            elif job["state"] == scoreboard.STARTED:
                launched += [tag * self._pieces + piece for piece in range(self._pieces)]
        if launched:
            self.io.cancel(np.array(launched, np.int64))

    def stop_tickets(self, tickets: set[int]) -> list[Landed]:
        """What of these tickets has not started does not start; wait for copies in memory that have. Afterwards nothing
        moves for them in the engine's memory."""
        mine = np.isin(self._jobs["ticket"], list(tickets)) & (self._jobs["state"] != scoreboard.FREE)
        tags = np.flatnonzero(mine)
        self.give_up(tags)
        landed = self.advance()
        while (self._jobs["state"][tags] == scoreboard.STARTED).any():
            time.sleep(0.0001)
            landed += self.advance()
        return landed

    @property
    def idle(self) -> bool:
        """Does nothing move, and wait to?"""
        records = self._ledger is None or (self._ledger.settled and not self._slots.batches)
        return records and not (len(self._line) or self.io.in_flight or self._to_submit)

    def close(self, timeout: float = 5.0) -> bool:
        """Stop. Orders that were received are carried out, for at most `timeout` seconds.

        Returns
        -------
        bool
            True if everything landed; else a device holds on to the memory, which stays mapped.
        """
        if self._closed:
            return True
        end = time.monotonic() + timeout
        self.sources_ready()
        while time.monotonic() < end and self._over is None and not self.idle:
            self.advance()
            time.sleep(0.0005)
        clean = self._settled and self._started and self.idle and self._over is None
        self._closed = True
        drained = self.io.close(max(0.0, end - time.monotonic()))
        if self._ledger is not None and self._pool is not None:
            if drained:
                self._ledger.close(self._slots, clean=clean, counters=self.io.counters())
                self._pool.close()
            else:
                self._ledger.abandon()
        if drained:
            self._host.close()
        return drained
