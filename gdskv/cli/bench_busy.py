"""``gdskv bench busy``: whether bytes move as fast beside a calling thread that never sleeps as beside one that does.

Knows what ``bench io`` measures with; its reference is gdskv itself, idle.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from gdskv.cli import benchlib, console
from gdskv.cli.bench_io import ROUNDS, opened
from gdskv.cli.benchlib import Result

__all__ = ["busy"]

BLOCK = 1 << 20
BLOCKS = 256  # in flight at once


def busy(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory to measure; a temporary one.", show_default=False)
    ] = None,
    size_gib: Annotated[float, typer.Option(min=0.1, help="Size of the file, GiB.")] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how long 256 transfers of 1 MiB take while Python code runs between polls, and while the caller sleeps.

    In turn; the ratio is the median of the rounds'. Nothing is left behind.
    """
    from gdskv.io.base import READ, WRITE
    from gdskv.io.measure import busy_pause, idle_pause, stream

    blocks = min(BLOCKS, int(size_gib * (1 << 30)) // BLOCK)
    results = []
    with (
        console.workplace(directory) as folder,
        console.progress("bench busy", 2 + 2 * ROUNDS) as step,
        opened(folder, int(size_gib * (1 << 30)) // BLOCK * BLOCK, BLOCK * blocks // 16, step) as bench,
    ):
        for name, op in (("read", READ), ("write", WRITE)):
            run = partial(stream, bench.engine, (op,), 0, bench.area, bench.memory, blocks * BLOCK)
            run = partial(run, piece=BLOCK, extent=BLOCK, depth=blocks)
            times: list[tuple[float, float]] = []
            for _ in range(ROUNDS):
                times.append((run(pause=busy_pause) * 1e3, run(pause=idle_pause) * 1e3))
                step(1)
            beside, alone = (median(side) for side in zip(*times, strict=True))
            share = median(idle / busy for busy, idle in times)
            results.append(Result(f"{name} 1MiB busy", beside, "ms", alone, "calling thread idle", share))
    benchlib.show("busy", results, json=json, rounds=ROUNDS, transfers=blocks)
