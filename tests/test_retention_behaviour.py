"""What a retention does once blocks carry it: when they stay, when they go, and what becomes of wishes that meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import Fail
from faulty import WRITE, Bench, aligned
from harness import LAYOUT, NAMESPACE, TOKENS, config, tokens

import gdskv
from gdskv import Retention, TokenRange
from gdskv.table.state import RETAINED_LIMIT, TENANT_LIMIT

OTHERS = itertools.count(1000)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as b:
        yield b


def shared(doc: int, prefix: int, n: int) -> np.ndarray:
    """`n` blocks of tokens of a document that begins with the first `prefix` blocks of document 0."""
    out = tokens(doc, n * TOKENS)
    out[: prefix * TOKENS] = tokens(0, prefix * TOKENS)
    return out


def run(b: Bench, ids: np.ndarray, wish: Retention | None = None) -> gdskv.Request:
    """One request with these tokens."""
    b.engine.now += 0.001
    request = b.kv.begin(ids, retention=wish, now=b.engine.now)
    assert isinstance(request, gdskv.Request), request
    b.engine.finish(request)
    return request


def press(b: Bench, times: int = 12) -> None:
    """Other documents come by, enough to push everything out that may go."""
    for _ in range(times):
        run(b, tokens(next(OTHERS), b.kv.sizing.device_blocks * TOKENS))
    b.drain()


def found(b: Bench, ids: np.ndarray) -> int:
    """Blocks of these tokens that some tier has."""
    return sum(b.kv.match(ids, now=b.engine.now)) // TOKENS


def at(b: Bench, now: float) -> None:
    """Let time be that."""
    b.engine.now = now
    b.kv.poll(now=now)


# ---- the clock


def test_retained_blocks_outlast_the_pressure_until_their_deadline(bench: Bench) -> None:
    run(bench, tokens(0, 4 * TOKENS), Retention(ttl=100))
    run(bench, tokens(1, 4 * TOKENS))
    press(bench)
    assert found(bench, tokens(0, 4 * TOKENS)) == 4
    assert found(bench, tokens(1, 4 * TOKENS)) == 0
    at(bench, 101)
    press(bench)
    assert found(bench, tokens(0, 4 * TOKENS)) == 0
    assert bench.stats["expired"] == 4
    bench.settled()


def test_the_clock_starts_at_commit_not_at_begin(bench: Bench) -> None:
    request = bench.kv.begin(tokens(0, 2 * TOKENS), retention=Retention(ttl=10), now=0)
    at(bench, 500)
    bench.engine.finish(request)
    assert bench.kv.deadlines(keys=request.keys).tolist() == [510, 510]


def test_deadlines_only_move_away(bench: Bench) -> None:
    ids = tokens(0, 2 * TOKENS)
    keys = run(bench, ids, Retention(ttl=100)).keys
    first = bench.kv.deadlines(keys=keys).tolist()
    run(bench, ids, Retention(ttl=10))
    assert bench.kv.deadlines(keys=keys).tolist() == first, "a shorter wish takes nothing back"
    at(bench, 50)
    run(bench, ids, Retention(ttl=100))
    assert bench.kv.deadlines(keys=keys).tolist() == [pytest.approx(150, abs=0.1)] * 2


def test_reuse_refreshes_a_deadline_only_with_a_ttl_of_its_own(bench: Bench) -> None:
    ids = tokens(0, 2 * TOKENS)
    keys = run(bench, ids, Retention(ttl=100)).keys
    first = bench.kv.deadlines(keys=keys).tolist()
    at(bench, 90)
    run(bench, ids)
    run(bench, ids, Retention(priority=90))
    assert bench.kv.deadlines(keys=keys).tolist() == first
    at(bench, 101)
    press(bench)
    assert found(bench, ids) in (0, 2)
    assert bench.stats["retained"] == 0


def test_a_later_commit_of_a_request_neither_extends_nor_shortens(bench: Bench) -> None:
    kv = bench.kv
    request = kv.begin(tokens(0, 2 * TOKENS), retention=Retention(ttl=100, on_expiry="forget"), now=0)
    bench.engine.wait(request)
    bench.engine.compute(request)
    kv.commit(request, now=0)
    for i in range(3, 6):
        at(bench, 10.0 * i)
        assert kv.allocate(request, 1, now=bench.engine.now) is None
        bench.engine.wait(request)
        kv.commit(request, tokens(0, i * TOKENS), now=bench.engine.now)
    assert kv.deadlines(keys=request.keys)[:2].tolist() == [100, 100]
    kv.release(request, now=bench.engine.now)
    at(bench, 100)
    assert found(bench, tokens(0, 5 * TOKENS)) == 0, "forgotten, though the request committed again after"
    bench.settled()


def test_a_request_that_goes_on_past_its_own_deadline_does_not_revive_what_is_forgotten(bench: Bench) -> None:
    kv = bench.kv
    request = kv.begin(tokens(0, 2 * TOKENS), retention=Retention(ttl=10, on_expiry="forget"), now=0)
    bench.engine.wait(request)
    bench.engine.compute(request)
    kv.commit(request, now=0)
    at(bench, 20)
    assert kv.allocate(request, 1, now=20) is None
    bench.engine.wait(request)
    kv.commit(request, tokens(0, 3 * TOKENS), now=20)
    assert found(bench, tokens(0, 3 * TOKENS)) == 0
    kv.release(request, now=20)
    assert found(bench, tokens(0, 3 * TOKENS)) == 0
    bench.settled()


# ---- which block takes what


def test_ranges_give_each_block_what_holds_its_first_token(bench: Bench) -> None:
    wish = Retention(ranges=(TokenRange(0, 2 * TOKENS + 1, 80, 50.0), TokenRange(3 * TOKENS, None, 20, None)))
    keys = run(bench, tokens(0, 5 * TOKENS), wish).keys
    now = bench.engine.now
    deadlines = bench.kv.deadlines(keys=keys)
    assert deadlines.tolist() == [pytest.approx(now + 50)] * 3 + [0, 0]
    entries, _ = bench.store.table.match(keys)
    assert bench.store.table.arrays.e["priority"][entries].tolist() == [80, 80, 80, 20, 20]


def test_retain_until_token_is_rounded_up_to_a_block(bench: Bench) -> None:
    keys = run(bench, tokens(0, 4 * TOKENS), Retention(ttl=50, retain_until_token=TOKENS + 1)).keys
    assert (bench.kv.deadlines(keys=keys) > 0).tolist() == [True, True, False, False]


def test_decoded_blocks_take_the_decode_ttl_and_lift_their_prompt(bench: Bench) -> None:
    kv = bench.kv
    request = kv.begin(tokens(0, 2 * TOKENS), retention=Retention(ttl=10, decode_ttl=200, decode_priority=60), now=0)
    bench.engine.wait(request)
    bench.engine.compute(request)
    kv.commit(request, now=0)
    assert kv.deadlines(keys=request.keys).tolist() == [10, 10]
    assert kv.allocate(request, 2, now=5) is None
    bench.engine.wait(request)
    kv.commit(request, tokens(0, 4 * TOKENS), now=5)
    assert kv.deadlines(keys=request.keys).tolist() == [205] * 4, "a block is of no use without its parents"
    kv.release(request, now=5)
    assert bench.stats["retained"] == 4
    bench.settled()


def test_ancestors_are_lifted_in_deadline_and_priority(bench: Bench) -> None:
    run(bench, tokens(0, 2 * TOKENS), Retention(priority=10))
    keys = run(bench, shared(1, 2, 4), Retention(ranges=(TokenRange(3 * TOKENS, None, 90, 100.0),))).keys
    assert (bench.kv.deadlines(keys=keys) > 0).all()
    press(bench)
    assert found(bench, shared(1, 2, 4)) == 4
    bench.settled()


# ---- at the deadline


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_forget_stops_matching_at_that_instant_in_every_tier(bench: Bench, tier: str) -> None:
    ids = tokens(0, 2 * TOKENS)
    run(bench, ids, Retention(ttl=100, on_expiry="forget"))
    press(bench, {"device": 0, "host": 1, "disk": 6}[tier])
    deadline = float(bench.kv.deadlines(keys=gdskv.block_keys(ids, TOKENS, namespace=bench.store.digest))[0])
    assert getattr(bench.kv.match(ids, now=deadline - 1e-6), tier) == 2 * TOKENS
    assert bench.kv.match(ids, now=deadline) == (0, 0, 0)
    at(bench, deadline)
    bench.drain()
    assert bench.stats["forgotten"] == 2
    assert bench.stats["retained"] == 0
    bench.settled()


def test_the_sweep_takes_bounded_steps_and_frees_all_slots(tmp_path: Path) -> None:
    with Bench(tmp_path, device=256, host=0, disk=0, retained_fraction=1.0) as b:
        for doc in range(25):
            run(b, tokens(doc, 8 * TOKENS), Retention(ttl=100, on_expiry="forget"))
        assert b.stats["device_used"] == 200
        b.engine.now = 1000
        b.kv.poll(now=1000)
        assert 0 < b.stats["forgotten"] < 200
        for _ in range(10):
            b.kv.poll(now=1000)
        s = b.stats
        assert (s["forgotten"], s["device_used"], s["device_free"]) == (200, 0, 256)
        b.settled()


def test_a_running_request_keeps_what_is_forgotten_under_it(bench: Bench) -> None:
    run(bench, tokens(0, 2 * TOKENS), Retention(ttl=10, on_expiry="forget"))
    request = bench.engine.begin(0, 2 * TOKENS)
    at(bench, 50)
    press_while_leased = bench.engine.begin(7, 6 * TOKENS)
    bench.engine.finish(press_while_leased)
    bench.engine.wait(request)
    bench.engine.verify(request)
    bench.kv.release(request, now=50)
    assert found(bench, tokens(0, 2 * TOKENS)) == 0
    bench.settled()


def test_demoted_blocks_stay_as_ordinary_ones_in_their_place_by_use(tmp_path: Path) -> None:
    with Bench(tmp_path, device=4, host=0, disk=0) as b:
        run(b, tokens(0, TOKENS), Retention(ttl=10, priority=90))
        run(b, tokens(1, TOKENS))
        run(b, tokens(2, TOKENS))
        at(b, 20)
        assert found(b, tokens(0, TOKENS)) == 1
        run(b, tokens(3, 2 * TOKENS))  # one slot is free, one block must go
        assert found(b, tokens(0, TOKENS)) == 0, "the least recently used, whatever its priority was"
        assert found(b, tokens(1, TOKENS)) == 1
        b.settled()


def test_what_config_says_is_the_default_for_expiry(tmp_path: Path) -> None:
    with Bench(tmp_path, on_expiry="forget") as b:
        run(b, tokens(0, TOKENS), Retention(ttl=10))
        run(b, tokens(1, TOKENS), Retention(ttl=10, on_expiry="demote"))
        run(b, tokens(2, TOKENS))
        at(b, 20)
        assert [found(b, tokens(doc, TOKENS)) for doc in range(3)] == [0, 1, 1]
        b.settled()


# ---- the budget


def test_the_budget_bounds_what_is_retained_and_the_rest_is_ordinary(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=32, retained_fraction=0.25) as b:
        run(b, tokens(0, 8 * TOKENS), Retention(ttl=100))
        run(b, tokens(1, 4 * TOKENS), Retention(ttl=100, priority=100))
        s = b.stats
        assert (s["retained"], s["over_budget"]) == (8, 4)
        press(b)
        assert found(b, tokens(0, 8 * TOKENS)) == 8
        assert found(b, tokens(1, 4 * TOKENS)) == 0, "neither by deadline nor by the priority that came with it"
        at(b, 200)
        run(b, tokens(1, 4 * TOKENS), Retention(ttl=100))
        assert b.stats["retained"] == 4, "what has lapsed makes room"
        b.settled()


def test_a_chain_is_retained_from_its_first_block_as_far_as_the_budget_reaches(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=32, retained_fraction=0.125) as b:
        keys = run(b, tokens(0, 8 * TOKENS), Retention(ttl=100)).keys
        assert (b.kv.deadlines(keys=keys) > 0).tolist() == [True] * 4 + [False] * 4


def test_what_is_over_budget_is_forgotten_all_the_same(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=32, retained_fraction=0.125) as b:
        wish = Retention(ttl=100, on_expiry="forget")
        run(b, tokens(0, 4 * TOKENS), wish)
        run(b, tokens(1, 4 * TOKENS), wish)
        assert b.stats["over_budget"] == 4
        assert found(b, tokens(1, 4 * TOKENS)) == 4
        at(b, 100.1)
        assert found(b, tokens(0, 4 * TOKENS)) == found(b, tokens(1, 4 * TOKENS)) == 0
        b.settled()


def test_that_outlives_the_process_too(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"device": 8, "host": 8, "disk": 32, "retained_fraction": 0.125}
    wish = Retention(ttl=100, on_expiry="forget")
    with Bench(tmp_path, **sizes, wall=1000.0) as b:
        run(b, tokens(0, 4 * TOKENS), wish)
        run(b, tokens(1, 4 * TOKENS), wish)
    with Bench(tmp_path, **sizes, wall=1050.0) as b:
        assert b.stats["retained"] == 4
        assert found(b, tokens(0, 4 * TOKENS)) == found(b, tokens(1, 4 * TOKENS)) == 4
        at(b, 51)
        assert found(b, tokens(0, 4 * TOKENS)) == found(b, tokens(1, 4 * TOKENS)) == 0
        b.settled()


def test_each_tenant_has_its_share(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=32, retained_fraction=0.5, tenant_fraction=0.5) as b:
        for doc in range(4):
            run(b, tokens(doc, 4 * TOKENS), Retention(ttl=100, tenant="a"))
        run(b, tokens(9, 4 * TOKENS), Retention(ttl=100, tenant="b"))
        assert b.store.table.retained() == {"": 0, "a": 8, "b": 4}
        assert b.stats["over_budget"] == 8


def test_a_shared_prefix_is_charged_once_to_who_retained_it_first(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=32) as b:
        run(b, shared(1, 2, 4), Retention(ttl=100, tenant="a"))
        run(b, shared(2, 2, 4), Retention(ttl=200, tenant="b"))
        assert b.store.table.retained() == {"": 0, "a": 4, "b": 2}
        at(b, 150)
        assert b.store.table.retained() == {"": 0, "a": 2, "b": 2}, "the prefix is still a's, for b's sake"
        at(b, 250)
        assert b.store.table.retained() == {"": 0, "a": 0, "b": 0}
        b.settled()


def test_a_lapsed_block_leaves_the_budget_also_where_it_was_passed_over(tmp_path: Path) -> None:
    """A retained parent whose child came later stays in the order by deadline, however often it is passed over."""
    with Bench(tmp_path, device=4, host=0, disk=4, retained_fraction=0.5) as b:
        run(b, tokens(0, TOKENS), Retention(ttl=100))
        run(b, tokens(0, 2 * TOKENS))
        for doc in range(1, 6):
            run(b, tokens(doc, 3 * TOKENS))
            b.drain()
        assert b.stats["retained"] == 1
        at(b, 101)
        assert b.stats["retained"] == 0
        b.settled()


# ---- a full disk


def test_without_protection_new_blocks_displace_the_earliest_deadline(tmp_path: Path) -> None:
    with Bench(tmp_path, device=4, host=0, disk=8, retained_fraction=1.0) as b:
        run(b, tokens(0, 4 * TOKENS), Retention(ttl=1000))
        run(b, tokens(1, 4 * TOKENS), Retention(ttl=100))
        b.drain()
        press(b, 2)
        assert found(b, tokens(0, 4 * TOKENS)) == 4
        assert found(b, tokens(1, 4 * TOKENS)) < 4
        b.settled()


def test_protect_unexpired_refuses_new_blocks_and_counts_them(tmp_path: Path) -> None:
    with Bench(tmp_path, device=4, host=0, disk=8, retained_fraction=1.0, protect_unexpired=True) as b:
        run(b, tokens(0, 4 * TOKENS), Retention(ttl=1000))
        run(b, tokens(1, 4 * TOKENS), Retention(ttl=100))
        b.drain()
        press(b, 6)
        assert found(b, tokens(0, 4 * TOKENS)) == found(b, tokens(1, 4 * TOKENS)) == 4
        s = b.stats
        assert s["refused_protected"] > 0 and s["shed_no_slot"] > 0 and s["evicted_disk"] == 0
        at(b, 200)
        press(b, 6)
        assert b.stats["evicted_disk"] > 0, "once deadlines have passed there is room again"
        assert found(b, tokens(0, 4 * TOKENS)) == 4
        b.settled()


# ---- what is written


@pytest.mark.parametrize("spill", ["all", "reused", "retained"])
def test_spill_says_what_is_written(tmp_path: Path, spill: str) -> None:
    with Bench(tmp_path, device=4, host=4, disk=64, spill=spill) as b:
        run(b, tokens(0, 2 * TOKENS))
        run(b, tokens(1, 2 * TOKENS))
        run(b, tokens(1, 2 * TOKENS))
        run(b, tokens(2, 2 * TOKENS), Retention(ttl=1000))
        press(b, 8)
        kept = [found(b, tokens(doc, 2 * TOKENS)) for doc in range(3)]
        assert kept == {"all": [2, 2, 2], "reused": [0, 2, 2], "retained": [0, 0, 2]}[spill]
        assert (b.stats["dropped_unworthy"] > 0) == (spill != "all")
        b.settled()


def test_retained_blocks_are_written_soon_after_commit(tmp_path: Path) -> None:
    with Bench(tmp_path, spill="retained") as b:
        run(b, tokens(0, 4 * TOKENS), Retention(ttl=100))
        run(b, tokens(1, 4 * TOKENS))
        b.drain()
        s = b.stats
        assert (s["retained_writes"], s["disk_used"]) == (4, 4)


# ---- wishes that meet on a shared prefix


def test_the_higher_priority_of_two_counts(bench: Bench) -> None:
    run(bench, shared(1, 2, 3), Retention(priority=80))
    keys = run(bench, shared(2, 2, 3), Retention(priority=20)).keys
    entries, _ = bench.store.table.match(keys)
    assert bench.store.table.arrays.e["priority"][entries].tolist() == [80, 80, 20]


def test_the_later_deadline_of_two_counts(bench: Bench) -> None:
    run(bench, shared(1, 2, 3), Retention(ttl=100))
    keys = run(bench, shared(2, 2, 3), Retention(ttl=50)).keys
    assert [round(d) for d in bench.kv.deadlines(keys=keys)] == [100, 100, 50]


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_block_is_forgotten_only_if_every_wish_says_so(bench: Bench, plain_first: bool) -> None:
    forget, plain = Retention(ttl=100, on_expiry="forget"), Retention(ttl=100, on_expiry="demote")
    first, second = (plain, forget) if plain_first else (forget, plain)
    run(bench, shared(1, 2, 3), first)
    run(bench, shared(2, 2, 3), second)
    at(bench, 101)
    of_forget, of_plain = (2, 1) if plain_first else (1, 2)
    assert found(bench, shared(of_plain, 2, 3)) == 3
    assert found(bench, shared(of_forget, 2, 3)) == 2, "its own block is gone, what it shared is not"
    bench.settled()


def test_after_the_longer_of_two_that_both_say_forget(bench: Bench) -> None:
    run(bench, shared(1, 2, 3), Retention(ttl=10, on_expiry="forget"))
    run(bench, shared(2, 2, 3), Retention(ttl=100, on_expiry="forget"))
    at(bench, 50)
    assert found(bench, shared(1, 2, 3)) == 2
    assert found(bench, shared(2, 2, 3)) == 3
    at(bench, 101)
    assert found(bench, shared(2, 2, 3)) == 0
    bench.settled()


def test_a_priority_that_came_with_a_ttl_ends_with_it(tmp_path: Path) -> None:
    with Bench(tmp_path, device=4, host=0, disk=0) as b:
        run(b, tokens(0, TOKENS), Retention(priority=100, ttl=10))
        run(b, tokens(1, TOKENS), Retention(priority=100))
        at(b, 20)
        for doc in range(2, 8):
            run(b, tokens(doc, 2 * TOKENS))
        assert found(b, tokens(0, TOKENS)) == 0
        assert found(b, tokens(1, TOKENS)) == 1, "one with no ttl lasts until the block leaves"
        b.settled()


def test_the_store_keeps_the_same_promises(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=4, disk=16, retained_fraction=0.25) as b:

        def put(doc: int, wish: Retention | None = None) -> np.ndarray:
            keys = gdskv.block_keys(tokens(doc, 2 * TOKENS), TOKENS)
            b.kv.store(keys, source=aligned(2), retention=wish, now=b.engine.now)
            b.finished()
            return keys

        def length(keys: np.ndarray) -> int:
            found = b.kv.match(keys, now=b.engine.now)
            b.kv.release(found)
            return found.length

        kept, gone = put(0, Retention(ttl=100)), put(1, Retention(ttl=50, on_expiry="forget"))
        over = put(2, Retention(ttl=50, on_expiry="forget"))
        for doc in range(10, 14):
            put(doc)
        assert [length(k) for k in (kept, gone, over)] == [2, 2, 2]
        b.tick(50)
        assert [length(k) for k in (kept, gone, over)] == [2, 0, 0]
        for doc in range(20, 40):
            put(doc)
        assert length(kept) == 2
        b.tick(51)
        for doc in range(40, 60):
            put(doc)
        assert length(kept) == 0
        assert b.stats["over_budget"] == 2
        b.settled()


def test_writes_that_fail_do_not_bend_the_books(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=0, disk=32) as b:
        b.fail(WRITE, Fail(), times=1000)
        for doc in range(6):
            run(b, tokens(doc, 4 * TOKENS), Retention(ttl=100, tenant=f"t{doc % 2}"))
        b.drain()
        b.mend()
        at(b, 300)
        for doc in range(6):
            run(b, tokens(doc, 4 * TOKENS), Retention(ttl=100))
        at(b, 500)
        for _ in range(5):
            b.kv.poll(now=500)
        assert b.stats["retained"] == 0
        b.settled()


def test_open_settings_reach_the_table(tmp_path: Path) -> None:
    settings = config(tmp_path, 8, 8, 32, retained_fraction=0.25, tenant_fraction=0.5)
    with gdskv.BlockManager(settings, LAYOUT, NAMESPACE) as kv:
        m = kv.store.table.arrays.m
        assert (int(m[RETAINED_LIMIT]), int(m[TENANT_LIMIT])) == (8, 4)
