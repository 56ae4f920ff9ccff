"""An I/O engine that does everything late and out of order, as a seed says; and what to do with a sequence that fails.

Around a real engine on real files: the bytes of a transfer move at some later poll, not when it was submitted, so what
a plan should have held back shows. One seed, one order.
"""

from __future__ import annotations

import errno
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from gdskv.io.base import RESULT, TRANSFER, IOEngine, Results, Tags, Transfers

Step = TypeVar("Step")


class ShuffledEngine:
    """Keeps what is submitted, and at each poll carries out some of it, in any order.

    Parameters
    ----------
    inner : IOEngine
    rng : random.Random
    lazy : float
        Share of polls at which nothing happens.
    depth : int
        Transfers that it holds at once.
    """

    def __init__(self, inner: IOEngine, rng: random.Random, lazy: float = 0.3, depth: int = 4096) -> None:
        self.inner, self.rng, self.lazy, self.depth = inner, rng, lazy, depth
        self._kept: list[np.void] = []
        self._done: deque[np.void] = deque()

    def submit(self, transfers: Transfers) -> int:
        accepted = min(len(transfers), self.depth - len(self._kept))
        self._kept.extend(transfers[:accepted].copy())
        return accepted

    def poll(self, out: Results) -> int:
        if self._kept and self.rng.random() >= self.lazy:
            self._carry_out(self.rng.randint(1, len(self._kept)))
        n = min(len(out), len(self._done))
        for i in range(n):
            out[i] = self._done.popleft()
        return n

    def _carry_out(self, n: int) -> None:
        self.rng.shuffle(self._kept)
        batch, self._kept = self._kept[:n], self._kept[n:]
        assert self.inner.submit(np.array(batch, TRANSFER)) == n
        results = np.zeros(n, RESULT)
        got = 0
        while got < n:
            more = self.inner.poll(results[got:])
            got += more
            if not more:
                time.sleep(0.00002)
        results = results[np.argsort(results["tag"])]  # the real engine's order depends on its threads
        order = list(range(n))
        self.rng.shuffle(order)
        self._done.extend(results[order])

    def cancel(self, tags: Tags) -> int:
        wanted = set(np.asarray(tags).tolist())
        dropped = [t for t in self._kept if int(t["tag"]) in wanted]
        self._kept = [t for t in self._kept if int(t["tag"]) not in wanted]
        self._done.extend(np.array((t["tag"], -errno.ECANCELED, 0, 0), RESULT)[()] for t in dropped)
        return len(dropped)

    @property
    def in_flight(self) -> int:
        return len(self._kept) + len(self._done)

    def counters(self) -> dict[str, int]:
        return self.inner.counters()

    def path(self, slab: int) -> str:
        return self.inner.path(slab)

    def close(self, timeout: float) -> bool:
        return self.inner.close(timeout)


def shrink(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool], most: int = 300) -> list[Step]:
    """A shorter sequence that still fails: runs of steps are left out, long ones first, at most `most` tries."""
    kept = list(steps)
    size = max(1, len(kept) // 2)
    while most > 0:
        shorter = False
        at = 0
        while at < len(kept) and most > 0:
            most -= 1
            trial = kept[:at] + kept[at + size :]
            if fails(trial):
                kept, shorter = trial, True
            else:
                at += size
        if size > 1:
            size //= 2
        elif not shorter:
            break
    return kept
