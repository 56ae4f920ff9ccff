"""A block table and its twin side by side, over a memory that knows which block's bytes each slot holds.

After each call the two must agree, the table's invariants must hold, and every transfer must have read what it was to
read while nobody wrote there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from twin import DEVICE, DISK, HOST, Begun, Slot, Transfer, Twin

from gdskv.io.base import RESULT
from gdskv.table import COUNTERS, BlockTable, Rejection
from gdskv.table.state import HBASE, NENTS, NHEAP, NRETAINED, READY

LENGTH = 4096
LENGTHS = np.full(10, LENGTH, np.int64)
NS = 1_000_000_000
KINDS = (
    *("device to host", "host to device", "disk to device", "disk to host", "host to disk", "device to disk"),
    *("host to caller", "disk to caller", "caller to host", "caller to disk"),
)
NOT_COMPARED = ("recovered", "stale_slots")
COMPARED = [(i, name) for i, name in enumerate(COUNTERS) if name not in NOT_COMPARED]
RUBBISH = -1


def key_array(keys: list[int]) -> np.ndarray:
    """Keys of the table for keys of the twin."""
    return np.array([(key, ~key & (1 << 64) - 1) for key in keys], np.uint64).reshape(-1, 2)


class Request:
    """A request as begun on both sides, and as it grew."""

    def __init__(self, keys: list[int], table: Any, twin: Begun) -> None:
        self.keys = keys
        self.parts = [(table, twin)]
        self.matched = twin.matched
        self.given_up: set[int] = set()
        self.filled: set[int] = set()  # slots that hold what the holder has found or put there

    @property
    def slots(self) -> list[Slot]:
        return [slot for _, twin in self.parts for slot in twin.slots]

    @property
    def numbers(self) -> np.ndarray:
        return np.array(numbers(self.slots), np.int32)


class Pair:
    """Calls go to both sides. `clean` is the number of host blocks that are kept clean."""

    def __init__(self, device: int, host: int, disk: int, *, clean: int = 0, **settings: Any) -> None:
        grace, retry = settings.pop("grace", 30), settings.pop("retry", 1)
        self.table = BlockTable(
            device,
            host,
            disk,
            host_clean=(clean + 0.5) / host if host else 0.0,
            orphan_grace=float(grace),
            retry_after=float(retry),
            events=True,
            **settings,
        )
        self.told: set[tuple[int, int]] = set()  # key and tier, by the events
        self.twin = Twin(
            device, host, disk, clean_window=min(clean, host), grace_ns=grace * NS, retry_ns=retry * NS, **settings
        )
        self.out = np.zeros(self.table.transfers, np.int32)
        self.slot = {s.number: s for tier in self.twin.slots for s in tier}
        self.holds: dict[int, int] = {}  # slot number -> key of the bytes in it
        self.ids: dict[Transfer, int] = {}
        self.busy_reads: dict[int, int] = {}  # transfers under way per slot
        self.busy_writes: set[int] = set()
        self.exclusive = device > 0
        self.late: list[tuple[Any, Begun]] = []
        self.faults = False
        self.calls = 0

    # ---- calls

    def advance(self, now: int) -> None:
        self.table.advance(now)
        self.twin.advance(now)
        self.agree()

    def begin(self, keys: list[int], total: int) -> Request | None:
        ours, theirs = self.table.begin(key_array(keys), total), self.twin.begin(keys, total)
        self.agree()
        if isinstance(theirs, str) or isinstance(ours, Rejection):
            assert isinstance(ours, Rejection) and ours.reason == theirs, (ours, theirs)
            return None
        assert ours.matched == theirs.matched
        assert ours.tiers.tolist() == theirs.tiers
        assert ours.slots.tolist() == numbers(theirs.slots)
        return Request(keys, ours, theirs)

    def grow(self, request: Request, keys: list[int]) -> bool:
        """Further blocks, to be computed."""
        more = self.begin([], len(keys))
        if more:
            request.parts += more.parts
            request.keys = request.keys + keys
        return more is not None

    def is_ready(self, request: Request) -> bool:
        """Once all blocks have landed, those that arrived hold what they must, and the holder fills the others."""
        for ours, theirs in request.parts:
            landed = self.table.landed(ours, 0)
            assert landed == self.twin.landed(theirs)
            if landed < len(theirs.slots):
                return False
        lost = self.table.lost(request.parts[0][0]).tolist()
        assert lost == self.twin.lost(request.parts[0][1])
        for i, slot in enumerate(request.slots):
            if slot.number not in request.filled:
                request.filled.add(slot.number)
                if i < request.matched and i not in lost and i not in request.given_up:
                    assert self.holds[slot.number] == request.keys[i], "a matched block holds other bytes"
                else:
                    self.fill(slot, request.keys[i] if i < len(request.keys) else RUBBISH)
        return True

    def give_up(self, request: Request) -> int:
        """Blocks that have not landed get other slots, to be computed in; how many. The old are kept till then."""
        ours, theirs = request.parts[0]
        waiting = self.table.waiting(ours).tolist()
        other = self.begin([], len(waiting))
        if other is None or not waiting:
            return 0
        late = self.table.abandon(ours)
        assert late.tolist() == self.twin.abandon(theirs) == waiting
        mine, its = other.parts[0]
        self.late.append(
            (
                ours._replace(slots=ours.slots[late], need_w=ours.need_w[late], need_r=ours.need_r[late]),
                Begun(0, [], *([column[i] for i in waiting] for column in theirs[2:])),
            )
        )
        for i, j in enumerate(waiting):
            ours.slots[j], ours.need_w[j], ours.need_r[j] = mine.slots[i], mine.need_w[i], mine.need_r[i]
            theirs.slots[j], theirs.waits[j], theirs.arrivals[j] = its.slots[i], its.waits[i], its.arrivals[i]
        request.given_up.update(waiting)
        self.faults = True
        self.agree()
        return len(waiting)

    def let_late_ones_go(self) -> None:
        """Slots of blocks that came too late are free once these have landed."""
        waiting, self.late = self.late, []
        for ours, theirs in waiting:
            landed = self.table.landed(ours, 0)
            assert landed == self.twin.landed(theirs)
            if landed < len(theirs.slots):
                self.late.append((ours, theirs))
            else:
                self.table.release(ours.slots)
                self.twin.release(theirs.slots)
                self.agree()

    def fill(self, slot: Slot, key: int) -> None:
        """The holder of a slot writes into it."""
        assert slot.number not in self.busy_writes and not self.busy_reads.get(slot.number), "a slot in use is filled"
        self.holds[slot.number] = key

    def commit(
        self, request: Request, priority: list[int], ttl: list[int], forget: bool = False, tenant: int = 0
    ) -> int:
        keys = request.keys
        new = self.table.commit(
            key_array(keys),
            request.numbers[: len(keys)],
            np.array(priority, np.uint8),
            np.array(ttl, np.int64),
            forget,
            tenant,
        )
        assert new == self.twin.commit(keys, request.slots[: len(keys)], priority, list(ttl), forget, tenant)
        self.agree()
        return new

    def release(self, request: Request) -> None:
        self.table.release(request.numbers)
        self.twin.release(request.slots)
        self.agree()

    def prefetch(self, keys: list[int], most: int) -> int:
        got = self.table.prefetch(key_array(keys), most)
        assert got == self.twin.prefetch(keys, most)
        self.agree()
        return got

    def find(self, keys: list[int]) -> tuple[Any, Any]:
        ours, theirs = self.table.find(key_array(keys)), self.twin.find(keys)
        assert ours[2].tolist() == [slot.number for _, slot in theirs]
        self.agree()
        return ours, theirs

    def leave(self, found: tuple[Any, Any]) -> None:
        self.table.leave(*found[0][1:])
        for _, slot in reversed(found[1]):
            self.twin.unlease(slot)
        self.agree()

    def load(self, found: tuple[Any, Any], ticket: int) -> bool:
        gone = self.table.load(*found[0], np.zeros(len(found[1]), np.uint64), ticket)
        theirs = self.twin.load(found[1], ticket)
        assert (None if gone is None else gone.tolist()) == theirs
        self.agree()
        return gone is not None

    def store(
        self, keys: list[int], priority: list[int], ttl: list[int], ticket: int, forget: bool = False, tenant: int = 0
    ) -> int:
        ours = self.table.store(
            key_array(keys),
            np.zeros(len(keys), np.uint64),
            np.array(priority, np.uint8),
            np.array(ttl, np.int64),
            forget,
            ticket,
            tenant,
        )
        assert ours == self.twin.store(keys, priority, list(ttl), forget, tenant, ticket)
        self.agree()
        return ours[0]

    def cancel(self, ticket: int) -> list[Transfer]:
        self.faults = True
        ids, under_way = self.table.cancel(ticket).tolist(), self.twin.cancel(ticket)
        assert sorted(ids) == sorted(self.ids[x] for x in under_way)
        self.agree()
        return under_way

    def launch(self, room: int) -> list[Transfer]:
        n, never = self.table.launch(room, self.out)
        started, theirs = self.twin.launch(room)
        assert never.tolist() == [list(row) for row in theirs]
        rows = self.table.arrays.x[self.out[:n]]
        assert [(KINDS[r["kind"]], r["src"], r["dst"]) for r in rows] == [
            (x.kind, number(x.source), number(x.target)) for x in started
        ]
        for x, ident in zip(started, self.out[:n].tolist(), strict=True):
            self.ids[x] = ident
            self.start(x)
        self.agree()
        return started

    def complete(self, x: Transfer, error: str = "", flipped: bool = False) -> None:
        """`error`: "", "short", "EIO", "cancelled"; `flipped`: the bytes that were read are not those written."""
        moved = {"": LENGTH, "short": LENGTH - 512, "EIO": -5, "cancelled": -125}[error]
        crc = x.block.key & 0xFFFF
        if x.source and x.source.tier == DISK:
            crc = x.source.crc ^ flipped
        result = np.array([(self.ids.pop(x), moved, crc, 0)], RESULT)
        failed = self.table.complete(result, 1, LENGTHS)
        self.faults |= bool(error or flipped)
        ok = self.twin.complete(x, error=error, crc=crc)
        assert failed.tolist() == ([] if ok or x.ticket < 0 else [[x.ticket, x.index]])
        self.end(x, ok)
        self.agree()

    # ---- memory

    def start(self, x: Transfer) -> None:
        if x.source:
            assert x.source.number not in self.busy_writes, "a slot is read while it is written"
            assert self.holds.get(x.source.number) == x.block.key, "a transfer reads other bytes than it is to move"
            self.busy_reads[x.source.number] = self.busy_reads.get(x.source.number, 0) + 1
        if x.target:
            assert x.target.number not in self.busy_writes, "a slot is written twice at once"
            assert not self.busy_reads.get(x.target.number), "a slot is overwritten while it is read"
            self.busy_writes.add(x.target.number)
            self.holds[x.target.number] = RUBBISH

    def end(self, x: Transfer, ok: bool) -> None:
        if x.source:
            assert self.holds.get(x.source.number) == x.block.key, "a slot changed while it was read"
            self.busy_reads[x.source.number] -= 1
        if x.target:
            self.busy_writes.remove(x.target.number)
            if ok:
                self.holds[x.target.number] = x.block.key

    # ---- comparison

    def agree(self) -> None:
        self.calls += 1
        a, twin = self.table.arrays, self.twin
        # A block that is forgotten leaves children behind, and so may one that a transfer has lost.
        self.table.check(closed=not self.faults and not twin.count["forgotten"], exclusive=self.exclusive)
        assert self.where() == twin.where()
        counts, theirs = a.c.tolist(), twin.count
        if any(counts[i] != theirs[name] for i, name in COMPARED):
            assert {name: counts[i] for i, name in COMPARED} == {name: theirs[name] for _, name in COMPARED}
        assert (self.table.launched, self.table.deferred) == (len(twin.launched), len(twin.deferred))
        if self.calls % 4 == 0:
            self.agree_on_order()
        if self.calls % 3 == 0:
            self.agree_on_events()

    def agree_on_order(self) -> None:
        """Who leaves next, in each tier, and what is retained for whom."""
        a, twin = self.table.arrays, self.twin
        after = a.s["next"].tolist()
        lines: list[dict[int, list[int]]] = [{}, {}, {}]
        for tier, q in np.argwhere(a.ends[:, :, 0] >= 0).tolist():
            line, g = [], int(a.ends[tier, q, 0])
            while g >= 0:
                line.append(g)
                g = after[g]
            lines[tier][q - 1] = line
        assert lines == [{c: numbers(line) for c, line in tier.items() if line} for tier in twin.lists]
        for tier in (DEVICE, HOST, DISK):
            heap = a.heap[a.m[HBASE + tier] :][: a.m[NHEAP + tier]]
            assert sorted(heap.tolist()) == sorted(numbers(twin.retained[tier]))
        assert self.table.writing == twin.writing()
        charged = [b.retained_for for b in twin.blocks.values() if b.retained_for is not None]
        assert int(a.m[NRETAINED]) == len(charged) and int(a.ten[1]) == charged.count(1)

    def agree_on_events(self) -> None:
        """Who heard all events knows what is served from where; nothing is told twice."""
        for event in self.table.events():
            about = (int(event["k0"]), int(event["tier"]))
            assert (about in self.told) != bool(event["stored"]), "told twice"
            self.told ^= {about}
        rows = self.entries()
        states = zip(rows["k0"].tolist(), rows["state"].tolist(), strict=True)
        assert self.told == {(key, tier) for key, three in states for tier, s in enumerate(three) if s == READY}

    def where(self) -> dict[int, dict[int, int]]:
        """Slot number per key and tier, as the table has it."""
        rows = self.entries()
        return {
            k: {t: g for t, g in enumerate(slots) if g >= 0}
            for k, slots in zip(rows["k0"].tolist(), rows["slot"].tolist(), strict=True)
        }

    def entries(self) -> np.ndarray:
        """The table's entries that are in use."""
        a = self.table.arrays
        used = np.ones(len(a.e), bool)
        used[a.estack[: a.m[NENTS]]] = False
        return a.e[used]


def number(slot: Slot | None) -> int:
    return slot.number if slot else -1


def numbers(slots: list[Slot]) -> list[int]:
    return [slot.number for slot in slots]
