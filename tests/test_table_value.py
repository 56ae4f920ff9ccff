"""The order by value: what is learned, what leaves, what is refused, and that it holds beside everything else."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from gdskv.io.base import RESULT
from gdskv.table import DISK, BlockTable, Rejection, byvalue, index
from gdskv.table import learn as learning
from gdskv.table.learned import ASKED, BUCKETS, CLASSES, NOTES, SIZES, TRUST
from gdskv.table.state import BASE, DEFAULT_PRIORITY, NFREE, NONE

LENGTHS = np.zeros(10, np.int64)


def keys_of(path: list[int]) -> np.ndarray:
    return np.array([(k * 0x9E3779B97F4A7C15 % 2**64, k) for k in path], np.uint64).reshape(-1, 2)


def land(table: BlockTable) -> None:
    """Let everything that was planned happen."""
    ids, results = np.zeros(256, np.int32), np.zeros(256, RESULT)
    while table.deferred:
        n, _ = table.launch(256, ids)
        results["tag"][:n] = ids[:n]
        table.complete(results, n, LENGTHS)


def serve(table: BlockTable, path: list[int], priority: int = 35, ttl: int = 0) -> int:
    """One request under an engine's own device pool; how many of its blocks were found."""
    keys = keys_of(path)
    _, tiers, held = table.find(keys)
    table.leave(tiers, held)
    n = len(keys)
    table.store(keys, np.zeros(n, np.uint64), np.full(n, priority, np.uint8), np.full(n, ttl, np.int64), False, 0)
    land(table)
    return len(held)


def session(number: int, turn: int) -> list[int]:
    return [number * 1000 + i for i in range(1, 2 + 2 * turn)]


def sessions(requests: int, seed: int = 1) -> Iterator[list[int]]:
    """Requests of which a third come back and grow, the others are asked once."""
    rng = random.Random(seed)
    live: list[tuple[int, int]] = []
    number = 0
    for _ in range(requests):
        if live and rng.random() < 0.34:
            n, turn = live.pop(0)
            path = session(n, turn + 1)
            if turn < 6:
                live.append((n, turn + 1))
        else:
            number += 1
            returns = rng.random() < 0.2
            path = session(number, 1) if returns else [number * 1000 + i for i in range(1, 12)]
            if returns:
                live.append((number, 1))
        yield path


def play_sessions(table: BlockTable, requests: int, seed: int = 1) -> tuple[int, int]:
    """Serve `sessions`: hits, and blocks asked."""
    hits = asked = 0
    for path in sessions(requests, seed):
        hits += serve(table, path)
        asked += len(path)
    return hits, asked


def test_what_comes_back_is_kept_and_what_does_not_is_refused() -> None:
    tables = [BlockTable(0, 0, 200), BlockTable(0, 0, 200, policy="hazard", spill="learned")]
    (lru, asked), (learned, _) = (play_sessions(table, 3000) for table in tables)
    for table in tables:
        table.check()
    written = [table.counters()["committed"] for table in tables]
    assert learned > 2 * lru > 0.02 * asked
    assert written[1] < 0.5 * written[0]
    assert tables[1].counters()["refused_by_value"] > 0


def test_the_same_calls_decide_the_same_again() -> None:
    tables = [BlockTable(0, 0, 60, policy="hazard", spill="learned") for _ in range(2)]
    for table in tables:
        play_sessions(table, 800)
    assert np.array_equal(tables[0].arrays.e, tables[1].arrays.e)
    assert np.array_equal(tables[0].arrays.lv, tables[1].arrays.lv)


def through_memory(polls: Iterator[int]) -> np.ndarray:
    """Sessions through three tiers by value, polled so often after each call; which blocks are where at the end."""
    table = BlockTable(20, 20, 60, policy="hazard", memory_policy="hazard", spill="learned", host_clean=0.5)

    def poll() -> None:
        for _ in range(next(polls)):
            table.advance(0)

    for path in sessions(600):
        keys, n = keys_of(path), len(path)
        table.advance(0)
        begun = table.begin(keys, n)
        assert not isinstance(begun, Rejection)
        land(table)
        poll()
        table.advance(0)
        table.commit(keys, begun.slots, np.full(n, 35, np.uint8), np.zeros(n, np.int64), False)
        poll()
        table.advance(0)
        table.release(begun.slots)
        poll()
        land(table)
    table.advance(0)
    table.check()
    assert table.counters()["cleaned"] > 100
    return table.arrays.e.copy()


