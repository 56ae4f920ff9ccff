"""``BlockTable``: the jitted plans behind one object, with arrays of the right size and errors for wrong callers.

Adds no decision of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import entries, events, journal, moves, plan, slots
from .asked import catch_up
from .check import WRONG, check
from .learned import ASKED, BURST, PER_NS, S_ASKED, S_HITS, SCALES, TOKENS, from_bytes, to_bytes
from .state import (
    BASE,
    C_REJECTED,
    CAP,
    CHECKS,
    CLEAN_WINDOW,
    COUNTERS,
    DEVICE,
    DISK,
    FREE,
    GRACE_NS,
    HOST,
    JHEAD,
    JOURNAL,
    JTAIL,
    LEARNS,
    NBAD,
    NBADROWS,
    NFREE,
    NLAUNCHED,
    NLEASED,
    NOW,
    NRETAINED,
    NUSED,
    NWRITING,
    NXDEF,
    NXFREE,
    PROTECT,
    RETAINED_LIMIT,
    RETRY_NS,
    SPILL,
    SPILL_ALL,
    SPILL_LEARNED,
    SPILL_RETAINED,
    SPILL_REUSED,
    STRIPE,
    TENANT_LIMIT,
    TENANTS,
    THEAD,
    TIERS,
    TTAIL,
    WRITE_LIMIT,
    XCAP,
    new_arrays,
)

Keys = NDArray[np.uint64]
BURST_SHARE = 0.04  # of an hour's write budget, that may be spent at once
SWEEP = 64  # deadlines acted on per call, tier and kind
CLEAN_WINDOW_MOST = 1024  # host blocks looked at per call
_SPILL = {"all": SPILL_ALL, "reused": SPILL_REUSED, "retained": SPILL_RETAINED, "learned": SPILL_LEARNED}
_WHY = {plan.NO_SLOTS: "slots", plan.NO_TRANSFERS: "transfers"}


class Begun(NamedTuple):
    """A request's blocks, as planned."""

    matched: int  # blocks found, from the first
    entries: NDArray[np.int32]  # per matched block
    tiers: NDArray[np.int8]  # per matched block: where it was found
    slots: NDArray[np.int32]  # device slot per block
    need_w: NDArray[np.uint32]  # scoreboard: what `landed` waits for
    need_r: NDArray[np.uint32]


class Rejection(NamedTuple):
    """Why nothing was planned: what is short, how much there is, and how much of it is in use."""

    reason: str
    limit: int
    in_use: int


