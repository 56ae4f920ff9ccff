"""BlockManager beside a plain dict: a seed makes a sequence of steps, a run carries it out and holds every answer
against what the dict allows."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from doubles import Fail, FaultEngine, Flip, Short
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, WrongBytes, config, payload, trust
from shuffled import ShuffledEngine

import gdskv
from gdskv.io.base import READ, WRITE

INF = float("inf")
ENOSPC = 28
WALL = 1e9
PATIENCE = 20_000  # polls after which a request counts as stuck


class World(NamedTuple):
    """Sizes and settings of one run."""

    device: int = 4
    host: int = 4
    disk: int = 16
    directories: int = 1
    read_faults: float = 0.0
    """Share of reads that fail, come short or lie."""
    write_faults: float = 0.0
    copy_faults: float = 0.0
    lazy: float = 0.3
    depth: int = 4096
    spill: str = "all"
    policy: str = "lru"
    memory_policy: str = "lru"
    on_expiry: str = "demote"
    protect: bool = False
    retained: float = 0.5
    tenant: float = 1.0
    write_queue: int = 4096
    host_clean: float = 0.1
    docs: int = 12
    folder: str = ""
    """Where the disk tier lies; empty: where temporary files do."""
    roomy: bool = False
    """Everything fits: what was committed must be found."""
    patient: bool = False
    """Wait for a request before going on with it, so that what happens does not hang on when transfers end."""


class Step(NamedTuple):
    """What to do, and numbers that choose among what there is to do it with."""

    kind: str
    x: int
    y: int
    z: int


WEIGHTS = {
    "begin": 26,
    "poll": 24,
    "work": 44,
    "decode": 8,
    "cancel": 4,
    "release": 3,
    "prefetch": 4,
    "match": 3,
    "tick": 5,
    "drain": 1,
    "restart": 1,
}


def make_steps(rng: random.Random, n: int) -> list[Step]:
    """A sequence of steps. Any part of it is a sequence too, which is what makes shrinking work."""
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=n)
    return [Step(kind, rng.randrange(1 << 16), rng.randrange(1 << 16), rng.randrange(1 << 16)) for kind in kinds]


def document(doc: int, n: int) -> np.ndarray:
    """The first `n` tokens of a document. Documents form a tree: each shares a prefix with that of half its number."""
    out = np.arange(n, dtype=np.int64) + doc * 100_000
    if doc > 1:
        shared = min(n, (doc * 7 % 5) * TOKENS + (doc % 3) * 5)
        out[:shared] = document(doc // 2, shared)
    return out


class Known:
    """What the dict remembers of a committed block."""

    def __init__(self) -> None:
        self.plain = False
        """Some request wanted it with no end."""
        self.until = 0.0
        """Latest deadline, its descendants' included."""

    def visible(self, now: float) -> bool:
        return self.plain or now < self.until


class Live:
    """A request in flight."""

    def __init__(self, request: gdskv.Request, doc: int, length: int, wish: gdskv.Retention, now: float) -> None:
        self.request, self.doc, self.length, self.wish = request, doc, length, wish
        self.prompt = length
        self.filled = False
        self.committed = 0
        self.deadlines: list[float] = []


class Totals:
    """What all runs together have seen."""

    def __init__(self) -> None:
        self.steps = self.runs = self.requests = self.rejected = self.verified = self.restarts = 0
        self.faults = self.failed = self.wrong = self.stuck = self.leaks = 0
        self.found = [0, 0, 0]

    def __str__(self) -> str:
        device, host, disk = self.found
        return (
            f"{self.steps:,} steps in {self.runs} runs, {self.requests:,} requests and {self.rejected:,} rejected, "
            f"{self.verified:,} blocks verified "
            f"(found in device {device:,}, host {host:,}, disk {disk:,}); {self.faults:,} faults put in, "
            f"{self.failed:,} blocks lost in transfer and computed again, {self.restarts} restarts: "
            f"{self.wrong} wrong bytes, {self.stuck} stuck, {self.leaks} leaks"
        )


class Stuck(AssertionError):
    """A request that never becomes ready."""


class Leak(AssertionError):
    """Slots or leases that nobody has."""