def test_what_calls_put_off_is_done_before_the_next_decision_however_often_one_polls() -> None:
    often = random.Random(5)
    seldom, at_random = through_memory(iter(lambda: 0, 1)), through_memory(iter(lambda: often.randrange(4), 9))
    assert np.array_equal(seldom, at_random)


def test_a_chain_longer_than_can_be_noted_is_learned_at_once() -> None:
    tables = [BlockTable(0, 0, 60, policy="hazard", spill="learned") for _ in range(2)]
    longest = keys_of(list(range(1, NOTES + 2)))
    for table, n in zip(tables, (NOTES, NOTES + 1), strict=True):
        table.ask(longest[:n])
        known = [learning.recall(table.arrays, longest[i, 0]) >> 8 for i in (0, n - 1)]
        assert known == ([0, 0] if n == NOTES else [1, 1])
        table.advance(0)
        assert [learning.recall(table.arrays, longest[i, 0]) >> 8 for i in (0, n - 1)] == [1, 1]
        table.check()


def test_what_was_learned_is_told_with_what_calls_have_put_off() -> None:
    tables = [BlockTable(0, 0, 60, policy="hazard", spill="learned") for _ in range(2)]
    for table in tables:
        play_sessions(table, 300)
        table.ask(keys_of(list(range(1, 200))))
    tables[1].advance(0)
    assert tables[0].learned() == tables[1].learned()


def test_higher_priority_and_live_deadlines_stay_whatever_their_value() -> None:
    table = BlockTable(0, 0, 60, policy="hazard", spill="learned")
    play_sessions(table, 400)
    assert table.arrays.lm[TRUST]
    serve(table, [900_000 + i for i in range(8)], priority=90)
    serve(table, [910_000 + i for i in range(8)], ttl=10**15)
    play_sessions(table, 400, seed=2)
    for first in (900_000, 910_000):
        entries, _ = table.match(keys_of([first + i for i in range(8)]))
        assert len(entries) == 8
    table.check()


def test_a_refused_chain_is_refused_from_the_first_block_that_is_not_worth_it() -> None:
    table = BlockTable(0, 0, 60, policy="hazard", spill="learned")
    play_sessions(table, 600)
    e = table.arrays.e
    for n in np.flatnonzero(e["slot"][:, DISK] >= 0):
        parent = e["parent"][n]
        assert parent >= 0 or e["flags"][n] & 1
        assert parent < 0 or e["slot"][parent, DISK] >= 0


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("memory_policy", ["lru", "hazard"])
def test_any_calls_leave_a_sound_table(policy: str, memory_policy: str) -> None:
    rng = random.Random(5)
    spill = "learned" if policy == "hazard" else "all"
    table = BlockTable(12, 8, 40, policy=policy, memory_policy=memory_policy, spill=spill, orphan_grace=0.0)
    live = []
    for call in range(3000):
        table.advance(call * 10**7)
        if rng.random() < 0.6 or not live:
            path = session(rng.randrange(12), rng.randrange(1, 5))
            begun = table.begin(keys_of(path), len(path))
            if not isinstance(begun, Rejection):
                live.append((path, begun))
        else:
            path, begun = live.pop(rng.randrange(len(live)))
            n = len(path)
            priority = np.full(n, rng.choice([35, 35, 80]), np.uint8)
            ttl = np.full(n, rng.choice([0, 0, 10**8]), np.int64)
            table.commit(keys_of(path), begun.slots, priority, ttl, rng.random() < 0.2)
            table.release(begun.slots)
        if rng.random() < 0.7:
            land(table)
        if call % 10 == 0:
            table.check()


# ---- the guard: which order victims are taken by


