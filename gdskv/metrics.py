"""Prometheus: what a store or manager counts, as series. Needs prometheus-client, and only when it is used.

Reads ``stats()`` when a scrape asks; must not count anything itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gdskv.errors import ConfigError
from gdskv.manager import BlockManager
from gdskv.meanings import COUNTERS, GAUGES

if TYPE_CHECKING:
    from gdskv.io.modes import Mode
    from gdskv.store import KVStore

__all__ = ["Collector", "collect"]

_TIERS = ("device", "host", "disk")
_OF_TIER = {"blocks", "used", "free", "leased", "bad"}
_MOVED = re.compile(r"io_(read|write|copy)_(transfers|calls|bytes|errors|short)(?:_(.+))?")
_SPLIT = re.compile(r"(matched|evicted)_(device|host|disk)")


class Collector:
    """Series of one store or manager, for ``prometheus_client.REGISTRY.register(Collector(kv))``.

    Parameters
    ----------
    source : KVStore or BlockManager
    labels : mapping of str to str, optional
        Put on every series, such as ``{"rank": "0"}``; needed to register several.

    Raises
    ------
    ConfigError
        prometheus-client is not installed.
    """

    def __init__(self, source: KVStore | BlockManager, labels: Mapping[str, str] | None = None) -> None:
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            raise ConfigError("metrics need prometheus-client. Install gdskv[metrics].") from None
        self._source = source
        self._labels = dict(labels or {})

    def describe(self) -> list[Any]:
        """Nothing, so that registering does not scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families of this moment."""
        store = self._source.store if isinstance(self._source, BlockManager) else self._source
        places = store.disk_pool.directories if store.disk_pool is not None else []
        modes = {str(place.path): mode for place, mode in zip(places, store.modes, strict=False)}
        return collect(self._source.stats(), modes, self._labels)


def collect(stats: Mapping[str, int], modes: Mapping[str, Mode], labels: Mapping[str, str]) -> Iterator[Any]:
    """Families of what `stats` holds and of how each directory's bytes move.

    Counters of which ``stats`` has one per tier, direction or path become one family with labels: ``matched_host`` is
    ``gdskv_matched_blocks_total{tier="host"}``, ``io_read_bytes_posix_direct`` is
    ``gdskv_io_bytes_total{op="read",path="posix_direct"}``.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    own, values = list(labels), list(labels.values())
    families: dict[str, Any] = {}

    def add(kind: type[Any], name: str, text: str, value: float, **more: str) -> None:
        if name not in families:
            families[name] = kind(f"gdskv_{name}", text, labels=[*own, *more])
        families[name].add_metric([*values, *more.values()], value)

    for name, value in stats.items():
        head, _, tail = name.partition("_")
        if head in _TIERS and tail in _OF_TIER:
            what = "capacity" if tail == "blocks" else tail
            add(GaugeMetricFamily, f"{what}_blocks", f"Blocks of a tier: {what}.", value, tier=head)
        elif name in GAUGES:
            add(GaugeMetricFamily, name, f"{GAUGES[name]}.", value)
        elif split := _SPLIT.fullmatch(name):
            add(CounterMetricFamily, f"{split[1]}_blocks", f"Blocks {split[1]}, by tier.", value, tier=split[2])
        elif moved := _MOVED.fullmatch(name):
            text = f"{moved[2].capitalize()} of the I/O engine, by direction and path."
            add(CounterMetricFamily, f"io_{moved[2]}", text, value, op=moved[1], path=moved[3] or "memory")
        else:
            text = COUNTERS.get(name, name.replace("_", " ").capitalize() + ", in all")
            add(CounterMetricFamily, name, f"{text}.", value)
    for path, mode in modes.items():
        text = "How a directory's bytes move, and why."
        add(GaugeMetricFamily, "directory_info", text, 1, directory=path, mode=mode.name, why=mode.why)
    yield from families.values()
