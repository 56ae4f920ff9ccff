"""Kinds T1 to T5: identity and time. `now` is the caller's; nothing here waits for a clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import Bench
from harness import LAYOUT, NAMESPACE, TOKENS, Engine, config, tokens

import gdskv

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as b:
        yield b


def test_t1_keys_do_not_depend_on_the_process(tmp_path: Path) -> None:
    code = (
        "import gdskv; ns = gdskv.Namespace(model='m', rope={'b': 1, 'a': 2}).digest(gdskv.KVLayout.raw(4096, 16));"
        "print(gdskv.block_keys(range(64), 16, namespace=ns, salt=b's', content=[(3, b'x')]).tobytes().hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            cwd=CHECKOUT,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(answers) == 1 and len(answers.pop().strip()) == 4 * 32


def test_t1_hashes_that_look_process_local_are_refused_with_the_setting_that_fixes_it() -> None:
    with pytest.raises(gdskv.KeyFormatError, match="prefix-caching-hash-algo sha256"):
        gdskv.keys_from_hashes([hash("a block")])  # type: ignore[list-item]


def test_t1_after_a_restart_the_same_prompt_is_found(tmp_path: Path) -> None:
    with gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE) as kv:
        Engine(kv).run(0, 4 * TOKENS)
    with gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE) as kv:
        assert Engine(kv).run(0, 4 * TOKENS).matched.disk == 4 * TOKENS


def test_t2_a_ttl_is_enforced_at_lookup_and_by_the_sweep(bench: Bench) -> None:
    bench.engine.run(0, 4 * TOKENS, retention=gdskv.Retention(ttl=10, on_expiry="forget"))
    end = bench.engine.now + 10
    bench.engine.now = end - 1e-6
    assert sum(bench.found(0, 4)) == 4 * TOKENS
    bench.engine.now = end
    assert sum(bench.found(0, 4)) == 0
    bench.tick(0)
    bench.drain()
    s = bench.stats
    assert s["forgotten"] == 4
    assert s["device_used"] == s["host_used"] == s["disk_used"] == 0, "the slots are free without another lookup"
    bench.settled()


def test_t2_a_ttl_outlives_the_process_as_wall_time(tmp_path: Path) -> None:
    wish = gdskv.Retention(ttl=100, on_expiry="forget")
    with gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE, now=5.0, wall=1000.0) as kv:
        engine = Engine(kv)
        engine.now = 5.0
        engine.finish(engine.begin(0, 4 * TOKENS, retention=wish))
    for now, wall, found in ((0.0, 1060.0, 4), (7.0, 1099.0, 4), (0.0, 1101.0, 0)):
        with gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE, now=now, wall=wall) as kv:
            assert sum(kv.match(tokens(0, 4 * TOKENS), now=now)) == found * TOKENS, (now, wall)


def test_t3_the_clock_starts_at_commit(bench: Bench) -> None:
    kv, wish = bench.kv, gdskv.Retention(ttl=10, on_expiry="forget")
    request = bench.engine.begin(0, 4 * TOKENS, retention=wish)
    bench.tick(1000)  # a long prefill
    bench.engine.finish(request)
    bench.tick(9)
    assert bench.found(0, 4).device == 4 * TOKENS
    bench.tick(1)
    assert sum(bench.found(0, 4)) == 0
    assert kv.stats()["retained"] == 0
    bench.settled()


def test_t4_ranks_that_get_the_leaders_now_decide_the_same(tmp_path: Path) -> None:
    """Two ranks, one of them with slower transfers, and a `now` that once steps back."""
    wishes = [None, gdskv.Retention(ttl=3, on_expiry="forget"), gdskv.Retention(ttl=20, priority=80)]
    decided = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        with Bench(folder, device=4, host=4, disk=16) as b:
            out = []
            for i in range(60):
                b.engine.now = i * 0.7 - (5 if i == 30 else 0)
                request = b.engine.begin(i * 7 % 9, (1 + i % 4) * TOKENS, retention=wishes[i % 3])
                out.append((request.blocks.tolist(), request.tiers.tolist()))
                if rank:
                    b.polls(2)
                b.engine.finish(request)
            decided.append(out)
            b.settled()
    assert decided[0] == decided[1]


def test_t5_one_tenant_cannot_hold_the_whole_budget(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=32, retained_fraction=0.5, tenant_fraction=0.25) as b:
        greedy = gdskv.Retention(ttl=1000, priority=100, tenant="greedy")
        for doc in range(10):
            b.engine.run(doc, 4 * TOKENS, retention=greedy)
        s = b.stats
        assert s["retained"] == 4 and s["over_budget"] == 36
        b.engine.run(20, 8 * TOKENS, retention=gdskv.Retention(ttl=1000, tenant="other"))
        assert b.store.table.retained() == {"": 0, "greedy": 4, "other": 4}
        for doc in range(30, 50):
            b.engine.run(doc, 8 * TOKENS)
        b.drain()
        assert sum(b.found(20, 4)) == 4 * TOKENS, "what the other was granted is still there"
        assert sum(b.found(0, 4)) == 4 * TOKENS
        assert sum(sum(b.found(doc, 4)) for doc in range(1, 10)) == 0
        b.settled()
