"""A recording is a trace that replay reads, that stays within its bytes, and that says nothing of the keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import LAYOUT, NAMESPACE, TOKENS, Engine, config

import gdskv
from gdskv.recording import Recorder
from gdskv.replay.traces import read_trace


def keys(first: int, n: int) -> np.ndarray:
    return np.array([[i, i + 1] for i in range(first, first + n)], np.uint64)


def test_a_recording_is_a_trace_of_the_same_shape(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    with gdskv.BlockManager(config(tmp_path, record=file), LAYOUT, NAMESPACE) as kv:
        engine = Engine(kv)
        engine.run(1, TOKENS * 3)
        engine.run(1, TOKENS * 5)
        engine.run(2, TOKENS * 4 + 3)
    assert kv.stats()["recorded"] == 3 and kv.stats()["recorded_dropped"] == 0
    trace = read_trace(file, block_tokens=TOKENS)
    first, second, third = (request.hash_ids.tolist() for request in trace.requests)
    assert (len(first), len(second), len(third)) == (3, 5, 4)
    assert second[:3] == first and not set(third) & set(second)
    assert [request.timestamp for request in trace.requests] == [1.0, 2.0, 3.0]
    assert trace.requests[2].input_length == TOKENS * 4 + 3


def test_ids_are_of_one_recording_only(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b"):
        recorder = Recorder(tmp_path / name, 1 << 20, 16)
        recorder.add(keys(5, 20), 320, 0.0)
        recorder.close()
        ids.append(set(read_trace(tmp_path / name).requests[0].hash_ids.tolist()))
    assert len(ids[0]) == len(ids[1]) == 20
    assert not ids[0] & ids[1]


def test_files_are_rotated_and_stay_within_their_bytes(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    recorder = Recorder(file, 64 << 10, 16)
    for i in range(2000):
        recorder.add(keys(i * 100, 10), 160, float(i))
    recorder.close()
    assert recorder.recorded + recorder.dropped == 2000 and recorder.recorded > 1000
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["own.jsonl", "own.jsonl.1", "own.jsonl.2", "own.jsonl.3"]
    assert sum(f.stat().st_size for f in files) <= 64 << 10
    times = [request.timestamp for f in reversed(files) for request in read_trace(f).requests]
    assert times == sorted(times)


def test_a_place_that_cannot_be_written_is_refused_at_open(tmp_path: Path) -> None:
    with pytest.raises(gdskv.ConfigError, match=r"record=.* cannot be written"):
        Recorder(tmp_path / "no" / "such" / "place", 1 << 20, 16)
