"""Sizes that people write and read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdskv.errors import ConfigError
from gdskv.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        ("0", 0),
        ("4096", 4096),
        ("64GiB", 64 << 30),
        ("1.5 TiB", 3 << 39),
        ("500MB", 500_000_000),
        (" 2 kib ", 2048),
        ("7B", 7),
        (4096.0, 4096),
        (np.int64(12), 12),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "wrong",
    ["", "GiB", "64G", "64 gigabytes", "-1GiB", "1e3", "1,5GiB", -1, 1.5, float("nan"), True, None, b"1", "9EiB"],
)
def test_a_wrong_size_is_named_and_refused(wrong):
    with pytest.raises(ConfigError) as error:
        parse_size(wrong)
    assert str(error.value).startswith(repr(wrong))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (2 << 40, "2TiB"),
        (int(1.4 * 2**40) + 1, "1.40TiB"),
        (4095, "3.99KiB"),
        (-(3 << 20), "-3MiB"),
    ],
)
def test_sizes_are_written(size, text):
    assert format_size(size) == text


@given(st.integers(0, (1 << 62) - 1))
def test_what_is_written_reads_back_within_its_two_decimals(size):
    assert size - size // 100 - 1 <= parse_size(format_size(size)) <= size
