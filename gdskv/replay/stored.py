"""A player on a ``KVStore``: requests live in memory of the player's own, as under an engine with its own device pool.

Knows the store's public calls only.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdskv.replay import pattern
from gdskv.replay.player import Keys, Plan, Tally
from gdskv.replay.timing import Timing

if TYPE_CHECKING:
    from gdskv.store import Done, Found, KVStore, Ticket

__all__ = ["StoredPlayer"]

_TIERS = ("device", "host", "disk")
_NOTHING = np.empty(0, np.int64)


@dataclass(eq=False)
class _Flight:
    keys: Keys
    memory: npt.NDArray[Any]
    """A block per row; in a simulation an address each, of nothing."""
    found: Found
    began_ns: int
    ticket: Ticket | None
    """What it waits for: of a load, then of a store."""
    loading: bool = True


class StoredPlayer:
    """Match, load, verify what was found, make what was missing, store.

    Parameters
    ----------
    longest
        Blocks of the longest request.
    """

    def __init__(self, store: KVStore, plan: Plan, longest: int) -> None:
        self.tally = Tally(timings={name: Timing() for name in ("match", "load", "store", "poll")})
        self._store = store
        self._simulate = plan.simulate
        self._done: dict[int, Done] = {}
        self._free: list[npt.NDArray[Any]]
        if plan.simulate:  # nobody reads or writes there
            self._free = [np.zeros(longest, np.uint64) for _ in range(plan.concurrency)]
            return
        shape = (plan.concurrency, longest, plan.block_bytes)
        # a mapping of its own begins on a page, which O_DIRECT asks for
        memory = np.frombuffer(mmap.mmap(-1, max(1, plan.concurrency * longest * plan.block_bytes)), dtype=np.uint8)
        self._free = list(memory.reshape(shape))

    def start(self, keys: Keys, now: float) -> _Flight | None:
        from gdskv.store import Rejected

        began_ns = time.perf_counter_ns()
        found = self._store.match(keys, now=now)
        self.tally.timings["match"].since(began_ns)
        memory = self._free.pop()
        ticket = None
        if found.length:
            answer = self._store.load(found, into=memory[: found.length], now=now)
            if isinstance(answer, Rejected):
                self._free.append(memory)
                return None
            ticket = answer
        return _Flight(keys, memory, found, began_ns, ticket)

    def advance(self, flight: _Flight, now: float) -> bool:
        lost = _NOTHING
        if flight.ticket is not None:
            done = self._done.pop(flight.ticket.id, None)
            if done is None:
                return False
            lost = done.failed
        if flight.loading:
            self._loaded(flight, lost, now)
            return False
        self._free.append(flight.memory)
        return True

    def poll(self, now: float) -> None:
        start = time.perf_counter_ns()
        done = self._store.poll(now=now)
        self.tally.timings["poll"].since(start)
        self._done.update({d.ticket.id: d for d in done})

    def close(self) -> None:
        self._store.close()
        self.tally.stats = self._store.stats()
        self.tally.curve = self._store.sizing_curve()

    def _loaded(self, flight: _Flight, lost: npt.NDArray[np.int64], now: float) -> None:
        tally, found = self.tally, flight.found
        if found.length:
            tally.timings["load"].since(flight.began_ns)
        good = int(lost[0]) if len(lost) else found.length
        for tier in found.tier[:good].tolist():
            tally.hits[_TIERS[tier]] += 1
        tally.failed_blocks += len(lost)
        tally.blocks_missing += len(flight.keys) - good
        failed = set(lost.tolist())
        for index, key in enumerate(flight.keys if not self._simulate else ()):
            if index >= found.length or index in failed:
                pattern.fill(flight.memory[index], key)
            else:
                tally.verified_blocks += 1
                tally.wrong_blocks += not pattern.holds(flight.memory[index], key)
        start = time.perf_counter_ns()
        flight.ticket = self._store.store(flight.keys, source=flight.memory[: len(flight.keys)], now=now)
        tally.timings["store"].since(start)
        tally.requests_cut += flight.ticket.blocks < len(flight.keys)
        flight.loading = False
