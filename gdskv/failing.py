"""``Health``: which directories take writes. Repeated write errors close one; it is tried again later and later.

Sees results and tells the table; must not know requests, and reads no clock.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.extents import OPS
from gdskv.io.base import WRITE
from gdskv.table import BlockTable

__all__ = ["DirectoryState", "Health"]

ERRORS = 3  # write errors, less writes that went well since, that close a directory
FIRST_WAIT = 1_000_000_000  # ns until it is tried again; doubled each time that does not help
LONGEST_WAIT = 300_000_000_000


class DirectoryState(NamedTuple):
    """How a directory fares."""

    read_only: bool
    """It gets no new blocks; those in it are served."""
    write_errors: int
    """Since the open."""
    closures: int
    """How often it turned read-only."""
    retry_at: int
    """ns on the caller's clock; when a read-only one is tried again."""


class Health:
    """Counts what writes come to, directory by directory.

    Parameters
    ----------
    firsts : list of int
        First disk slot of each directory.
    blocks : int
        Disk slots.
    """

    def __init__(self, firsts: list[int], blocks: int) -> None:
        self._firsts = np.array(firsts, np.int64)
        self._blocks = blocks
        n = len(firsts)
        self._score = np.zeros(n, np.int64)
        self._errors = np.zeros(n, np.int64)
        self._closures = np.zeros(n, np.int64)
        self._wait = np.full(n, FIRST_WAIT, np.int64)
        self._retry_at = np.zeros(n, np.int64)
        self._closed = np.zeros(n, np.bool_)
        self._troubled = False

    @property
    def states(self) -> list[DirectoryState]:
        """How each directory fares."""
        columns = (self._closed, self._errors, self._closures, self._retry_at)
        return [DirectoryState(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    @property
    def any_closed(self) -> bool:
        """Is a directory read-only?"""
        return self._troubled and bool(self._closed.any())

    def closed(self, slots: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of these disk slots stand in a read-only directory."""
        return self._closed[self._of(slots)]

    def see(self, table: BlockTable, results: NDArray[Any]) -> None:
        """Take note of results, before the table does."""
        if not self._troubled and int(results["moved"].min()) >= 0:
            return  # a short write is not the disk's word on what it can do
        tags, moved = results["tag"], results["moved"]
        ours = tags < table.transfers
        x = table.arrays.x[np.where(ours, tags, 0)]
        slots = np.where(ours, x["dst"] - table.base(2), (tags - table.transfers) >> 1)
        writes = (~ours | (OPS[x["kind"]] == WRITE)) & (moved != -errno.ECANCELED) & (slots < self._blocks)
        where, good = self._of(slots[writes]), moved[writes] >= 0
        failed = np.bincount(where[~good], minlength=len(self._firsts))
        went_well = np.bincount(where[good], minlength=len(self._firsts))
        self._errors += failed
        self._score = np.maximum(self._score - went_well, 0) + failed
        self._wait[(went_well > 0) & (failed == 0)] = FIRST_WAIT
        for k in np.flatnonzero((self._score >= ERRORS) & ~self._closed).tolist():
            self._close(table, k)
        self._troubled = bool(self._score.any() or self._closed.any())

    def tick(self, table: BlockTable) -> bool:
        """Try directories again whose time has come. True if there is one: what it owes may be written again."""
        if not self._troubled:
            return False
        due = np.flatnonzero(self._closed & (self._retry_at <= table.now))
        for k in due.tolist():
            self._closed[k] = False
            self._score[k] = ERRORS - 1  # one more error is enough
            table.close_directory(k, False)
        return len(due) > 0

    def _close(self, table: BlockTable, k: int) -> None:
        self._closed[k] = True
        self._closures[k] += 1
        self._retry_at[k] = table.now + self._wait[k]
        self._wait[k] = min(2 * self._wait[k], LONGEST_WAIT)
        table.close_directory(k, True)

    def _of(self, slots: NDArray[Any]) -> NDArray[np.int64]:
        return np.searchsorted(self._firsts, slots, "right").astype(np.int64) - 1
