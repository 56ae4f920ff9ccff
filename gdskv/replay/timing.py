"""How long calls took: samples in nanoseconds in, percentiles in microseconds out.

Knows numbers only; it must not know what was timed.
"""

from __future__ import annotations

import time
from array import array

import numpy as np

__all__ = ["Timing"]


class Timing:
    """Samples of one kind of call."""

    def __init__(self) -> None:
        self._samples = array("q")

    def since(self, start_ns: int) -> None:
        """Add the time from ``start_ns``, a value of ``time.perf_counter_ns``, until now."""
        self._samples.append(time.perf_counter_ns() - start_ns)

    def percentiles(self) -> dict[str, float] | None:
        """Return p50, p99 and p99.9 in microseconds, rounded to nanoseconds; None if there is no sample."""
        if not self._samples:
            return None
        values = np.percentile(np.frombuffer(self._samples, dtype=np.int64), [50, 99, 99.9]) / 1e3
        return {name: round(float(value), 3) for name, value in zip(("p50", "p99", "p99.9"), values, strict=True)}
