"""What stands in a leader's store for I/O engine, pools and records: the ranks, as they were when all had said hello.

`Fleet` turns planned transfers into orders and reports into results. `RankedStore` is a `KVStore` on top of it.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdskv.config import CacheConfig
from gdskv.directory.records import IS_BAD, REMEMBERED
from gdskv.failing import Health
from gdskv.io.base import RESULT, TRANSFER, Results, Tags, Transfers
from gdskv.keys import Keys, as_keys
from gdskv.layout import KVLayout, Namespace
from gdskv.ledger import ROUND as RECORDS
from gdskv.ledger import Recovered
from gdskv.pools.device import DevicePool
from gdskv.pump import Pump
from gdskv.ranks.messages import ORDER, Hello, Orders, Report, pack, unpack
from gdskv.ranks.messages import RESULT as OUTCOME
from gdskv.store import Done, Found, KVStore, Ticket, Wrap, nanoseconds
from gdskv.table import CHANGE, BlockTable

__all__ = ["Fleet", "RankedStore"]


class Fleet:
    """The ranks of one opening, as an I/O engine and as a ledger.

    Parameters
    ----------
    hellos : list of Hello
        One per rank, with equal sizes.
    to_wall : int
        ns from the leader's clock to the wall's.
    """

    def __init__(self, hellos: Sequence[Hello], to_wall: int) -> None:
        self.epochs = [h.epoch for h in hellos]
        self.regions = list(hellos[0].directories)
        self.recovered = Recovered(0, 0, 0, 0, 0, tuple(why for h in hellos for why in h.why))
        self.failed_records = self.durable_records = 0
        self.learned_loaded = self.learned_discarded = 0
        self._hellos = hellos
        self._to_wall = to_wall
        self._fill = max(h.next_fill for h in hellos)
        disk = sum(self.regions)
        firsts = [sum(self.regions[:i]) for i in range(len(self.regions))] or [0]
        self.health = Health(firsts, max(disk, 1))
        n = len(hellos)
        self._owed = np.zeros((n, 4096), np.bool_)  # answers that are to come, by rank and tag
        self._worst = np.zeros(4096, np.int64)
        self._lied = np.zeros(4096, np.bool_)
        self._count = np.zeros(n, np.int64)  # answers to come, per rank
        self._results: list[tuple[int, int, int, int]] = []
        self._records_owed = np.zeros((n, disk), np.bool_)
        self._records_bad = np.zeros(disk, np.bool_)
        self._written: list[int] = []
        self._unwritten: list[int] = []
        self._changes = np.zeros(RECORDS, CHANGE)
        # what the next orders will hold
        self._transfers: list[NDArray[Any]] = []
        self._cancelled: list[NDArray[np.int64]] = []
        self._records: NDArray[Any] = np.zeros(0, CHANGE)
        self._tenants: dict[int, str] = {}
        self._known: set[int] = {0}
        self.ordered = 0
        """Transfers ordered so far."""

    # ---- messages

    def take_orders(self, number: int, wall: int, settled: bool, learned: bytes) -> Orders:
        """All that was planned since the last call."""
        empty = not (self._transfers or self._cancelled or len(self._records))
        orders = Orders(
            number,
            self.epochs,
            wall=wall,
            fill=self._fill,
            settled=settled and empty,
            transfers=b"".join(pack(part) for part in self._transfers),
            cancelled=b"".join(pack(part) for part in self._cancelled),
            changes=pack(self._records),
            tenants=self._tenants,
            learned=learned,
        )
        self._transfers, self._cancelled, self._records, self._tenants = [], [], self._records[:0], {}
        return orders

    def take_in(self, report: Report) -> bool:
        """A rank's answers. True if what it holds is not what the table says."""
        rank = report.rank
        disagrees = False
        for tag, lied, moved in unpack(report.results, OUTCOME).tolist():
            if not self._owed[rank, tag]:
                continue  # of no transfer that is under way
            self._owed[rank, tag] = False
            self._count[rank] -= 1
            self._worst[tag] = min(self._worst[tag], moved)
            self._lied[tag] |= bool(lied)
            disagrees |= moved == -errno.ESTALE
            if not self._owed[:, tag].any():
                self._results.append((tag, int(self._worst[tag]), int(self._lied[tag]), 1))
        for data, bad in ((report.written, False), (report.unwritten, True)):
            slots = unpack(data, np.int32)
            self._records_owed[rank, slots] = False
            self._records_bad[slots] |= bad
            if bad:
                self.failed_records += len(slots)
            done = slots[~self._records_owed[:, slots].any(axis=0)]
            self._written += done[~self._records_bad[done]].tolist()
            self._unwritten += done[self._records_bad[done]].tolist()
            self._records_bad[done] = False
        return disagrees

    @property
    def owing(self) -> list[int]:
        """Ranks from which answers are to come."""
        return [int(r) for r in np.flatnonzero(self._count + self._records_owed.sum(axis=1))]

    # ---- an I/O engine's

    def order(self, table: BlockTable, ids: NDArray[np.int32]) -> None:
        """Have planned transfers carried out by every rank."""
        x = table.arrays.x[ids]
        out = np.zeros(len(ids), ORDER)
        for name in ("address", "kind", "src", "dst", "ticket", "index"):
            out[name] = x[name]
        out["tag"] = ids
        entries = table.arrays.e[x["entry"]]
        out["k0"], out["k1"] = entries["k0"], entries["k1"]
        if int(ids.max()) >= self._owed.shape[1]:
            more = max(2 * self._owed.shape[1], int(ids.max()) + 1) - self._owed.shape[1]
            self._owed = np.pad(self._owed, ((0, 0), (0, more)))
            self._worst, self._lied = np.pad(self._worst, (0, more)), np.pad(self._lied, (0, more))
        # what was to be cancelled under these tags has ended since
        self._cancelled = [tags[~np.isin(tags, ids)] for tags in self._cancelled]
        self._owed[:, ids] = True
        self._worst[ids], self._lied[ids] = 0, False
        self._count += len(ids)
        self.ordered += len(ids)
        self._transfers.append(out)

    def ordered_for(self, ticket: int, before: int) -> int:
        """Transfers of a ticket among those ordered since `ordered` was `before`."""
        new = self.ordered - before
        count = 0
        for part in reversed(self._transfers):
            if new <= 0:
                break
            count += int((part["ticket"][-new:] == ticket).sum())
            new -= len(part)
        return count

    def submit(self, transfers: Transfers) -> int:
        raise NotImplementedError("orders are given to ranks by `order`")

    def poll(self, out: Results) -> int:
        n = min(len(out), len(self._results))
        if n:
            part, self._results = self._results[:n], self._results[n:]
            out[:n] = np.array(part, RESULT)
        return n

    def cancel(self, tags: Tags) -> int:
        self._cancelled.append(np.asarray(tags, np.int64))
        return 0

    @property
    def in_flight(self) -> int:
        return int(self._count.max(initial=0))

    def counters(self) -> dict[str, int]:
        return {}

    def path(self, slab: int) -> str:
        return "ranks"

    def close(self, *_: Any, **__: Any) -> Any:
        return True  # nothing here is open; each worker closes what it holds

    # ---- a ledger's

    @property
    def complete(self) -> bool:
        return self.settled

    @property
    def settled(self) -> bool:
        """Is every record written, on every rank?"""
        return not (self._records_owed.any() or len(self._records))

    def tenant(self, table: BlockTable, name: str) -> int:
        number = table.tenant(name)
        if number not in self._known:
            self._known.add(number)
            self._tenants[number] = name
        return number

    def recover(self, table: BlockTable) -> None:
        """Fill the table with the blocks that every rank has, alike: in the same slot, of the same fill."""
        disk = sum(self.regions)
        table.remember()
        if not disk:
            return
        held = [unpack(h.blocks, REMEMBERED) for h in self._hellos]
        first = np.zeros(disk, REMEMBERED)
        first[held[0]["slot"]] = held[0]
        good = np.zeros(disk, np.bool_)
        good[held[0]["slot"]] = True
        touched = good.copy()
        bad = (first["flags"] & IS_BAD) != 0
        for blocks in held[1:]:
            other = np.zeros(disk, REMEMBERED)
            other[blocks["slot"]] = blocks
            here = np.zeros(disk, np.bool_)
            here[blocks["slot"]] = True
            touched |= here
            bad |= (other["flags"] & IS_BAD) != 0
            for name in ("k0", "k1", "fill"):
                good &= here & (first[name] == other[name])
        first["flags"][bad] = IS_BAD
        blocks = first[good | bad]
        blocks["slot"] = np.flatnonzero(good | bad)
        names = self._hellos[0].tenants
        numbers = np.array([self.tenant(table, name) for name in names] or [0], np.uint32)
        blocks["tenant"] = numbers[np.minimum(blocks["tenant"], len(numbers) - 1)]
        blocks["crc"] = 0  # each rank has its own
        blocks["deadline"] = np.where(blocks["deadline"] != 0, blocks["deadline"] - self._to_wall, 0)
        back = table.restore(blocks, np.argsort(blocks["last"], kind="stable"))
        again = [unpack(h.again, np.int32) for h in self._hellos]
        dropped = np.flatnonzero(touched & ~good & ~bad).astype(np.int32)
        gone = table.free_among(np.ascontiguousarray(blocks["slot"]))
        table.record_again(np.unique(np.concatenate([*again, dropped, gone])).astype(np.int32))
        self.recovered = self.recovered._replace(blocks=back, dropped=len(dropped) + len(gone))
        if table.learns:
            content = self._hellos[0].learned
            fits = bool(content) and table.learn_from(content or b"")
            self.learned_loaded += fits
            self.learned_discarded += not fits and content != b""

    def collect(self, table: BlockTable, now: int) -> NDArray[Any]:
        if table.unremembered and not len(self._records):
            n = table.changes(self._changes)
            changes = self._changes[np.argsort(self._changes["slot"][:n])]
            changes["deadline"] = np.where(changes["deadline"] != 0, changes["deadline"] + self._to_wall, 0)
            self._records_owed[:, changes["slot"]] = True
            self._records = changes
        if self._written:
            table.all_written(np.array(self._written, np.int32))
            self._written = []
        for slot in self._unwritten:
            table.written(slot, 3, False)
        self._unwritten = []
        return np.zeros(0, TRANSFER)

    def finish(self, table: BlockTable, results: NDArray[Any]) -> None:
        raise NotImplementedError("records are the ranks' own")

    def catch_up(self, table: BlockTable) -> None:
        pass

    def abandon(self) -> None:
        pass


