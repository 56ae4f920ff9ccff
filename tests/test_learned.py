"""What was learned is kept with the directory, and is not used if it is not whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import LAYOUT, NAMESPACE, TOKENS, Engine, config

import gdskv
from gdskv.directory import learned


def serve(folder: Path, requests: int, **more: object) -> tuple[Engine, dict[str, int]]:
    settings = config(folder, device=8, host=8, disk=64, policy="hazard", **more)
    engine = Engine(gdskv.BlockManager(settings, LAYOUT, NAMESPACE))
    opened = engine.kv.stats()
    rng = np.random.default_rng(requests)
    for _ in range(requests):
        engine.run(int(rng.integers(30)), TOKENS * int(rng.integers(1, 8)))
    engine.kv.close()
    return engine, opened


def test_what_was_learned_outlives_the_process(tmp_path: Path) -> None:
    first, opened = serve(tmp_path, 150)
    assert (opened["learned_loaded"], opened["learned_discarded"]) == (0, 0)
    second, opened = serve(tmp_path, 0)
    assert (opened["learned_loaded"], opened["learned_discarded"]) == (1, 0)
    ours, theirs = (engine.kv.store.table.arrays for engine in (first, second))
    assert ours.lv.any()
    assert np.array_equal(ours.lv, theirs.lv)


def flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize(
    "damage",
    [flip, lambda d: d[:-1], lambda d: d[:10], lambda d: d[:8] + b"\2" + d[9:], lambda d: b"", lambda d: b"x" * 5000],
    ids=["flipped bit", "cut", "cut in the header", "other version", "empty", "rubbish"],
)
def test_a_file_that_is_not_whole_is_a_cold_start_and_is_counted(tmp_path: Path, damage: object) -> None:
    serve(tmp_path, 100)
    file = next(tmp_path.glob(f"*/{learned.NAME}"))
    file.write_bytes(damage(file.read_bytes()))
    engine, opened = serve(tmp_path, 0)
    assert (opened["learned_loaded"], opened["learned_discarded"]) == (0, 1)
    assert not engine.kv.store.table.arrays.lh.any()


def test_a_half_written_file_of_a_dead_owner_is_swept(tmp_path: Path) -> None:
    serve(tmp_path, 60)
    file = next(tmp_path.glob(f"*/{learned.NAME}"))
    file.with_name(learned.NAME + ".new").write_bytes(b"half")
    _, opened = serve(tmp_path, 0)
    assert opened["learned_loaded"] == 1
    assert sorted(p.name for p in file.parent.glob("learned*")) == ["learned"]


def test_under_lru_nothing_is_kept(tmp_path: Path) -> None:
    with gdskv.BlockManager(config(tmp_path, policy="lru"), LAYOUT, NAMESPACE) as kv:
        Engine(kv).run(1, TOKENS * 4)
    assert not list(tmp_path.glob(f"*/{learned.NAME}"))


def test_the_budget_counts_bytes_or_drive_writes() -> None:
    day = gdskv.CacheConfig(disk_bytes="1TiB", directories=["/x"], write_budget="240GiB")
    assert day.budget_per_hour() == 10 << 30
    drive = gdskv.CacheConfig(disk_bytes="1TiB", directories=["/x"], write_budget="0.5dwpd")
    assert drive.budget_per_hour() == (1 << 40) / 48
    with pytest.raises(gdskv.ConfigError, match="drive writes per day"):
        gdskv.CacheConfig(write_budget="manydwpd")
