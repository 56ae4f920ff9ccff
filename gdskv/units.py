"""Sizes in bytes, read from and written for people: ``64GiB``, ``1.5 TiB``, ``500MB``.

Knows numbers and text only and must not import anything of the project but its errors.
"""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import SupportsIndex

from gdskv.errors import ConfigError

__all__ = ["format_size", "parse_size"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_UNITS = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)}
_UNITS |= {unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb", "eb"))}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_LIMIT = 1 << 62  # offsets are int64; half of that leaves room to add two of them


def parse_size(value: str | float | SupportsIndex) -> int:
    """Turn a size into bytes.

    Parameters
    ----------
    value
        A number of bytes, or text such as ``"64GiB"`` (powers of 1024), ``"500MB"`` (powers of 1000) or ``"4096"``.
        A part of a byte that remains after multiplication is dropped.

    Raises
    ------
    ConfigError
        The value is negative, has an unknown unit, is no number, or is 2**62 bytes or more.
    """
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        scale = _UNITS.get((found[2] or "B").lower()) if found else None
        if found is None or scale is None:
            if value.strip().startswith("-"):
                raise ConfigError(f"{value!r} is negative. A size is 0 or more bytes, such as '64GiB'.")
            raise ConfigError(
                f"{value!r} is not a size. Write bytes, or a number with one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, "
                "such as '64GiB'."
            )
        size = int(Decimal(found[1]) * scale)
    elif isinstance(value, float):
        if not value.is_integer():
            raise ConfigError(f"{value!r} is not a whole number of bytes. Write bytes, or text such as '1.5GiB'.")
        size = int(value)
    else:
        try:
            if isinstance(value, bool):
                raise TypeError
            size = operator.index(value)
        except TypeError:
            raise ConfigError(f"{value!r} is not a size. Write bytes, or text such as '64GiB'.") from None
    if size < 0:
        raise ConfigError(f"{value!r} is negative. A size is 0 or more bytes, such as '64GiB'.")
    if size >= _LIMIT:
        raise ConfigError(f"{value!r} is above the limit of {format_size(_LIMIT)}. Choose a smaller size.")
    return size


def format_size(size: int) -> str:
    """Write bytes for people: exact where a unit divides them (``2TiB``), else cut to two decimals (``1.39TiB``)."""
    sign, size = ("-", -size) if size < 0 else ("", int(size))
    power = max(0, min((size.bit_length() - 1) // 10, len(_BINARY) - 1))
    unit = 1024**power
    if size % unit == 0:
        return f"{sign}{size // unit}{_BINARY[power]}"
    return f"{sign}{size // unit}.{size * 100 // unit % 100:02}{_BINARY[power]}"