def returns_of_what_never_came_back(requests: int) -> Iterator[list[int]]:
    """Chains like those of `sessions` that are asked once, each asked twice: the second time after eight others."""
    for i in range(requests // 2):
        if i >= 8:
            yield [(10**6 + i - 8) * 1000 + k for k in range(1, 12)]
        yield [(10**6 + i) * 1000 + k for k in range(1, 12)]


class Watched:
    """A table that is sound after every request, and by which order its victims were taken."""

    def __init__(self) -> None:
        self.table = BlockTable(0, 0, 200, policy="hazard", spill="learned")
        self.orders: list[str] = []
        """Of requests for which of the two blocks next to leave, by use and by value, one left and the other stayed."""

    def serve(self, path: list[int]) -> None:
        table, a, keys, n = self.table, self.table.arrays, keys_of(path), len(path)
        _, tiers, held = table.find(keys)
        table.leave(tiers, held)
        table.advance(0)
        slots = (self.oldest(), byvalue.worst(a, DISK)) if a.m[NFREE + DISK] == 0 else ()
        next_to_leave = [a.e[a.s["entry"][slot]].copy() for slot in slots]
        table.store(keys, np.zeros(n, np.uint64), np.full(n, 35, np.uint8), np.zeros(n, np.int64), False, 0)
        land(table)
        table.check()
        left = [index.find(a, e["k0"], e["k1"]) == NONE for e in next_to_leave]
        if left in ([True, False], [False, True]):
            self.orders.append("use" if left[0] else "value")

    def oldest(self) -> int:
        a = self.table.arrays
        slot = a.ends[DISK, 1 + DEFAULT_PRIORITY, 0]
        while a.l["kids"][a.s["entry"][slot], DISK]:
            slot = a.s["next"][slot]
        return int(slot)

    def took(self, paths: Iterator[list[int]]) -> list[str]:
        """Serve requests: the order of each that shows one."""
        self.orders = []
        for path in paths:
            self.serve(path)
        return self.orders


def test_the_order_goes_back_to_last_use_where_value_misjudges_and_returns_once_it_pays_again() -> None:
    watched = Watched()
    cold = watched.took(sessions(1200))
    turn = cold.index("value")
    assert set(cold[:turn]) == {"use"} and set(cold[turn:]) == {"value"}
    assert turn > 20 and len(cold) - turn > 100
    misjudged = watched.took(returns_of_what_never_came_back(400))
    turn = misjudged.index("use")
    assert turn > 0 and set(misjudged[:turn]) == {"value"} and set(misjudged[turn:]) == {"use"}
    assert len(misjudged) - turn > 20
    back = watched.took(sessions(1200, seed=7))
    turn = back.index("value")
    assert set(back[:turn]) == {"use"} and set(back[turn:]) == {"value"}
    assert turn > 20 and len(back) - turn > 50


# ---- the learner beside the same in plain Python


def test_a_value_is_the_best_ratio_of_hits_to_time_over_all_holding_times() -> None:
    table = BlockTable(0, 0, 200, policy="hazard", spill="learned")
    play_sessions(table, 1000)
    a = table.arrays
    learning.sum_groups(a)
    edges = [0.0] + [learning.YOUNG * 2.0 ** (k / 2) for k in range(1, BUCKETS + 1)]
    prior = learning.PRIOR
    for klass in (0, 5, 40, CLASSES - 1):
        learning._revalue(a, klass)
        group = klass // (2 * SIZES) if klass < CLASSES - 1 else 4
        rates = []
        for k in range(BUCKETS):
            few = [c for c in range(CLASSES) if c // (2 * SIZES) != 3]
            everything, time = a.lh[few, k].sum(), a.lx[few, k].sum()
            if everything <= 0 or time <= 0:
                rates.append(0.0)
                continue
            members = [c for c in range(CLASSES) if (c // (2 * SIZES) if c < CLASSES - 1 else 4) == group]
            rate = (a.lh[members, k].sum() + prior) / (a.lx[members, k].sum() + prior * time / everything)
            rates.append((a.lh[klass, k] + prior) / (a.lx[klass, k] + prior / rate))
        for at in range(BUCKETS):
            best, stays, hits, waits = 0.0, 1.0, 0.0, 0.0
            for k in range(at, BUCKETS):
                width = edges[k + 1] - edges[k]
                p = 1 - math.exp(-rates[k] * width)
                hits += stays * p
                waits += stays * (p / rates[k] if rates[k] > 1e-15 else width)
                stays *= 1 - p
                best = max(best, hits / waits)
            assert a.lv[klass, at] == pytest.approx(best, rel=1e-9)


def test_ages_are_cut_two_to_an_octave() -> None:
    young = learning.YOUNG
    ages = [0, 1, young, int(1.5 * young), 2 * young, 3 * young, 4 * young, 2**62]
    assert [learning.bucket(age) for age in ages] == [0, 0, 0, 1, 2, 3, 4, BUCKETS - 1]


def test_a_key_that_left_is_remembered_until_others_push_it_out() -> None:
    table = BlockTable(0, 0, 8, policy="hazard")
    learning.remember(table.arrays, np.uint64(learning.spread(np.uint64(77))), 5, 9)
    assert learning.recall(table.arrays, np.uint64(77)) == 5 << 8 | 9
    for k in range(2_000_000, 2_600_000):
        learning.remember(table.arrays, np.uint64(learning.spread(np.uint64(k))), 1, 0)
    assert learning.recall(table.arrays, np.uint64(77)) == 0


def test_check_sees_a_list_by_value_that_lacks_a_block() -> None:
    table = BlockTable(0, 0, 60, policy="hazard", spill="learned")
    play_sessions(table, 300)
    table.check()
    a = table.arrays
    listed = np.flatnonzero(a.b["where"] >= 0)
    a.b["where"][listed[0]] = -1
    with pytest.raises(AssertionError, match="a list by value is broken"):
        table.check()
    assert listed[0] >= a.m[BASE + DISK] and a.lm[ASKED] > 0


# ---- beside it: shadows, budget, what outlives the process


def hits_of(blocks: int, requests: int, policy: str) -> float:
    spill = "learned" if policy == "hazard" else "all"
    table = BlockTable(0, 0, blocks, policy=policy, spill=spill)
    hits, asked = play_sessions(table, requests)
    return hits / asked


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_the_curve_is_what_tables_of_those_sizes_hit(policy: str) -> None:
    spill = "learned" if policy == "hazard" else "all"
    table = BlockTable(0, 0, 400, policy=policy, spill=spill)
    play_sessions(table, 2500)
    for scale, ratio in table.curve().items():
        assert ratio == pytest.approx(hits_of(int(400 * scale), 2500, policy), abs=0.02), scale


def test_the_shadows_take_at_most_a_mebibyte_whatever_the_table() -> None:
    for blocks in (1, 1000, 1025, 100_000, 5_000_000):
        a = BlockTable(0, 0, blocks, policy="hazard" if blocks < 10**6 else "lru").arrays
        assert sum(x.nbytes for x in (a.sm, a.sb, a.se, a.sx)) <= 1 << 20


def test_no_hour_is_written_more_in_than_its_share_of_the_budget() -> None:
    for policy, spill in (("lru", "all"), ("hazard", "learned")):
        table = BlockTable(0, 0, 100, policy=policy, spill=spill, write_budget=600.0)
        written, now = [0], 0
        for request in range(4000):
            now += 2_700_000_000  # three hours in all
            table.advance(now)
            serve(table, [request * 100 + i for i in range(1, 6)])
            written.append(table.counters()["committed"])
        per_hour = 4000 // 3
        most = max(written[i + per_hour] - written[i] for i in range(len(written) - per_hour))
        assert most <= 1.05 * 600
        assert policy == "hazard" or most > 0.9 * 600
        assert table.counters()["refused_by_budget"] > 0
        table.check()


def test_retained_blocks_come_first_within_the_budget() -> None:
    table = BlockTable(0, 0, 400, write_budget=1000.0)
    for request in range(40):
        serve(table, [request * 100 + i for i in range(1, 6)])
    best_effort = table.counters()["committed"]
    assert best_effort < 40
    serve(table, [9_000_000 + i for i in range(8)], ttl=10**15)
    entries, _ = table.match(keys_of([9_000_000 + i for i in range(8)]))
    assert len(entries) == 8
    assert table.counters()["refused_by_budget_retained"] == 0


def test_what_was_learned_goes_on_in_the_next_table() -> None:
    old = BlockTable(0, 0, 200, policy="hazard", spill="learned")
    play_sessions(old, 1000)
    new = BlockTable(0, 0, 200, policy="hazard", spill="learned")
    assert new.learn_from(old.learned())
    assert np.array_equal(new.arrays.lv, old.arrays.lv)
    play_sessions(new, 200, seed=3)
    new.check()


@pytest.mark.parametrize("damage", ["cut", "longer", "nan", "bin"])
def test_what_cannot_have_been_learned_is_not_taken(damage: str) -> None:
    old = BlockTable(0, 0, 200, policy="hazard", spill="learned")
    play_sessions(old, 300)
    content = old.learned()
    nan = np.array([np.nan]).tobytes()
    at = 16 + 3 * old.arrays.lx.nbytes
    content = {
        "cut": content[:-1],
        "longer": content + b"\0",
        "nan": content[:32] + nan + content[40:],
        "bin": content[:at] + b"\xff" + content[at + 1 :],
    }[damage]
    new = BlockTable(0, 0, 200, policy="hazard", spill="learned")
    assert not new.learn_from(content)
    assert not new.arrays.lh.any()
