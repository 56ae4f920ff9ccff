"""``gdskv replay``: figures as an independent model has them, verified bytes, wrong input is one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command
from doubles import DelayEngine

from gdskv.replay.generator import generate_trace
from gdskv.replay.player import Plan
from gdskv.replay.run import run
from gdskv.replay.traces import Trace, TraceRequest, read_trace


@pytest.fixture
def gdskv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def lru_hits(trace: Trace, capacity: int) -> int:
    """Count the hits of a cache that evicts the least recently asked block, children before their parents."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        ids = request.hash_ids.tolist()[:capacity]
        found = next((n for n, i in enumerate(ids) if i not in cached), len(ids))
        hits += found
        for i in reversed(ids):  # the root was asked last, so it leaves last
            cached[i] = None
            cached.move_to_end(i)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [40, 300, 2000, 100_000])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_one_simulated_tier_hits_exactly_what_lru_hits(
    gdskv: Command, tmp_path: Path, tier: str, capacity: int
) -> None:
    answer = gdskv(
        "replay", "--simulate", "--policy", "lru", "--limit", 300, "--seed", 5, f"--{tier}-blocks", capacity, "--json"
    )
    assert answer.code == 0
    report = answer.json
    trace = generate_trace(300, seed=5)
    assert report["blocks_asked"] == sum(len(r.hash_ids) for r in trace.requests)
    assert report[f"hits_{tier}"] == lru_hits(trace, capacity)
    assert report["hit_ratio"] == report[f"hits_{tier}"] / report["blocks_asked"]
    assert (report["requests_cut"] > 0) == (capacity == 40)


@pytest.mark.parametrize(
    ("name", "capacity", "expected"),
    [("conversation", 20_000, 0.2878), ("synthetic", 5_000, 0.2793), ("agent", 5_000, 0.7026)],
)
def test_the_real_traces_hit_what_an_independent_model_hits(
    trace: Callable[[str], Path], name: str, capacity: int, expected: float
) -> None:
    tally = run(read_trace(trace(name)), Plan(disk_blocks=capacity, simulate=True))
    assert tally.hits["disk"] / tally.blocks_asked == pytest.approx(expected, abs=0.003)


@pytest.mark.parametrize(
    "tiers",
    [(300, 600, 0), (300, 0, 600), (0, 300, 600), (200, 300, 600)],
    ids=["device+host", "device+disk", "host+disk", "all"],
)
def test_lower_tiers_serve_what_left_the_upper_ones(gdskv: Command, tiers: tuple[int, ...]) -> None:
    names = ("device", "host", "disk")
    sizes = [part for name, blocks in zip(names, tiers, strict=True) for part in (f"--{name}-blocks", blocks)]
    report = gdskv("replay", "--simulate", "--limit", 500, *sizes, "--json").json
    for name, blocks in zip(names, tiers, strict=True):
        assert (report[f"hits_{name}"] > 0) == (blocks > 0)
    trace = generate_trace(500)
    assert lru_hits(trace, min(t for t in tiers if t)) < report["hit_ratio"] * report["blocks_asked"]
    assert (report["blocks_written"] > 0) == (tiers[2] > 0)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("simulate", [True, False])
def test_a_request_longer_than_the_device_tier_passes_through_it_in_windows(
    tmp_path: Path, simulate: bool, concurrency: int
) -> None:
    trace = generate_trace(250, seed=5)
    everything = {"device_blocks": 40, "host_blocks": 100, "disk_blocks": 8000, "block_bytes": 4096}
    tally = run(trace, Plan(**everything, directories=(tmp_path,), simulate=simulate, concurrency=concurrency))
    longer = sum(len(r.hash_ids) > 40 for r in trace.requests)
    assert tally.windowed_requests == longer > 0
    assert tally.requests_cut == tally.blocks_cut == tally.wrong_blocks == 0
    assert tally.hits.total() + tally.blocks_missing == tally.blocks_asked
    if concurrency == 1:  # nothing leaves the last tier, so all that was ever asked is found
        assert tally.hits.total() == lru_hits(trace, 10**6)


def test_a_window_behind_a_missing_block_hits_nothing() -> None:
    ids = np.arange(30, dtype=np.int64)
    other = np.arange(100, 115, dtype=np.int64)
    requests = [TraceRequest(float(i), part, 1, 1) for i, part in enumerate((ids, other, other + 100, ids))]
    tally = run(Trace(requests, 512), Plan(device_blocks=10, host_blocks=45, policy="lru", simulate=True))
    assert tally.windowed_requests == 4
    assert tally.hits.total() == 5  # the other half of the first window has left
    assert tally.stats["matched_host"] > 5


