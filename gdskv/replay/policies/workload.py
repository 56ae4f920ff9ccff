"""A trace as flat arrays, which the reference policies run over: dense block numbers, request after request.

Knows a trace and nothing of a table, a store or a policy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.replay.traces import Trace

__all__ = ["Workload", "flatten"]

NEVER = np.int64(1) << 62
"""Place of a block's next use where there is none."""


class Workload(NamedTuple):
    """Blocks asked, in order."""

    blocks: NDArray[np.int64]
    """Number of the block asked at each place, from 0 without gaps."""
    starts: NDArray[np.int64]
    """Place at which each request begins, and one more for the end."""
    next_use: NDArray[np.int64]
    """Place at which the block of each place is asked again; NEVER where it is not."""
    distinct: int
    """Different blocks."""


def flatten(trace: Trace) -> Workload:
    """Number a trace's blocks in the order in which they are first asked."""
    lengths = [len(request.hash_ids) for request in trace.requests]
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    asked = np.concatenate([request.hash_ids for request in trace.requests] or [np.empty(0, np.int64)])
    distinct, blocks = np.unique(asked, return_inverse=True)
    next_use = np.full(len(blocks), NEVER, np.int64)
    order = np.argsort(blocks, kind="stable")
    again = blocks[order[1:]] == blocks[order[:-1]]
    next_use[order[:-1][again]] = order[1:][again]
    return Workload(blocks.astype(np.int64), starts, next_use, len(distinct))
