"""On every file system that can be mounted here the disk tier opens, or says why not, and says which way bytes move."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from faults import NOTES, audit, book, open_engine, open_store, settings, work
from mounts import mounted

import gdskv


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs"])
def test_a_file_system_serves_or_says_why_not(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path) as place:
        try:
            engine = open_engine(settings(place))
        except gdskv.DirectoryError as error:
            NOTES.append(f"{kind}: refused: {error}")
            assert kind in str(error)
            return
        with engine.kv:
            (info,) = engine.kv.store.disk_pool.directories
            assert info.file_system == kind
            assert info.mode in ("direct", "buffered")
            assert info.why
            work(engine, np.random.default_rng(1), requests=60)
            if info.mode == "direct":
                assert (
                    engine.kv.stats()["io_write_bytes_posix_buffered"]
                    < engine.kv.stats()["io_write_bytes_posix_direct"]
                )  # records are buffered, payloads are not
        with open_store(settings(place)) as store:
            found = audit(store)
            assert store.ledger.recovered.blocks == len(found.right) > 0
        NOTES.append(f"{kind}: {info.mode} ({info.why})")
        book(f"file system {kind}", injected=1, served_right=len(found.right), wrong=found.wrong)
        assert found.wrong == 0