class BlockTable:
    """Index, order of eviction, leases, deadlines and scoreboard of three tiers.

    Every call takes a whole batch of keys and does bounded work in memory. Times are nanoseconds and never step back.

    Parameters
    ----------
    device_blocks, host_blocks, disk_blocks : int
        Slots per tier; 0 = absent. 0 <= each, at least one > 0.
    transfers : int
        Transfers planned or in flight at once; by default enough for every slot in memory and `write_limit`.
    write_limit : int
        Blocks waiting to be written to disk, above which best-effort spills are shed.
    host_clean : float
        Share of the host slots, those next to leave, that are written to disk ahead of need.
    policy, memory_policy : {"lru", "hazard"}
        Order among equals in the disk tier, and in the two above: by last use, or by what is learned to come back.
    spill : {"all", "reused", "retained", "learned"}
        Which blocks are worth writing; "learned" asks for `policy` "hazard".
    write_budget : float
        Blocks that may be written to disk in an hour; 0 = any number.
    protect_unexpired : bool
        A disk full of live retained blocks refuses new ones.
    checksums : bool
        Compare the CRC-32C of what was read with what was written.
    retry_after, orphan_grace : float
        Seconds until a block is tried again after a transient read error; until an orphan loses its place.
    retained_limit, tenant_limit : int
        Blocks with a live deadline, ancestors included, in all and per tenant.
    directories : sequence of int
        Disk slots per directory, one after the other; by default all in one.
    stripe_width : int
        Directories that one allocation is cut over.
    events : bool
        Keep what comes and goes for `events`.
    """

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        disk_blocks: int,
        *,
        transfers: int = 0,
        write_limit: int = 4096,
        host_clean: float = 0.1,
        policy: str = "lru",
        memory_policy: str = "lru",
        spill: str = "all",
        write_budget: float = 0.0,
        protect_unexpired: bool = False,
        checksums: bool = True,
        retry_after: float = 1.0,
        orphan_grace: float = 30.0,
        retained_limit: int = 1 << 40,
        tenant_limit: int = 1 << 40,
        directories: Sequence[int] = (),
        stripe_width: int = 4,
        events: bool = False,
    ) -> None:
        memory = device_blocks + host_blocks
        self.transfers = transfers or max(4096, 4 * memory + 4 * write_limit)
        policies = (memory_policy, memory_policy, policy)
        by_value = [t for t in range(3) if policies[t] == "hazard"]
        a = self.arrays = new_arrays(
            device_blocks, host_blocks, disk_blocks, self.transfers, directories, by_value, events
        )
        a.m[STRIPE] = stripe_width
        a.lf[PER_NS] = write_budget / 3600e9
        a.lf[BURST] = a.lf[TOKENS] = max(1.0, BURST_SHARE * write_budget) if write_budget else 0.0
        a.m[WRITE_LIMIT] = write_limit
        a.m[SPILL] = _SPILL[spill]
        a.m[PROTECT] = protect_unexpired
        a.m[CHECKS] = checksums
        a.m[CLEAN_WINDOW] = min(CLEAN_WINDOW_MOST, int(host_clean * host_blocks))
        a.m[RETRY_NS] = int(retry_after * 1e9)
        a.m[GRACE_NS] = int(orphan_grace * 1e9)
        a.m[RETAINED_LIMIT], a.m[TENANT_LIMIT] = retained_limit, tenant_limit
        self._tenants: dict[str, int] = {"": 0}
        self.tickets_done = np.zeros(max(1, self.transfers), np.int64)
        self._failed = np.zeros((self.transfers, 2), np.int64)
        self._result = np.zeros(8, np.int64)

    def capacity(self, tier: int) -> int:
        """Slots of a tier."""
        return int(self.arrays.m[CAP + tier])

    def base(self, tier: int) -> int:
        """Number of a tier's first slot among the slots of all tiers."""
        return int(self.arrays.m[BASE + tier])

    @property
    def launched(self) -> int:
        """Transfers handed out by `launch` and not completed."""
        return int(self.arrays.m[NLAUNCHED])

    @property
    def deferred(self) -> int:
        """Transfers planned and not handed out."""
        return int(self.arrays.m[NXDEF])

    @property
    def writing(self) -> int:
        """Blocks on their way to disk."""
        return int(self.arrays.m[NWRITING])

    def tenant(self, name: str) -> int:
        """Number of a tenant in the budget."""
        return self._tenants.setdefault(name, min(len(self._tenants), TENANTS - 1))

    def retained(self) -> dict[str, int]:
        """Blocks with a live deadline per tenant."""
        return {name: int(self.arrays.ten[i]) for name, i in self._tenants.items()}

    @property
    def now(self) -> int:
        """The table's time, ns."""
        return int(self.arrays.m[NOW])

    def advance(self, now: int) -> None:
        """Let time be `now`, ns, and act on a bounded number of deadlines that have passed."""
        plan.advance(self.arrays, now)
        entries.sweep(self.arrays, SWEEP)

    def match(self, keys: Keys) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Entry and tier of each block of the longest run that can be served. Holds nothing."""
        ents, tiers = np.empty(len(keys), np.int32), np.empty(len(keys), np.int8)
        n = plan.match(self.arrays, keys, len(keys), ents, tiers)
        return ents[:n], tiers[:n]

    def begin(self, keys: Keys, total: int) -> Begun | Rejection:
        """Match keys and lease a device slot for each of `total` >= len(keys) blocks."""
        a, n = self.arrays, len(keys)
        if total > a.m[CAP + DEVICE]:
            a.c[C_REJECTED] += 1
            return Rejection("request is larger than the device tier", int(a.m[CAP + DEVICE]), total)
        ents, tiers = np.empty(n, np.int32), np.empty(n, np.int8)
        slots = np.empty(total, np.int32)
        need = np.empty((2, total), np.uint32)
        why = plan.begin(a, keys, n, total, ents, tiers, slots, need[0], need[1], self._result)
        if why == plan.NO_SLOTS:
            return Rejection("device slots are leased", int(a.m[CAP + DEVICE]), int(a.m[NLEASED + DEVICE]))
        if why == plan.NO_TRANSFERS:
            return Rejection("transfers are in flight", int(a.m[XCAP]), int(a.m[XCAP] - a.m[NXFREE]))
        m = int(self._result[0])
        return Begun(m, ents[:m], tiers[:m], slots, need[0], need[1])

    def landed(self, begun: Begun, start: int) -> int:
        """First block, from `start`, whose slot is not to be used yet; the number of blocks if there is none."""
        return int(moves.landed(self.arrays, begun.slots, begun.need_w, begun.need_r, start, len(begun.slots)))

    def lost(self, begun: Begun) -> NDArray[np.int64]:
        """Indices of the matched blocks that did not arrive."""
        out = np.empty(begun.matched, np.int64)
        return out[: moves.lost(self.arrays, begun.slots, begun.need_w, begun.matched, out)]

    def waiting(self, begun: Begun) -> NDArray[np.int64]:
        """Indices of the blocks whose slots are not to be used yet."""
        s = self.arrays.s[begun.slots]
        return np.flatnonzero((s["wd"] < begun.need_w) | (s["rd"] < begun.need_r))

    def abandon(self, begun: Begun) -> NDArray[np.int64]:
        """Indices of the blocks whose slots are not to be used yet: nobody finds there what should have come, and the
        leases stay. For a time the blocks are not read from disk either."""
        n = len(begun.slots)
        out = np.empty(n, np.int64)
        return out[: moves.abandon(self.arrays, begun.slots, begun.need_w, begun.need_r, n, out)]

    def commit(
        self,
        keys: Keys,
        slots: NDArray[np.int32],
        priority: NDArray[np.uint8],
        ttl: NDArray[np.int64],
        forget: bool,
        tenant: int = 0,
    ) -> int:
        """Blocks `keys`, a chain from its root, computed in the leased device `slots`, become findable. `ttl` in ns,
        0 = none, `~x` = not retained, yet forgotten after x. What finds no room in the budget is changed in place to
        that under `forget`, else to 0, and its priority to the default at most. Returns how many were new; -1 - i if
        slot i holds another block's content."""
        ents = np.empty(len(keys), np.int32)
        return int(plan.commit(self.arrays, keys, slots, len(keys), priority, ttl, forget, tenant, ents))

    def release(self, slots: NDArray[np.int32]) -> None:
        """End one hold on each of these device slots."""
        plan.release(self.arrays, slots, len(slots))

    def prefetch(self, keys: Keys, most: int) -> int:
        """Plan reads of blocks that are on disk alone into host."""
        if self.capacity(HOST) == 0:
            return 0
        ents, tiers = np.empty(len(keys), np.int32), np.empty(len(keys), np.int8)
        return int(plan.prefetch(self.arrays, keys, len(keys), most, ents, tiers))

    def ask(self, keys: Keys) -> tuple[NDArray[np.int8], bool]:
        """Match for a request that asks for all of `keys`, and learn from it: the tiers, and whether it is another
        request than the last one."""
        ents, tiers = np.empty(len(keys), np.int32), np.empty(len(keys), np.int8)
        n = plan.ask_only(self.arrays, keys, len(keys), ents, tiers, self._result)
        return tiers[:n], bool(self._result[0])

    def find(self, keys: Keys, *, asks: bool = True) -> tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int32]]:
        """Match and lease: entry, tier and slot of each block. `asks`: no `ask` came before."""
        n = len(keys)
        ents, tiers, held = np.empty(n, np.int32), np.empty(n, np.int8), np.empty(n, np.int32)
        m = plan.find(self.arrays, keys, n, ents, tiers, held, asks)
        return ents[:m], tiers[:m], held[:m]

    def leave(self, tiers: NDArray[np.int8], held: NDArray[np.int32]) -> None:
        """End the leases of `find`."""
        plan.leave(self.arrays, tiers, held, len(held))

    def load(
        self,
        ents: NDArray[np.int32],
        tiers: NDArray[np.int8],
        held: NDArray[np.int32],
        addresses: NDArray[np.uint64],
        ticket: int,
    ) -> NDArray[np.int64] | None:
        """Plan reads of leased blocks to the caller's memory; indices of those lost meanwhile, or None if there are not
        enough transfers left."""
        if len(held) > self.arrays.m[NXFREE]:
            return None
        gone = np.empty(len(held), np.int64)
        self.tickets_done[ticket] = 0
        return gone[: plan.load(self.arrays, ents, tiers, held, addresses, len(held), ticket, gone)]

    def store(
        self,
        keys: Keys,
        addresses: NDArray[np.uint64],
        priority: NDArray[np.uint8],
        ttl: NDArray[np.int64],
        forget: bool,
        ticket: int,
        tenant: int = 0,
    ) -> tuple[int, int]:
        """Take a chain from the caller's memory: blocks cached once done, and transfers planned for it."""
        ents = np.empty(len(keys), np.int32)
        self.tickets_done[ticket] = 0
        args = (self.arrays, keys, addresses, len(keys), priority, ttl, forget, tenant, ticket, ents, self._result)
        return int(plan.store(*args)), int(self._result[0])

    def launch(self, room: int, out: NDArray[np.int32], *, at_once: bool = False) -> tuple[int, NDArray[np.int64]]:
        """Transfers that may start now, into `out`; and [ticket, index] of those that can never start. With `at_once`
        in order of issue, for somebody who sees to it that each waits for the earlier ones it depends on."""
        n = moves.launch(self.arrays, min(room, len(out)), out, self._failed, self.tickets_done, at_once)
        return int(n), self._failed[: self.arrays.m[NBADROWS]].copy()

    def complete(self, results: NDArray[Any], count: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take in results of the I/O engine (fields tag, moved, crc), each of which should have moved `lengths[kind]`
        bytes; [ticket, index] of those that failed."""
        n = moves.complete(self.arrays, results, count, lengths, self._failed, self.tickets_done)
        return self._failed[:n].copy()

    def cancel(self, ticket: int) -> NDArray[np.int64]:
        """Let the deferred transfers of a ticket fail; the launched ones, which the I/O engine may still cancel."""
        out = np.empty(self.transfers, np.int64)
        return out[: moves.cancel(self.arrays, ticket, out)]

    def remember(self) -> None:
        """Keep a journal of the disk tier from now on."""
        self.arrays.m[JOURNAL] = 1

    def changes(self, out: NDArray[Any]) -> int:
        """What is to be remembered, into `out` (dtype CHANGE); each slot is busy until `written`."""
        return int(journal.drain(self.arrays, len(out), out))

    def written(self, slot: int, what: int, ok: bool) -> None:
        """The record of a disk slot is written, or failed to be."""
        journal.written(self.arrays, slot, what, ok)

    @property
    def unremembered(self) -> int:
        """Disk slots whose changes are not written yet."""
        return int(self.arrays.m[JTAIL] - self.arrays.m[JHEAD])

    def all_written(self, slots: NDArray[np.int32]) -> None:
        """The records of these disk slots are written."""
        journal.all_written(self.arrays, slots)

    def events(self) -> NDArray[Any]:
        """Blocks that have come to be served from a tier, or are so no more, since the last call (dtype EVENT)."""
        out = np.empty(2 * int(self.arrays.m[TTAIL] - self.arrays.m[THEAD]), events.EVENT)
        return out[: events.drain(self.arrays, out)]

    def restore(self, blocks: NDArray[Any], by_use: NDArray[np.int64]) -> int:
        """Make the disk tier from remembered blocks; how many came back. `by_use` lists them from the least recently
        used on.

        `blocks` has the fields of CHANGE, and `fill`, a number that is higher the later a block was written."""
        return int(journal.restore(self.arrays, blocks, by_use))

    def close_directory(self, k: int, closed: bool) -> None:
        """Stop, or begin again, to hand out free slots of a directory. Its blocks are served all the same."""
        slots.close_region(self.arrays, DISK, k, closed)

    def free_among(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Which of these disk slots hold nothing."""
        return slots[self.arrays.s["state"][self.base(DISK) + slots] == FREE]

    def record_again(self, slots: NDArray[np.int32]) -> None:
        """Let the records of these disk slots be written anew."""
        journal.record_again(self.arrays, slots)

    def flush(self, most: int) -> int:
        """Plan writes of up to `most` blocks that memory alone holds, the most valuable first."""
        if not self.capacity(DISK):
            return 0
        n = int(plan.flush(self.arrays, DEVICE, most))
        return n + int(plan.flush(self.arrays, HOST, most - n))

    def counters(self) -> dict[str, int]:
        """What has happened since the table was made, and how full it is."""
        a = self.arrays
        out = {name: int(a.c[i]) for i, name in enumerate(COUNTERS)}
        for t, tier in enumerate(TIERS):
            for name, at in (("blocks", CAP), ("used", NUSED), ("free", NFREE), ("leased", NLEASED), ("bad", NBAD)):
                out[f"{tier}_{name}"] = int(a.m[at + t])
        out["retained"] = int(a.m[NRETAINED])
        out.update(in_flight=self.launched, deferred=self.deferred, writing=self.writing)
        return out

    @property
    def learns(self) -> bool:
        """Is there a tier whose order is learned?"""
        return bool(self.arrays.m[LEARNS])

    def learned(self) -> bytes:
        """What was learned, for a later table's `learn_from`."""
        catch_up(self.arrays)
        return to_bytes(self.arrays)

    def learn_from(self, content: bytes) -> bool:
        """Begin with what an earlier table has learned. False, and cold, if that is nothing of the kind."""
        return from_bytes(self.arrays, content)

    def curve(self) -> dict[float, float]:
        """Hit ratio that the tiers together would have had at 1/4 up to 8 times their size, from shadow caches.

        Few blocks are asked by almost every request. Where the sample holds fewer uses than it should, one of those is
        not in it, and its uses are hits at any size (the correction of SHARDS, FAST 2015)."""
        a = self.arrays
        expected = int(a.lm[ASKED]) / (1 << int(a.sh[0]))
        out = {}
        for m, scale in enumerate(SCALES):
            hits = int(a.sm[m, S_HITS]) + expected - int(a.sm[m, S_ASKED])
            out[scale] = min(1.0, max(0.0, hits / expected)) if expected else 0.0
        return out

    def check(self, *, closed: bool = True, exclusive: bool = False) -> None:
        """Raise AssertionError if counts, lists, leases, tree, index and scoreboard do not agree."""
        a = self.arrays
        wrong = check(a, closed, exclusive)
        if wrong:
            raise AssertionError(f"block table at {int(a.m[NOW])} ns: {WRONG[wrong]}")


__all__ = ["DEVICE", "DISK", "HOST", "Begun", "BlockTable", "Rejection"]
