"""With one tier and no wishes the table is exactly least recently used, request by request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from gdskv.replay.traces import read_trace
from gdskv.table import BlockTable, Rejection


def table_hits(requests: Iterable[Sequence[int]], slots: int) -> list[int]:
    """Blocks found per request, each of which is computed, committed and released before the next begins."""
    table = BlockTable(slots, 0, 0)
    hits = []
    for ids in requests:
        keys = np.array([(i + 1, i) for i in ids], np.uint64)
        begun = table.begin(keys, len(keys))
        assert not isinstance(begun, Rejection)
        table.commit(keys, begun.slots, np.full(len(keys), 35, np.uint8), np.zeros(len(keys), np.int64), False)
        table.release(begun.slots)
        hits.append(begun.matched)
    table.check()
    return hits


def model_hits(requests: Iterable[Sequence[int]], slots: int) -> list[int]:
    """The same by an ordered dict: blocks are used from the last to the first, so children leave before parents."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ids in requests:
        found = next((n for n, i in enumerate(ids) if i not in cache), len(ids))
        for i in reversed(ids):
            cache[i] = None
            cache.move_to_end(i)
        while len(cache) > slots:
            cache.popitem(last=False)
        hits.append(found)
    return hits


def test_hits_of_a_trace_worked_out_by_hand() -> None:
    requests = [
        [1, 2, 3],
        [1, 2, 4],  # finds 1 2; all four slots are full now: from the first to leave 3, 4, 2, 1
        [5],  # 3 leaves: 4, 2, 1, 5
        [1, 2, 3],  # finds 1 2; 4 leaves: 5, 3, 2, 1
        [1, 2, 4],  # finds 1 2; 5 leaves: 3, 4, 2, 1
        [6, 7],  # 3 and 4 leave: 2, 1, 7, 6
        [1, 2],  # finds both: 7, 6, 2, 1
        [6, 7],  # finds both: 2, 1, 7, 6
        [8, 9, 10],  # 2, 1 and 7 leave: 6, 10, 9, 8
        [6, 7],  # finds 6; 10 leaves: 9, 8, 7, 6
        [8, 9, 10],  # finds 8 9; 7 leaves: 6, 10, 9, 8
    ]
    hits = [0, 2, 0, 2, 2, 0, 2, 2, 0, 1, 2]
    assert table_hits(requests, 4) == hits
    assert model_hits(requests, 4) == hits


@pytest.mark.parametrize(
    ("name", "slots", "ratio"),
    [
        ("conversation", 20_000, 0.288),
        ("conversation", 50_000, 0.355),
        ("synthetic", 5_000, 0.279),
        ("synthetic", 20_000, 0.572),
        ("agent", 5_000, 0.703),
        ("agent", 10_000, 0.903),
    ],
)
def test_hits_of_a_real_trace(trace: Callable[[str], Path], name: str, slots: int, ratio: float) -> None:
    requests = [request.hash_ids.tolist() for request in read_trace(trace(name)).requests]
    hits = table_hits(requests, slots)
    assert hits == model_hits(requests, slots)
    assert sum(hits) / sum(map(len, requests)) == pytest.approx(ratio, abs=0.003)
