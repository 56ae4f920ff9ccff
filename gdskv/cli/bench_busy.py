"""``gdskv bench busy``: whether bytes move as fast beside a calling thread that never sleeps as beside one that does.

Knows what ``bench io`` measures with; its reference is gdskv itself, idle.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from gdskv.cli import benchlib, console
from gdskv.cli.bench_io import DEPTH, EXTENT, LONG_S, ROUNDS, compared, opened

__all__ = ["busy"]


def busy(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory to measure; a temporary one.", show_default=False)
    ] = None,
    size_gib: Annotated[float, typer.Option(min=0.1, help="Size of the file, GiB.")] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure reads and writes of 2 MiB while Python code runs between polls, beside the same with sleeps there.

    The ratio is the busy bandwidth as a share of the idle one, the median of the rounds'; nothing is left behind.
    """
    from gdskv.io.base import READ, WRITE
    from gdskv.io.measure import busy_pause, idle_pause

    size = int(size_gib * (1 << 30)) // EXTENT * EXTENT
    results = []
    with (
        TemporaryDirectory(prefix="gdskv-bench-", dir=directory) as folder,
        console.progress("bench busy", 2 + 2 * ROUNDS) as step,
        opened(Path(folder), size, EXTENT, step) as bench,
    ):
        for name, op in (("read", READ), ("write", WRITE)):
            run = partial(bench.run, (op,), EXTENT, DEPTH, LONG_S)
            ours, theirs = bench.beside(partial(run, pause=busy_pause), partial(run, pause=idle_pause))
            results.append(compared(f"{name} 2MiB qd16 busy", ours, theirs, "idle"))
    benchlib.show("busy", results, json=json, rounds=ROUNDS)
