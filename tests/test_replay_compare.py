"""Reference policies beside plain-Python ones, and the command that compares them."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from command import Command

from gdskv.replay.policies import references
from gdskv.replay.policies.workload import NEVER, Workload, flatten
from gdskv.replay.traces import Trace, TraceRequest


@pytest.fixture
def gdskv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def some_trace(seed: int, requests: int = 150) -> Trace:
    """Documents of which requests ask for a beginning."""
    rng = random.Random(seed)
    out = []
    for i in range(requests):
        first = 100 * rng.randrange(12)
        ids = np.arange(first, first + rng.randint(1, 8), dtype=np.int64)
        out.append(TraceRequest(float(i), ids, 512 * len(ids), 1))
    return Trace(out, 512)


def run(name: str, flat: Workload, cap: int) -> tuple[int, int]:
    hits, written = getattr(references, name)(flat.blocks, flat.starts, flat.next_use, flat.distinct, cap)
    return int(hits), int(written)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cap", [8, 20, 50])
def test_lru_is_an_ordered_dict(seed: int, cap: int) -> None:
    trace = some_trace(seed)
    held: OrderedDict[int, None] = OrderedDict()
    hits = written = 0
    for request in trace.requests:
        ids = request.hash_ids.tolist()
        hits += next((i for i, b in enumerate(ids) if b not in held), len(ids))
        written += sum(b not in held for b in ids)
        for b in reversed(ids):
            held[b] = None
            held.move_to_end(b)
        while len(held) > cap:
            held.popitem(last=False)
    assert run("lru", flatten(trace), cap) == (hits, written)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cap", [8, 20, 50])
def test_belady_keeps_what_is_asked_next(seed: int, cap: int) -> None:
    flat = flatten(some_trace(seed))
    held: dict[int, int] = {}
    hits = written = 0
    for b, due in zip(flat.blocks.tolist(), flat.next_use.tolist(), strict=True):
        hits += b in held
        written += b not in held and due < NEVER
        held[b] = due
        held = {k: v for k, v in held.items() if v < NEVER}
        if len(held) > cap:
            furthest = max(held, key=held.__getitem__)
            written -= furthest == b
            del held[furthest]
    assert run("belady", flat, cap) == (hits, written)


@pytest.mark.parametrize("name", ["lru", "arc", "s3fifo"])
def test_no_policy_is_better_than_the_bound_and_all_hit_the_same_with_room(name: str) -> None:
    flat = flatten(some_trace(9, 400))
    for cap in (8, 20, 50, 96):
        assert run(name, flat, cap)[0] <= run("belady", flat, cap)[0]
    assert run(name, flat, 2 * flat.distinct) == (len(flat.blocks) - flat.distinct, flat.distinct)


def test_the_command_compares_and_plots(gdskv: Command, tmp_path: Path) -> None:
    file, image = tmp_path / "t.jsonl", tmp_path / "t.png"
    file.write_text(
        "\n".join(
            f'{{"timestamp": {i}, "hash_ids": {r.hash_ids.tolist()}, "input_length": 1, "output_length": 1}}'
            for i, r in enumerate(some_trace(1).requests)
        )
    )
    options = ("--compare", "lru,arc,s3fifo,hazard,belady", "--disk-blocks", "8,30", "--plot", image)
    answer = gdskv("replay", file, "--simulate", *options, "--json")
    assert answer.code == 0
    rows = {(r["policy"], r["disk_blocks"]): r for r in answer.json["results"]}
    assert len(rows) == 10
    assert rows["lru", 8]["way"] == 0.0 and rows["belady", 30]["way"] == 1.0
    assert rows["lru", 8]["hits"] <= rows["lru", 30]["hits"] <= rows["belady", 30]["hits"]
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--simulate", "--compare", "fifo", "--disk-blocks", "8"], "no policy"),
        (["--compare", "lru", "--disk-blocks", "8"], "--simulate"),
        (["--simulate", "--compare", "lru", "--disk-blocks", "eight"], "no number"),
        (["--simulate", "--disk-blocks", "8,9"], "2 sizes"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused_in_words(
    gdskv: Command, tmp_path: Path, options: list[str], said: str
) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0, "hash_ids": [1], "input_length": 1, "output_length": 1}\n')
    answer = gdskv("replay", file, *options)
    assert answer.code == 2 and said in answer.err
