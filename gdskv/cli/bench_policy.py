"""``gdskv bench policy``: what an order by value costs the calling thread beside one by last use; what recording costs.

The same trace runs with real files under either order, in turn. Knows the replay and the recorder.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from gdskv.cli import benchlib, console

if TYPE_CHECKING:
    from gdskv.replay.traces import Trace

__all__ = ["policy"]

CALLS = ("match", "allocate", "commit", "release", "poll")
POLICIES = ("hazard", "lru")
AT = ("p50", "p99", "p99.9")
_GENERATED_REQUESTS = 4000
_AT_ONCE = 2000  # requests handed to the recorder before it is waited for: less than it holds


def policy(
    trace: Annotated[Path | None, typer.Argument(help="Trace file; a made-up one if none is given.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for the disk tier; a temporary one.", show_default=False)
    ] = None,
    device_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the device tier.")] = 1000,
    host_blocks: Annotated[int, typer.Option(min=0, help="Blocks of the host tier.")] = 3000,
    disk_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the disk tier.")] = 16000,
    block_bytes: Annotated[str, typer.Option(help="Bytes of a block.")] = "64KiB",
    rounds: Annotated[int, typer.Option(min=1, help="Runs under each order that count.")] = benchlib.ROUNDS,
    limit: Annotated[int | None, typer.Option(min=1, help="Run at most that many requests.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Decisions only: no bytes, no files.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the calls of a manager over a trace, by learned value beside by last use: percentiles in us, the median
    of the rounds. And what a recording of that trace costs, in ns a block."""
    from gdskv.replay.generator import generate_trace
    from gdskv.replay.player import Plan
    from gdskv.replay.run import run
    from gdskv.replay.traces import read_trace
    from gdskv.units import parse_size

    loaded = read_trace(trace, limit=limit) if trace else generate_trace(limit or _GENERATED_REQUESTS)
    found: dict[tuple[str, str, str], list[float]] = {}
    wrong = 0
    with (
        console.workplace(directory) as folder,
        console.progress("bench policy", 2 * (rounds + 1)) as step,
    ):
        for number in range(rounds + 1):
            for name in POLICIES:
                place = folder / f"{number}-{name}"
                place.mkdir()
                plan = Plan(
                    device_blocks,
                    host_blocks,
                    disk_blocks,
                    block_bytes=parse_size(block_bytes),
                    directories=(place,),
                    policy=name,
                    simulate=simulate,
                )
                tally = run(loaded, plan)
                _remove(place)
                wrong += tally.wrong_blocks
                step(1)
                for call in CALLS if number else ():  # the first round warms up
                    for at, value in (tally.timings[call].percentiles() or {}).items():
                        found.setdefault((call, at, name), []).append(value)
        results = [
            benchlib.Result.of(
                f"{call} {at}", median(found[call, at, "hazard"]), "us", median(found[call, at, "lru"]), "by last use"
            )
            for call in CALLS
            for at in AT
            if (call, at, "lru") in found
        ]
        results += record_ns(loaded, folder, rounds)
    benchlib.show("policy", results, json=json, rounds=rounds, requests=len(loaded.requests), wrong_blocks=wrong)


def _remove(place: Path) -> None:
    import shutil

    shutil.rmtree(place)


def record_ns(trace: Trace, folder: Path, rounds: int) -> list[benchlib.Result]:
    """Time that a recording of the trace takes of the calling thread, and processor time of the recorder's own, ns a
    block. Nothing else runs meanwhile."""
    import numpy as np

    from gdskv.recording import Recorder
    from gdskv.replay.pattern import trace_keys

    keys = [trace_keys(request.hash_ids.tolist()) for request in trace.requests[:_AT_ONCE]]
    blocks = sum(map(len, keys))
    callers, own = [], []
    for number in range(rounds + 1):
        recorder = Recorder(folder / f"record-{number}.jsonl", 1 << 30, trace.block_tokens)
        cpu = time.process_time()
        called = benchlib.seconds(lambda r=recorder: [r.add(part, 1, 0.0) for part in keys])  # type: ignore[misc]
        recorder.close()
        if recorder.dropped:
            raise AssertionError(f"{recorder.dropped} requests were not recorded")
        callers.append(called * 1e9 / blocks)
        own.append((time.process_time() - cpu) * 1e9 / blocks - callers[-1])
    mean = float(np.mean([len(part) for part in keys]))
    return [
        benchlib.Result.of(f"record, calling thread, {mean:.0f} blocks a request", median(callers[1:]), "ns/block"),
        benchlib.Result.of("record, its own thread", median(own[1:]), "ns/block"),
    ]
