"""gdskv's series on vLLM's Prometheus page, ``gdskv_*`` with vLLM's own labels.

Counters travel as what was added since the last time, gauges as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from gdskv import meanings

__all__ = ["GdskvPrometheus", "GdskvStats", "Meter"]

NOT_SHOWN = {"deferred", "io_read_threads", "io_write_threads"}  # say nothing of a leader
GAUGES = {name: words for name, words in meanings.GAUGES.items() if name not in NOT_SHOWN}
GAUGES["open"] = "1 while all ranks serve"
COUNTERS = meanings.COUNTERS | {
    "loads": "Requests for which blocks were loaded",
    "loaded_tokens_host": "Tokens loaded from host memory",
    "loaded_tokens_disk": "Tokens loaded from disk",
    "failed_load_blocks": "Blocks that did not arrive and were computed again",
    "wrong_retention": "Requests whose retention could not be read",
    "not_cached": "Requests that are not cached (prompt embeddings, pooling)",
    "unnamed_events": "Blocks whose KV event could not be published, as their hashes were not known any more",
    "sessions_lost": "Times that the ranks had to start over",
}


@dataclass
class GdskvStats(KVConnectorStats):
    """What has changed since the last time."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Meter:
    """Turns totals into `GdskvStats`."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def __call__(self, totals: dict[str, int]) -> GdskvStats | None:
        """What changed; None if nothing did."""
        now = {name: totals[name] for name in (*GAUGES, *COUNTERS) if name in totals}
        data = {name: now[name] for name in GAUGES if name in now and now[name] != self._last.get(name)}
        for name in COUNTERS:
            added = now.get(name, 0) - self._last.get(name, 0)
            if added > 0:  # totals of a table that was made anew start at 0
                data[name] = added
        self._last = now
        return GdskvStats(data=data) if data else None


class GdskvPrometheus(KVConnectorPromMetrics):
    """The series."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._series: dict[str, dict[int, Any]] = {}
        for names, kind in ((GAUGES, self._gauge_cls), (COUNTERS, self._counter_cls)):
            for name, words in names.items():
                metric = kind(name=f"gdskv_{name}", documentation=words, labelnames=self._labelnames)
                self._series[name] = {
                    engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            series = self._series.get(name, {}).get(engine_idx)
            if series is not None:
                series.set(value) if name in GAUGES else series.inc(value)
