"""How many I/O threads a directory gets: measured once, when it is new and large, kept, and shown."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from command import Command
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config

import gdskv
from gdskv.directory import directory
from gdskv.io import tuning
from gdskv.io.tuning import Threads, choose


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({2: 1.0, 4: 2.0, 8: 4.0, 16: 8.0}, 16),
        ({2: 1.0, 4: 1.8, 8: 2.0, 16: 1.8}, 4),
        ({2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, 2),
        ({2: 1.0, 4: 1.79, 8: 2.0, 16: 1.9}, 8),
    ],
)
def test_the_fewest_that_come_close_to_the_best(speeds: dict[int, float], chosen: int) -> None:
    assert choose(speeds) == chosen


def test_a_file_is_measured_where_it_may_be_written(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"a" * 4096)
        file.truncate(4096 + tuning.AREA + 4096)
        file.seek(4096 + tuning.AREA)
        file.write(b"b" * 4096)
        file.flush()
        found = tuning.measure(file.fileno(), 4096)
        assert {found.read, found.write} <= set(tuning.COUNTS)
        for speeds in (found.read_speed, found.write_speed):
            assert set(speeds) == set(tuning.COUNTS) and min(speeds.values()) > 0
        assert os.pread(file.fileno(), 4096, 0) == b"a" * 4096
        assert os.pread(file.fileno(), 4096, 4096 + tuning.AREA) == b"b" * 4096


def test_a_short_transfer_is_an_error(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file, open("/dev/full", "w+b") as full:
        with pytest.raises(OSError, match="No space"):
            tuning.measure(full.fileno(), 0)
        file.truncate(4096)
        with open(tmp_path / "file", "rb") as readable, pytest.raises(OSError):
            tuning.measure(readable.fileno(), 0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Directories of a few blocks are measured, with a known outcome; who asked."""
    asked: list[int] = []

    def measure(fd: int, offset: int) -> Threads:
        asked.append(offset)
        return Threads(3, 5, {3: 1.0}, {5: 1.0})

    monkeypatch.setattr(directory, "MEASURED", 64 * BLOCK)
    monkeypatch.setattr(tuning, "measure", measure)
    return asked


def threads(place: Path, blocks: int = 64, **settings: object) -> tuple[int, int]:
    with gdskv.BlockManager(config(place, disk=blocks, **settings), LAYOUT, NAMESPACE) as kv:
        Engine(kv).run(0, 4 * TOKENS)
        stats = kv.stats()
    return stats["io_read_threads"], stats["io_write_threads"]


def test_measured_when_new_and_kept(tmp_path: Path, measured: list[int]) -> None:
    assert threads(tmp_path) == (3, 5)
    assert threads(tmp_path) == (3, 5)
    assert measured == [4096], "once, behind the slab's header"


def test_settings_win(tmp_path: Path, measured: list[int]) -> None:
    assert threads(tmp_path, read_threads=2) == (2, 5)
    assert threads(tmp_path, read_threads=2, write_threads=1) == (2, 1)


def test_not_measured_where_it_is_small_or_holds_blocks(tmp_path: Path, measured: list[int]) -> None:
    assert threads(tmp_path, blocks=63) == (8, 6)
    assert threads(tmp_path, blocks=64) == (8, 6), "its blocks would be written over"
    assert measured == []


def test_a_failure_is_told_and_costs_nothing(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fd: int, offset: int) -> Threads:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tuning, "measure", fail)
    with caplog.at_level(logging.WARNING):
        assert threads(tmp_path) == (8, 6)
    assert "threads could not be measured" in caplog.text


def test_inspect_shows_them(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, capsys)
    threads(tmp_path)
    assert "3 to read and 5 to write, measured" in command("inspect", tmp_path).out
    assert command("inspect", tmp_path, "--json").json["namespaces"][0]["threads"] == {"read": 3, "write": 5}
