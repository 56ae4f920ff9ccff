"""What Prometheus gets: every counter of ``stats()`` once, under names and labels that stay."""

from __future__ import annotations

import builtins
from pathlib import Path

import prometheus_client
import pytest
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config

import gdskv
from gdskv import meanings
from gdskv.metrics import Collector, collect


@pytest.fixture
def engine(tmp_path: Path):
    engine = Engine(gdskv.BlockManager(config(tmp_path, disk=64), LAYOUT, NAMESPACE))
    with engine.kv:
        for doc in (0, 1, 2, 3, 4, 5, 0):
            engine.run(doc, 4 * TOKENS)
        engine.drain()
        yield engine


def registry(*collectors: Collector) -> prometheus_client.CollectorRegistry:
    found = prometheus_client.CollectorRegistry()
    for collector in collectors:
        found.register(collector)
    return found


def test_every_statistic_is_one_sample(engine: Engine) -> None:
    stats = engine.kv.stats()
    samples = [s for family in collect(stats, {}, {}) for s in family.samples]
    assert sorted(s.value for s in samples) == sorted(stats.values())
    assert len({(s.name, *s.labels.items()) for s in samples}) == len(samples)


def test_a_page_reads_as_prometheus_wants_it(engine: Engine, tmp_path: Path) -> None:
    page = prometheus_client.generate_latest(registry(Collector(engine.kv))).decode()
    stats = engine.kv.stats()
    path = engine.kv.store.io.path(0)
    for line in (
        f'gdskv_matched_blocks_total{{tier="device"}} {stats["matched_device"]:.1f}',
        f'gdskv_evicted_blocks_total{{tier="host"}} {stats["evicted_host"]:.1f}',
        f'gdskv_capacity_blocks{{tier="disk"}} {64.0}',
        f'gdskv_used_blocks{{tier="disk"}} {stats["disk_used"]:.1f}',
        f"gdskv_committed_total {stats['committed']:.1f}",
        f'gdskv_io_bytes_total{{op="write",path="posix_{path}"}} {stats[f"io_write_bytes_posix_{path}"]:.1f}',
        f'gdskv_io_bytes_total{{op="copy",path="memory"}} {stats["io_copy_bytes"]:.1f}',
        "gdskv_directories_read_only 0.0",
    ):
        assert line in page.splitlines()
    assert (
        stats["committed"] >= 24 and stats["io_copy_bytes"] >= BLOCK and stats[f"io_write_bytes_posix_{path}"] >= BLOCK
    )
    assert f'gdskv_directory_info{{directory="{tmp_path}",mode="posix",why=' in page


def test_what_is_described_is_counted_and_shown_with_its_words(engine: Engine) -> None:
    assert set(meanings.COUNTERS) | set(meanings.GAUGES) <= set(engine.kv.stats())
    page = prometheus_client.generate_latest(registry(Collector(engine.kv))).decode().splitlines()
    assert f"# HELP gdskv_bad_payloads_total {meanings.COUNTERS['bad_payloads']}." in page
    assert f"# HELP gdskv_retained {meanings.GAUGES['retained']}." in page


def test_several_are_told_apart_by_labels(engine: Engine, tmp_path: Path) -> None:
    place = tmp_path / "other"
    place.mkdir()
    with gdskv.KVStore(config(place, disk=64), LAYOUT, NAMESPACE) as store:
        found = registry(Collector(engine.kv, {"rank": "0"}), Collector(store, {"rank": "1"}))
        assert found.get_sample_value("gdskv_used_blocks", {"rank": "1", "tier": "disk"}) == 0
        assert found.get_sample_value("gdskv_used_blocks", {"rank": "0", "tier": "disk"}) > 0


def test_registering_asks_for_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.kv, "stats", lambda: pytest.fail("asked"))
    found = registry(Collector(engine.kv))
    with pytest.raises(pytest.fail.Exception, match="asked"):  # a look at the page does ask
        found.get_sample_value("gdskv_used_blocks", {"tier": "disk"})


def test_without_the_library_it_says_what_to_install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: object) -> object:
        if name == "prometheus_client":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(gdskv.ConfigError, match=r"Install gdskv\[metrics\]"):
        Collector(engine.kv)
