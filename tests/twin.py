"""A twin of the block table in plain Python: blocks and slots are objects, orders are lists, nothing is counted twice.

Written from the semantics, for tests to compare with. Slow: it searches where the table keeps an account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

DEVICE, HOST, DISK = range(3)
DEFAULT_PRIORITY = 35
MOST_TRANSIENT = 3  # errors of one slot in a row
FIRST = -1  # the class that leaves before all priorities


@dataclass(eq=False, repr=False)
class Block:
    key: int
    root: bool
    parent: Block | None = None
    children: list[Block] = field(default_factory=list)  # the newest first
    at: dict[int, Slot] = field(default_factory=dict)  # by tier
    priority: int = 0  # never below that of a child
    deadline: int = 0  # nor this
    firm: int = 0  # priority once the deadline has passed
    forget: bool = False
    retained_for: int | None = None  # tenant in whose budget it is
    guards: list[int] = field(default_factory=lambda: [0, 0, 0])  # per tier: children about to come, or as good as gone
    uses: int = 1
    last: int = 0
    alive: bool = True

    def __repr__(self) -> str:
        return f"Block({self.key})"


@dataclass(eq=False, repr=False)
class Slot:
    tier: int
    number: int  # over all tiers
    block: Block | None = None
    taken: bool = False
    leases: int = 0
    listed: bool = False  # stands somewhere in the order of eviction
    held: bool = False  # was passed over: waits for its children to leave
    bad: bool = False  # its medium lies
    retry_at: int = 0
    errors: int = 0
    crc: int = 0
    writes: list[Transfer] = field(default_factory=list)
    reads: list[Transfer] = field(default_factory=list)
    failed: Transfer | None = None  # the last write that failed, unless its holder has filled it since

    def __repr__(self) -> str:
        return f"Slot({self.number})"


@dataclass(eq=False, repr=False)
class Transfer:
    kind: str
    source: Slot | None
    target: Slot | None
    block: Block
    ticket: int
    index: int
    after: list[Transfer]  # what must be over before it starts
    content: Transfer | None  # the write that it reads the result of
    state: str = "deferred"  # then "launched", "done" or "failed"
    cancelled: bool = False

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed")

    def __repr__(self) -> str:
        return f"{self.block} {self.kind}, {self.source} to {self.target}"


class Begun(NamedTuple):
    matched: int
    tiers: list[int]
    slots: list[Slot]
    waits: list[list[Transfer]]  # per block, all that must be over before its slot is used
    arrivals: list[Transfer | None]  # per block, the write that brings it


class Twin:
    def __init__(
        self,
        device: int,
        host: int,
        disk: int,
        *,
        transfers: int = 4096,
        write_limit: int = 4096,
        clean_window: int = 0,
        spill: str = "all",
        protect_unexpired: bool = False,
        checksums: bool = True,
        retry_ns: int = 10**9,
        grace_ns: int = 30 * 10**9,
        retained_limit: int = 1 << 40,
        tenant_limit: int = 1 << 40,
    ) -> None:
        sizes, first = (device, host, disk), 0
        self.slots: list[list[Slot]] = []
        for tier, size in enumerate(sizes):
            self.slots.append([Slot(tier, first + i) for i in range(size)])
            first += size
        self.cursor = [0, 0, 0]
        self.blocks: dict[int, Block] = {}
        self.lists: list[dict[int, list[Slot]]] = [{}, {}, {}]  # per tier, class -> least recently used first
        self.retained: list[list[Slot]] = [[], [], []]  # with a live deadline
        self.orphans: list[tuple[int, Block]] = []  # due when
        self.deferred: list[Transfer] = []
        self.launched: list[Transfer] = []
        self.now = self.clock = self.keep = self.to_clean = self.clean_now = 0
        self.count: Counter[str] = Counter()
        self.transfers, self.write_limit, self.clean_window = transfers, write_limit, clean_window
        self.spill, self.protect, self.checksums = spill, protect_unexpired, checksums
        self.retry_ns, self.grace_ns = retry_ns, grace_ns
        self.retained_limit, self.tenant_limit = retained_limit, tenant_limit

    # ---- what can be asked

    def match(self, keys: list[int]) -> list[tuple[Block, int]]:
        found: list[tuple[Block, int]] = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None or self.forgotten(block) or (found and block.parent is not found[-1][0]):
                break
            tier = next((t for t in sorted(block.at) if t != DISK or block.at[t].retry_at <= self.now), None)
            if tier is None:
                break
            found.append((block, tier))
        return found

    def where(self) -> dict[int, dict[int, int]]:
        """Slot number per key and tier."""
        return {b.key: {t: s.number for t, s in sorted(b.at.items())} for b in self.blocks.values()}

    def free(self, tier: int) -> list[Slot]:
        return [s for s in self.slots[tier] if not s.taken and not s.bad]

    def in_flight(self) -> int:
        return len(self.deferred) + len(self.launched)

    def writing(self) -> int:
        return sum(x.kind.endswith("to disk") for x in self.deferred + self.launched)

    # ---- time

    def forgotten(self, block: Block) -> bool:
        return block.forget and 0 < block.deadline <= self.now

    def live(self, block: Block) -> bool:
        """Is it to be kept until its deadline? One for which the budget had no room is only forgotten then."""
        return block.deadline > self.now and block.retained_for is not None

    def advance(self, now: int) -> None:
        self.clean(self.clean_now)
        self.clean_now = 0
        self.now = max(self.now, now)
        for tier in range(3):
            while self.retained[tier]:
                block = owner(min(self.retained[tier], key=by_deadline))
                if self.live(block):
                    break
                if block.forget:
                    self.forget(block)
                else:
                    self.count["expired"] += 1
                    self.settle(block)
        while self.orphans and self.orphans[0][0] <= self.now:
            block = self.orphans.pop(0)[1]
            if block.alive and is_orphan(block):
                for tier in range(3):
                    self.put_first(block.at.get(tier))

    def lapse(self, block: Block) -> None:
        block.priority, block.deadline = block.firm, 0
        block.retained_for = None

    def settle(self, block: Block) -> None:
        """Its deadline has passed: it stands where its last use puts it."""
        moved = [s for t, s in sorted(block.at.items()) if s.listed and not s.held]
        for slot in moved:
            self.take_out(slot)
        self.lapse(block)
        for slot in moved:
            line = self.lists[slot.tier].setdefault(self.class_of(block), [])
            older = bool(line) and owner(line[0]).last > block.last
            line.insert(0 if older else len(line), slot)

    # ---- order of eviction

    def class_of(self, block: Block) -> int:
        return FIRST if self.forgotten(block) else block.priority

    def take_out(self, slot: Slot) -> None:
        if slot in self.retained[slot.tier]:
            self.retained[slot.tier].remove(slot)
        for line in self.lists[slot.tier].values():
            if slot in line:
                line.remove(slot)

    def put_in(self, slot: Slot, *, next_to_leave: bool = False) -> None:
        block = owner(slot)
        if self.live(block):
            self.retained[slot.tier].append(slot)
            return
        line = self.lists[slot.tier].setdefault(self.class_of(block), [])
        line.insert(0 if next_to_leave else len(line), slot)

    def enlist(self, slot: Slot) -> None:
        block = owner(slot)
        if 0 < block.deadline <= self.now and not block.forget:
            self.settle(block)
        slot.listed = True
        self.put_in(slot)

    def delist(self, slot: Slot) -> None:
        self.take_out(slot)
        slot.listed = slot.held = False

    def touch(self, slot: Slot | None) -> None:
        if slot and slot.listed:
            self.delist(slot)
            self.enlist(slot)

    def put_first(self, slot: Slot | None) -> None:
        if slot and slot.listed:
            self.take_out(slot)
            slot.held = False
            self.lists[slot.tier].setdefault(FIRST, []).append(slot)

    def hold(self, slot: Slot) -> None:
        self.take_out(slot)
        slot.held = True

    def kids(self, block: Block, tier: int) -> int:
        return sum(tier in child.at for child in block.children) + block.guards[tier]

    def child_left(self, block: Block | None, tier: int) -> None:
        slot = block.at.get(tier) if block else None
        if block and slot and slot.held and self.kids(block, tier) == 0:
            slot.held = False
            self.put_in(slot, next_to_leave=True)

    def victim(self, tier: int) -> Slot | None:
        while True:
            filled = [c for c, line in self.lists[tier].items() if line]
            if filled:
                slot = self.lists[tier][min(filled)][0]
                first = min(filled) == FIRST
            else:
                return self.earliest(tier)
            block = owner(slot)
            if self.kids(block, tier) == 0:
                self.delist(slot)
                return slot
            if first:  # what hangs on it goes ahead
                for child in block.children:
                    below = child.at.get(tier)
                    if below and below not in self.lists[tier].get(FIRST, []):
                        self.put_first(below)
            self.hold(slot)

    def earliest(self, tier: int) -> Slot | None:
        """Of the retained blocks; those with children stay where they are."""
        for slot in sorted(self.retained[tier], key=by_deadline):
            if tier == DISK and self.protect and owner(slot).deadline > self.now:
                return None
            if self.kids(owner(slot), tier) == 0:
                self.delist(slot)
                return slot
        return None

    # ---- slots and copies

    def take(self, tier: int, want: int) -> list[Slot]:
        """Free slots in runs: the first run found that is long enough, else the longest of all."""
        got: list[Slot] = []
        slots = self.slots[tier]
        while len(got) < want:
            need = want - len(got)
            best: list[Slot] = []
            for run in self.runs(tier, self.cursor[tier]):
                best = max(best, run[:need], key=len)
                if len(best) == need:
                    break
            for slot in best:
                slot.taken = True
            got += best
            self.cursor[tier] = slots.index(best[-1]) + 1
        return got

    def runs(self, tier: int, start: int) -> Iterator[list[Slot]]:
        """Runs of free slots from a place on to the end, then from the first slot to the end."""
        slots = self.slots[tier]
        for begin in (start, 0):
            run: list[Slot] = []
            for slot in slots[begin:]:
                if not slot.taken and not slot.bad:
                    run.append(slot)
                elif run:
                    yield run
                    run = []
            if run:
                yield run

    def put_away(self, slot: Slot) -> None:
        if slot.bad:
            self.count["quarantined"] += 1
        slot.taken = False

    def attach(self, block: Block, slot: Slot) -> None:
        block.at[slot.tier] = slot
        slot.block = block
        slot.retry_at = slot.errors = 0

    def detach(self, block: Block, tier: int) -> Slot:
        slot = block.at[tier]
        self.delist(slot)
        del block.at[tier]
        slot.block = None
        self.child_left(block.parent, tier)
        if not block.at:
            self.destroy(block)
        return slot

    def destroy(self, block: Block) -> None:
        block.alive = False
        del self.blocks[block.key]
        if block.parent:
            block.parent.children.remove(block)
        for child in block.children:
            child.parent = None
            self.count["orphaned"] += 1
            if self.grace_ns:
                self.orphans.append((self.now + self.grace_ns, child))
            else:
                for tier in range(3):
                    self.put_first(child.at.get(tier))

    def lose(self, block: Block, tier: int) -> None:
        slot = self.detach(block, tier)
        self.count["lost"] += 1
        if not slot.leases:
            self.put_away(slot)

    def forget(self, block: Block) -> None:
        self.count["forgotten"] += 1
        for tier in sorted(block.at):
            self.lose(block, tier)

    def lease(self, slot: Slot) -> None:
        if not slot.leases:
            self.delist(slot)
        slot.leases += 1

    def unlease(self, slot: Slot) -> None:
        slot.leases -= 1
        if slot.leases:
            return
        if slot.block is None:
            self.put_away(slot)
            return
        block = slot.block
        self.enlist(slot)
        if self.forgotten(block):
            self.forget(block)

    # ---- transfers

    def issue(self, kind: str, source: Slot | None, target: Slot | None, block: Block, ticket=-1, index=0) -> None:
        after: list[Transfer] = []
        if source:
            after += source.writes
        if target:
            after += target.writes + target.reads
        x = Transfer(kind, source, target, block, ticket, index, unfinished(after), newest_write(source))
        if source:
            source.reads = [*unfinished(source.reads), x]
        if target:
            target.writes = [*unfinished(target.writes), x]
        self.deferred.append(x)

    def launch(self, room: int) -> tuple[list[Transfer], list[tuple[int, int]]]:
        started, never = [], []
        for x in list(self.deferred):
            if len(started) == room or not all(y.over for y in x.after):
                continue
            self.deferred.remove(x)
            if x.cancelled or (x.source and x.content and x.source.failed is x.content):
                if x.ticket >= 0:
                    never.append((x.ticket, x.index))
                self.finish(x, ok=False)
            else:
                x.state = "launched"
                self.launched.append(x)
                started.append(x)
        return started, never

    def complete(self, x: Transfer, *, error: str = "", crc: int = 0) -> bool:
        """`error`: "" or "cancelled" or anything else that is wrong with the medium for now."""
        self.launched.remove(x)
        lied = False
        if not error and self.checksums:
            if x.target and x.target.tier == DISK:
                x.target.crc = crc
            elif x.source and x.source.tier == DISK:
                lied = crc != x.source.crc
        ok = not error and not lied
        self.finish(x, ok=ok, transient=not ok and not lied and error != "cancelled", lied=lied)
        return ok

    def finish(self, x: Transfer, *, ok: bool, transient: bool = False, lied: bool = False) -> None:
        x.state = "done" if ok else "failed"
        if x.target and not ok:
            x.target.failed = x
        newest = x.target is not None and x.target.writes[-1] is x
        if not ok and x.target and newest and x.block.alive and x.block.at.get(x.target.tier) is x.target:
            if x.target.tier == DISK:
                self.lose_below(x.block, DISK)
            else:
                self.lose(x.block, x.target.tier)
        from_disk = x.source is not None and x.source.tier == DISK
        still_there = x.source is not None and x.block.alive and x.block.at.get(x.source.tier) is x.source
        if ok:
            if from_disk and still_there:
                x.source.errors = 0
            return
        if x.kind.endswith("to disk"):
            self.count["failed_writes"] += 1
        elif not from_disk:
            self.count["failed_copies"] += 1
        else:
            self.count["failed_reads"] += 1
            self.count["bad_payloads"] += lied
            met_before = transient and x.source is not None and x.source.retry_at > self.now
            if (lied or transient) and still_there and not met_before:
                x.source.errors += 1
                if lied or x.source.errors >= MOST_TRANSIENT:
                    x.source.bad = True
                    self.lose(x.block, DISK)
                else:
                    self.count["transient_errors"] += 1
                    x.source.retry_at = self.now + self.retry_ns * 2 ** (x.source.errors - 1)

    def lose_below(self, block: Block, tier: int) -> None:
        """With what hangs on it in the tier, leaves first."""
        for child in list(block.children):
            if tier in child.at:
                self.lose_below(child, tier)
        self.lose(block, tier)

    def cancel(self, ticket: int) -> list[Transfer]:
        for x in self.deferred:
            if x.ticket == ticket:
                x.cancelled = True
        return [x for x in self.launched if x.ticket == ticket]

    # ---- to disk

    def worth(self, block: Block) -> bool:
        return self.spill == "all" or self.live(block) or (self.spill == "reused" and block.uses >= 2)

    def gather(self, block: Block, to_write: list[Block]) -> None:
        """It and its ancestors that are not on disk yet, root first."""
        line: list[Block] = []
        here: Block | None = block
        while here and DISK not in here.at and here not in to_write:
            if is_orphan(here):
                return
            line.insert(0, here)
            here = here.parent
        to_write += line

    def drop(self, tier: int, slot: Slot) -> None:
        block = owner(slot)
        self.count[f"evicted_{('device', 'host', 'disk')[tier]}"] += 1
        self.put_away(self.detach(block, tier))
        self.count["dropped_last"] += not block.alive

    def disk_room(self, want: int) -> int:
        while len(self.free(DISK)) < want:
            slot = self.victim(DISK)
            if slot is None:
                if self.protect and self.retained[DISK]:
                    self.count["refused_protected"] += want - len(self.free(DISK))
                break
            self.drop(DISK, slot)
        return min(want, len(self.free(DISK)))

    def guard(self, block: Block | None, tier: int, by: int) -> None:
        if block:
            block.guards[tier] += by
            if by < 0:
                self.child_left(block, tier)

    def write(self, blocks: list[Block]) -> int:
        if not blocks:
            return 0
        room = self.write_limit - self.writing()
        want = 0
        for block in blocks:
            if not (want < room or (self.live(block) and want < room + self.write_limit)):
                break
            want += 1
        want = min(want, max(0, self.transfers - self.in_flight() - self.keep))
        self.count["shed_queue"] += len(blocks) - want
        parents = [block.parent for block in blocks[:want]]
        for parent in parents:
            self.guard(parent, DISK, 1)
        got = self.disk_room(want)
        self.count["shed_no_slot"] += want - got
        written = list(zip(blocks, self.take(DISK, got), strict=False))
        for block, slot in written:
            self.attach(block, slot)
            if HOST in block.at:
                self.issue("host to disk", block.at[HOST], slot, block)
            else:
                self.issue("device to disk", block.at[DEVICE], slot, block)
        for _, slot in reversed(written):
            self.enlist(slot)
        for parent in parents:
            self.guard(parent, DISK, -1)
        self.count["spills"] += got
        return got

    # ---- to host

    def pop(self, tier: int, chosen: list[Slot]) -> bool:
        slot = self.victim(tier)
        if slot:
            chosen.append(slot)
            self.guard(owner(slot).parent, tier, -1)
        return slot is not None

    def unpop(self, slot: Slot) -> Block:
        block = owner(slot)
        if block.parent:
            block.parent.guards[slot.tier] += 1
        return block

    def leave(self, slot: Slot) -> None:
        block = self.unpop(slot)
        self.detach(block, slot.tier)
        self.count["dropped_last"] += not block.alive

    def host_room(self, want: int, *, clean_later: bool = False) -> list[Slot]:
        if not self.slots[HOST] or not want:
            return []
        got = self.take(HOST, min(want, len(self.free(HOST))))
        chosen: list[Slot] = []
        to_write: list[Block] = []
        while len(got) + len(chosen) < want and self.pop(HOST, chosen):
            block = owner(chosen[-1])
            if DISK in block.at:
                self.count["dropped_clean"] += 1
            elif self.slots[DISK]:
                if self.worth(block):
                    self.gather(block, to_write)
                else:
                    self.count["dropped_unworthy"] += 1
        self.write(to_write)
        for slot in chosen:
            self.leave(slot)
        self.count["evicted_host"] += len(chosen)
        if chosen:
            self.to_clean += 2 * len(chosen) + 8
        if not clean_later and chosen:
            self.clean(2 * len(chosen) + 8)
            self.to_clean -= 2 * len(chosen) + 8
        return got + chosen

    def clean(self, most: int) -> None:
        if not self.slots[DISK]:
            return
        line = [s for c in sorted(self.lists[HOST]) for s in self.lists[HOST][c]]
        to_write: list[Block] = []
        for slot in line[: self.clean_window]:
            if len(to_write) >= most:
                break
            if DISK not in owner(slot).at and self.worth(owner(slot)):
                self.gather(owner(slot), to_write)
        self.count["cleaned"] += self.write(to_write)

    # ---- requests

    def device_room(self, want: int) -> list[Slot] | None:
        free = self.take(DEVICE, min(want, len(self.free(DEVICE))))
        chosen: list[Slot] = []
        while len(free) + len(chosen) < want and self.pop(DEVICE, chosen):
            pass
        if len(free) + len(chosen) < want:
            for slot in reversed(chosen):
                self.unpop(slot)
                slot.listed = True
                self.put_in(slot, next_to_leave=True)
            for slot in free:
                self.put_away(slot)
            return None
        there = self.host_room(want - len(free), clean_later=True)
        for slot, to in zip(chosen, there, strict=False):
            block = owner(slot)
            self.attach(block, to)
            self.leave(slot)
            self.enlist(to)
            self.issue("device to host", slot, to, block)
        self.count["offloads"] += len(there)
        to_write: list[Block] = []
        for slot in chosen[len(there) :]:
            block = owner(slot)
            if DISK not in block.at and self.slots[DISK]:
                if self.worth(block):
                    self.gather(block, to_write)
                else:
                    self.count["dropped_unworthy"] += 1
        self.write(to_write)
        for slot in chosen[len(there) :]:
            self.leave(slot)
        self.count["evicted_device"] += len(chosen)
        return free + chosen

    def use(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            self.clock += 1
            block.uses += 1
            block.last = self.clock
            for tier in range(3):
                self.touch(block.at.get(tier))

    def begin(self, keys: list[int], total: int) -> Begun | str:
        if total > len(self.slots[DEVICE]):
            self.count["rejected"] += 1
            return "request is larger than the device tier"
        found = self.match(keys)
        for block, tier in found:
            self.lease(block.at[tier])
        want = total - sum(tier == DEVICE for _, tier in found)
        self.keep = 2 * want
        new, why = None, ""
        if self.transfers - self.in_flight() < 2 * want:
            why = "transfers are in flight"
        else:
            listed = sum(s.listed for s in self.slots[DEVICE])
            new = self.device_room(want) if len(self.free(DEVICE)) + listed >= want else None
            why = "" if new is not None else "device slots are leased"
        self.keep = 0
        if new is None:
            self.count["rejected"] += 1
            for block, tier in reversed(found):
                self.unlease(block.at[tier])
            return why
        self.use([block for block, _ in found])
        begun = Begun(len(found), [tier for _, tier in found], [], [], [])
        for i in range(total):
            block, tier = found[i] if i < len(found) else (None, None)
            if block and tier == DEVICE:
                slot = block.at[DEVICE]
                self.count["matched_device"] += 1
                self.count["joined"] += any(not x.over for x in slot.writes)
                waits = []
            else:
                slot = new.pop(0)
                slot.leases = 1
                waits = list(slot.reads)
                if block:
                    self.onboard(block, tier, slot)
            begun.slots.append(slot)
            begun.waits.append(waits + slot.writes)
            begun.arrivals.append(newest_write(slot))
        for block, tier in reversed(found):
            if tier == DISK:
                self.unlease(block.at[DISK])
        return begun

    def onboard(self, block: Block, tier: int, to: Slot) -> None:
        slot = block.at[tier]
        self.count[f"matched_{('device', 'host', 'disk')[tier]}"] += 1
        self.attach(block, to)
        if tier == DISK:
            self.count["onboards_disk"] += 1
            self.issue("disk to device", slot, to, block)
            return
        self.count["onboards_host"] += 1
        self.issue("host to device", slot, to, block)
        slot.leases -= 1
        self.detach(block, HOST)
        if not slot.leases:
            self.put_away(slot)

    def landed(self, begun: Begun) -> int:
        waiting = (i for i, waits in enumerate(begun.waits) if not all(x.over for x in waits))
        return next(waiting, len(begun.slots))

    def lost(self, begun: Begun) -> list[int]:
        return [i for i, x in enumerate(begun.arrivals[: begun.matched]) if x and begun.slots[i].failed is x]

    def abandon(self, begun: Begun) -> list[int]:
        """What has not landed is not waited for: nobody finds it there, nor on disk for a while."""
        late = [i for i, waits in enumerate(begun.waits) if not all(x.over for x in waits)]
        for slot in (begun.slots[i] for i in late):
            block, write = slot.block, newest_write(slot)
            if block and write and not write.over:
                if DISK in block.at:
                    block.at[DISK].retry_at = self.now + self.retry_ns
                self.detach(block, DEVICE)
        return late

    def admit(
        self, keys: list[int], priority: list[int], ttl: list[int], forget: bool, tenant: int
    ) -> tuple[list[int], list[int]]:
        """Cut priorities and deadlines to the budget: from the first block on, as far as it reaches."""
        charged = [b.retained_for for b in self.blocks.values() if b.retained_for is not None]
        room = min(self.retained_limit - len(charged), self.tenant_limit - charged.count(tenant))
        last = max((i for i, t in enumerate(ttl) if t > 0), default=-1)
        for i, key in enumerate(keys[: last + 1]):
            block = self.blocks.get(key)
            if block and block.retained_for is not None:
                continue
            if room <= 0:
                over = [t > 0 for t in ttl[i:]]
                self.count["over_budget"] += sum(over)
                cut = [min(p, DEFAULT_PRIORITY) if o else p for p, o in zip(priority[i:], over, strict=True)]
                then = [(~t if forget else 0) if o else t for t, o in zip(ttl[i:], over, strict=True)]
                return priority[:i] + cut, ttl[:i] + then
            room -= 1
        return priority, ttl

    def enter(self, key: int, parent: Block | None, priority: int, ttl: int, forget: bool) -> Block:
        block = self.blocks.get(key)
        if block and self.forgotten(block):
            self.forget(block)
            block = None
        if block is None:
            block = self.blocks[key] = Block(key, root=parent is None, parent=parent)
            if parent:
                parent.children.insert(0, block)
            block.forget = forget and ttl != 0
        else:
            if parent and is_orphan(block):
                block.parent = parent
                parent.children.insert(0, block)
                self.count["adopted"] += 1
                for tier in range(3):
                    slot = block.at.get(tier)
                    if slot in self.lists[tier].get(FIRST, []):
                        self.touch(slot)
            block.forget = block.forget and forget and ttl != 0
        block.firm = max(block.firm, priority if ttl == 0 else min(priority, DEFAULT_PRIORITY))
        return block

    def retain(self, blocks: list[Block], priority: list[int], ttl: list[int], tenant: int) -> None:
        """What a block is granted, its ancestors are granted."""
        most, until, firm = 0, 0, 0
        for block, wish, time in reversed(list(zip(blocks, priority, ttl, strict=False))):
            if not block.last:
                self.clock += 1
                block.last = self.clock
            firm = block.firm = max(firm, block.firm)
            most = max(most, wish, block.priority)
            until = max(until, self.now + time if time > 0 else 0, block.deadline if self.live(block) else 0)
            counted = block.retained_for is not None
            if not counted:
                at = self.now + (time if time >= 0 else ~time) if time else 0
                block.deadline = max(block.deadline, at) if block.forget else 0
            if most <= block.priority and (until <= self.now or (counted and until <= block.deadline)):
                continue
            listed = [s for _, s in sorted(block.at.items()) if s.listed]
            for slot in listed:
                self.delist(slot)
            block.priority = max(block.priority, most)
            if until > self.now:
                block.deadline = max(block.deadline, until) if counted else until
                block.retained_for = block.retained_for if counted else tenant
            for slot in listed:
                self.enlist(slot)

    def write_soon(self, blocks: list[Block]) -> None:
        to_write: list[Block] = []
        if self.slots[DISK]:
            for block in blocks:
                above_disk = any(DISK in child.at for child in block.children)
                if DISK not in block.at and (self.live(block) or above_disk):
                    self.gather(block, to_write)
        self.count["retained_writes"] += self.write(to_write)

    def commit(
        self, keys: list[int], slots: list[Slot], priority: list[int], ttl: list[int], forget: bool, tenant: int
    ) -> int:
        priority, ttl = self.admit(keys, priority, ttl, forget, tenant)
        new, parent, blocks = 0, None, []
        for key, slot, wish, time in zip(keys, slots, priority, ttl, strict=False):
            block = self.enter(key, parent, wish, time, forget)
            if DEVICE not in block.at:
                self.attach(block, slot)
                slot.failed = None
                new += 1
                if HOST in block.at:
                    copy = self.detach(block, HOST)
                    if not copy.leases:
                        self.put_away(copy)
            elif block.at[DEVICE] is not slot:
                self.count["duplicates"] += 1
            blocks.append(block)
            parent = block
        self.count["committed"] += new
        self.retain(blocks, priority, ttl, tenant)
        self.write_soon(blocks)
        return new

    def release(self, slots: list[Slot]) -> None:
        for slot in reversed(slots):
            self.unlease(slot)
        self.clean_now += self.to_clean
        self.to_clean = 0

    def prefetch(self, keys: list[int], most: int) -> int:
        if not self.slots[HOST]:
            return 0
        found = self.match(keys)
        for block, tier in found:
            self.lease(block.at[tier])
        wanted = [block for block, tier in found if tier == DISK][:most]
        self.keep = len(wanted)
        room = self.host_room(len(wanted)) if self.transfers - self.in_flight() >= len(wanted) else []
        self.keep = 0
        for block, slot in zip(wanted, room, strict=False):
            self.attach(block, slot)
            self.issue("disk to host", block.at[DISK], slot, block)
        for block, tier in reversed(found):
            if tier == DISK and HOST in block.at:
                self.enlist(block.at[HOST])
            self.unlease(block.at[tier])
        self.count["prefetches"] += len(room)
        return len(room)

    # ---- under somebody else's device pool

    def find(self, keys: list[int]) -> list[tuple[Block, Slot]]:
        found = self.match(keys)
        self.use([block for block, _ in found])
        held = []
        for block, tier in found:
            self.count[f"matched_{('device', 'host', 'disk')[tier]}"] += 1
            self.lease(block.at[tier])
            held.append((block, block.at[tier]))
        return held

    def load(self, held: list[tuple[Block, Slot]], ticket: int) -> list[int] | None:
        if self.transfers - self.in_flight() < len(held):
            return None
        gone = []
        for i, (block, slot) in enumerate(held):
            if slot.block is not block:
                gone.append(i)
            else:
                kind = "disk to caller" if slot.tier == DISK else "host to caller"
                self.issue(kind, slot, None, block, ticket, i)
        return gone

    def own_stay(self, known: list[int], missing: int) -> bool:
        """Is there room in host without the request's own first blocks, or nowhere else for them to be?"""
        if not self.slots[DISK] or self.spill != "all":
            return True
        own = [self.blocks[key].at.get(HOST) for key in known]
        listed = sum(s.listed for s in self.slots[HOST]) - sum(s is not None and s.listed for s in own)
        return len(self.free(HOST)) + listed >= missing

    def store(
        self, keys: list[int], priority: list[int], ttl: list[int], forget: bool, tenant: int, ticket: int
    ) -> tuple[int, int]:
        priority, ttl = self.admit(keys, priority, ttl, forget, tenant)

        def there(key: int) -> bool:
            return key in self.blocks and not self.forgotten(self.blocks[key])

        known = next((i for i, key in enumerate(keys) if not there(key)), len(keys))
        missing = sum(not there(key) for key in keys[known:])
        last = self.blocks[keys[known - 1]] if known else None
        top = HOST if self.slots[HOST] else DISK
        room: list[Slot] = []
        self.keep = missing
        if self.transfers - self.in_flight() >= missing:
            guarded = [HOST, DISK] if self.own_stay(keys[:known], missing) else [DISK]
            for tier in guarded:
                self.guard(last, tier, 1)
            if top == HOST:
                room = self.host_room(missing)
            else:
                room = self.take(DISK, self.disk_room(min(missing, max(0, self.write_limit - self.writing()))))
            for tier in guarded:
                self.guard(last, tier, -1)
        blocks: list[Block] = []
        used = 0
        for i, key in enumerate(keys):
            if not there(key) and used == len(room):
                break
            block = self.enter(key, blocks[-1] if blocks else None, priority[i], ttl[i], forget)
            if HOST not in block.at and DISK not in block.at:
                self.attach(block, room[used])
                kind = "caller to host" if top == HOST else "caller to disk"
                self.issue(kind, None, room[used], block, ticket, i)
                used += 1
            blocks.append(block)
        for slot in room[used:]:
            self.put_away(slot)
        for i, block in reversed(list(enumerate(blocks))):
            slot = block.at.get(top)
            if slot and not slot.listed and not slot.leases:
                self.enlist(slot)
            elif i < known:
                for tier in (HOST, DISK):
                    self.touch(block.at.get(tier))
        self.retain(blocks, priority, ttl, tenant)
        self.keep = 0
        self.write_soon(blocks)
        self.count["committed"] += used
        self.count["shed_no_slot"] += max(0, missing - used)
        return len(blocks), used


def owner(slot: Slot) -> Block:
    assert slot.block is not None
    return slot.block


def is_orphan(block: Block) -> bool:
    return block.parent is None and not block.root


def by_deadline(slot: Slot) -> tuple[int, int]:
    return owner(slot).deadline, owner(slot).last


def newest_write(slot: Slot | None) -> Transfer | None:
    return slot.writes[-1] if slot and slot.writes else None


def unfinished(transfers: list[Transfer]) -> list[Transfer]:
    return [x for x in transfers if not x.over]
