"""An I/O engine that moves nothing: each transfer succeeds at the next poll. For replays of decisions only.

Knows the contract only.
"""

from __future__ import annotations

import numpy as np

from gdskv.io.base import RESULT, Results, Tags, Transfers

__all__ = ["NullEngine"]


class NullEngine:
    """Fulfils :class:`gdskv.io.base.IOEngine` without touching memory, files or threads.

    Parameters
    ----------
    queue_depth
        Transfers in flight that are accepted in all.
    """

    def __init__(self, *, queue_depth: int = 4096) -> None:
        self._done = np.zeros(queue_depth, RESULT)  # the first `_count` wait to be polled
        self._count = 0
        self._counters = {f"{op}_{what}_null": 0 for op in ("read", "write", "copy") for what in ("transfers", "bytes")}

    def submit(self, transfers: Transfers) -> int:
        accepted = min(len(transfers), len(self._done) - self._count)
        batch = transfers[:accepted]
        done = self._done[self._count : self._count + accepted]
        done["tag"] = batch["tag"]
        done["moved"] = batch["length"]
        done["started"] = 1
        self._count += accepted
        for op, name in enumerate(("read", "write", "copy")):
            chosen = batch["op"] == op
            self._counters[f"{name}_transfers_null"] += int(np.count_nonzero(chosen))
            self._counters[f"{name}_bytes_null"] += int(batch["length"][chosen].sum())
        return accepted

    def poll(self, out: Results) -> int:
        if self._count == 0:
            return 0
        n = min(len(out), self._count)
        out[:n] = self._done[:n]
        self._done[: self._count - n] = self._done[n : self._count].copy()
        self._count -= n
        return n

    def cancel(self, tags: Tags) -> int:
        return 0  # whatever was submitted has happened already

    @property
    def in_flight(self) -> int:
        return self._count

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def path(self, slab: int) -> str:
        return "buffered"

    def close(self, timeout: float) -> bool:
        return True
