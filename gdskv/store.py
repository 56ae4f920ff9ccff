"""``KVStore``: the host and disk tiers under somebody else's device pool; what engines plug into.

Ties the table, the pools and the I/O engine together. Never waits for a device outside `close`; must not know engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv import extents
from gdskv.config import CacheConfig, Sizing
from gdskv.directory import superblock
from gdskv.errors import ConfigError, GdskvError, StoreClosed
from gdskv.io.base import ALIGNMENT, RESULT, IOEngine
from gdskv.io.choice import open_engine
from gdskv.io.courtesy import in_call
from gdskv.io.modes import Mode
from gdskv.io.null import NullEngine
from gdskv.keys import as_keys
from gdskv.layout import KVLayout, Namespace
from gdskv.ledger import Ledger, Records
from gdskv.pace import Pace
from gdskv.pools.device import DevicePool
from gdskv.pools.disk import DiskPool
from gdskv.pools.host import HostPool
from gdskv.pools.pages import DevicePages
from gdskv.pump import ROUND, Pump
from gdskv.recording import Recorder
from gdskv.retention import Retention
from gdskv.table import DEVICE, DISK, HOST, BlockTable, warm
from gdskv.table.state import CALLER_TO_HOST, HOST_TO_CALLER, NONE

__all__ = ["Done", "Found", "KVStore", "Rejected", "Ticket", "nanoseconds"]

Keys = NDArray[np.uint64]
Wrap = Callable[[IOEngine], IOEngine]


_NO_WISH = Retention()


class Rejected(NamedTuple):
    """Why a request was not taken, decided at once: what is short, how much there is, how much is in use."""

    reason: str
    limit: int
    in_use: int


class Found(NamedTuple):
    """What `KVStore.match` found, held until `load` or `release`."""

    length: int
    """Blocks, from the first."""
    tier: NDArray[np.int8]
    """Per block: 1 host, 2 disk."""
    entries: NDArray[np.int32]
    slots: NDArray[np.int32]
    id: int


class Ticket(NamedTuple):
    """A batch of transfers on its way."""

    id: int
    blocks: int
    """Blocks that the ticket stands for; of a `store`, the leading ones that will be cached."""


class Done(NamedTuple):
    """A ticket whose transfers have all landed: the caller's memory is his again."""

    ticket: Ticket
    bytes: int
    failed: NDArray[np.int64]
    """Indices of blocks that did not arrive: to be computed again."""


class Wish(NamedTuple):
    """A request's retention, per block."""

    priority: NDArray[np.uint8]
    ttl: NDArray[np.int64]
    """Nanoseconds; 0 = none."""
    forget: bool
    tenant: int


class _Pending(NamedTuple):
    ticket: Ticket
    expected: int
    failed: list[int]
    late: int
    """ns; then what of it has not started does not start any more."""
    from_disk: int
    """Blocks that were on disk when it began."""


def nanoseconds(now: float) -> int:
    """Seconds, as the callers give them, to the table's nanoseconds."""
    return round(now * 1e9)


