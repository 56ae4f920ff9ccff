"""Faults that users of other caches have met with disks, restarts and capacity; each is a kind, and each holds here.

The kinds have numbers in the docs. Those of wrong bytes, of killed owners and of failing disks are beside the tests of
these: W2 to W5 in test_corrupt, W6 in test_rank_skew, D5 in test_kill, R10 in tests/test_failing.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from faults import audit, open_engine, open_store, settings, work
from harness import BLOCK, TOKENS, tokens

import gdskv
from gdskv.table.state import NENTS, NXFREE, XCAP


def files(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}


def test_the_disk_tier_never_grows_beyond_its_cap(tmp_path: Path) -> None:
    """D1 of the cases."""
    engine = open_engine(settings(tmp_path, disk=16))
    with engine.kv:
        before = files(tmp_path)
        work(engine, np.random.default_rng(1), requests=150)
        assert engine.kv.stats()["evicted_disk"] > 0
        assert files(tmp_path) == before


def test_a_disk_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """D1 of the cases."""
    system = os.statvfs(tmp_path)
    blocks = system.f_blocks * system.f_frsize // BLOCK
    with pytest.raises(gdskv.DirectoryError, match=r"disk_bytes=\S+ does not fit .* free, .* must stay free"):
        open_engine(settings(tmp_path, disk=blocks, min_free=0.05))
    assert not files(tmp_path)


def test_a_few_files_whatever_the_number_of_blocks(tmp_path: Path) -> None:
    """D2 of the cases."""
    with open_store(settings(tmp_path, disk=20_000)) as store:
        names = {path.rpartition("/")[2] for path in files(tmp_path)}
        assert names == {"gdskv.lock", "blocks.slab", "slots.dir", "state.dir", "superblock"}
        assert store.table.capacity(2) == 20_000


def test_an_open_reads_records_and_no_payload(tmp_path: Path) -> None:
    """D3 of the cases."""
    engine = open_engine(settings(tmp_path, disk=4096))
    with engine.kv:
        work(engine, np.random.default_rng(1), requests=60)
    slab = next(tmp_path.glob("*/blocks.slab"))
    os.truncate(slab, 4096)  # its name is there, and no block
    os.truncate(slab, 4096 + 4096 * BLOCK)
    with open_store(settings(tmp_path, disk=4096)) as store:
        assert store.ledger.recovered.blocks > 0, "what it did not read it cannot know to be gone"
        assert sum(n for name, n in store.stats().items() if name.startswith("io_read_bytes")) == 0
        found = audit(store)
        assert (len(found.right), found.wrong) == (0, 0)
        assert found.refused > 0


def test_index_and_accounting_survive_a_restart(tmp_path: Path) -> None:
    """D4 of the cases."""
    engine = open_engine(settings(tmp_path))
    with engine.kv:
        work(engine, np.random.default_rng(1), requests=60)
        engine.drain()
        retained = engine.kv.store.table.retained()
        now = engine.now
    with gdskv.BlockManager(
        settings(tmp_path), engine.kv.layout, engine.kv.store.namespace, wall=1000.0 + now, now=now
    ) as kv:
        blocks = kv.store.ledger.recovered.blocks
        assert kv.stats()["disk_used"] == blocks == 48
        assert kv.stats()["disk_free"] == 0
        again = kv.store.table.retained()
        assert {name for name, n in retained.items() if n} == {name for name, n in again.items() if n}
        assert sum(again.values()) == kv.stats()["retained"]
        kv.check()


def test_an_open_keeps_the_files_that_it_finds(tmp_path: Path) -> None:
    """D6 of the cases: nothing is truncated at start, not even by an open that is refused."""
    engine = open_engine(settings(tmp_path))
    with engine.kv:
        work(engine, np.random.default_rng(1), requests=60)
        with pytest.raises(gdskv.DirectoryBusy):
            open_store(settings(tmp_path))
    slab = next(tmp_path.glob("*/blocks.slab"))
    before = slab.stat().st_ino, slab.read_bytes()
    with open_store(settings(tmp_path)) as store:
        assert store.ledger.recovered.blocks == 48
    assert (slab.stat().st_ino, slab.read_bytes()) == before


def test_no_file_is_sparse(tmp_path: Path) -> None:
    """D7 of the cases: what is promised was taken from the file system."""
    with open_store(settings(tmp_path, disk=1000)):
        for path in tmp_path.glob("*/*"):
            status = path.stat()
            assert status.st_blocks * 512 >= status.st_size, path


def test_a_block_that_comes_and_goes_is_written_once(tmp_path: Path) -> None:
    """D8 of the cases."""
    engine = open_engine(settings(tmp_path, disk=64))
    with engine.kv:
        for _ in range(20):
            for doc in range(6):
                engine.run(doc, 8 * TOKENS)
        engine.drain()
        stats = engine.kv.stats()
        assert stats["spills"] <= 48
        assert stats["matched_disk"] > 10 * stats["spills"]
        assert stats["evicted_disk"] == 0


def test_books_are_flat_over_100_000_blocks_that_come_and_go(tmp_path: Path) -> None:
    """R9 of the cases."""
    engine = open_engine(settings(tmp_path, disk=256, device_bytes=32 * BLOCK, host_bytes=32 * BLOCK, policy="lru"))
    with engine.kv as kv:
        store, table = kv.store, kv.store.table

        def held() -> tuple[int, ...]:
            engine.drain()
            m = table.arrays.m
            entries = len(table.arrays.e) - int(m[NENTS])
            return (entries, int(m[XCAP] - m[NXFREE]), len(store._pending), len(store._found), len(store._done))

        sizes = []
        for number in range(4_200):
            engine.run(number % 40, 24 * TOKENS)
            if number in (200, 2_000, 4_199):
                sizes.append(held())
                kv.check()
        assert kv.stats()["evicted_device"] > 100_000
        assert kv.stats()["spills"] > 50_000
        assert [size[1:] for size in sizes] == [(0, 0, 0, 0)] * 3
        assert max(size[0] for size in sizes) <= 32 + 32 + 256


def test_a_ttl_is_enforced_at_lookup_and_outlives_the_process(tmp_path: Path) -> None:
    """T2 of the cases."""
    gone = gdskv.Retention(ttl=100, on_expiry="forget")
    with open_engine(settings(tmp_path)).kv as kv:
        request = kv.begin(tokens(0, 2 * TOKENS), retention=gone, now=0.0)
        kv.commit(request, now=0.0)
        kv.release(request, now=0.0)
        assert sum(kv.match(tokens(0, 2 * TOKENS), now=50.0)) == 2 * TOKENS
    for wall, now, there in ((1060.0, 39.0, 2), (1100.0, 0.0, 0)):
        config = settings(tmp_path)
        with gdskv.BlockManager(config, kv.layout, kv.store.namespace, wall=wall) as again:
            assert again.match(tokens(0, 2 * TOKENS), now=now).disk == there * TOKENS


def test_a_ttl_that_passes_while_open_is_enforced_at_the_next_lookup(tmp_path: Path) -> None:
    """T2 of the cases."""
    engine = open_engine(settings(tmp_path))
    with engine.kv as kv:
        engine.run(0, 2 * TOKENS, retention=gdskv.Retention(ttl=100, on_expiry="forget"))
        assert sum(kv.match(tokens(0, 2 * TOKENS), now=100.9)) == 2 * TOKENS
        assert sum(kv.match(tokens(0, 2 * TOKENS), now=101.0)) == 0
        engine.drain()
        assert kv.stats()["disk_used"] == 0
