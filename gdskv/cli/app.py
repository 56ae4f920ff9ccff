"""``gdskv``: the commands under one name, and how an error becomes one line and an exit code.

Each command is a module of its own, which imports what it needs when it runs.
"""

from __future__ import annotations

import sys

import typer

from gdskv.cli.bench import app as bench
from gdskv.cli.console import print_error
from gdskv.cli.demo import demo
from gdskv.cli.doctor import doctor
from gdskv.cli.inspect import inspect
from gdskv.cli.replay import replay
from gdskv.errors import GdskvError

__all__ = ["main"]

app = typer.Typer(
    name="gdskv",
    help="A KV-cache block manager with three tiers: GPU memory, host memory, local disk.",
    epilog="Start with: gdskv demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog="Example: gdskv demo")(demo)
app.command(epilog="Example: gdskv doctor /nvme0/kv")(doctor)
app.command(epilog="Example: gdskv inspect /nvme0/kv --verify")(inspect)
app.command(epilog="Example: gdskv replay --simulate --disk-blocks 5000")(replay)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 the result is not what it must be, 2 wrong usage or settings."""
    try:
        app()
    except (GdskvError, OSError, MemoryError) as error:
        print_error(str(error) or type(error).__name__)
        sys.exit(2)
