"""``gdskv inspect`` shows what a directory holds, finds what is broken in it, and removes only what it was told to."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from command import Command
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, tokens

import gdskv as package
from gdskv.directory.superblock import HOUR, Superblock, parse
from gdskv.io.crc import crc32c_bytes


@pytest.fixture
def gdskv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A directory with 24 blocks, of which 4 are retained for a tenant."""
    place = tmp_path / "kv"
    place.mkdir()
    with package.BlockManager(config(place, disk=64), LAYOUT, NAMESPACE) as kv:
        engine = Engine(kv)
        engine.run(0, 4 * TOKENS, retention=package.Retention(ttl=1800, tenant="acme"))
        for doc in range(1, 6):
            engine.run(doc, 4 * TOKENS)
    return place


def damage(place: Path, block: int) -> None:
    with open(next(place.glob("*/blocks.slab")), "r+b") as file:
        file.seek(4096 + block * BLOCK + 100)
        file.write(b"\xee")


def test_it_shows_what_is_there_and_changes_nothing(gdskv: Command, used: Path) -> None:
    before = {path: path.read_bytes() for path in used.rglob("*") if path.is_file()}
    answer = gdskv("inspect", used, "--json")
    assert answer.code == 0
    (entry,) = answer.json["namespaces"]
    assert entry["digest"] == NAMESPACE.digest(LAYOUT).hex()
    assert entry["fields"]["model"] == "test"
    assert (entry["slots"], entry["blocks"], entry["capacity_bytes"]) == (64, 24, 64 * BLOCK)
    assert (entry["retained_blocks"], entry["tenants"]) == (4, {"acme": 4 * BLOCK})
    assert entry["quarantined"] == 0
    assert entry["closed"] is True
    assert entry["bytes_written"] >= 24 * BLOCK
    assert sum(entry["ages"].values()) == sum(entry["deadlines"].values()) == 24
    assert entry["deadlines"]["below 1 h"] == 4
    assert entry["deadlines"]["none"] == 20
    assert {path: path.read_bytes() for path in used.rglob("*") if path.is_file()} == before


