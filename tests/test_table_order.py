"""Who leaves a tier, and when: each case names what is put in and the order in which it leaves again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from pair import NS, key_array

from gdskv.table import BlockTable, Rejection, plan

SLOTS = 8


@dataclass
class Tier:
    """A table of one tier, with requests that come and go at once. Keys are numbers."""

    table: BlockTable = field(default_factory=lambda: BlockTable(SLOTS, 0, 0))
    held: list[np.ndarray] = field(default_factory=list)
    seconds: int = 0

    def put(self, *keys: int, priority: int = 35, ttl: int = 0, forget: bool = False) -> None:
        """A request of this chain; priority, ttl and forget are wished for its last block, 35 and none for others."""
        self.hold(*keys, priority=priority, ttl=ttl, forget=forget)
        self.let_go()

    def hold(self, *keys: int, priority: int = 35, ttl: int = 0, forget: bool = False) -> None:
        """The same, and the request stays."""
        begun = self.table.begin(key_array(list(keys)), len(keys))
        assert not isinstance(begun, Rejection)
        priorities, ttls = np.full(len(keys), 35, np.uint8), np.zeros(len(keys), np.int64)
        priorities[-1], ttls[-1] = priority, ttl * NS
        self.table.commit(key_array(list(keys)), begun.slots, priorities, ttls, forget)
        self.held.append(begun.slots)

    def let_go(self) -> None:
        """The last request that stayed leaves."""
        self.table.release(self.held.pop())
        self.table.check()

    def wait(self, seconds: int) -> None:
        self.seconds += seconds
        self.table.advance(self.seconds * NS)
        self.table.check()

    def keys(self) -> set[int]:
        a = self.table.arrays
        held = a.s["entry"][: self.table.capacity(0)]
        return set(a.e["k0"][held[held >= 0]].tolist())

    def leaving(self) -> list[int]:
        """Take slot after slot away, and say which key goes with each."""
        left = []
        while True:
            before = self.keys()
            if isinstance(self.table.begin(key_array([]), 1), Rejection):
                return left
            self.table.check()
            left += before - self.keys()


Play = Callable[[Tier], None]


def plays(*steps: Play) -> Play:
    def play(tier: Tier) -> None:
        for step in steps:
            step(tier)

    return play


CASES: dict[str, tuple[Play, list[int]]] = {
    "the least recently used first": (
        plays(lambda t: t.put(1), lambda t: t.put(2), lambda t: t.put(3)),
        [1, 2, 3],
    ),
    "use makes recent": (
        plays(lambda t: t.put(1), lambda t: t.put(2), lambda t: t.put(3), lambda t: t.put(1)),
        [2, 3, 1],
    ),
    "children before parents": (
        plays(lambda t: t.put(1, 2, 3), lambda t: t.put(4)),
        [3, 2, 1, 4],
    ),
    "a parent after all of its children": (
        plays(lambda t: t.put(1, 2), lambda t: t.put(1, 3), lambda t: t.put(4)),
        [2, 3, 1, 4],
    ),
    "low priority first, whatever was used last": (
        plays(lambda t: t.put(1, priority=80), lambda t: t.put(2), lambda t: t.put(3, priority=10)),
        [3, 2, 1],
    ),
    "a parent is as precious as its child": (
        plays(lambda t: t.put(1, 2, priority=80), lambda t: t.put(3), lambda t: t.put(4)),
        [3, 4, 2, 1],
    ),
    "live deadlines last, the earliest first": (
        plays(
            lambda t: t.put(1, ttl=50), lambda t: t.put(2, ttl=20), lambda t: t.put(3, priority=100), lambda t: t.put(4)
        ),
        [4, 3, 2, 1],
    ),
    "a parent is retained as long as its child": (
        plays(lambda t: t.put(1, 2, ttl=50), lambda t: t.put(3, ttl=20), lambda t: t.put(4)),
        [4, 3, 2, 1],
    ),
    "a deadline moves away only": (
        plays(lambda t: t.put(1, ttl=50), lambda t: t.put(2, ttl=30), lambda t: t.put(1, ttl=10)),
        [2, 1],
    ),
    "reuse without a ttl of its own keeps the deadline": (
        plays(lambda t: t.put(1, ttl=10), lambda t: t.put(2, ttl=20), lambda t: t.wait(5), lambda t: t.put(1)),
        [1, 2],
    ),
    "after its deadline a block is as recent as any, unless all others are more recent": (
        plays(lambda t: t.put(2), lambda t: t.put(1, ttl=5), lambda t: t.put(3), lambda t: t.wait(6)),
        [2, 3, 1],
    ),
    "after its deadline the oldest block leaves next": (
        plays(lambda t: t.put(1, ttl=5), lambda t: t.put(2), lambda t: t.put(3), lambda t: t.wait(6)),
        [1, 2, 3],
    ),
    "a high priority that came with a deadline ends with it": (
        plays(lambda t: t.put(1, priority=90, ttl=5), lambda t: t.put(2, priority=40), lambda t: t.wait(6)),
        [1, 2],
    ),
    "one that came without stays": (
        plays(
            lambda t: t.put(1, priority=90, ttl=5),
            lambda t: t.put(1, priority=60),
            lambda t: t.put(2, priority=50),
            lambda t: t.wait(6),
        ),
        [2, 1],
    ),
    "an ancestor keeps a grandchild's, when the child between is in use meanwhile": (
        plays(
            lambda t: t.put(1, 2, 3, priority=80),
            lambda t: t.put(1, 2, ttl=5),
            lambda t: t.hold(1, 2),
            lambda t: t.wait(6),
            lambda t: t.let_go(),
            lambda t: t.put(4, priority=70),
        ),
        [4, 3, 2, 1],
    ),
    "what is to be forgotten goes at its deadline": (
        plays(lambda t: t.put(1, ttl=5, forget=True), lambda t: t.put(2), lambda t: t.wait(6)),
        [2],
    ),
    "if others want it kept, it is": (
        plays(lambda t: t.put(1, ttl=5, forget=True), lambda t: t.put(1), lambda t: t.put(2), lambda t: t.wait(6)),
        [1, 2],
    ),
    "in use at its deadline, it goes when it is released": (
        plays(
            lambda t: t.hold(1, ttl=5, forget=True),
            lambda t: t.put(2),
            lambda t: t.wait(6),
            lambda t: t.let_go(),
        ),
        [2],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_order_of_eviction(name: str) -> None:
    play, expected = CASES[name]
    tier = Tier()
    play(tier)
    assert tier.leaving() == expected


def orphan() -> Tier:
    """2 has lost its parent 1, which was to be forgotten though 2 was not."""
    tier = Tier()
    tier.put(3, priority=10)
    keys = key_array([1, 2])
    begun = tier.table.begin(keys, 2)
    assert not isinstance(begun, Rejection)
    tier.table.commit(keys, begun.slots, np.full(2, 35, np.uint8), np.array([5 * NS, 0]), True)
    tier.table.release(begun.slots)
    tier.wait(6)
    assert tier.keys() == {2, 3}
    assert tier.table.counters()["orphaned"] == 1
    return tier


def test_an_orphan_keeps_its_place_for_a_while() -> None:
    assert orphan().leaving() == [3, 2]


def test_an_orphan_leaves_first_after_its_grace() -> None:
    tier = orphan()
    tier.wait(31)
    assert tier.leaving() == [2, 3]


@pytest.mark.parametrize("seconds", [1, 31])
def test_an_orphan_whose_parent_comes_back_is_adopted(seconds: int) -> None:
    tier = orphan()
    tier.wait(seconds)
    tier.put(1)
    assert len(tier.table.match(key_array([1, 2]))[0]) == 1, "it is not known yet that 2 is a child of this 1"
    tier.put(1, 2)
    assert tier.table.counters()["adopted"] == 1
    assert len(tier.table.match(key_array([1, 2]))[0]) == 2
    assert tier.leaving() == [3, 2, 1]


def test_t2_a_block_to_be_forgotten_stops_matching_at_its_deadline() -> None:
    tier = Tier()
    tier.put(1, 2, ttl=5, forget=True)
    plan.advance(tier.table.arrays, 5 * NS - 1)
    assert len(tier.table.match(key_array([1, 2]))[0]) == 2
    # The same instant, before the sweep comes by
    plan.advance(tier.table.arrays, 5 * NS)
    assert len(tier.table.match(key_array([1, 2]))[0]) == 1


def test_r1_a_leased_block_never_leaves() -> None:
    tier = Tier()
    tier.hold(1, 2, 3)
    tier.put(4)
    assert tier.leaving() == [4]
    assert len(tier.table.match(key_array([1, 2, 3]))[0]) == 3


def test_r8_a_new_block_enters_as_the_most_recent() -> None:
    tier = Tier()
    for key in range(1, SLOTS + 1):
        tier.put(key)
    tier.put(100)
    assert tier.leaving()[-1] == 100


def test_a_full_disk_of_live_blocks_refuses_new_ones_where_they_are_protected() -> None:
    table = BlockTable(0, 0, 2, protect_unexpired=True)

    def store(key: int, ttl: int) -> int:
        arguments = (np.full(1, 35, np.uint8), np.array([ttl * NS]), False, 0)
        cached, _ = table.store(key_array([key]), np.zeros(1, np.uint64), *arguments)
        table.check()
        return cached

    assert [store(1, 10), store(2, 20), store(3, 30)] == [1, 1, 0]
    assert table.counters()["refused_protected"] == 1
    table.advance(11 * NS)
    assert store(3, 30) == 1
    assert len(table.match(key_array([1]))[0]) == 0
