"""Holds a run to what it promised: blocks with a ttl stay until their deadline, forgotten ones are not served after it.

Keeps its own books, from the public calls alone, and compares; it must not know how promises are kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gdskv.errors import ConfigError
from gdskv.replay.pattern import Keys
from gdskv.retention import Retention

if TYPE_CHECKING:
    from gdskv.manager import BlockManager

__all__ = ["Promises", "TtlPlan"]


@dataclass(frozen=True)
class TtlPlan:
    """Which requests of a trace carry a ttl."""

    share: float = 0.0
    """Of the requests; which ones follows from their number in the trace."""
    ttl_s: float = 600.0
    on_expiry: Literal["demote", "forget"] = "demote"
    retained_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name in ("share", "retained_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a share. Give a number from 0 to 1.")
        if self.ttl_s <= 0:
            raise ConfigError(f"ttl={self.ttl_s} is not positive. Give seconds above 0.")

    def wish(self, number: int) -> Retention | None:
        """What the request of that number asks for."""
        if (number * 2654435761 & 0xFFFFFFFF) >= self.share * 2**32:
            return None
        return Retention(ttl=self.ttl_s, on_expiry=self.on_expiry)


class Promises:
    """Books of one run."""

    def __init__(self, plan: TtlPlan) -> None:
        self.plan = plan
        self.requests = 0
        self.asked = 0
        """Blocks for which a ttl was asked."""
        self.promised = 0
        """Of these, blocks that got their deadline; the others were over the budget."""
        self.kept = 0
        """Promised blocks that could be served until their deadline."""
        self.served_after_forget = 0
        self._due: list[tuple[float, int, Keys]] = []
        self._number = 0
        self._last = 0.0
        self._of_key: dict[bytes, tuple[float, bool]] = {}  # deadline, and to be forgotten then

    def lapse(self, kv: BlockManager, now: float) -> None:
        """Before time moves to `now`: are the blocks whose deadline passes with it still there?"""
        while self._due and self._due[0][0] <= now:
            _, _, keys = heapq.heappop(self._due)
            found = sum(kv.match(keys=keys, now=self._last))
            self.kept += min(found // kv.layout.tokens_per_block, len(keys))
        self._last = max(self._last, now)

    def committed(self, kv: BlockManager, keys: Keys, found: int, wish: Retention | None, now: float) -> None:
        """A request has committed its blocks, of which it had found the first `found`."""
        deadline = now + self.plan.ttl_s if wish is not None else 0.0
        if wish is not None:
            self.requests += 1
            self.asked += len(keys)
            got = kv.deadlines(keys=keys)
            # A microsecond: seconds and nanoseconds round apart.
            promised = int(np.argmin(np.append(got >= deadline - 1e-6, False)))
            self.promised += promised
            if promised:
                self._number += 1
                heapq.heappush(self._due, (deadline, self._number, keys[:promised]))
        forget = self.plan.on_expiry == "forget"
        for index, key in enumerate(keys):
            name = key.tobytes()
            old, forgets = self._of_key.get(name, (0.0, True)) if index < found else (0.0, True)
            within = wish is not None and index < promised
            self._of_key[name] = (max(old, deadline if within else 0.0), forgets and within and forget)

    def served(self, keys: Keys, found: int, now: float) -> None:
        """A request has found its first `found` blocks."""
        for key in keys[:found]:
            deadline, forgets = self._of_key.get(key.tobytes(), (0.0, False))
            self.served_after_forget += forgets and now >= deadline

    def report(self) -> dict[str, Any]:
        """The books, per deadline class."""
        open_ = sum(len(keys) for _, _, keys in self._due)
        return {
            f"ttl {self.plan.ttl_s:g} s {self.plan.on_expiry}": {
                "requests": self.requests,
                "blocks_asked": self.asked,
                "blocks_promised": self.promised,
                "blocks_over_budget": self.asked - self.promised,
                "blocks_past_deadline": self.promised - open_,
                "blocks_kept_to_deadline": self.kept,
                "blocks_served_after_forget": self.served_after_forget,
            }
        }
