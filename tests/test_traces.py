"""Traces are read in both schemas, a broken line is named, and a made-up trace is what it says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdskv.errors import TraceError
from gdskv.replay import pattern
from gdskv.replay.generator import generate_trace
from gdskv.replay.traces import read_trace

MOONCAKE = {"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [4, 7]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": 55,
    "timestamp": 61.114,
    "input_length": 33,
    "output_length": 132,
    "type": "text",
    "turn": 2,
    "hash_ids": [1089, 1090, 6326],
}


def write(path: Path, *lines: Any) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_a_mooncake_line_has_milliseconds_and_blocks_of_512_tokens(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    (request,) = trace.requests
    assert trace.block_tokens == 512
    assert (request.timestamp, request.input_length, request.output_length) == (1.5, 700, 20)
    assert request.hash_ids.tolist() == [4, 7]
    assert request.hash_ids.dtype == np.int64


def test_a_bailian_line_has_seconds_blocks_of_16_tokens_and_its_place_in_a_conversation(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BAILIAN))
    (request,) = trace.requests
    assert trace.block_tokens == 16
    assert request.timestamp == 61.114
    assert (request.chat_id, request.parent_chat_id, request.turn) == (159, 55, 2)


def test_the_block_size_and_a_limit_can_be_given(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE, "", MOONCAKE, "broken"), block_tokens=128, limit=2)
    assert (trace.block_tokens, len(trace.requests)) == (128, 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\x00", "not JSON"),
        ("[1]", "not a JSON object"),
        ({**MOONCAKE, "hash_ids": "4"}, "hash_ids is not a list of integers"),
        ({**MOONCAKE, "hash_ids": [4, 7.0]}, "hash_ids is not a list of integers"),
        ({**MOONCAKE, "hash_ids": [True]}, "hash_ids is not a list of integers"),
        ({**MOONCAKE, "hash_ids": [4, -7]}, "outside"),
        ({**MOONCAKE, "hash_ids": [2**63]}, "outside"),
        ({**MOONCAKE, "hash_ids": [4, 4]}, "twice"),
        ({**MOONCAKE, "timestamp": "now"}, "timestamp is not a number"),
        ({**MOONCAKE, "timestamp": float("nan")}, "timestamp is not a number"),
        ({**MOONCAKE, "timestamp": -1}, "timestamp is not a number"),
        ({**MOONCAKE, "input_length": None}, "input_length is not an integer"),
        ({k: v for k, v in MOONCAKE.items() if k != "output_length"}, "output_length is missing"),
    ],
)
def test_a_broken_line_is_named_and_can_be_skipped(tmp_path: Path, line: Any, reason: str) -> None:
    file = write(tmp_path, MOONCAKE, line, MOONCAKE)
    with pytest.raises(TraceError, match=rf"trace\.jsonl line 2: .*{reason}.*--skip-bad-lines") as error:
        read_trace(file)
    assert "\n" not in str(error.value)
    trace = read_trace(file, skip_bad_lines=True)
    assert (len(trace.requests), trace.bad_lines) == (2, 1)


def test_a_file_has_one_schema(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: chat_id is missing"):
        read_trace(write(tmp_path, BAILIAN, MOONCAKE))


def test_a_trace_that_cannot_be_read_or_is_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no request"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nothing.jsonl")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


def test_a_generated_trace_is_the_same_for_the_same_seed_only() -> None:
    one, same, other = (generate_trace(50, seed) for seed in (3, 3, 4))
    assert [r.hash_ids.tolist() for r in one.requests] == [r.hash_ids.tolist() for r in same.requests]
    assert [r.timestamp for r in one.requests] == [r.timestamp for r in same.requests]
    assert [r.hash_ids.tolist() for r in one.requests] != [r.hash_ids.tolist() for r in other.requests]


def test_a_generated_turn_continues_its_parent_and_conversations_share_their_beginning() -> None:
    requests = generate_trace(400).requests
    assert len(requests) == 400
    assert all(a.timestamp <= b.timestamp for a, b in itertools.pairwise(requests))
    later = [r for r in requests if r.parent_chat_id >= 0]
    assert later
    for request in later:
        parent = requests[request.parent_chat_id]
        before = len(parent.hash_ids)
        assert request.turn == parent.turn + 1
        assert len(request.hash_ids) > before
        assert request.hash_ids[:before].tolist() == parent.hash_ids.tolist()
    first = [r.hash_ids[0] for r in requests if r.turn == 1]
    assert 1 < len(set(first)) < len(first)


def test_a_pattern_is_what_plain_python_makes_of_key_and_place() -> None:
    block = np.zeros(4096, dtype=np.uint8)
    key = pattern.trace_keys([12345])[0]
    pattern.fill(block, key)
    first, second = key.tolist()
    for place, word in enumerate(block.view(np.uint64).tolist()):
        x = (first + place * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
        assert word == ((x ^ (x >> 29)) + second) % 2**64


def test_a_pattern_tells_any_other_content() -> None:
    key, other = pattern.trace_keys([1, 2])
    block = np.zeros(4096, dtype=np.uint8)
    assert not pattern.holds(block, key)
    pattern.fill(block, key)
    assert pattern.holds(block, key)
    assert not pattern.holds(block, other)
    assert not pattern.holds(np.roll(block, 8), key)
    for place in (0, 1000, 4095):
        block[place] ^= 1
        assert not pattern.holds(block, key)
        block[place] ^= 1
    assert pattern.holds(block, key)


def test_keys_follow_from_id_and_salt_alone() -> None:
    keys = pattern.trace_keys([0, 1, 2**63 - 1])
    assert keys.shape == (3, 2)
    assert keys.tolist() == pattern.trace_keys([0, 1, 2**63 - 1]).tolist()
    assert len({tuple(k) for k in keys.tolist()}) == 3
    assert keys.tolist() != pattern.trace_keys([0, 1, 2**63 - 1], salt=b"other").tolist()
