"""The table's index alone, against a dict."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gdskv.table import index
from gdskv.table.state import NONE, Arrays, new_arrays

ENTRIES = 1024  # in an index of 2048 places: as full as it may be


class Index:
    """The index of a table with as many entries as there are keys."""

    def __init__(self) -> None:
        self.arrays: Arrays = new_arrays(0, 0, ENTRIES - 1, 1)
        self.free = list(range(ENTRIES))
        self.entry: dict[tuple[int, int], int] = {}

    def insert(self, key: tuple[int, int]) -> None:
        n = self.entry[key] = self.free.pop()
        self.arrays.e[n]["k0"], self.arrays.e[n]["k1"] = key
        index.insert(self.arrays, n)

    def remove(self, key: tuple[int, int]) -> None:
        n = self.entry.pop(key)
        index.remove(self.arrays, n)
        self.free.append(n)

    def find(self, key: tuple[int, int]) -> int:
        return index.find(self.arrays, np.uint64(key[0]), np.uint64(key[1]))

    def places(self) -> dict[int, int]:
        """Distance of each entry from where its probe begins."""
        ix = self.arrays.ix
        at = np.flatnonzero(ix)
        home = (ix[at] >> np.uint64(32)).astype(np.int64) % len(ix)
        entries = (ix[at] & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1
        return dict(zip(entries.tolist(), ((at - home) % len(ix)).tolist(), strict=True))


def digest(rng: random.Random) -> tuple[int, int]:
    return rng.getrandbits(64), rng.getrandbits(64)


def test_index_answers_as_a_dict_does() -> None:
    rng = random.Random(1)
    ours = Index()
    few = [(k % 300, k) for k in range(900)]  # small numbers, three with each first half
    for _ in range(30_000):
        key = rng.choice(few)
        assert ours.find(key) == ours.entry.get(key, NONE)
        if key in ours.entry:
            ours.remove(key)
        else:
            ours.insert(key)
    assert np.count_nonzero(ours.arrays.ix) == len(ours.entry)


def test_probes_after_tenfold_turnover_are_as_short_as_in_a_fresh_index() -> None:
    rng = random.Random(2)
    used = Index()
    keys = [digest(rng) for _ in range(ENTRIES)]
    for key in keys:
        used.insert(key)
    for _ in range(10 * ENTRIES):
        i = rng.randrange(ENTRIES)
        used.remove(keys[i])
        keys[i] = digest(rng)
        used.insert(keys[i])
    fresh = Index()
    for key in keys:
        fresh.insert(key)
    # With linear probes the sum does not depend on the order of insertion, so it must be the same to the last place.
    assert sum(used.places().values()) == sum(fresh.places().values())
    assert all(used.find(key) == used.entry[key] for key in keys)


@pytest.mark.parametrize("same", ["first half", "second half"])
def test_w9_keys_that_share_a_half_are_told_apart(same: str) -> None:
    ours = Index()
    keys = [(7, n) if same == "first half" else (n, 7) for n in range(1, 200)]
    for key in keys:
        ours.insert(key)
    assert [ours.find(key) for key in keys] == [ours.entry[key] for key in keys]
    assert ours.find((7, 1000)) == NONE
    for key in keys[::2]:
        ours.remove(key)
    assert [ours.find(key) != NONE for key in keys] == [n % 2 == 1 for n in range(len(keys))]
