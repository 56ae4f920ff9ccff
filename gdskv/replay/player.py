"""Runs a trace: starts requests, waits for their blocks, counts what was found where and whether it was right.

Knows the public calls of manager and store; it must not know how they keep their promises.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gdskv.errors import ConfigError, GdskvError
from gdskv.replay.pattern import Keys, trace_keys
from gdskv.replay.promises import TtlPlan
from gdskv.replay.timing import Timing
from gdskv.replay.traces import Trace

if TYPE_CHECKING:
    from gdskv.pools.disk import DirectoryInfo

__all__ = ["Keys", "Plan", "Player", "Tally", "play"]

_SPINS = 200  # polls in a row before the thread sleeps between two
_NAP_S = 5e-5
_STUCK_S = 120.0  # no device answers later than that


@dataclass(frozen=True)
class Plan:
    """What to run a trace against. A tier of 0 blocks is absent."""

    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    block_bytes: int = 65536
    directories: tuple[Path, ...] = ()
    policy: str = "lru"
    """Of the disk tier, or of the only one."""
    memory_policy: str = "lru"
    """Of the tiers above it."""
    write_budget: str = "0"
    """Bytes, or drive writes, per day of trace time; 0 is any number."""
    simulate: bool = False
    """Decisions only: no bytes, no files."""
    concurrency: int = 1
    """Requests in flight."""
    speed: float = 0.0
    """Trace seconds per second; 0 is as fast as it goes."""
    ttl: TtlPlan = field(default_factory=TtlPlan)

    def __post_init__(self) -> None:
        for name in ("device_blocks", "host_blocks", "disk_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative. Give 0 (no such tier) or more.")
        if not self.device_blocks + self.host_blocks + self.disk_blocks:
            raise ConfigError("all tiers have 0 blocks. Give at least one of device, host and disk blocks.")
        if self.block_bytes < 8 or self.block_bytes % 8:
            raise ConfigError(f"block_bytes={self.block_bytes} is not a multiple of 8 from 8 up. Take 64KiB.")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} is below 1. Give at least 1 request in flight.")
        if not 0 <= self.speed < float("inf"):
            raise ConfigError(f"speed={self.speed} is not 0 (as fast as it goes) or a positive factor of trace time.")

        if self.ttl.share and not self.device_blocks and not self.simulate:
            raise ConfigError("a share of requests with a ttl needs device_blocks above 0, or a simulation.")

    @property
    def blocks(self) -> dict[str, int]:
        """The tiers that there are, from the top, with their blocks."""
        named = {"device": self.device_blocks, "host": self.host_blocks, "disk": self.disk_blocks}
        return {tier: blocks for tier, blocks in named.items() if blocks}


@dataclass
class Tally:
    """What a run counted."""

    requests: int = 0
    windowed_requests: int = 0
    """Requests longer than the device tier, which passed through it in windows."""
    requests_cut: int = 0
    """Requests longer than the only tier, of which only the leading part was run."""
    blocks_cut: int = 0
    """Blocks behind that part, which nobody asked the tiers for."""
    blocks_asked: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    """Blocks found, by tier."""
    blocks_missing: int = 0
    """Blocks that had to be made and were inserted."""
    verified_blocks: int = 0
    wrong_blocks: int = 0
    failed_blocks: int = 0
    """Blocks that were found but lost on their way."""
    retention: dict[str, Any] = field(default_factory=dict)
    """Promises made and kept, per deadline class."""
    directories: list[DirectoryInfo] = field(default_factory=list)
    """Where the disk tier lies, and how its bytes move."""
    stats: dict[str, int] = field(default_factory=dict)
    """The counters of the manager or the store."""
    curve: dict[str, float] = field(default_factory=dict)
    """Hit ratio with the lowest tier at 0.25 to 8 times its size, as the shadow caches say."""
    elapsed_s: float = 0.0
    timings: dict[str, Timing] = field(default_factory=dict)
    """By the name of the call; ``load`` is from its match until all found blocks have landed."""


class Player(Protocol):
    """One way to serve requests. ``start`` and ``advance`` never wait."""

    tally: Tally

    def start(self, keys: Keys, now: float) -> Any | None:
        """Start a request; None if that can only be done once another one has ended."""

    def advance(self, flight: Any, now: float) -> bool:
        """Do what can be done for a request now; True once it has ended."""

    def poll(self, now: float) -> None:
        """Take note of the transfers that have finished."""

    def close(self) -> None:
        """Give everything back."""


def play(trace: Trace, player: Player, plan: Plan, step: Callable[[int], None] = lambda done: None) -> Tally:
    """Run a trace from its first request to the end of its last.

    Parameters
    ----------
    trace, player
        What to run, and against what. ``now`` is the trace's own time and never steps back.
    plan
        Says how many requests are in flight and how fast they arrive.
    step
        Called with 1 for each request that has started.

    Raises
    ------
    GdskvError
        No request came forward for two minutes.
    """
    distinct, places = np.unique(np.concatenate([r.hash_ids for r in trace.requests]), return_inverse=True)
    keys = trace_keys(distinct.tolist())[places]
    tally = player.tally
    flights: list[Any] = []
    now = 0.0
    started = time.perf_counter()

    def move() -> bool:
        left = [flight for flight in flights if not player.advance(flight, now)]
        ended = len(left) < len(flights)
        flights[:] = left
        return ended

    patience = _Patience()
    first = 0
    for request in trace.requests:
        last = first + len(request.hash_ids)
        wanted, first = keys[first:last], last
        while plan.speed and (early := request.timestamp / plan.speed - (time.perf_counter() - started)) > 0:
            now = max(now, request.timestamp - early * plan.speed)
            player.poll(now)
            if not move():
                time.sleep(min(early, _NAP_S if flights else 0.05))
        now = max(now, request.timestamp)
        tally.requests += 1
        tally.blocks_asked += len(wanted)
        step(1)
        if not len(wanted):
            continue
        while True:  # as in an engine's step: poll, schedule, and let what runs go on
            player.poll(now)
            if len(flights) < plan.concurrency and (flight := player.start(wanted, now)) is not None:
                break
            patience.wait(move())
        patience.wait(True)
        if not player.advance(flight, now):
            flights.append(flight)
    while flights:
        player.poll(now)
        patience.wait(move())
    tally.elapsed_s = time.perf_counter() - started
    return tally


class _Patience:
    """Between two polls: go on at once a while, then sleep a little, and give up in the end."""

    def __init__(self) -> None:
        self._idle = 0
        self._since = 0.0

    def wait(self, moved: bool) -> None:
        if moved:
            self._idle = 0
            return
        if not self._idle:
            self._since = time.monotonic()
        self._idle += 1
        if self._idle > _SPINS:
            if time.monotonic() - self._since > _STUCK_S:
                raise GdskvError(
                    f"no request came forward for {_STUCK_S:.0f} s. Look whether the directory's device answers."
                )
            time.sleep(_NAP_S)
        else:
            time.sleep(0)
