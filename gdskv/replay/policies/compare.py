"""Several policies over one trace at several sizes: what each hits and writes, and how far from LRU to Belady that is.

``lru``, ``arc``, ``s3fifo`` and ``belady`` are references over the flat trace; ``hazard`` is the product's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gdskv.errors import ConfigError
from gdskv.replay.player import Plan
from gdskv.replay.policies import references
from gdskv.replay.policies.workload import flatten
from gdskv.replay.run import run
from gdskv.replay.traces import Trace

__all__ = ["POLICIES", "Outcome", "compare", "plot"]

_REFERENCES = {name: getattr(references, name) for name in references.__all__}
POLICIES = ("lru", "arc", "s3fifo", "hazard", "belady")


class Outcome(NamedTuple):
    """What a policy did at one size."""

    policy: str
    disk_blocks: int
    hits: int
    blocks_written: int
    way: float
    """Share of the way from LRU's hits to Belady's; 1 where LRU is at the bound."""


def compare(
    trace: Trace, policies: Sequence[str], sizes: Sequence[int], step: Callable[[int], None] = lambda done: None
) -> list[Outcome]:
    """Run the policies over the trace on a single tier of each size.

    Raises
    ------
    ConfigError
        A policy is not known, or there is none, or no size.
    """
    unknown = [name for name in policies if name not in POLICIES]
    if unknown or not policies:
        raise ConfigError(f"compare={','.join(policies)!r}: {unknown or 'nothing'} is no policy of {list(POLICIES)}.")
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"disk_blocks={list(sizes)} cannot be compared. Give sizes of at least 1 block.")
    flat = flatten(trace)
    out = []
    for size in sizes:
        found = {}
        for name in dict.fromkeys([*policies, "lru", "belady"]):
            if name in _REFERENCES:
                args = (flat.blocks, flat.starts, flat.next_use, flat.distinct, size)
                found[name] = tuple(int(n) for n in _REFERENCES[name](*args))
            else:
                tally = run(trace, Plan(disk_blocks=size, policy=name, simulate=True))
                found[name] = (sum(tally.hits.values()), tally.stats["committed"])
            step(1)
        low, high = found["lru"][0], found["belady"][0]
        for name in policies:
            hits, written = found[name]
            out.append(Outcome(name, size, hits, written, (hits - low) / (high - low) if high > low else 1.0))
    return out


def plot(outcomes: Sequence[Outcome], asked: int, title: str, path: Path) -> None:
    """Draw hit ratio and blocks written over the size, a line a policy, into an image file.

    Raises
    ------
    ConfigError
        matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot needs matplotlib, which is not installed. Install gdskv[bench].") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(o.policy for o in outcomes):
        rows: list[Any] = [o for o in outcomes if o.policy == name]
        sizes = [o.disk_blocks for o in rows]
        style = "--" if name == "belady" else "-"
        left.plot(sizes, [o.hits / asked for o in rows], style, marker="o", label=name)
        right.plot(sizes, [o.blocks_written / asked for o in rows], style, marker="o", label=name)
    left.set(ylabel="hit ratio", title=title)
    right.set(ylabel="blocks written per block asked")
    for axis in (left, right):
        axis.set(xlabel="blocks of the tier", xscale="log", ylim=(0, None))
        axis.grid(alpha=0.3)
    left.legend()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot={path} cannot be written: {error}. Name a .png or .svg file.") from None
