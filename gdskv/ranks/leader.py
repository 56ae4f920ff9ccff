"""``Leader``: decides for all ranks. One table, whose slot numbers hold on every rank; no bytes pass through here.

A block is ready when all ranks say so and lost when one does. What the ranks hold alike at open is what there is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.config import CacheConfig
from gdskv.errors import ConfigError
from gdskv.keys import Keys
from gdskv.layout import KVLayout, Namespace
from gdskv.ranks.fleet import Fleet, RankedStore
from gdskv.ranks.messages import Hello, Orders, Report
from gdskv.retention import Retention
from gdskv.store import Done, Found, Rejected, Ticket, nanoseconds
from gdskv.table import DISK, HOST
from gdskv.table.learned import REQUESTS
from gdskv.table.state import NONE, READY

__all__ = ["Held", "Leader", "Load"]

log = logging.getLogger(__name__)

# Seconds between two orders that tell what was learned, if something was asked since: while much is to do, and at rest.
TELL_LEARNED = 10.0
TELL_AT_REST = 1.0


class Load(NamedTuple):
    """Blocks on their way to the engine's memory."""

    ticket: Ticket | None
    """None: none of them is."""
    failed: NDArray[np.int64]
    """Indices of blocks that will not come, known already; workers never hear of them."""
    tiers: NDArray[np.int8]
    """Per block that was found, from the first asked for on: 1 host, 2 disk."""


class Held(NamedTuple):
    """Blocks in host memory that stay there until `Leader.load_held` or `Leader.let_go`."""

    found: Found
    store: RankedStore
    """Whose they are: a later session knows nothing of them."""


