"""What the benches share: A B A B timing, the median, facts about the machine, result rows and how they are shown.

Knows no bench and nothing of what is measured.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gdskv.cli import console
from gdskv.errors import ConfigError

__all__ = ["Result", "interleave", "machine", "pyplot", "seconds", "show", "stolen_s"]

ROUNDS = 5  # of each side, at least


@dataclass(frozen=True)
class Result:
    """A measured figure, with the same job done by a reference in the same run.

    Attributes
    ----------
    name
        Plain and stable, as scripts look it up: ``match 2048 of 10000000``.
    value, unit
        The figure.
    reference, reference_name
        The reference's figure in the same unit, and what it is; None and "" where there is none.
    ratio
        How many times better than the reference, whichever way is better; above 1 is ahead.
    """

    name: str
    value: float
    unit: str
    reference: float | None = None
    reference_name: str = ""
    ratio: float | None = None

    @classmethod
    def of(
        cls,
        name: str,
        value: float,
        unit: str,
        reference: float | None = None,
        reference_name: str = "",
        *,
        more_is_better: bool = False,
    ) -> Result:
        """Work the ratio out: value / reference where more is better, else reference / value."""
        if reference is None:
            return cls(name, value, unit)
        over, under = (value, reference) if more_is_better else (reference, value)
        return cls(name, value, unit, reference, reference_name, over / under if under else None)


def seconds(job: Callable[[], object]) -> float:
    """Time that one call of `job` takes, s."""
    start = perf_counter()
    job()
    return perf_counter() - start


def interleave(
    *sides: Callable[[int], float], rounds: int = ROUNDS, step: Callable[[int], None] | None = None
) -> list[float]:
    """Measure the sides in turn, A B A B, so that a change of the machine's mood meets both; the median of each.

    Parameters
    ----------
    *sides
        Each takes the number of the round and returns its figure.
    rounds
        How often each is measured; the first one warms up and does not count.
    step
        Called with 1 after each measurement, for a progress bar of ``len(sides) * (rounds + 1)`` steps.
    """
    figures: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for side, found in zip(sides, figures, strict=True):
            figure = side(number)
            if number:
                found.append(figure)
            if step:
                step(1)
    return [median(found) for found in figures]


def stolen_s() -> float:
    """Processor time that a host kept from this virtual machine since boot, s; 0 where none is told."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def machine() -> dict[str, Any]:
    """Facts about where this runs, for beside the figures."""
    return {
        "cpu": _first(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("numpy", "numba", "torch")},
    }


def show(title: str, results: Sequence[Result], *, json: bool, **more: Any) -> None:
    """Print the results: for people a table, with `json` one object that has `more` beside `results` and `machine`."""
    if json:
        console.print_json(
            {"bench": title, "results": [asdict(r) for r in results], "machine": machine(), **more},
        )
        return
    table = Table("", "this", "reference", "", "times better", title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in (table.columns[1], table.columns[2], table.columns[4]):
        column.justify = "right"
    for r in results:
        reference = "" if r.reference is None else f"{_figure(r.reference)} {r.unit}"
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        table.add_row(r.name, f"{_figure(r.value)} {r.unit}", reference, r.reference_name, ratio)
    console.out.print(table)
    facts = machine()
    console.out.print(
        f"{facts['cpu']}, {facts['usable_cores']} cores, {facts['memory_bytes'] / (1 << 30):.0f} GiB, "
        f"load {facts['load_1min']}; Python {facts['python']}, NumPy {facts['numpy']}, Numba {facts['numba']}"
    )


def pyplot() -> Any:
    """Matplotlib's, for drawing into files.

    Raises
    ------
    ConfigError
        It is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib, which is not here. Run: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _first(path: Path, field: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