class KVStore:
    """Host and disk tiers for an engine that owns its device memory.

    One thread calls it, and no call waits for a disk: each plans in memory, hands transfers over and returns.

    Parameters
    ----------
    config : CacheConfig
    layout : KVLayout
        Shape of a block; `layout.slot_bytes` is what each block takes in every tier.
    namespace : Namespace
        What makes KV bytes interchangeable; another namespace never sees these blocks.
    now : float
        Seconds on the caller's clock, which must not be another clock in later calls.
    wall : float, optional
        The wall clock at that instant, seconds since 1970: deadlines outlive the process by it. By default the
        system's, asked once, here.
    io : None, "null", or callable
        None: the engine for this node. "null": decisions only, nothing is opened and no bytes move. A callable wraps
        the engine, as tests do.
    device_pool : DevicePool, optional
        Set by `BlockManager`: the device tier then belongs to the same table.
    device_pages : DevicePages, optional
        The engine's own paged KV on a GPU. `load` and `store` then take page numbers too, and move such blocks through
        staging buffers there (`CacheConfig.staging_bytes`).

    Raises
    ------
    ConfigError, DirectoryError, DirectoryBusy
    """

    def __init__(
        self,
        config: CacheConfig,
        layout: KVLayout,
        namespace: Namespace,
        *,
        now: float = 0.0,
        wall: float | None = None,
        io: Wrap | str | None = None,
        device_pool: DevicePool | None = None,
        device_blocks: int = 0,
        device_pages: DevicePages | None = None,
    ) -> None:
        self.config, self.layout, self.namespace = config, layout, namespace
        self.digest = namespace.digest(layout)
        self.device_pages = device_pages
        if device_pages is not None and device_pages.layout != layout:
            raise ConfigError(
                f"device_pages hold blocks of {device_pages.layout}, the store of {layout}. Use one layout."
            )
        self.sizing: Sizing = config.sizing(layout)
        self._open = False
        self._owner = os.getpid()
        if not (self.sizing.host_blocks or self.sizing.disk_blocks or device_blocks):
            raise ConfigError("no tier has a size: set host_bytes, disk_bytes or device_bytes.")
        self.host_pool: HostPool | None = None
        self.disk_pool: DiskPool | None = None
        self.ledger: Records | None = None
        self.recorder: Recorder | None = None
        """Writes down what is asked, where `record` names a file."""
        self.modes: list[Mode] = []
        """How the bytes of each directory move, and why."""
        self.io: IOEngine
        try:
            if config.record is not None:
                self.recorder = Recorder(config.record, config.record_bytes, layout.tokens_per_block)
            regions = self._open_parts(io, device_pool, now, time.time() if wall is None else wall)
        except BaseException:
            if self.recorder is not None:
                self.recorder.close()
            if self.ledger is not None:
                self.ledger.abandon()
            self._close_pools()
            raise
        warm(RESULT)
        disk_blocks = sum(regions)
        self.table = BlockTable(
            device_blocks,
            self.sizing.host_blocks,
            disk_blocks,
            write_limit=config.write_queue,
            host_clean=config.host_clean,
            policy=config.policy,
            memory_policy=config.memory_policy,
            spill=config.spills,
            write_budget=config.budget_per_hour() / layout.slot_bytes,
            protect_unexpired=config.protect_unexpired,
            checksums=config.checksums and io != "null",
            directories=regions,
            stripe_width=config.stripe_width,
            events=config.events,
            retained_limit=(
                budget := int(config.retained_fraction * max(device_blocks, self.sizing.host_blocks, disk_blocks))
            ),
            tenant_limit=int(config.tenant_fraction * budget),
        )
        lengths = np.full(extents.KINDS, layout.slot_bytes, np.int64)
        lengths[[HOST_TO_CALLER, CALLER_TO_HOST]] = layout.block_bytes
        pools = np.zeros((2, 3), np.int64)
        for row, pool, tier in ((0, device_pool, DEVICE), (1, self.host_pool, HOST)):
            pools[row, 0] = self.table.base(tier)
            if pool is not None:
                pools[row, 1:] = pool.base, pool.stride
        firsts = [sum(regions[:i]) for i in range(len(regions))] or [0]
        slabs = np.array([*firsts, max(disk_blocks, 1)], np.int64)
        self._moving = self._new_pump(lengths, pools, slabs)
        self._pending: dict[int, _Pending] = {}
        self._done: list[Done] = []
        self._next_ticket = 0
        self.timeout = nanoseconds(config.io_timeout)
        self.pace = Pace()
        self._found: dict[int, Found] = {}
        self._next_found = 0
        # The caller's memory and where its blocks begin, per ticket: it must not go while bytes move in it
        self._memory: dict[int, tuple[Any, NDArray[np.uint64]]] = {}
        self._staged = 0
        self._open = True
        self.table.advance(nanoseconds(now))
        if self.ledger is not None:
            try:
                self.ledger.recover(self.table)
            except BaseException:
                self._open = False
                if self.recorder is not None:
                    self.recorder.close()
                self.io.close(1.0)
                self.ledger.abandon()
                self._close_pools()
                raise

    def _open_parts(
        self, io: Wrap | str | None, device_pool: DevicePool | None, now: float, wall: float
    ) -> Sequence[int]:
        """Open pools, records and I/O engine; disk slots per directory."""
        config, layout = self.config, self.layout
        regions = [self.sizing.disk_blocks] if self.sizing.disk_blocks else []
        if regions and io != "null":
            self.disk_pool = DiskPool(
                config.places(self.namespace.rank), config.disk_bytes, layout.slot_bytes, self.digest, config.min_free
            )
            regions = [d.blocks for d in self.disk_pool.directories]
            self.ledger = Ledger(
                self.disk_pool,
                self.namespace.fields(layout),
                self.digest,
                now=nanoseconds(now),
                wall=nanoseconds(wall),
                checksums=config.checksums,
                durable=config.durability == "fsync",
                verify=config.verify == "all",
            )
        if self.sizing.host_blocks and io != "null":
            self.host_pool = HostPool(self.sizing.host_blocks, layout.slot_bytes, pin=config.device.startswith("cuda"))
        self.io = self._engine(io, device_pool)
        return regions

    def _new_pump(self, lengths: NDArray[np.int64], pools: NDArray[np.int64], slabs: NDArray[np.int64]) -> Pump:
        return Pump(self.table, self.io, self.ledger, lengths, pools, slabs)

    def _engine(self, io: Wrap | str | None, device_pool: DevicePool | None) -> IOEngine:
        c = self.config
        if io == "null":
            return NullEngine(queue_depth=c.queue_depth)
        if isinstance(io, str):
            raise ConfigError(f'io="{io}" is not an engine. Leave it out, or give "null" for decisions only.')
        slabs, records, places = [], [], []
        if self.disk_pool is not None and isinstance(self.ledger, Ledger):
            slabs, records = self.disk_pool.slabs, self.ledger.slabs()
            places = [d.path for d in self.disk_pool.directories]
        threads = self.ledger.threads if isinstance(self.ledger, Ledger) else list
        engine, self.modes = open_engine(c, slabs, records, places, device_pool, threads, self.device_pages)
        return io(engine) if io is not None else engine

    # ---- what an engine calls

    @in_call
    def match(self, keys: Keys, *, now: float) -> Found:
        """Longest run of keys, from the first, that can be served; it is held until `load` or `release`.

        Parameters
        ----------
        keys : ndarray of uint64, shape (n, 2)
        now : float
            Seconds.
        """
        found = self._hold(keys, now, asks=True)
        if self.recorder is not None:
            self.recorder.add(as_keys(keys), len(keys) * self.layout.tokens_per_block, now)
        return found

    def _hold(self, keys: Keys, now: float, *, asks: bool) -> Found:
        self._begin_call(now)
        entries, tiers, slots = self.table.find(as_keys(keys), asks=asks)
        self._next_found += 1
        found = Found(len(slots), tiers, entries, slots, self._next_found)
        if found.length:
            self._found[found.id] = found
        return found

    def peek(self, keys: Keys, *, now: float) -> NDArray[np.int8]:
        """Tier of each block of the longest run that can be served, as `match` would find it (1 host, 2 disk). Holds
        nothing and counts as no use."""
        self._begin_call(now)
        return self.table.match(as_keys(keys))[1]

    def seconds(self, found: Found) -> float:
        """How long loading these blocks from disk is expected to take, by the loads so far; 0 while there was none.
        Where computing them again is quicker, leave them."""
        return self.pace.seconds(int((found.tier == DISK).sum()))

    @in_call
    def release(self, found: Found) -> None:
        """Let go of a match that will not be loaded; once is enough and more does no harm."""
        if self._found.pop(found.id, None) is not None:
            self.table.leave(found.tier, found.slots)

    @in_call
    def load(self, found: Found, *, into: Any, now: float) -> Ticket | Rejected:
        """Bring found blocks to the caller's memory.

        Parameters
        ----------
        found : Found
            From `match`, not loaded or released yet. Its hold ends here.
        into : ndarray of uint64 addresses, 2-D uint8 array, or torch tensor with blocks along its first axis
            `found.length` blocks of `layout.block_bytes` contiguous bytes each. It stays the store's until the ticket
            is done. Memory that is not aligned to 4 KiB goes through a host slot, and is counted (`staged`).
            With `device_pages` also an ndarray of int32 or int64: the numbers of each block's pages, shape
            (blocks, pages per block), or 1-D where a block is one page.

        Returns
        -------
        Ticket or Rejected
        """
        self._begin_call(now)
        if found.length and found.id not in self._found:
            raise GdskvError("this match was loaded or released already. Call match again before load.")
        addresses = self._addresses(into, found.length)
        memory = isinstance(into, np.ndarray) and into.dtype != np.uint64 and not self._are_pages(into)
        if memory and not into.flags.writeable:
            raise GdskvError("into is read-only memory. Give an array that may be written.")
        staged = bool((found.tier == DISK).any()) and not self._aligned(addresses)
        if staged and not self.sizing.host_blocks:
            raise self._misaligned(addresses)
        self._found.pop(found.id, None)
        try:
            from_disk = int((found.tier == DISK).sum())
            answer = (self._load_staged if staged else self._load)(found, addresses, from_disk)
        finally:
            self.table.leave(found.tier, found.slots)
        self._keep(answer, into, addresses)
        return answer

    def _keep(self, answer: Ticket | Rejected, memory: Any, addresses: NDArray[np.uint64]) -> None:
        if isinstance(answer, Ticket) and answer.id in self._pending:
            self._memory[answer.id] = (memory, addresses)
        else:
            self._forget(addresses)

    def _forget(self, addresses: NDArray[np.uint64]) -> None:
        if self.device_pages is not None and self.device_pages.named(addresses).all():
            self.device_pages.forget(addresses)

    def _load(self, found: Found, addresses: NDArray[np.uint64], from_disk: int) -> Ticket | Rejected:
        """Plan the copies and reads, from wherever `found` says; a slot of -1 is not there."""
        ticket = Ticket(self._ticket_id(), found.length)
        gone = self.table.load(found.entries, found.tier, found.slots, addresses, ticket.id)
        if gone is None:
            return Rejected("transfers are in flight", self.table.transfers, self.table.launched + self.table.deferred)
        self._await(ticket, found.length - len(gone), gone.tolist(), from_disk)
        self._start()
        return ticket

    def _load_staged(self, found: Found, addresses: NDArray[np.uint64], from_disk: int) -> Ticket | Rejected:
        """Through host slots: what is on disk is brought there first, and what finds no room there is not loaded."""
        self._staged += from_disk
        arrays = self.table.arrays
        still = arrays.s["entry"][found.slots] == found.entries  # else lost, and the entry may be another block's now
        records = arrays.e[found.entries[: int(np.argmin(still)) if not still.all() else None]]
        self.table.prefetch(np.stack([records["k0"], records["k1"]], axis=1), found.length)
        slots = np.where(still, arrays.e["slot"][found.entries, HOST], NONE)
        return self._load(found._replace(tier=np.full_like(found.tier, HOST), slots=slots), addresses, from_disk)

    def _misaligned(self, addresses: NDArray[np.uint64]) -> GdskvError:
        return GdskvError(
            f"memory at {int(addresses[0]):#x} with blocks of {self.layout.block_bytes} bytes is not aligned to "
            f"{ALIGNMENT} and there is no host tier to stage it. Align it, or set host_bytes."
        )

    @in_call
    def store(
        self,
        keys: Keys,
        *,
        source: Any,
        retention: Retention | None = None,
        prompt_tokens: int | None = None,
        now: float,
    ) -> Ticket:
        """Take blocks in that are not cached yet: into host memory, or to disk where there is no host tier.

        Parameters
        ----------
        keys : ndarray of uint64, shape (n, 2)
            A chain from its first block.
        source : as `into` of `load`
            Must not change until the ticket is done. With no host tier it must be aligned to 4 KiB.
        retention : Retention, optional
        prompt_tokens : int, optional
            Where the prompt ends, for a retention that tells it from what was decoded. By default all is prompt.

        Returns
        -------
        Ticket
            `blocks` may be fewer than asked where there is no room; the rest is counted (`shed_no_slot`).
        """
        self._begin_call(now)
        keys = as_keys(keys)
        addresses = self._addresses(source, len(keys))
        if not self.sizing.host_blocks and not self._aligned(addresses):
            raise self._misaligned(addresses)
        tokens = len(keys) * self.layout.tokens_per_block
        wish = self.resolve(retention, len(keys), tokens if prompt_tokens is None else prompt_tokens)
        ident = self._ticket_id()
        cached, moving = self.table.store(keys, addresses, wish.priority, wish.ttl, wish.forget, ident, wish.tenant)
        ticket = Ticket(ident, cached)
        self._await(ticket, moving, [], 0)
        self._start()
        self._keep(ticket, source, addresses)
        return ticket

    def prefetch(self, keys: Keys, *, now: float) -> int:
        """Bring blocks that are on disk alone to host, at most a quarter of it; how many are on their way."""
        self._begin_call(now)
        n = self.table.prefetch(as_keys(keys), max(1, self.table.capacity(HOST) // 4))
        self._start()
        return n

    @in_call
    def poll(self, *, now: float) -> list[Done]:
        """Take in what has landed, hand out what may start; the tickets that are done since the last call."""
        self._begin_call(now)
        self._pump()
        done, self._done = self._done, []
        return done

    @in_call
    def cancel(self, ticket: Ticket) -> None:
        """Give up a ticket: what has not started does not start. It is still reported by `poll`, once nothing moves in
        the caller's memory any more, with what did not arrive as failed."""
        if ticket.id in self._pending:
            self.io.cancel(self.table.cancel(ticket.id))

    def events(self) -> NDArray[Any]:
        """Blocks that have come to be served from a tier, and those that are so no more, since the last call, for
        routers that send a request where its prefix is. Empty unless `CacheConfig.events` is set.

        Ask as often or seldom as you like: what there is to tell takes no more than the tiers have blocks, and is
        never lost. Blocks that came back from disk at the open are told of when they are first matched.

        Returns
        -------
        ndarray
            Fields ``k0`` and ``k1`` (the key), ``tier`` (0 device, 1 host, 2 disk) and ``stored`` (1, or 0: no more).
        """
        return self.table.events()

    def stats(self) -> dict[str, int]:
        """Counters and gauges: the table's, and the I/O engine's bytes per path."""
        out = self.table.counters()
        out.update({f"io_{k}": v for k, v in self.io.counters().items()})
        out["staged"] = self._staged
        out.update({f"hits_per_million_at_{scale}x": round(1e6 * r) for scale, r in self.sizing_curve().items()})
        if self.recorder is not None:
            out["recorded"], out["recorded_dropped"] = self.recorder.recorded, self.recorder.dropped
        out["reads_again"] = self._moving.reads_again
        if self.ledger is not None:
            out["failed_records"], out["durable_records"] = self.ledger.failed_records, self.ledger.durable_records
            out["learned_loaded"], out["learned_discarded"] = self.ledger.learned_loaded, self.ledger.learned_discarded
            states = self.ledger.health.states
            out["directories_read_only"] = sum(s.read_only for s in states)
            out["read_only_periods"] = sum(s.closures for s in states)
            out["write_errors"] = sum(s.write_errors for s in states)
        return out

    def sizing_curve(self) -> dict[str, float]:
        """Hit ratio of the tiers together with the disk tier, or memory where there is no disk, at 0.25, 0.5, 1, 2, 4
        and 8 times its size; estimated from a sample of the keys asked since the open."""
        return {f"{scale:g}": ratio for scale, ratio in self.table.curve().items()}

    def check(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        c = self.table.counters()
        self.table.check(closed=not (c["failed_writes"] or c["lost"] or c["adopted"]), exclusive=False)

    @property
    def idle(self) -> bool:
        """Is nothing in flight, and nothing waiting to be?"""
        table = self.table
        settled = self.ledger is None or (self.ledger.settled and not table.unremembered)
        return settled and not (table.launched or table.deferred)

    def close(self, timeout: float = 5.0, *, forget: bool = False) -> bool:
        """Stop. Within `timeout` seconds transfers land and what memory alone holds is written to disk, the most
        valuable first. A device that holds on to a transfer longer keeps its memory mapped. With `forget` nothing is
        written, and the next open finds nothing.

        Returns
        -------
        bool
            True if everything landed.
        """
        if not self._open or self._owner != os.getpid():
            return True  # closed before, or inherited by a forked child, to which nothing of it belongs
        self._open = False
        end = time.monotonic() + timeout
        if self.recorder is not None:
            self.recorder.close()
        left = self.table.capacity(DISK)  # the first are the most valuable, and more would displace them
        while time.monotonic() < end:
            if self.idle:
                planned = 0 if forget else self.table.flush(min(ROUND, left))
                left -= planned
                if not planned:
                    break
            self._pump()
            time.sleep(0.0005)
        clean = self.idle and (self.ledger is None or self.ledger.complete)
        drained = self.io.close(max(0.0, end - time.monotonic()))
        if self.ledger is not None:
            if drained:
                self.ledger.close(self.table, clean=clean, counters=self.io.counters())
            else:
                self.ledger.abandon()
        if forget and self.disk_pool is not None:
            for directory in self.disk_pool.directories:  # without its superblock nothing of a namespace is believed
                (directory.path / self.digest.hex() / superblock.NAME).unlink(missing_ok=True)
        if drained:
            self._close_pools()
        return drained

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- shared with the manager

    def resolve(self, retention: Retention | None, blocks: int, prompt_tokens: int) -> Wish:
        """What a request's retention means for each of its blocks."""
        r = retention if retention is not None else _NO_WISH
        priority, ttl = r.resolve(blocks, self.layout.tokens_per_block, prompt_tokens)
        tenant = self.ledger.tenant(self.table, r.tenant) if self.ledger is not None else self.table.tenant(r.tenant)
        return Wish(priority, ttl, (r.on_expiry or self.config.on_expiry) == "forget", tenant)

    def _begin_call(self, now: float) -> None:
        if not self._open:
            raise StoreClosed("this store is closed. Open a new one.")
        if self._owner != os.getpid():
            raise StoreClosed(
                f"this store belongs to process {self._owner}, from which this one was forked. "
                "Open a store after the fork, in other directories."
            )
        self.table.advance(nanoseconds(now))

    def _ticket_id(self) -> int:
        while True:
            self._next_ticket = (self._next_ticket + 1) % self.table.transfers
            if self._next_ticket not in self._pending:
                return self._next_ticket

    def _await(self, ticket: Ticket, expected: int, failed: list[int], from_disk: int) -> None:
        self._pending[ticket.id] = _Pending(ticket, expected, failed, self.table.now + self.timeout, from_disk)
        if expected == 0:
            self._finish(ticket.id)

    def _finish(self, ident: int) -> None:
        p = self._pending.pop(ident)
        if ident in self._memory:
            self._forget(self._memory.pop(ident)[1])
        failed = np.array(sorted(p.failed), np.int64)
        if not len(failed):
            self.pace.see(p.from_disk, self.table.now - (p.late - self.timeout))
        self._done.append(Done(p.ticket, (p.ticket.blocks - len(failed)) * self.layout.block_bytes, failed))

    def _addresses(self, memory: Any, n: int) -> NDArray[np.uint64]:
        """Where each of `n` blocks of the caller's memory begins."""
        if self.device_pages is not None and self._are_pages(memory):
            return self.device_pages.name(memory, n)
        if isinstance(memory, np.ndarray) and memory.dtype == np.uint64 and memory.ndim == 1:
            if len(memory) < n:
                raise GdskvError(f"{len(memory)} addresses for {n} blocks. Give one address a block.")
            return np.require(memory[:n], requirements=["C", "W"])
        if isinstance(memory, np.ndarray):
            base, strides, shape, itemsize = memory.ctypes.data, memory.strides, memory.shape, memory.itemsize
        elif hasattr(memory, "data_ptr"):
            if memory.device.type != "cpu":
                raise GdskvError(
                    f"memory on {memory.device} is out of this call's reach. Give memory of the host, or open the "
                    "store with device_pages and give page numbers."
                )
            base, shape, itemsize = memory.data_ptr(), tuple(memory.shape), memory.element_size()
            strides = tuple(s * itemsize for s in memory.stride())
        else:
            raise GdskvError(f"memory is a {type(memory).__name__}. Give an array, a tensor, or one address a block.")
        size, dense = itemsize, len(shape) > 0
        for extent, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
            dense &= extent == 1 or stride == size
            size *= extent
        if not dense or size != self.layout.block_bytes or shape[0] < n or (n > 1 and abs(strides[0]) < size):
            raise GdskvError(
                f"memory of shape {tuple(shape)} does not hold {n} blocks of {self.layout.block_bytes} contiguous "
                "bytes along its first axis. Give such an array, or one address a block."
            )
        return (base + np.arange(n, dtype=np.int64) * strides[0]).astype(np.uint64)

    def _are_pages(self, memory: Any) -> bool:
        return self.device_pages is not None and isinstance(memory, np.ndarray) and memory.dtype in (np.int32, np.int64)

    def _aligned(self, addresses: NDArray[np.uint64]) -> bool:
        if self.device_pages is not None and self.device_pages.named(addresses).all():
            return True  # its staging buffers are
        return self.layout.block_bytes == self.layout.slot_bytes and not (addresses % np.uint64(ALIGNMENT)).any()

    def _start(self) -> None:
        """Let what was planned begin; the rest of it follows in `poll`."""
        self._moving.start()
        self._report()

    def _pump(self) -> None:
        """Bounded rounds: results in, dependants out."""
        self._moving.run()
        self._report()
        if self._pending:
            self._settle()
            late = [p.ticket for p in self._pending.values() if p.late <= self.table.now]
            for ticket in late:
                self._pending[ticket.id] = self._pending[ticket.id]._replace(late=self.table.now + self.timeout)
                self.cancel(ticket)

    def _report(self) -> None:
        for ticket, index in self._moving.failed:
            self._pending[ticket].failed.append(index)
        self._moving.failed.clear()

    def _settle(self) -> None:
        done = self.table.tickets_done
        for ident in [i for i, p in self._pending.items() if done[i] >= p.expected]:
            self._finish(ident)

    def _close_pools(self) -> None:
        for pool in (self.host_pool, self.disk_pool):
            if pool is not None:
                pool.close()