class Leader:
    """The deciding half of a cache over several ranks.

    One thread calls it. Send what `orders` returns to every rank, in that order, and hand every rank's report to
    `receive`. Until all ranks have said hello, and from the loss of one until it is back, everything is a miss.

    Parameters
    ----------
    config : CacheConfig
        As of the workers; sizes come from what they say.
    layout : KVLayout
        For `tokens_per_block`.
    namespace : Namespace
        For the keys; of rank 0.
    ranks : int
    now : float
        Seconds on the caller's clock.
    wall : float, optional
        The wall clock at that instant, seconds since 1970; by default the system's.
    """

    def __init__(
        self,
        config: CacheConfig,
        layout: KVLayout,
        namespace: Namespace,
        *,
        ranks: int = 1,
        now: float = 0.0,
        wall: float | None = None,
    ) -> None:
        self.config, self.layout, self.namespace, self.ranks = config, layout, namespace, ranks
        self.digest = namespace.digest(layout)
        self.store: RankedStore | None = None
        """The table and all that belongs to it, while all ranks are there."""
        self.recovered = 0
        """Blocks that came back from disk at the last open."""
        self._to_wall = nanoseconds(time.time() if wall is None else wall) - nanoseconds(now)
        self._hellos: dict[int, Hello] = {}
        self._retired: list[int] = []
        self._forget = False
        self._number = 0
        self._heard = [now] * ranks
        self._lost: list[Done] = []
        self._learned = b""  # by tables that were given up
        self._told_of, self._told_at = 0, now  # requests that what rank 0 keeps goes back on, and when it was told
        self._left_to_flush = 0
        self.counters = {"sessions": 0, "sessions_lost": 0, "reports_ignored": 0}
        self.rank_counters: list[dict[str, int]] = [{} for _ in range(ranks)]
        """The latest that each rank has told."""

    # ---- messages

    def receive(self, report: Report, *, now: float) -> None:
        """Take a rank's report in.

        Raises
        ------
        ConfigError
            The ranks hold different numbers of blocks.
        """
        rank = report.rank
        known = self.store is not None and self.store.fleet.epochs[rank] == report.epoch
        if report.hello is not None and not known and report.epoch not in self._retired:
            if self.store is not None:
                self._lose(f"rank {rank} has started over", keep=rank)
            self._hellos[rank] = report.hello
            if self.store is None and len(self._hellos) == self.ranks:
                self._open(now)
        if self.store is None or self.store.fleet.epochs[rank] != report.epoch:
            self.counters["reports_ignored"] += report.hello is None
            return
        self._heard[rank] = now
        self.rank_counters[rank] = report.counters
        if self.store.fleet.take_in(report):
            self._lose(f"rank {rank} has another block in a slot than the table")

    def orders(self, *, now: float) -> Orders:
        """What the ranks are to do since the last call; to be sent to each of them."""
        self._number += 1
        if self.store is None:
            return Orders(self._number, [], self._retired, self._forget)
        return self.store.fleet.take_orders(
            self._number, nanoseconds(now) + self._to_wall, self.idle, self._to_keep(self.store, now)
        )

    def _to_keep(self, store: RankedStore, now: float) -> bytes:
        """What was learned, if rank 0 is to be told of it."""
        asked = int(store.table.arrays.lm[REQUESTS])
        if asked == self._told_of or now - self._told_at < (TELL_AT_REST if self.idle else TELL_LEARNED):
            return b""
        if not store.fleet.regions:
            return b""  # nobody has a place for it
        self._told_of, self._told_at = asked, now
        return store.table.learned()

    def _open(self, now: float) -> None:
        hellos = [self._hellos[rank] for rank in range(self.ranks)]
        first = hellos[0]
        for other in hellos[1:]:
            if (other.host_blocks, other.directories) != (first.host_blocks, first.directories):
                raise ConfigError(
                    f"rank {other.rank} has room for {other.host_blocks} host blocks and {other.directories} disk "
                    f"blocks, rank 0 for {first.host_blocks} and {first.directories}. Give every rank sizes that hold "
                    "as many blocks."
                )
        self._to_wall = max(self._to_wall, max(h.wall for h in hellos) - nanoseconds(now))
        slot = self.layout.slot_bytes
        disk = sum(first.directories)
        sizes = {"host_bytes": first.host_blocks * slot, "disk_bytes": disk * slot, "device_bytes": 0}
        fleet = Fleet(hellos, self._to_wall)
        self.store = RankedStore(fleet, self.config.model_copy(update=sizes), self.layout, self.namespace, now=now)
        self._told_of, self._told_at = int(self.store.table.arrays.lm[REQUESTS]), now
        if self._learned:  # later than what is kept
            self.store.table.learn_from(self._learned)
            fleet.learned_loaded = 0
        self.recovered = fleet.recovered.blocks
        self._hellos, self._retired, self._forget = {}, [], False
        self._heard = [now] * self.ranks
        self._left_to_flush = 0
        self.counters["sessions"] += 1
        for why in fleet.recovered.why:
            log.warning("%s", why)

    def _lose(self, why: str, keep: int | None = None) -> None:
        """Give the table up: every ticket ends, and all ranks but the one that has just opened start over."""
        assert self.store is not None
        log.warning("%s: nothing is served until every rank has opened its files again", why)
        self.counters["sessions_lost"] += 1
        epochs = self.store.fleet.epochs
        self._retired = [e for rank, e in enumerate(epochs) if rank != keep]
        if self.store.table.learns:
            self._learned = self.store.table.learned()
        if self.store.recorder is not None:
            self.store.recorder.close()
        self._lost += self.store.fail_all()
        self.store = None

    def forget(self) -> None:
        """Let go of everything, on disk too, as when the engine's weights have changed."""
        self._forget = True
        if self.store is not None:
            self._lose("the cache is to be cleared")
        else:
            self._retired += [h.epoch for h in self._hellos.values()]
            self._hellos = {}

    # ---- what an engine's scheduler calls

    @property
    def open(self) -> bool:
        """Have all ranks said hello?"""
        return self.store is not None

    def match(self, keys: Keys, *, now: float) -> NDArray[np.int8]:
        """Tier of each block of the longest run that can be served to a request that asks for all of `keys`. Holds
        nothing; the request is learned from, once however often it is repeated."""
        if self.store is None:
            return np.empty(0, np.int8)
        return self.store.ask(keys, now=now)

    def load(self, keys: Keys, *, start: int, into: Sequence[int], now: float) -> Load:
        """Bring the blocks from `start` on to the engine's blocks `into`, as many.

        Those that are not there any more are told as failed, at once or when the ticket is done.
        """
        asked = len(keys) - start
        nothing = Load(None, np.arange(asked), np.empty(0, np.int8))
        if self.store is None:
            return nothing
        found = self.store.hold(keys, now=now)
        if found.length <= start:
            self.store.release(found)
            return nothing
        tail = self.store.part(found, start, found.length)
        ticket = self.store.load(tail, into=np.array(into[: tail.length], np.uint64), now=now)
        if isinstance(ticket, Rejected):
            return nothing
        failed = self.store.failed_so_far(ticket)
        return Load(ticket, np.concatenate([failed, np.arange(tail.length, asked)]), tail.tier)

    # For an engine that cannot be told of a block that did not arrive: what is promised is checked before.

    def hold(self, keys: Keys, *, now: float) -> Held | None:
        """Hold the longest run whose bytes have landed in host memory on every rank, and were checked there."""
        if self.store is None:
            return None
        self.store.advance(now)
        entries, tiers = self.store.table.match(keys)
        ready = (tiers == HOST) & (self.store.table.arrays.e["state"][entries, HOST] == READY)
        n = len(ready) if ready.all() else int(np.argmin(ready))
        return Held(self.store.hold(keys[:n], now=now), self.store) if n else None

    def load_held(self, held: Held, *, start: int, into: Sequence[int], now: float) -> Ticket | None:
        """Copy held blocks from `start` on to the engine's blocks `into`, as many; the hold ends. None: it cannot be,
        as the ranks have started over since, or too much is in flight."""
        if held.store is not self.store:
            return None
        rest = held.store.part(held.found, start, min(start + len(into), held.found.length))
        ticket = held.store.load(rest, into=np.array(into[: rest.length], np.uint64), now=now)
        if isinstance(ticket, Rejected):
            held.store.release(rest)
            return None
        return ticket

    def coming(self, keys: Keys) -> int:
        """Blocks of the longest run that are on their way from disk to host memory."""
        if self.store is None:
            return 0
        entries, tiers = self.store.table.match(keys)
        e = self.store.table.arrays.e[entries]
        return int(((tiers == HOST) & (e["state"][:, HOST] != READY) & (e["slot"][:, DISK] != NONE)).sum())

    def let_go(self, held: Held) -> None:
        """End a hold."""
        if held.store is self.store:
            held.store.release(held.found)

    def prefetch(self, keys: Keys, *, now: float) -> int:
        """Bring blocks that are on disk alone to host memory, at most a quarter of it; how many are on their way."""
        return self.store.prefetch(keys, now=now) if self.store is not None else 0

    def cancel(self, ticket: Ticket) -> None:
        """Give up a ticket: what has not started does not start."""
        if self.store is not None:
            self.store.cancel(ticket)

    def take(
        self,
        keys: Keys,
        *,
        source: Sequence[int],
        retention: Retention | None = None,
        prompt_tokens: int | None = None,
        now: float,
    ) -> tuple[Ticket, int] | None:
        """Store a chain from the engine's blocks `source`, those that are not known yet; the ticket, and how many of
        them every worker will copy. None while ranks are missing."""
        if self.store is None:
            return None
        before = self.store.fleet.ordered
        ticket = self.store.store(
            keys, source=np.array(source, np.uint64), retention=retention, prompt_tokens=prompt_tokens, now=now
        )
        self._left_to_flush = self.store.table.capacity(2)
        return ticket, self.store.fleet.ordered_for(ticket.id, before)

    def poll(self, *, now: float) -> list[Done]:
        """Bounded work: take in what ranks have told, plan what follows; tickets that have come to an end."""
        done, self._lost = self._lost, []
        store = self.store
        if store is not None:
            done += store.poll(now=now)
            silent = [r for r in store.fleet.owing if now - self._heard[r] > self.config.io_timeout]
            if silent:
                self._lose(f"rank {silent[0]} has not answered for {self.config.io_timeout:g} s")
        return done

    def flush(self, most: int = 64) -> int:
        """Plan writes of blocks that memory alone holds, the most valuable first: for an engine that has nothing else
        to do, so that a crash finds them on disk. How many; 0: nothing is left."""
        store = self.store
        if store is None or not store.idle or not self._left_to_flush:
            return 0
        n = store.table.flush(min(most, self._left_to_flush))
        self._left_to_flush = self._left_to_flush - n if n else 0
        return n

    @property
    def idle(self) -> bool:
        """Is nothing under way, and nothing left for `flush`?"""
        return self.store is None or (self.store.idle and not self._left_to_flush)

    def stats(self) -> dict[str, int]:
        """Counters and gauges: the table's, the sum of the ranks' and the leader's own."""
        out = dict(self.store.stats()) if self.store is not None else {}
        for counters in self.rank_counters:
            for name, value in counters.items():
                out[name] = out.get(name, 0) + value
        return out | self.counters | {"ranks": self.ranks, "open": int(self.open)}
