"""``gdskv bench``: figures beside a reference in the same run. Each command is a module of its own, ``bench_*.py``.

Registers commands, does nothing else. Helpers are in ``benchlib``.
"""

from __future__ import annotations

import typer

from gdskv.cli.bench_busy import busy
from gdskv.cli.bench_engine import engine
from gdskv.cli.bench_io import io
from gdskv.cli.bench_policy import policy
from gdskv.cli.bench_recovery import recovery
from gdskv.cli.bench_stall import stall
from gdskv.cli.bench_table import table

__all__ = ["app"]

app = typer.Typer(help="Measure, beside a reference in the same run.", no_args_is_help=True)
app.command(epilog="Example: gdskv bench table --entries 1000000")(table)
app.command(epilog="Example: gdskv bench io --dir /nvme0 --plot io.png")(io)
app.command(epilog="Example: gdskv bench stall --dir /nvme0")(stall)
app.command(epilog="Example: gdskv bench busy --dir /nvme0")(busy)
app.command(epilog="Example: gdskv bench engine --dir /nvme0 --json")(engine)
app.command(epilog="Example: gdskv bench policy TRACE.jsonl --dir /nvme0 --json")(policy)
app.command(epilog="Example: gdskv bench recovery --records 100000")(recovery)


@app.callback()
def _group() -> None:
    """Keep the commands' names even while there is one only."""
