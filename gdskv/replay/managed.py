"""A player on a ``BlockManager``: requests live in the device pool, the lower tiers serve what left it.

A request that is longer than the device pool passes through it in windows, one after the other, as under an engine that
computes a long prompt in parts; where there is no tier below, only its beginning is run. Knows the manager's public
calls only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdskv.replay import pattern
from gdskv.replay.player import Keys, Plan, Tally
from gdskv.replay.promises import Promises
from gdskv.replay.timing import Timing
from gdskv.retention import Retention

if TYPE_CHECKING:
    from gdskv.manager import BlockManager, Rejected, Request

__all__ = ["ManagedPlayer"]


@dataclass(eq=False)
class _Flight:
    keys: Keys
    """Of the window in hand."""
    rest: Keys
    """Of those after it."""
    began_ns: int
    wish: Retention | None
    request: Request | None = None
    """None while the window waits for room."""
    whole: bool = True
    """Has all been found of the windows before?"""


class ManagedPlayer:
    """Begin (timed as ``allocate``), wait until ready, verify what was found, make the rest, commit, release."""

    def __init__(self, kv: BlockManager, plan: Plan) -> None:
        self.tally = Tally(
            timings={name: Timing() for name in ("match", "allocate", "load", "commit", "release", "poll")}
        )
        self._kv = kv
        self._simulate = plan.simulate
        self._block_bytes = plan.block_bytes
        # the manager always has a device tier; in a simulation it stands for the topmost one that was asked for
        top = next(iter(plan.blocks))
        self._names = (top, "host", "disk")
        self._below = len(plan.blocks) > 1
        self._promises = Promises(plan.ttl)
        self._number = 0

    def start(self, keys: Keys, now: float) -> _Flight | None:
        began_ns = time.perf_counter_ns()
        self._kv.match(keys=keys, now=now)  # only to time it: it changes nothing, and begin looks for itself
        self.tally.timings["match"].since(began_ns)
        flight = _Flight(keys[:0], keys, began_ns, self._promises.plan.wish(self._number))
        if not self._next_window(flight, now):
            return None
        if len(flight.rest) and not self._below:
            self.tally.requests_cut += 1
            self.tally.blocks_cut += len(flight.rest)
            flight.rest = keys[:0]
        self.tally.windowed_requests += len(flight.rest) > 0
        self._number += 1
        return flight

    def _next_window(self, flight: _Flight, now: float) -> bool:
        """Begin with as many of the blocks to come as the device pool holds; False if other requests hold it."""
        from gdskv.manager import Rejected

        keys = flight.rest
        answer = self._begin(keys, now, flight.wish)
        if isinstance(answer, Rejected) and answer.limit < len(keys):  # can never be had as a whole
            keys = keys[: answer.limit]
            answer = self._begin(keys, now, flight.wish)
        if isinstance(answer, Rejected):
            return False
        flight.request, flight.keys, flight.rest = answer, keys, flight.rest[len(keys) :]
        if self._promises.plan.share:
            self._promises.served(keys, len(answer.tiers), now)
        return True

    def advance(self, flight: _Flight, now: float) -> bool:
        kv, tally, request = self._kv, self.tally, flight.request
        if request is None:
            self._next_window(flight, now)
            return False
        if not kv.is_ready(request):
            return False
        found = request.cached_blocks
        tiers = request.tiers[:found].tolist()
        if any(tiers):
            tally.timings["load"].since(flight.began_ns)
        if not flight.whole:  # what stands behind a missing block serves nobody
            found, tiers = 0, []
        flight.whole = found == len(flight.keys)
        for tier, name in enumerate(self._names):
            tally.hits[name] += tiers.count(tier)
        tally.failed_blocks += len(request.failed)
        tally.blocks_missing += len(flight.keys) - found
        if not self._simulate:
            self._check_and_fill(request, flight.keys)
        start = time.perf_counter_ns()
        kv.commit(request, keys=flight.keys, now=now)
        tally.timings["commit"].since(start)
        if self._promises.plan.share:
            self._promises.committed(kv, flight.keys, found, flight.wish, now)
        start = time.perf_counter_ns()
        kv.release(request, now=now)
        tally.timings["release"].since(start)
        flight.request = None
        return not len(flight.rest)

    def poll(self, now: float) -> None:
        self._promises.lapse(self._kv, now)
        start = time.perf_counter_ns()
        self._kv.poll(now=now)
        self.tally.timings["poll"].since(start)

    def close(self) -> None:
        self._kv.close()
        self.tally.stats = self._kv.stats()
        self.tally.curve = self._kv.store.sizing_curve()
        if self._promises.plan.share:
            self.tally.retention = self._promises.report()

    def _begin(self, keys: Keys, now: float, wish: Retention | None) -> Request | Rejected:
        start = time.perf_counter_ns()
        answer = self._kv.begin(keys=keys, retention=wish, now=now)
        self.tally.timings["allocate"].since(start)
        return answer

    def _check_and_fill(self, request: Request, keys: Keys) -> None:
        pool = self._kv.device_pool
        lost = set(request.failed.tolist())
        for index, (slot, key) in enumerate(zip(request.blocks.tolist(), keys, strict=True)):
            block = pool.view(slot)[: self._block_bytes]
            if index >= len(request.tiers) or index in lost:
                pattern.fill(block, key)
            else:
                self.tally.verified_blocks += 1
                self.tally.wrong_blocks += not pattern.holds(block, key)
