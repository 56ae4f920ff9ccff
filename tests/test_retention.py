"""Retention: what each block gets, compared with the rules written out per block; wrong values."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdskv import Retention, RetentionError, TokenRange

priorities = st.integers(0, 100)
ttls = st.none() | st.floats(0.001, 1e6)


@st.composite
def range_lists(draw):
    edges = sorted(draw(st.lists(st.integers(0, 60), unique=True, max_size=8)))
    ranges = [
        TokenRange(start, end, draw(priorities), draw(ttls))
        for start, end in zip(edges[::2], edges[1::2], strict=False)
    ]
    if len(edges) % 2:
        ranges.append(TokenRange(edges[-1], None, draw(priorities), draw(ttls)))
    return tuple(ranges)


def twin(retention, first_token, prompt_tokens):
    """The rules, for one block."""
    if first_token >= prompt_tokens:
        return retention.decode_priority, retention.decode_ttl
    if not retention.ranges:
        until = retention.retain_until_token
        return (retention.priority, retention.ttl) if until is None or first_token < until else (35, None)
    for part in retention.ranges:
        if part.start <= first_token and (part.end is None or first_token < part.end):
            return part.priority, part.ttl
    return 35, None


retentions = st.builds(
    Retention,
    priority=priorities,
    ttl=ttls,
    decode_priority=priorities,
    decode_ttl=ttls,
    retain_until_token=st.none() | st.integers(0, 70),
) | st.builds(Retention, ranges=range_lists(), decode_priority=priorities, decode_ttl=ttls)


@given(retentions, st.integers(0, 20), st.integers(1, 9), st.integers(0, 70), st.integers(0, 9))
def test_each_block_gets_what_its_first_token_gets(retention, blocks, size, prompt_tokens, first_block):
    priority, ttl_ns = retention.resolve(blocks, size, prompt_tokens, first_block)
    assert (priority.dtype, ttl_ns.dtype) == (np.uint8, np.int64)
    assert priority.shape == ttl_ns.shape == (blocks,)
    for index in range(blocks):
        want, ttl = twin(retention, (first_block + index) * size, prompt_tokens)
        assert priority[index] == want
        assert ttl_ns[index] == round((ttl or 0) * 1e9)


def test_the_default_is_priority_35_without_a_deadline():
    priority, ttl_ns = Retention().resolve(3, 16, 48)
    assert priority.tolist() == [35, 35, 35]
    assert ttl_ns.tolist() == [0, 0, 0]


def test_ttl_is_seconds_or_a_timedelta_and_never_rounds_to_none():
    for ttl, nanoseconds in (
        (1.5, 1_500_000_000),
        (timedelta(hours=1), 3600 * 10**9),
        (1e-12, 1),
        (np.float32(2), 2 * 10**9),
    ):
        assert Retention(ttl=ttl).resolve(1, 16, 16)[1].tolist() == [nanoseconds]


def test_retain_until_token_is_rounded_up_to_a_block():
    priority, ttl_ns = Retention(priority=80, ttl=1, retain_until_token=17).resolve(4, 16, 64)
    assert priority.tolist() == [80, 80, 35, 35]
    assert ttl_ns.tolist() == [10**9, 10**9, 0, 0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"priority": 101}, "priority=101 is outside 0..100"),
        ({"priority": -1}, "priority=-1"),
        ({"priority": 3.5}, "priority=3.5"),
        ({"priority": True}, "priority=True"),
        ({"decode_priority": 101}, "decode_priority=101"),
        ({"ttl": 0}, "ttl=0"),
        ({"ttl": -3}, "ttl=-3"),
        ({"ttl": float("nan")}, "ttl=nan"),
        ({"ttl": float("inf")}, "ttl=inf"),
        ({"ttl": 2e9}, "at most 1000000000 seconds"),
        ({"ttl": "1h"}, "ttl='1h' is no time"),
        ({"ttl": True}, "ttl=True"),
        ({"ttl": timedelta(0)}, "ttl=datetime.timedelta"),
        ({"decode_ttl": 0}, "decode_ttl=0"),
        ({"tenant": 3}, "tenant=3"),
        ({"on_expiry": "drop"}, "on_expiry='drop'"),
        ({"retain_until_token": -1}, "retain_until_token=-1"),
        ({"ranges": [(0, 5)]}, r"ranges holds \(0, 5\)"),
        ({"ranges": 3}, "ranges holds 3"),
        ({"ranges": [TokenRange(5, 9), TokenRange(0, 3)]}, "Sort the ranges"),
        ({"ranges": [TokenRange(0, 5), TokenRange(4, 9)]}, "from 4 begins before 5"),
        ({"ranges": [TokenRange(0), TokenRange(4, 9)]}, "Only the last may be open"),
        ({"ranges": [TokenRange(0)], "ttl": 5}, "ttl=5 is given beside ranges"),
        ({"ranges": [TokenRange(0)], "priority": 36}, "priority=36 is given beside ranges"),
        ({"ranges": [TokenRange(0)], "retain_until_token": 5}, "retain_until_token=5 is given beside ranges"),
    ],
)
def test_an_impossible_retention_is_one_line_that_names_it(values, named):
    with pytest.raises(RetentionError, match=named) as error:
        Retention(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"start": -1}, "start=-1"),
        ({"start": "0"}, "start='0'"),
        ({"start": 4, "end": 4}, "end=4 is not behind start=4"),
        ({"start": 0, "priority": 200}, "priority=200"),
        ({"start": 0, "ttl": -1}, "ttl=-1"),
    ],
)
def test_an_impossible_range_is_one_line_that_names_it(values, named):
    with pytest.raises(RetentionError, match=named):
        TokenRange(**values)
