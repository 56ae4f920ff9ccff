"""``Pace``: how long blocks take to come back from disk, learned from those that came.

Knows numbers only. A caller compares it with the time to compute the blocks again.
"""

from __future__ import annotations

__all__ = ["Pace"]

WEIGHT = 0.2
"""Of the newest request, however large."""


class Pace:
    """Seconds per block from disk, from the moment a request asked until all its blocks were there."""

    def __init__(self) -> None:
        self._ns = 0.0

    def see(self, blocks: int, ns: int) -> None:
        """`blocks` of a request were on disk, and it was ready after `ns`."""
        if blocks:
            each = ns / blocks
            self._ns = each if self._ns == 0 else (1 - WEIGHT) * self._ns + WEIGHT * each

    def seconds(self, blocks: int) -> float:
        """Expected for `blocks` from disk; 0 while none has come yet."""
        return blocks * self._ns / 1e9
