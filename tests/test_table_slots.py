"""Free slots: handed out in runs, each to one holder at a time, cut over directories."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gdskv.table import slots
from gdskv.table.slots import GOOD_RUN
from gdskv.table.state import DISK, NFREE, STRIPE, Arrays, new_arrays


def take(a: Arrays, want: int) -> list[int]:
    out = np.zeros(want, np.int32)
    slots.take(a, DISK, want, out, 0)
    return out.tolist()


def tier(blocks: int, taken: tuple[int, ...] = (), directories: tuple[int, ...] = ()) -> Arrays:
    """A disk tier of which the slots named are taken."""
    a = new_arrays(0, 0, blocks, 1, directories)
    a.m[STRIPE] = 4
    for g in taken:
        slots.claim(a, DISK, g)
    return a


@pytest.mark.parametrize(
    ("taken", "want", "got"),
    [
        ((), 4, [0, 1, 2, 3]),
        ((2, 3), 4, [4, 5, 6, 7]),  # the first run that is long enough
        ((3, 7, 9), 3, [0, 1, 2]),
        ((1, 3, 7, 12), 6, [8, 9, 10, 11, 13, 14]),  # none is: the longest, then the longest of what is left
        ((0, 2, 4, 6, 8, 10, 12, 14), 3, [1, 3, 5]),
    ],
)
def test_an_allocation_takes_the_longest_runs(taken: tuple[int, ...], want: int, got: list[int]) -> None:
    assert take(tier(16, taken), want) == got


def test_allocations_in_a_row_are_neighbours() -> None:
    a = tier(1000)
    assert [g for n in (3, 5, 64, 1, 200) for g in take(a, n)] == list(range(273))


def test_a_slot_has_one_holder_and_free_slots_are_counted() -> None:
    rng = random.Random(3)
    blocks = 5000  # more than one word of words
    a, held = tier(blocks), []
    for _ in range(3000):
        free = blocks - len(held)
        if rng.random() < 0.55 and free:
            got = take(a, rng.randint(1, min(free, 60)))
            assert not set(got) & set(held)
            held += got
        elif held:
            for _ in range(rng.randint(1, min(len(held), 60))):
                slots.give(a, DISK, held.pop(rng.randrange(len(held))))
        assert a.m[NFREE + DISK] == blocks - len(held)
    assert sorted(held + take(a, blocks - len(held))) == list(range(blocks))


def by_rule(free: list[bool], cursor: int, want: int) -> tuple[list[int], int]:
    """The rule of `slots.take` in full: of LOOKS runs from the cursor on, around the end too, which is itself a look,
    the first that is long enough, else the longest. Slots and the new cursor."""
    got: list[int] = []
    while len(got) < want:
        need, best, at = want - len(got), range(0), cursor
        for _ in range(slots.LOOKS):
            start = next((i for i in range(at, len(free)) if free[i]), None)
            if start is None:
                at = 0
                continue
            at = start
            while at < len(free) and free[at] and at - start < need:
                at += 1
            best = max(best, range(start, at), key=len)
            if len(best) >= min(need, GOOD_RUN):
                break
        for i in best:
            free[i] = False
        got += best
        cursor = best.stop
    return got, cursor


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_however_free_slots_lie_the_same_are_taken_as_by_the_rule(share: float) -> None:
    rng = random.Random(share)
    cursor, free = 0, [True] * 2000
    a = tier(2000)
    for _ in range(60):
        for i in range(2000):
            if not free[i] and rng.random() < share:
                slots.give(a, DISK, i)
                free[i] = True
        want = min(sum(free), rng.choice([1, 7, 80, 300, 2000]))
        mine, cursor = by_rule(free, cursor, want)
        assert take(a, want) == mine


def test_a_long_allocation_is_cut_over_directories_in_long_pieces() -> None:
    a = tier(400, directories=(100, 100, 100, 100))
    got = np.array(take(a, 4 * GOOD_RUN))
    pieces = np.split(got, np.flatnonzero(np.diff(got) != 1) + 1)
    assert [len(piece) for piece in pieces] == [GOOD_RUN] * 4
    assert sorted(piece[0] // 100 for piece in pieces) == [0, 1, 2, 3]
    assert len({g // 100 for g in take(a, 8)}) == 1  # a short one is not cut


def test_a_closed_directory_gives_no_slots_and_takes_back_its_own() -> None:
    a = tier(8, directories=(4, 4))
    mine = take(a, 2)
    slots.close_region(a, DISK, mine[0] // 4, True)
    assert a.m[NFREE + DISK] == 4
    assert {g // 4 for g in take(a, 4)} == {1 - mine[0] // 4}
    for g in mine:
        slots.give(a, DISK, g)
    assert a.m[NFREE + DISK] == 0
    slots.close_region(a, DISK, mine[0] // 4, False)
    assert a.m[NFREE + DISK] == 4
