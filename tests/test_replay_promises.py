"""A replay with deadlines: what was promised within the budget is kept, what was to be forgotten is not served."""

from __future__ import annotations

import numpy as np
import pytest

from gdskv.errors import ConfigError
from gdskv.replay.player import Plan
from gdskv.replay.promises import TtlPlan
from gdskv.replay.run import run
from gdskv.replay.traces import Trace, TraceRequest


def trace(*requests: tuple[float, list[int]]) -> Trace:
    made = [
        TraceRequest(timestamp=t, hash_ids=ids, input_length=512 * len(ids), output_length=1) for t, ids in requests
    ]
    return Trace(requests=made, block_tokens=512, bad_lines=0)


def books(ttl: TtlPlan, *requests: tuple[float, list[int]]) -> dict[str, int]:
    plan = Plan(device_blocks=4, disk_blocks=16, simulate=True, ttl=ttl)
    return next(iter(run(trace(*requests), plan).retention.values()))


def test_promised_blocks_are_kept_to_their_deadline_and_the_budget_is_held() -> None:
    flood = [(1.0 + i, [100 + 4 * i + k for k in range(4)]) for i in range(30)]
    got = books(TtlPlan(1.0, 20.0, "demote", 0.25), (0.0, [1, 2, 3]), *flood)
    assert got["blocks_asked"] == 123
    assert 0 < got["blocks_promised"] < 123
    assert got["blocks_kept_to_deadline"] == got["blocks_past_deadline"] > 0


def test_forgotten_blocks_are_not_served() -> None:
    got = books(TtlPlan(1.0, 5.0, "forget", 0.5), (0.0, [1, 2]), (4.0, [1, 2]), (9.5, [1, 2]), (20.0, [1, 2]))
    assert got["blocks_served_after_forget"] == 0


def test_the_books_notice_a_promise_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdskv.manager import BlockManager, Matched

    plain = BlockManager.match
    monkeypatch.setattr(BlockManager, "match", lambda kv, **k: Matched(0, 0, 0) if k["now"] > 2 else plain(kv, **k))
    got = books(TtlPlan(1.0, 5.0, "demote", 0.5), (0.0, [1, 2]), (3.0, [9]), (8.0, [8]))
    assert got["blocks_past_deadline"] == 3
    assert got["blocks_kept_to_deadline"] == 0


@pytest.mark.parametrize("values", [{"share": 2}, {"share": -0.1}, {"ttl_s": 0}, {"retained_fraction": np.inf}])
def test_wrong_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        TtlPlan(**values)