class _Dispatch(Pump):
    """Hands every planned transfer to the ranks at once: each keeps the order itself."""

    def __init__(self, fleet: Fleet, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._fleet = fleet

    def start(self) -> None:
        while self._hand_out():
            pass

    def _hand_out(self, most: int = 0) -> int:
        table = self._table
        if not table.deferred:
            return 0
        n, never = table.launch(len(self._ids), self._ids, at_once=True)
        self._fail(never)
        if n:
            self._fleet.order(table, self._ids[:n].copy())
        return n + len(never)

    def _once_more(self, results: Results) -> Results:
        whole = results["moved"] == 0  # the ranks tell 0 or an error
        results["moved"][whole] = self._lengths[self._table.arrays.x["kind"][results["tag"][whole]]]
        return results

    def _submit(self) -> None:
        pass


class RankedStore(KVStore):
    """Host and disk tiers that lie with several ranks. Addresses are the engine's numbers of its blocks."""

    def __init__(
        self, fleet: Fleet, config: CacheConfig, layout: KVLayout, namespace: Namespace, *, now: float
    ) -> None:
        self.fleet = fleet
        super().__init__(config, layout, namespace, now=now, wall=0.0)

    def _open_parts(
        self, io: Wrap | str | None, device_pool: DevicePool | None, now: float, wall: float
    ) -> Sequence[int]:
        self.ledger = self.fleet if self.fleet.regions else None
        self.io = self.fleet
        return self.fleet.regions

    def _new_pump(self, lengths: NDArray[np.int64], pools: NDArray[np.int64], slabs: NDArray[np.int64]) -> Pump:
        return _Dispatch(self.fleet, self.table, self.io, self.ledger, lengths, pools, slabs)

    def _addresses(self, memory: Any, n: int) -> NDArray[np.uint64]:
        return np.ascontiguousarray(memory[:n], np.uint64)

    def _aligned(self, addresses: NDArray[np.uint64]) -> bool:
        return False  # every block passes through host memory

    def advance(self, now: float) -> None:
        """Let time be `now`, seconds."""
        self.table.advance(nanoseconds(now))

    def ask(self, keys: Keys, *, now: float) -> NDArray[np.int8]:
        """As `peek`, for a request that asks for all of `keys`: it is recorded and learned from, once however often it
        is repeated, whether anything is found or not."""
        self._begin_call(now)
        tiers, new = self.table.ask(as_keys(keys))
        if new and self.recorder is not None:
            self.recorder.add(as_keys(keys), len(keys) * self.layout.tokens_per_block, now)
        return tiers

    def hold(self, keys: Keys, *, now: float) -> Found:
        """As `match`, after `ask`."""
        return self._hold(keys, now, asks=False)

    def part(self, found: Found, start: int, end: int) -> Found:
        """Let go of a match outside of the blocks from `start` up to `end`; those are held on."""
        if (start, end) == (0, found.length):
            return found
        self._found.pop(found.id)
        outside = np.r_[:start, end : found.length]
        self.table.leave(found.tier[outside], found.slots[outside])
        inside = slice(start, end)
        rest = Found(
            end - start,
            found.tier[inside].copy(),
            found.entries[inside].copy(),
            found.slots[inside].copy(),
            found.id,
        )
        if rest.length:
            self._found[found.id] = rest
        return rest

    def failed_so_far(self, ticket: Ticket) -> NDArray[np.int64]:
        """Indices of a ticket's blocks that no rank was ordered to move."""
        if ticket.id in self._pending:
            return np.array(sorted(self._pending[ticket.id].failed), np.int64)
        return next((d.failed for d in self._done if d.ticket.id == ticket.id), np.empty(0, np.int64))

    def fail_all(self) -> list[Done]:
        """End every ticket, with nothing arrived; the store is closed."""
        self._open = False
        done, self._done = self._done, []
        return done + [Done(p.ticket, 0, np.arange(p.ticket.blocks)) for p in self._pending.values()]