class Run:
    """One manager and the dict beside it."""

    def __init__(self, world: World, seed: int, folder: Path, totals: Totals) -> None:
        self.world, self.totals = world, totals
        self.rng = random.Random(seed)
        self.now = 0.0
        self.known: dict[bytes, Known] = {}
        self.live: list[Live] = []
        self.decisions: list[Any] = []
        self.folder = folder
        self.excused = self.quiet = False
        self.open()

    def open(self) -> None:
        """A manager on the run's folder, at the run's time."""
        w = self.world
        folders = [self.folder / str(i) for i in range(w.directories)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        self.kv = gdskv.BlockManager(
            config(
                self.folder,
                w.device,
                w.host,
                w.disk,
                spill=w.spill,
                policy=w.policy,
                memory_policy=w.memory_policy,
                on_expiry=w.on_expiry,
                protect_unexpired=w.protect,
                retained_fraction=w.retained,
                tenant_fraction=w.tenant,
                write_queue=w.write_queue,
                host_clean=w.host_clean,
                read_threads=1,
                write_threads=1,
                io_timeout=1e6 if w.patient else 30.0,
            ).model_copy(update={"directories": tuple(folders)} if w.disk else {}),
            LAYOUT,
            NAMESPACE,
            now=self.now,
            wall=WALL + self.now,
            io=self._wrap,
        )
        trust(self.kv.store)

    def _wrap(self, engine: Any) -> Any:
        engine = FaultEngine(engine, self._fault)
        return ShuffledEngine(engine, self.rng, self.world.lazy, self.world.depth)

    def _fault(self, transfer: np.void) -> Any:
        w, op = self.world, int(transfer["op"])
        if self.quiet or self.rng.random() >= (w.read_faults, w.write_faults, w.copy_faults)[op]:
            return None
        self.totals.faults += 1
        if op == READ:
            return self.rng.choice([Fail(), Fail(), Short(512), Short(0), Flip(self.rng.randrange(BLOCK))])
        if op == WRITE:
            return self.rng.choice([Fail(), Fail(ENOSPC), Short(1024)])
        return Fail()

    # ---- steps

    def carry_out(self, steps: Sequence[Step]) -> None:
        """All steps, then everything is let go and nothing may be left."""
        try:
            for step in steps:
                getattr(self, f"do_{step.kind}")(step)
                self.kv.check()
                self.totals.steps += 1
            self.finish()
        except WrongBytes:
            self.totals.wrong += 1
            raise
        except Stuck:
            self.totals.stuck += 1
            raise
        except Leak:
            self.totals.leaks += 1
            raise
        finally:
            self.totals.runs += 1
            self.kv.close()

    def finish(self) -> None:
        for live in list(self.live):
            self.wait(live)
            self.progress(live, release=True)
        self.quiet = True
        self.drain()
        while self.kv.stats()["directories_read_only" if self.world.disk else "in_flight"]:
            self.now += 100.0  # until it is tried again: before that its free slots are not on offer
            self.kv.poll(now=self.now)
            self.drain()
        s = self.kv.stats()
        for tier in ("device", "host", "disk"):
            if s[f"{tier}_leased"] or s[f"{tier}_free"] + s[f"{tier}_used"] + s[f"{tier}_bad"] != s[f"{tier}_blocks"]:
                raise Leak(f"{tier}: {s}")
        if s["in_flight"] or s["deferred"] or s["writing"]:
            raise Leak(f"transfers: {s}")
        self.kv.check()

    def do_begin(self, step: Step) -> None:
        w = self.world
        doc = step.x % w.docs
        blocks = 1 + step.y % max(1, min(w.device, 8) // (1, 2, 3)[step.z % 3])
        length = blocks * TOKENS - (1 + step.z % (TOKENS - 1)) * (step.y % 4 == 0)  # the last may be partly filled
        tokens = document(doc, length)
        may_find = self.findable(tokens)
        must_find = self.promised(tokens)
        idle = not self.live
        answer = self.kv.begin(tokens, retention=(wish := self.wish(step.z)), now=self.now)
        if isinstance(answer, gdskv.Rejected):
            self.decisions.append(answer.reason)
            self.totals.rejected += 1
            held = self.kv.stats()["device_leased"]  # by nobody: given up, and still on their way
            if idle and not held and answer.reason != "transfers are in flight":
                raise AssertionError(f"rejected with nothing leased: {answer} {self.kv.stats()}")
            return
        self.totals.requests += 1
        n = len(answer.tiers)
        self.decisions.append((answer.blocks.tolist(), answer.tiers.tolist()))
        if n > may_find:
            raise AssertionError(f"found {n} blocks, of which only {may_find} were committed and may be served")
        if n < must_find:
            raise AssertionError(f"found {n} blocks of {must_find} that were to be kept: {self.kv.stats()}")
        for tier in answer.tiers:
            self.totals.found[tier] += 1
        self.live.append(Live(answer, doc, length, wish, self.now))

    def wish(self, z: int) -> gdskv.Retention:
        tenant = ("", "a", "b")[z % 3]
        ttl = (2.0, 10.0, 60.0)[z // 3 % 3]
        kind = z // 16 % 8
        if kind == 0:
            return gdskv.Retention(ttl=ttl, tenant=tenant, priority=80)
        if kind == 1:
            return gdskv.Retention(ttl=ttl, tenant=tenant, on_expiry="forget", decode_ttl=ttl)
        if kind == 2:
            return gdskv.Retention(priority=z % 101, tenant=tenant, decode_priority=z // 7 % 101)
        if kind == 3:
            ranges = (gdskv.TokenRange(0, TOKENS + 3, 90, ttl), gdskv.TokenRange(3 * TOKENS, None, 20))
            return gdskv.Retention(ranges=ranges, tenant=tenant)
        if kind == 4:
            return gdskv.Retention(ttl=ttl, retain_until_token=TOKENS + 1, tenant=tenant, decode_ttl=1.0)
        return gdskv.Retention()

    def do_poll(self, step: Step) -> None:
        for _ in range(1 + step.x % 3):
            self.kv.poll(now=self.now)

    def do_tick(self, step: Step) -> None:
        self.now += (0.1, 0.9, 1.1, 2.0, 9.0, 31.0)[step.x % 6]
        self.kv.poll(now=self.now)

    def do_drain(self, step: Step) -> None:
        self.drain()

    def do_restart(self, step: Step) -> None:
        """A close, or a crash with transfers under way; then another process on the same files."""
        w = self.world
        if not w.disk or w.patient or (w.roomy and step.x % 2):
            return
        self.totals.restarts += 1
        self.live = []
        if step.x % 2:
            self.excused = True
            store = self.kv.store
            store._open = False
            store.io.close(5.0)
            assert store.ledger is not None
            store.ledger.abandon()
            store._close_pools()
        else:
            self.excused |= self.excuses()
            assert self.kv.close(timeout=60)
        self.open()

    def do_work(self, step: Step) -> None:
        if self.live:
            live = self.live[step.x % len(self.live)]
            if self.world.patient:
                self.wait(live)
            self.progress(live, release=step.y % 3 != 0)

    def do_decode(self, step: Step) -> None:
        if not self.live:
            return
        live = self.live[step.x % len(self.live)]
        if self.world.patient:
            self.wait(live)
        if not live.committed or not self.kv.is_ready(live.request):
            return
        more = 1 + step.y % (2 * TOKENS)
        blocks = -(-(live.length + more) // TOKENS) - len(live.request.blocks)
        if blocks > 0:
            answer = self.kv.allocate(live.request, blocks, now=self.now)
            self.decisions.append(answer and answer.reason)
            if answer is not None:
                return
        live.length += more
        live.filled = False

    def do_cancel(self, step: Step) -> None:
        if self.live:
            live = self.live.pop(step.x % len(self.live))
            self.kv.cancel(live.request, now=self.now)
            if step.y % 4 == 0:
                self.kv.cancel(live.request, now=self.now)

    def do_release(self, step: Step) -> None:
        if self.live:
            live = self.live.pop(step.x % len(self.live))
            self.verify(live)
            self.kv.release(live.request, now=self.now)

    def do_prefetch(self, step: Step) -> None:
        self.decisions.append(self.kv.prefetch(document(step.x % self.world.docs, 8 * TOKENS), now=self.now))

    def do_match(self, step: Step) -> None:
        tokens = document(step.x % self.world.docs, 8 * TOKENS)
        found = self.kv.match(tokens, now=self.now)
        self.decisions.append(found)
        n = sum(found) // TOKENS
        if not self.promised(tokens) <= n <= self.findable(tokens):
            raise AssertionError(f"{found}: {self.promised(tokens)} blocks promised, {self.findable(tokens)} findable")

    # ---- what an engine does

    def wait(self, live: Live) -> None:
        for _ in range(PATIENCE):
            if self.kv.is_ready(live.request):
                return
            self.kv.poll(now=self.now)
        raise Stuck(f"request {live.request.id}: {self.kv.stats()}")

    def drain(self) -> None:
        for _ in range(PATIENCE):
            if self.kv.store.idle:
                return
            self.kv.poll(now=self.now)
        raise Stuck(f"{self.kv.stats()}")

    def progress(self, live: Live, release: bool) -> None:
        request = live.request
        if not self.kv.is_ready(request):
            return
        self.verify(live)
        full = live.length // TOKENS
        tokens = document(live.doc, live.length)
        if not live.filled:
            keys = self.keys(tokens)
            old = len(request.tiers) if not live.committed else live.committed
            lost = [] if live.committed else request.failed.tolist()
            self.totals.failed += len(lost)
            for i in [*lost, *range(old, full)]:
                self.kv.device_pool.view(int(request.blocks[i]))[:BLOCK] = payload(keys[i])
            for i in range(full, len(request.blocks)):  # the last block is partly filled: nobody may be shown this
                self.kv.device_pool.view(int(request.blocks[i]))[:] = 0xEE
            live.filled = True
        self.kv.commit(request, tokens, now=self.now)
        self.remember(live, self.keys(tokens))
        live.committed = full
        self.verify(live)
        if release:
            self.kv.release(request, now=self.now)
            self.live.remove(live)

    def verify(self, live: Live) -> None:
        """What the request holds must be its bytes: those found once it is ready, those computed from then on."""
        request = live.request
        if not self.kv.is_ready(request) and not live.committed:
            return
        full = live.committed if live.committed else len(request.tiers)
        lost = set() if live.filled else set(request.failed.tolist()) if not live.committed else set()
        if live.filled:
            full = live.length // TOKENS
        keys = self.keys(document(live.doc, live.length))
        for i in range(full):
            if i in lost:
                continue
            have = self.kv.device_pool.view(int(request.blocks[i]))[:BLOCK]
            if not np.array_equal(have, payload(keys[i])):
                tier = request.tiers[i] if i < len(request.tiers) else "computed"
                raise WrongBytes(f"block {i} of request {request.id} (document {live.doc}), {tier}")
            self.totals.verified += 1

    # ---- the dict

    def keys(self, tokens: np.ndarray) -> np.ndarray:
        return gdskv.block_keys(tokens, TOKENS, namespace=self.kv.store.digest)

    def remember(self, live: Live, keys: np.ndarray) -> None:
        wish = self.kv.store.resolve(live.wish, len(keys), live.prompt)
        while len(live.deadlines) < len(keys):  # a block's time starts at its first commit
            ttl = int(wish.ttl[len(live.deadlines)])
            live.deadlines.append(self.now + ttl / 1e9 if ttl else INF)
        lift = 0.0
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i].tobytes()
            block = self.known.get(key)
            if block is None or not block.visible(self.now):
                block = self.known[key] = Known()
            deadline = live.deadlines[i]
            block.plain |= not wish.forget or deadline == INF
            if deadline < INF:
                block.until = max(block.until, deadline)
            block.until = max(block.until, lift)
            if block.until > self.now:
                lift = max(lift, block.until)

    def findable(self, tokens: np.ndarray) -> int:
        """Blocks from the first that were committed and have not been forgotten since."""
        keys = self.keys(tokens)
        for i in range(len(keys)):
            block = self.known.get(keys[i].tobytes())
            if block is None or not block.visible(self.now):
                return i
        return len(keys)

    def promised(self, tokens: np.ndarray) -> int:
        """Blocks from the first that must be found: all, in a roomy world; else those with a live deadline, as long as
        no counter says that something was turned down or went wrong."""
        w = self.world
        if w.roomy:
            return self.findable(tokens)
        if w.read_faults or w.write_faults or w.copy_faults or w.disk < w.device + w.host or self.excuses():
            return 0
        if w.retained == 1.0 and not w.protect:  # a disk full of them: the earliest deadline makes room
            return 0
        keys = self.keys(tokens)
        last = 0
        for i in range(self.findable(tokens)):
            if self.known[keys[i].tobytes()].until > self.now:
                last = i + 1
        return last

    def excuses(self) -> bool:
        """Has anything been turned down or gone wrong?"""
        s = self.kv.stats()
        names = ("over_budget", "shed_queue", "shed_no_slot", "refused_protected", "lost", "failed_reads", "timed_out")
        return self.excused or any(s[name] for name in names)


def attempt(world: World, seed: int, steps: Sequence[Step], totals: Totals) -> Run:
    """Carry out steps in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="gdskv-model-", dir=world.folder or None) as folder:
        run = Run(world, seed, Path(folder), totals)
        run.carry_out(steps)
        return run