@pytest.mark.parametrize(
    "tiers", [(250, 0, 0), (250, 300, 0), (250, 0, 900), (250, 300, 900), (0, 300, 900), (0, 600, 0)]
)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_real_bytes_come_back_as_they_were_from_every_tier(
    gdskv: Command, tmp_path: Path, tiers: tuple[int, ...], concurrency: int
) -> None:
    names = ("device", "host", "disk")
    sizes = [part for name, blocks in zip(names, tiers, strict=True) for part in (f"--{name}-blocks", blocks)]
    answer = gdskv(
        "replay",
        "--limit",
        300,
        *sizes,
        "--block-bytes",
        "8KiB",
        "--concurrency",
        concurrency,
        "--dir",
        tmp_path,
        "--json",
    )
    report = answer.json
    assert answer.code == 0
    assert report["wrong_blocks"] == report["failed_blocks"] == 0
    hits = sum(report[f"hits_{name}"] for name in names)
    assert report["verified_blocks"] == hits > 0
    if tiers[2]:
        assert report["hits_disk"] > 0
        assert report["bytes_written"] >= report["blocks_written"] * 8192 > 0
        assert report["bytes_read"] >= report["hits_disk"] * 8192
    else:
        assert report["bytes_written"] == report["bytes_read"] == 0
    assert report["us"]["match"]["p50"] <= report["us"]["match"]["p99.9"]


def test_a_slow_device_delays_loads_and_no_call() -> None:
    plan = Plan(device_blocks=250, host_blocks=50, disk_blocks=900, block_bytes=4096)
    tally = run(generate_trace(60), plan, io=lambda engine: DelayEngine(engine, 0.1))
    median = {call: t["p50"] for call, timing in tally.timings.items() if (t := timing.percentiles())}
    assert tally.hits["disk"] > 0 == tally.wrong_blocks
    assert median["load"] >= 100_000  # µs: cannot be sooner
    assert max(median[call] for call in ("match", "allocate", "commit", "release", "poll")) < 50_000


def test_trace_time_is_kept_at_the_speed_asked_for() -> None:
    trace = generate_trace(20)
    span = trace.requests[-1].timestamp
    tally = run(trace, Plan(device_blocks=1000, simulate=True, speed=span / 0.5))
    assert tally.elapsed_s >= 0.5


def test_tables_and_a_sentence_for_people(gdskv: Command) -> None:
    answer = gdskv("replay", "--device-blocks", 300, "--limit", 50, "--block-bytes", "4KiB")
    assert answer.code == 0
    assert "match" in answer.out
    assert "none was wrong" in " ".join(answer.out.split())


def test_broken_lines_are_named_or_skipped(gdskv: Command, tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]})
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{line}\n{{"timestamp": 0}}\n{line}\n')
    answer = gdskv("replay", file, "--simulate", "--disk-blocks", 10, "--json")
    assert (answer.code, answer.out) == (2, "")
    assert "line 2: hash_ids is missing" in answer.err
    report = gdskv("replay", file, "--simulate", "--disk-blocks", 10, "--skip-bad-lines", "--json").json
    assert (report["requests"], report["bad_lines"], report["hits_disk"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "all tiers have 0 blocks"),
        (["--device-blocks", -1], "device_blocks=-1"),
        (["--device-blocks", 9, "--block-bytes", "64XB"], "64XB"),
        (["--device-blocks", 9, "--block-bytes", 12], "block_bytes=12"),
        (["--device-blocks", 9, "--block-tokens", 0], "block_tokens=0"),
        (["--device-blocks", 9, "--concurrency", 0], "concurrency=0"),
        (["--device-blocks", 9, "--speed", -1], "speed=-1"),
        (["--device-blocks", 9, "--policy", "fifo"], "policy='fifo'"),
        (["--device-blocks", 9, "--limit", 0], "--limit"),
        (["--device-blocks", "many"], "--device-blocks"),
        (["no-such-trace.jsonl", "--device-blocks", 9], "no-such-trace.jsonl"),
        (["--disk-blocks", 9, "--dir", "no-such-directory"], "no-such-directory"),
        (["--disk-blocks", 9, "--dir", "file"], "file"),
        (["--disk-blocks", 1 << 30, "--block-bytes", "1MiB", "--dir", "."], "free"),
        (["--disk-blocks", 9, "--dir", ".", "--dir", "."], "twice"),
    ],
)
def test_wrong_input_is_one_clear_error_with_nothing_left_behind(
    gdskv: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    answer = gdskv("replay", "--json", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err
    assert "Traceback" not in answer.err
    assert os.listdir() == ["file"]


def test_a_directory_in_use_is_refused(gdskv: Command, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gdskv.cli", "replay", "--disk-blocks", "500", "--dir", str(tmp_path)]
    slow = subprocess.Popen([*command, "--device-blocks", "300", "--speed", "1"], stdout=subprocess.DEVNULL)
    try:
        while not any(tmp_path.rglob("*")):
            assert slow.poll() is None
        answer = gdskv("replay", "--device-blocks", 300, "--disk-blocks", 500, "--dir", tmp_path, "--json")
        assert (answer.code, answer.out) == (2, "")
        assert f"in use by process {slow.pid}" in answer.err
    finally:
        slow.terminate()
        slow.wait()


def test_help_ends_with_an_example(gdskv: Command) -> None:
    for command in ((), ("demo",), ("replay",)):
        answer = gdskv(*command, "--help")
        assert answer.code == 0
        assert "gdskv " in answer.out.strip().splitlines()[-1]
