"""``Slots``: what the ledger of a rank has in the place of a table. Changes come from the leader, and what is found at
open goes to him.

Knows no orders and moves nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RECORDS", "Slots"]

RECORDS = 1 << 40
"""Tags of records' transfers start here."""


class Slots:
    """As `gdskv.ledger.Journaled`."""

    transfers = RECORDS

    def __init__(self, learns: bool = False) -> None:
        self.learns = learns
        """Is what the leader's table has learned kept here?"""
        self._learned = b""
        self.batches: deque[NDArray[Any]] = deque()
        self.done: list[int] = []
        self.failed: list[int] = []
        self.tenants: list[str] = [""]
        self.blocks: NDArray[Any] = np.zeros(0, np.void)
        self.again = np.zeros(0, np.int32)

    @property
    def unremembered(self) -> int:
        return len(self.batches)

    def tenant(self, name: str) -> int:
        if name not in self.tenants:
            self.tenants.append(name)
        return self.tenants.index(name)

    def learned(self) -> bytes:
        return self._learned

    def learn_from(self, content: bytes) -> bool:
        self._learned = content
        return True

    def curve(self) -> dict[float, float]:
        return {}

    def remember(self) -> None:
        pass

    def restore(self, blocks: NDArray[Any], by_use: NDArray[np.int64]) -> int:
        self.blocks = blocks.copy()
        return len(blocks)

    def free_among(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        return slots[:0]

    def record_again(self, slots: NDArray[np.int32]) -> None:
        self.again = np.unique(np.concatenate([self.again, slots])).astype(np.int32)

    def changes(self, out: NDArray[Any]) -> int:
        batch = self.batches.popleft()
        out[: len(batch)] = batch
        return len(batch)

    def all_written(self, slots: NDArray[np.int32]) -> None:
        self.done += slots.tolist()

    def written(self, slot: int, what: int, ok: bool) -> None:
        (self.done if ok else self.failed).append(slot)
