"""Kinds D1, D7 and D8: what a disk tier takes, and how often it writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import Bench, slab
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, config

import gdskv


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as b:
        yield b


def taken(folder: Path) -> int:
    """Bytes that a folder takes on its file system."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def test_d1_a_cap_that_does_not_fit_is_refused_at_open_with_both_numbers(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    settings = config(tmp_path).model_copy(update={"disk_bytes": 2 * free})
    with pytest.raises(gdskv.DirectoryError) as caught:
        gdskv.BlockManager(settings, LAYOUT, NAMESPACE)
    assert re.search(r"does not fit .*: .* free, .* must stay free. Lower disk_bytes to at most ", str(caught.value))
    assert list(tmp_path.iterdir()) == [], "and nothing is left behind"


def test_d1_what_must_stay_free_stays_free(tmp_path: Path) -> None:
    settings = config(tmp_path).model_copy(update={"min_free": 1 << 60})
    with pytest.raises(gdskv.DirectoryError, match=r"must stay free"):
        gdskv.BlockManager(settings, LAYOUT, NAMESPACE)


def test_d1_the_cap_is_hard(bench: Bench) -> None:
    size, before = slab(bench.folder).stat().st_size, taken(bench.folder)
    for doc in range(30):
        bench.engine.run(doc, 8 * TOKENS)
        s = bench.stats
        assert s["disk_used"] + s["disk_free"] + s["disk_bad"] <= s["disk_blocks"] == 32
    bench.drain()
    assert bench.stats["evicted_disk"] > 100, "many times its size went through"
    assert slab(bench.folder).stat().st_size == size
    assert taken(bench.folder) <= before + 8192, "besides the lock and the superblock"
    bench.settled()


def test_d7_all_space_is_taken_at_open(bench: Bench) -> None:
    status = slab(bench.folder).stat()
    assert status.st_blocks * 512 >= 32 * BLOCK, "preallocated, not sparse"


def test_d8_a_block_is_written_once_however_often_it_comes_and_goes(bench: Bench) -> None:
    for _ in range(20):
        for doc in range(3):
            bench.engine.run(doc, 8 * TOKENS)
    bench.drain()
    s = bench.stats
    assert s["matched_disk"] > 10 * 24, "served from disk many times"
    assert s["spills"] == 24, "and written once"
    written = s["io_write_bytes_posix_direct"] + s["io_write_bytes_posix_buffered"]
    served = s["io_read_bytes_posix_direct"] + s["io_read_bytes_posix_buffered"]
    assert served > 8 * 24 * BLOCK and written < 2 * 24 * BLOCK + 64 * 64 * 20, "bytes written and served are metrics"
    bench.settled()


@pytest.mark.parametrize(("spill", "least", "most"), [("all", 100, 10_000), ("reused", 0, 0), ("retained", 0, 0)])
def test_d8_what_is_never_asked_for_again_need_not_be_written(
    tmp_path: Path, spill: str, least: int, most: int
) -> None:
    with Bench(tmp_path, disk=64, spill=spill) as b:
        for doc in range(30):  # an agent's trace: every prompt once
            b.engine.run(doc, 8 * TOKENS)
        b.drain()
        s = b.stats
        assert least <= s["spills"] <= most
        assert (s["dropped_unworthy"] > 0) == (spill != "all")
        b.settled()
