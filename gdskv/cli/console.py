"""What the commands share: where text goes, how an error ends a command, progress, one JSON object.

Results go to standard output, everything else to standard error. Knows no command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gdskv.errors import ConfigError

if TYPE_CHECKING:
    from gdskv.pools.disk import DirectoryInfo

__all__ = ["out", "places", "print_error", "print_json", "print_places", "progress", "workplace"]

out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """Write one line about what is wrong to standard error."""
    _err.print("error:", style="bold red", end=" ")
    _err.print(" ".join(message.split()), markup=False, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Write ``value`` as the one JSON object on standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error while the block runs, on a terminal only; yields a function that adds to it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=_err, transient=True, disable=not _err.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def workplace(directory: Path | None) -> Iterator[Path]:
    """A folder for a bench in the directory that was given, or a temporary one; nothing of it is left.

    Raises
    ------
    ConfigError
        There can be no folder in that directory.
    """
    try:
        folder = TemporaryDirectory(prefix="gdskv-bench-", dir=directory)
    except OSError as error:
        raise ConfigError(
            f"--dir={directory}: no folder can be made in it: {error.strerror}. Name a directory that can be written."
        ) from None
    with folder as name:
        yield Path(name)


def places(directories: Iterable[DirectoryInfo]) -> list[dict[str, str]]:
    """Return for each directory of the disk tier how its bytes move, for a JSON object."""
    return [{"path": str(d.path), "file_system": d.file_system, "mode": d.mode, "why": d.why} for d in directories]


def print_places(listed: Iterable[Mapping[str, str]]) -> None:
    """Write what ``places`` gave as lines."""
    for place in listed:
        out.print("disk tier in {path} ({file_system}): {mode}, {why}".format(**place), markup=False)