def test_what_the_last_day_wrote_is_summed_over_runs_and_older_hours_are_left_out() -> None:
    block = Superblock("00" * 16, {}, BLOCK, 64, 0, 1, "a" * 32)
    for hour, size in ((100, 1000), (100, 200), (102, 10)):
        block.highest_wall = hour * HOUR + 5
        block.count_hours({hour: 3}, size)
    block.highest_wall = 103 * HOUR
    block.count_hours({102: 1, 103: 3}, 400)
    block.count_hours({}, 7)  # nothing came of what was written
    assert block.hours == {"100": 1200, "102": 110, "103": 307}
    assert block.written_last_day(103 * HOUR + HOUR // 2) == 1617
    assert block.written_last_day(124 * HOUR + HOUR // 4) == 900 + 417, "three quarters of the first hour"
    assert block.written_last_day(128 * HOUR) == 0
    block.highest_wall = 126 * HOUR
    block.count_hours({126: 1}, 5)
    assert block.hours == {"102": 110, "103": 307, "126": 5}


@pytest.mark.parametrize("hours", [{"-1": 1}, {"x": 1}, {"1": -1}, {"1": "1"}, {"9" * 5000: 1}, [1]])
def test_hours_that_cannot_be_are_damage(hours: object) -> None:
    block = Superblock("00" * 16, {}, BLOCK, 64, 0, 1, "a" * 32)
    block.hours = hours  # type: ignore[assignment]
    body = json.dumps(asdict(block))
    assert parse(f"{body}\n{crc32c_bytes(body.encode()):08x}\n", Path("/kv/a/superblock")) == "superblock is damaged"


def test_it_shows_the_last_days_writes_over_runs_and_the_last_runs_rate(gdskv: Command, used: Path) -> None:
    with package.BlockManager(config(used, disk=64), LAYOUT, NAMESPACE) as kv:
        for doc in range(20, 24):
            Engine(kv).run(doc, 4 * TOKENS)
    (entry,) = gdskv("inspect", used, "--json").json["namespaces"]
    assert entry["bytes_written_last_day"] == pytest.approx(entry["bytes_written"], abs=8)
    assert entry["bytes_written"] >= 40 * BLOCK
    assert entry["drive_writes_per_day"] == pytest.approx(entry["bytes_written"] / (64 * BLOCK), rel=1e-3)
    assert entry["drive_writes_per_day_last_run"] > entry["drive_writes_per_day"], "it took seconds"
    text = gdskv("inspect", used).out
    assert "in the last 24 hours " in text and "at the last run's rate" in text


def test_it_reads_as_text(gdskv: Command, used: Path) -> None:
    answer = gdskv("inspect", used)
    assert answer.code == 0
    for words in ("24 blocks", "acme 16", "64 slots", "closed", "4 below 1 h"):
        assert words in answer.out


def test_it_may_look_while_a_store_is_open(gdskv: Command, used: Path) -> None:
    with package.BlockManager(config(used, disk=64), LAYOUT, NAMESPACE) as kv:
        Engine(kv).run(7, 4 * TOKENS)
        answer = gdskv("inspect", used, "--json", "--verify")
        assert answer.code == 0
        assert answer.json["namespaces"][0]["closed"] is False
        assert answer.json["namespaces"][0]["verified"]["bad"] == 0
        assert gdskv("inspect", used, "--clear", "--yes").code == 2
        assert "in use by" in gdskv("inspect", used, "--clear", "--yes").err


def test_verify_counts_the_blocks_that_are_broken(gdskv: Command, used: Path) -> None:
    whole = gdskv("inspect", used, "--verify", "--json")
    assert whole.code == 0
    assert whole.json["namespaces"][0]["verified"] == {"good": 24, "bad": 0}
    damage(used, 3)
    damage(used, 9)
    broken = gdskv("inspect", used, "--verify", "--json", "--rate", "100MiB")
    assert broken.code == 1
    assert broken.json["namespaces"][0]["verified"] == {"good": 22, "bad": 2}


def test_verify_at_open_drops_the_blocks_that_are_broken(used: Path) -> None:
    damage(used, 0)
    with package.BlockManager(config(used, disk=64, verify="all"), LAYOUT, NAMESPACE) as kv:
        assert kv.store.ledger.recovered.broken == 1
        assert kv.store.ledger.recovered.blocks == 23
        lost = [doc for doc in range(6) if kv.match(tokens(doc, 4 * TOKENS), now=0).disk < 4 * TOKENS]
        assert len(lost) == 1
    with package.BlockManager(config(used, disk=64), LAYOUT, NAMESPACE) as kv:
        assert kv.store.ledger.recovered.blocks == 23


def test_clear_asks_first(gdskv: Command, used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    answer = gdskv("inspect", used, "--clear")
    assert answer.code == 2
    assert "nothing was removed" in answer.err
    assert len(list(used.iterdir())) == 1


def test_clear_removes_the_namespaces_and_nothing_else(gdskv: Command, used: Path) -> None:
    (used / "notes.txt").write_text("mine")
    answer = gdskv("inspect", used, "--clear", "--yes", "--json")
    assert answer.code == 0
    assert answer.json["removed"] == [NAMESPACE.digest(LAYOUT).hex()]
    assert [path.name for path in used.iterdir()] == ["notes.txt"]
    with package.BlockManager(config(used, disk=64), LAYOUT, NAMESPACE) as kv:
        assert kv.store.ledger.recovered.blocks == 0


def test_another_namespace_must_fit_beside_and_reclaim_makes_room(gdskv: Command, used: Path) -> None:
    other = package.Namespace(model="test", revision="2")
    with pytest.raises(package.DirectoryError, match=r"256KiB .* 256KiB .*gdskv inspect .* --reclaim") as refused:
        package.BlockManager(config(used, disk=64), LAYOUT, other)
    assert str(used) in str(refused.value)
    assert len(list(used.iterdir())) == 1, "the refused one has left nothing"
    answer = gdskv("inspect", used, "--reclaim", "--yes", "--json")
    assert answer.json["removed"] == [NAMESPACE.digest(LAYOUT).hex()]
    with package.BlockManager(config(used, disk=64), LAYOUT, other) as kv:
        assert kv.store.ledger.recovered.blocks == 0
        assert Engine(kv).run(0, 4 * TOKENS).matched == (0, 0, 0)


@pytest.mark.parametrize("name", ["superblock", "slots.dir", "state.dir", "blocks.slab"])
def test_damaged_files_are_named(gdskv: Command, used: Path, name: str) -> None:
    path = next(used.glob(f"*/{name}"))
    path.write_bytes(b"\xee" * path.stat().st_size)
    answer = gdskv("inspect", used, "--json", "--verify")
    (entry,) = answer.json["namespaces"]
    assert entry["why"]
    assert gdskv("inspect", used).code == 0


def test_what_is_no_directory_is_said_in_one_line(gdskv: Command, tmp_path: Path) -> None:
    answer = gdskv("inspect", tmp_path / "none")
    assert answer.code == 2
    assert "cannot be read" in answer.err
    assert gdskv("inspect", tmp_path, "--json").json["namespaces"] == []
