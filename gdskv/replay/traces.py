"""Traces: which prefix blocks each request of a recorded workload asks for, read from JSON lines.

Knows the two public schemas and must not know a store, a pool or a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdskv.errors import TraceError

__all__ = ["BAILIAN_BLOCK_TOKENS", "MOONCAKE_BLOCK_TOKENS", "Trace", "TraceRequest", "read_trace"]

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per block of a Mooncake trace (FAST'25 release), whose timestamps are milliseconds."""

BAILIAN_BLOCK_TOKENS = 16
"""Tokens per block of a Qwen-Bailian trace, told by its ``chat_id``; its timestamps are seconds."""

_MAX_ID = 2**63 - 1


class TraceRequest(NamedTuple):
    """One request of a trace."""

    timestamp: float
    """Arrival in seconds since the trace began."""
    hash_ids: npt.NDArray[np.int64]
    """One id per prompt block; it names the block with all that stands before it: equal ids are equal prefixes."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Generated tokens."""
    chat_id: int = -1
    """This request's id in its conversation; -1 where the schema has none."""
    parent_chat_id: int = -1
    """The request that this one continues; -1 for a first turn."""
    turn: int = 1
    """Place in the conversation, from 1."""


class Trace(NamedTuple):
    """A whole trace, in the order of its file."""

    requests: list[TraceRequest]
    block_tokens: int
    """Tokens per block."""
    bad_lines: int = 0
    """Lines that were skipped because they are broken (only with ``skip_bad_lines``)."""


def read_trace(
    path: Path, *, block_tokens: int | None = None, limit: int | None = None, skip_bad_lines: bool = False
) -> Trace:
    """Read a JSON-lines trace: Mooncake's schema, or Qwen-Bailian's where a line has a ``chat_id``.

    Parameters
    ----------
    path
        A file with one JSON object per line: ``timestamp``, ``hash_ids``, ``input_length``, ``output_length`` and
        for Qwen-Bailian ``chat_id``, ``parent_chat_id``, ``turn``. Empty lines are allowed.
    block_tokens
        Tokens per block, where it is not the schema's own (512, or 16 for Qwen-Bailian).
    limit
        Read at most that many requests.
    skip_bad_lines
        Count broken lines instead of raising.

    Raises
    ------
    TraceError
        The file cannot be read or holds no request, or a line is broken; the message names the line.
    """
    requests: list[TraceRequest] = []
    bad = 0
    bailian: bool | None = None
    for number, line in _lines(path):
        if limit is not None and len(requests) >= limit:
            break
        try:
            record = _parse(line)
            if bailian is None:  # a file has one schema: that of its first good line
                bailian = "chat_id" in record
            request = _bailian(record) if bailian else _mooncake(record)
        except _BadLine as wrong:
            if not skip_bad_lines:
                raise TraceError(f"{path} line {number}: {wrong}. Fix the line, or pass --skip-bad-lines.") from None
            bad += 1
            continue
        requests.append(request)
    if not requests:
        raise TraceError(f"{path} holds no request ({bad} broken lines): a trace has one JSON object per line.")
    native = BAILIAN_BLOCK_TOKENS if bailian else MOONCAKE_BLOCK_TOKENS
    return Trace(requests, native if block_tokens is None else block_tokens, bad)


class _BadLine(Exception):
    """What is wrong with a line, without its place."""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}. Give a trace file with JSON lines.") from None


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _BadLine(f"not JSON ({error})") from None
    except RecursionError:
        raise _BadLine("not JSON (nested too deep)") from None
    if not isinstance(record, dict):
        raise _BadLine("not a JSON object")
    return record


def _mooncake(record: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        timestamp=_number(record, "timestamp") / 1000.0,
        hash_ids=_hash_ids(record),
        input_length=_integer(record, "input_length", 0),
        output_length=_integer(record, "output_length", 0),
    )


def _bailian(record: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        timestamp=_number(record, "timestamp"),
        hash_ids=_hash_ids(record),
        input_length=_integer(record, "input_length", 0),
        output_length=_integer(record, "output_length", 0),
        chat_id=_integer(record, "chat_id", -1),
        parent_chat_id=_integer(record, "parent_chat_id", -1),
        turn=_integer(record, "turn", 0),
    )


def _field(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise _BadLine(f"{name} is missing")
    return record[name]


def _number(record: dict[str, Any], name: str) -> float:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:  # also not NaN
        raise _BadLine(f"{name} is not a number from 0 to 1e15")
    return float(value)


def _integer(record: dict[str, Any], name: str, low: int) -> int:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_ID:
        raise _BadLine(f"{name} is not an integer of at least {low}")
    return value


def _hash_ids(record: dict[str, Any]) -> npt.NDArray[np.int64]:
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise _BadLine("hash_ids is not a list of integers")
    if any(i < 0 or i > _MAX_ID for i in ids):
        raise _BadLine(f"hash_ids holds an id outside 0..{_MAX_ID}")
    if len(set(ids)) != len(ids):
        raise _BadLine("hash_ids names a block twice, but an id stands for a whole prefix")
    return np.array(ids, dtype=np.int64)
