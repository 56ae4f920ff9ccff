"""A store that is closed, or dies, comes back with its blocks, deadlines and budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, tokens

import gdskv
from gdskv.directory.directory import HEADER
from gdskv.directory.superblock import Superblock, read
from gdskv.io.crc import crc32c_bytes


def manager(tmp_path: Path, *, wall: float = 1000.0, now: float = 0.0, **more: Any) -> gdskv.BlockManager:
    return gdskv.BlockManager(config(tmp_path, **more), LAYOUT, NAMESPACE, wall=wall, now=now)


def crash(kv: gdskv.BlockManager) -> None:
    """Leave the files as a killed process would: nothing is flushed, nothing is marked as closed."""
    store = kv.store
    store._open = False
    store.io.close(5.0)
    store.ledger.abandon()
    store._close_pools()


def test_blocks_that_were_closed_come_back_with_their_bytes(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        engine = Engine(kv)
        for doc in range(5):
            engine.run(doc, 8 * TOKENS)
    with manager(tmp_path, disk=64) as kv:
        assert kv.store.ledger.recovered.blocks == 40
        assert kv.store.ledger.recovered.why == ()
        engine = Engine(kv)
        for doc in range(5):
            assert engine.run(doc, 8 * TOKENS).matched.disk == 8 * TOKENS
        assert engine.verified == 40
        assert kv.stats()["spills"] == 0


def test_what_a_request_still_uses_is_written_at_close_too(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        engine = Engine(kv)
        engine.run(0, 4 * TOKENS)
        assert engine.begin(0, 4 * TOKENS).matched.device == 4 * TOKENS  # and never released
    with manager(tmp_path, disk=64) as kv:
        assert Engine(kv).run(0, 4 * TOKENS).matched.disk == 4 * TOKENS


def test_what_was_on_disk_when_the_process_died_comes_back(tmp_path: Path) -> None:
    kv = manager(tmp_path, disk=64)
    engine = Engine(kv)
    for doc in range(5):
        engine.run(doc, 8 * TOKENS)
    engine.drain()
    on_disk = kv.stats()["disk_used"]
    assert on_disk > 16
    crash(kv)
    with manager(tmp_path, disk=64) as kv:
        assert kv.store.ledger.recovered.blocks == on_disk
        engine = Engine(kv)
        for doc in range(5):
            engine.run(doc, 8 * TOKENS)
        assert engine.verified == on_disk


def test_deadlines_priorities_and_tenants_outlive_the_process(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64, wall=1000.0) as kv:
        engine = Engine(kv)
        engine.run(0, 2 * TOKENS, retention=gdskv.Retention(ttl=100, priority=80, tenant="acme"))
        engine.run(1, 2 * TOKENS, retention=gdskv.Retention(ttl=10, on_expiry="forget"))
    with manager(tmp_path, disk=64, wall=1050.0, now=7.0) as kv:
        assert kv.store.ledger.recovered.forgotten == 2
        assert kv.store.table.retained()["acme"] == 2
        engine = Engine(kv)
        engine.now = 57.0
        kv.poll(now=57.9)
        assert kv.stats()["retained"] == 2
        kv.poll(now=58.1)
        assert kv.stats()["retained"] == 0
        assert kv.match(tokens(1, 2 * TOKENS), now=58.1) == (0, 0, 0)
        assert kv.match(tokens(0, 2 * TOKENS), now=58.1).disk == 2 * TOKENS


def test_a_clock_that_steps_back_neither_revives_nor_loses(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64, wall=1000.0) as kv:
        engine = Engine(kv)
        engine.run(0, 2 * TOKENS, retention=gdskv.Retention(ttl=50, on_expiry="forget"))
        engine.run(1, 2 * TOKENS, retention=gdskv.Retention(ttl=500))
        engine.now = 100.0
        engine.run(2, TOKENS)
    with manager(tmp_path, disk=64, wall=500.0) as kv:
        assert kv.match(tokens(0, 2 * TOKENS), now=0) == (0, 0, 0)
        assert kv.match(tokens(1, 2 * TOKENS), now=0).disk == 2 * TOKENS
        assert kv.stats()["retained"] == 2


def test_a_block_to_be_forgotten_whose_deadline_is_lost_is_not_served(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        engine = Engine(kv)
        engine.run(0, 2 * TOKENS, retention=gdskv.Retention(ttl=1000, on_expiry="forget"))
        engine.run(1, 2 * TOKENS, retention=gdskv.Retention(ttl=1000))
    (states,) = tmp_path.rglob("state.dir")
    states.write_bytes(states.read_bytes()[:HEADER].ljust(states.stat().st_size, b"\0"))
    with manager(tmp_path, disk=64) as kv:
        assert kv.match(tokens(0, 2 * TOKENS), now=0) == (0, 0, 0)
        assert kv.match(tokens(1, 2 * TOKENS), now=0).disk == 2 * TOKENS
        assert kv.stats()["retained"] == 0
        kv.check()


def test_a_larger_disk_keeps_all_and_a_smaller_one_the_most_valuable(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        engine = Engine(kv)
        for doc in range(5):
            engine.run(doc, 8 * TOKENS, retention=gdskv.Retention(priority=80) if doc == 0 else None)
    with manager(tmp_path, disk=128) as kv:
        assert kv.store.ledger.recovered.blocks == 40
    with manager(tmp_path, disk=16, host=4) as kv:
        found = kv.store.ledger.recovered
        assert found.blocks == 16
        assert found.dropped == 24
        engine = Engine(kv)
        assert engine.run(0, 8 * TOKENS).matched.disk == 8 * TOKENS
        assert engine.run(4, 8 * TOKENS).matched.disk == 8 * TOKENS
    slab = next(tmp_path.rglob("blocks.slab"))
    assert slab.stat().st_size == 16 * BLOCK + 4096


def test_without_checksums_only_a_clean_close_is_believed(tmp_path: Path) -> None:
    kv = manager(tmp_path, disk=64, checksums=False)
    engine = Engine(kv)
    for doc in range(5):
        engine.run(doc, 8 * TOKENS)
    engine.drain()
    crash(kv)
    with manager(tmp_path, disk=64, checksums=False) as kv:
        assert kv.store.ledger.recovered.blocks == 0
        assert "checksums are off" in kv.store.ledger.recovered.why[0]
        Engine(kv).run(0, 4 * TOKENS)
    with manager(tmp_path, disk=64, checksums=False) as kv:
        assert kv.store.ledger.recovered.blocks == 4


def test_a_payload_newer_than_its_record_is_a_miss_and_its_slot_is_used_again(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        Engine(kv).run(0, 2 * TOKENS)
    slab = next(tmp_path.rglob("blocks.slab"))
    with open(slab, "r+b") as file:
        file.seek(4096)
        file.write(b"\xee" * BLOCK)
    with manager(tmp_path, disk=64) as kv:
        engine = Engine(kv)
        request = engine.run(0, 2 * TOKENS)
        assert request.failed.tolist() == [0]
        assert kv.stats()["stale_slots"] == 1
        assert kv.stats()["disk_bad"] == 0


@pytest.mark.parametrize("name", ["superblock", "slots.dir", "state.dir", "blocks.slab"])
@pytest.mark.parametrize("damage", ["remove", "zero", "noise"])
def test_a_damaged_file_costs_blocks_and_never_bytes(tmp_path: Path, name: str, damage: str) -> None:
    with manager(tmp_path, disk=64) as kv:
        engine = Engine(kv)
        for doc in range(5):
            engine.run(doc, 8 * TOKENS)
    path = next(tmp_path.rglob(name))
    size = path.stat().st_size
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes(size) if damage == "zero" else np.random.default_rng(1).bytes(size))
    with manager(tmp_path, disk=64) as kv:
        if name != "state.dir" or damage == "remove":
            assert kv.store.ledger.recovered.why or kv.store.ledger.recovered.blocks == 0
        engine = Engine(kv)
        for doc in range(5):
            engine.run(doc, 8 * TOKENS)
        kv.check()


def test_another_namespace_is_never_read(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        Engine(kv).run(0, 2 * TOKENS)
    other = gdskv.Namespace(model="test", revision="2")
    folder = tmp_path / NAMESPACE.digest(LAYOUT).hex()
    folder.rename(tmp_path / "elsewhere")  # both at once do not fit
    with gdskv.BlockManager(config(tmp_path, disk=64), LAYOUT, other) as kv:
        assert kv.store.ledger.recovered.blocks == 0
        assert Engine(kv).run(0, 2 * TOKENS).matched == (0, 0, 0)
    (tmp_path / other.digest(LAYOUT).hex()).rename(folder)
    with manager(tmp_path, disk=64) as kv:
        assert kv.store.ledger.recovered.blocks == 0
        assert "another namespace's" in kv.store.ledger.recovered.why[0]


def test_another_format_version_is_refused_with_the_command_that_clears_it(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        Engine(kv).run(0, 2 * TOKENS)
    path = next(tmp_path.rglob("superblock"))
    body = path.read_text().partition("\n")[0].replace('"format": 1', '"format": 9')
    path.write_text(f"{body}\n{crc32c_bytes(body.encode()):08x}\n")
    with pytest.raises(gdskv.DirectoryError, match="--clear"):
        manager(tmp_path, disk=64)


def test_hours_of_writes_outlive_the_process_and_a_file_without_them_opens(tmp_path: Path) -> None:
    day = 24 * 3600.0
    docs = iter(range(100))
    for wall in (1000.0, 1000.0 + 3600, 1000.0 + day, 1000.0 + 3 * day):
        with manager(tmp_path, disk=64, wall=wall) as kv:
            for _ in range(4):
                Engine(kv).run(next(docs), 4 * TOKENS)
        block = read(next(tmp_path.glob("*/superblock")).parent)
        assert isinstance(block, Superblock) and block.last_written >= 16 * BLOCK
        hours = {int(hour): size for hour, size in block.hours.items()}
        assert hours[max(hours)] == pytest.approx(block.last_written, abs=8)
        assert max(hours) == wall // 3600
        assert len(hours) == {1000.0: 1, 4600.0: 2, 1000.0 + day: 3}.get(wall, 1)
    path = next(tmp_path.glob("*/superblock"))
    values = json.loads(path.read_text().partition("\n")[0])
    del values["hours"]
    body = json.dumps(values)
    path.write_text(f"{body}\n{crc32c_bytes(body.encode()):08x}\n")
    with manager(tmp_path, disk=64, wall=1000.0 + 3 * day) as kv:
        assert kv.store.ledger.recovered.blocks > 0
        assert kv.store.ledger.recovered.why == ()


def test_fsync_counts_what_is_durable(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64, durability="fsync") as kv:
        engine = Engine(kv)
        for doc in range(5):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        assert kv.stats()["durable_records"] >= kv.stats()["spills"]


def test_each_rank_has_the_directory_that_its_number_stands_in(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"gpu{rank}").mkdir()
    settings = config(tmp_path / "gpu{rank}", disk=32)
    with (
        gdskv.BlockManager(settings, LAYOUT, gdskv.Namespace(model="test", tp=2, rank=0)) as first,
        gdskv.BlockManager(settings, LAYOUT, gdskv.Namespace(model="test", tp=2, rank=1)) as second,
    ):
        for rank, kv in enumerate((first, second)):
            assert [d.path for d in kv.store.disk_pool.directories] == [tmp_path / f"gpu{rank}"]
    with pytest.raises(gdskv.DirectoryError, match=r"gpu2 does not exist. Create it"):
        gdskv.BlockManager(settings, LAYOUT, gdskv.Namespace(model="test", tp=3, rank=2))


def test_a_store_that_forgets_at_its_close_comes_back_empty(tmp_path: Path) -> None:
    with manager(tmp_path, disk=64) as kv:
        Engine(kv).run(0, 4 * TOKENS)
        Engine(kv).drain()
    settings = config(tmp_path, device=0, disk=64)
    with gdskv.KVStore(settings, LAYOUT, NAMESPACE) as store:
        assert store.ledger.recovered.blocks == 4
        assert store.close(5.0, forget=True)
        assert store.stats()["io_write_transfers_posix_direct"] == 0
    with gdskv.KVStore(settings, LAYOUT, NAMESPACE) as store:
        assert store.ledger.recovered.blocks == 0
