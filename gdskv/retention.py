"""Retention: how long and how dearly a request's KV is kept, resolved to one (priority, ttl) per block.

Knows token positions only and must not read a clock: a ttl becomes a deadline when the block is committed.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gdskv.errors import RetentionError

__all__ = ["DEFAULT_PRIORITY", "Retention", "TokenRange"]

DEFAULT_PRIORITY = 35  # of 0..100, as in TensorRT-LLM
MAX_TTL = 1e9  # seconds, about 31 years: a wall clock plus this still fits int64 nanoseconds

Ttl = float | timedelta | None


@dataclass(frozen=True)
class TokenRange:
    """Priority and ttl of the tokens from `start` up to, but without, `end`.

    Parameters
    ----------
    start, end
        Token positions. ``end=None``: all that follow; only the last range may be open.
    priority
        0 (goes first) to 100 (goes last).
    ttl
        Seconds or a `datetime.timedelta` from commit; None: none.

    Raises
    ------
    RetentionError
        The range is empty, the priority is not within 0..100, or the ttl is not positive.
    """

    start: int
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    ttl: Ttl = None

    def __post_init__(self) -> None:
        _set(self, start=_position("start", self.start), priority=_priority("priority", self.priority))
        if self.end is not None:
            _set(self, end=_position("end", self.end))
            if self.end <= self.start:
                raise RetentionError(f"end={self.end} is not behind start={self.start}. Give an end above the start.")
        _nanoseconds("ttl", self.ttl)


@dataclass(frozen=True)
class Retention:
    """What one request asks for its KV.

    Parameters
    ----------
    priority, ttl
        Of the whole prompt, where `ranges` is empty. 0 (goes first) to 100 (goes last); seconds or a
        `datetime.timedelta` from commit, None: none.
    tenant
        Whose byte budget the retained blocks count in.
    ranges
        Sorted, disjoint ranges of the prompt instead; a block takes the range of its first token, and one in no range
        gets priority 35 and no ttl.
    decode_priority, decode_ttl
        Of the blocks that begin behind the prompt.
    retain_until_token
        `priority` and `ttl` hold for the blocks that begin before this token only; the rest of the prompt gets
        priority 35 and no ttl. None: the whole prompt.
    on_expiry
        ``"demote"``: an expired block is an ordinary one. ``"forget"``: it stops matching at once. None: what the
        config says.

    Raises
    ------
    RetentionError
        A value is out of range, the ranges are unsorted, overlap, or are open before the last, or both ranges and
        values for the whole prompt are given.
    """

    priority: int = DEFAULT_PRIORITY
    ttl: Ttl = None
    tenant: str = ""
    ranges: tuple[TokenRange, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_ttl: Ttl = None
    retain_until_token: int | None = None
    on_expiry: Literal["demote", "forget"] | None = None

    def __post_init__(self) -> None:
        _set(
            self,
            priority=_priority("priority", self.priority),
            decode_priority=_priority("decode_priority", self.decode_priority),
            ranges=_ranges(self.ranges),
        )
        _nanoseconds("ttl", self.ttl)
        _nanoseconds("decode_ttl", self.decode_ttl)
        if self.retain_until_token is not None:
            _set(self, retain_until_token=_position("retain_until_token", self.retain_until_token))
        if not isinstance(self.tenant, str):
            raise RetentionError(f"tenant={self.tenant!r} is not text. Give the tenant's name as a str.")
        if self.on_expiry not in (None, "demote", "forget"):
            raise RetentionError(f"on_expiry={self.on_expiry!r} is not known. Choose 'demote', 'forget' or None.")
        if self.ranges:
            whole = {"priority": DEFAULT_PRIORITY, "ttl": None, "retain_until_token": None}
            for name, default in whole.items():
                if getattr(self, name) != default:
                    raise RetentionError(
                        f"{name}={getattr(self, name)!r} is given beside ranges, which decide for the whole prompt. "
                        f"Give ranges or {name}, not both."
                    )

    def resolve(
        self, n_blocks: int, tokens_per_block: int, prompt_tokens: int, first_block: int = 0
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return priority and ttl of `n_blocks` blocks from `first_block` on.

        Parameters
        ----------
        n_blocks, first_block
            Which blocks of the sequence.
        tokens_per_block
            Tokens in one block.
        prompt_tokens
            Length of the prompt; blocks that begin at or behind it are decoded ones.

        Returns
        -------
        priority : numpy.ndarray
            uint8, shape ``(n_blocks,)``.
        ttl_ns : numpy.ndarray
            int64, shape ``(n_blocks,)``, nanoseconds; 0 is none.
        """

        def at(token: int) -> int:
            """First of the blocks that begins at or behind a token."""
            return min(max(-(-token // tokens_per_block) - first_block, 0), n_blocks)

        priority = np.full(n_blocks, DEFAULT_PRIORITY, dtype=np.uint8)
        ttl_ns = np.zeros(n_blocks, dtype=np.int64)
        if self.ranges:
            parts = [(part.start, part.end, part.priority, part.ttl) for part in self.ranges]
        else:
            parts = [(0, self.retain_until_token, self.priority, self.ttl)]
        for start, end, part_priority, ttl in parts:
            last = prompt_tokens if end is None else min(end, prompt_tokens)
            priority[at(start) : at(last)] = part_priority
            ttl_ns[at(start) : at(last)] = _nanoseconds("ttl", ttl)
        decoded = at(prompt_tokens)
        priority[decoded:] = self.decode_priority
        ttl_ns[decoded:] = _nanoseconds("decode_ttl", self.decode_ttl)
        return priority, ttl_ns


def _set(target: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(target, name, value)


def _integer(name: str, value: object, limit: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise RetentionError(f"{name}={value!r} is not a whole number. Give {limit}.") from None


def _position(name: str, value: object) -> int:
    number = _integer(name, value, "a token position")
    if number < 0:
        raise RetentionError(f"{name}={number} is negative. Give a token position, 0 or more.")
    return number


def _priority(name: str, value: object) -> int:
    number = _integer(name, value, "0 to 100")
    if not 0 <= number <= 100:
        raise RetentionError(f"{name}={number} is outside 0..100. Give 0 (goes first) to 100 (goes last).")
    return number


def _nanoseconds(name: str, ttl: object) -> int:
    if ttl is None:
        return 0
    if isinstance(ttl, timedelta):
        seconds = ttl.total_seconds()
    elif isinstance(ttl, Real) and not isinstance(ttl, bool):
        seconds = float(ttl)
    else:
        raise RetentionError(f"{name}={ttl!r} is no time. Give seconds, a timedelta, or None for no deadline.")
    if not 0 < seconds <= MAX_TTL or math.isnan(seconds):
        raise RetentionError(
            f"{name}={ttl!r} is not above 0 and at most {MAX_TTL:.0f} seconds. Give such a time, or None for none."
        )
    return max(1, round(seconds * 1e9))  # 0 means none


def _ranges(ranges: object) -> tuple[TokenRange, ...]:
    try:
        parts: tuple[object, ...] = tuple(ranges)  # type: ignore[arg-type]
    except TypeError:
        parts = (ranges,)
    for part in parts:
        if not isinstance(part, TokenRange):
            raise RetentionError(f"ranges holds {part!r}. Give TokenRange(start, end, priority, ttl) objects.")
    checked = tuple(part for part in parts if isinstance(part, TokenRange))
    for before, after in pairwise(checked):
        if before.end is None:
            raise RetentionError(
                f"the range from {before.start} is open but one from {after.start} follows. Only the last may be open."
            )
        if after.start < before.end:
            raise RetentionError(
                f"the range from {after.start} begins before {before.end}, where the one from {before.start} ends. "
                "Sort the ranges and keep them apart."
            )
    return checked
