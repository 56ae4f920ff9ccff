"""Whether a hit on disk is worth its wait: the estimate is what loads took, and a caller may leave what is too slow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, tokens

import gdskv
from gdskv.pace import Pace


def test_newer_loads_count_more_and_none_is_no_wait() -> None:
    pace = Pace()
    assert pace.seconds(10) == 0
    pace.see(0, 10**9)
    assert pace.seconds(10) == 0, "nothing was on disk"
    pace.see(4, 4 * 10**9)
    assert pace.seconds(3) == pytest.approx(3)
    for _ in range(50):
        pace.see(1, 10**8)
    assert pace.seconds(1) == pytest.approx(0.1, rel=0.01)


@pytest.fixture
def engine(tmp_path: Path):
    """Its first document is on disk, and the engine's clock says that loading a block of it takes a second."""
    engine = Engine(gdskv.BlockManager(config(tmp_path, device=8, host=4, disk=64), LAYOUT, NAMESPACE))
    with engine.kv:
        for doc in range(6):
            engine.run(doc, 4 * TOKENS)
        engine.drain()
        request = engine.kv.begin(tokens(0, 4 * TOKENS), now=engine.now)
        assert request.matched.disk == 4 * TOKENS
        while engine.kv.store.table.launched or engine.kv.store.table.deferred:
            engine.kv.store._pump()
        engine.now += 4.0
        engine.kv.poll(now=engine.now)
        assert engine.kv.is_ready(request) and request.cached_blocks == 4
        engine.kv.release(request, now=engine.now)
        assert engine.kv.store.pace.seconds(4) == pytest.approx(4.0)
        for doc in range(10, 16):
            engine.run(doc, 4 * TOKENS)
        engine.drain()
        yield engine


def test_g9_a_hit_that_takes_longer_than_computing_is_left(engine: Engine) -> None:
    before = engine.kv.stats()
    request = engine.kv.begin(tokens(0, 4 * TOKENS), max_wait=engine.kv.store.pace.seconds(3), now=engine.now)
    assert request.matched == (0, 0, 0) and len(request.blocks) == 4 and len(request.keys) == 4
    assert engine.kv.stats()["skipped_slow"] - before["skipped_slow"] == 4
    engine.finish(request)
    assert engine.kv.stats()["onboards_disk"] == before["onboards_disk"]
    assert engine.kv.match(tokens(0, 4 * TOKENS), now=engine.now).device == 4 * TOKENS
    engine.kv.check()
    verified = engine.verified
    engine.run(0, 4 * TOKENS)
    assert engine.verified == verified + 4


def test_a_hit_that_is_quick_enough_is_taken(engine: Engine) -> None:
    request = engine.kv.begin(tokens(0, 4 * TOKENS), max_wait=1e6, now=engine.now)
    assert request.matched.disk == 4 * TOKENS
    engine.kv.cancel(request, now=engine.now)


def test_a_store_says_what_a_match_will_take(tmp_path: Path) -> None:
    source = np.arange(4 * BLOCK, dtype=np.uint8).reshape(4, BLOCK)
    keys = np.arange(8, dtype=np.uint64).reshape(4, 2) + 1
    with gdskv.KVStore(config(tmp_path, device=0, host=8, disk=64), LAYOUT, NAMESPACE) as store:
        store.store(keys, source=source, now=0.0)
        for doc in range(1, 12):
            store.store(keys + np.uint64(100 * doc), source=source, now=0.0)
            while not store.idle:
                store.poll(now=0.0)
        found = store.match(keys, now=1.0)
        assert list(found.tier) == [2, 2, 2, 2] and store.seconds(found) == 0
        store.load(found, into=source, now=1.0)
        while not store.idle:
            store._pump()
        assert len(store.poll(now=3.0)) == 1
        assert store.pace.seconds(1) >= 0
