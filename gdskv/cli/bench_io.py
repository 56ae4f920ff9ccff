"""``gdskv bench io``: bytes between the device pool and disk through the I/O engine, beside fio on the same file.

Knows pools and engines. What tiers, tables and requests add is left out, but for the records of the disk tier.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdskv.cli import benchlib, console
from gdskv.cli.benchlib import Result

if TYPE_CHECKING:
    from gdskv.cli.reference import Moved, Reference
    from gdskv.io.base import IOEngine, Slab
    from gdskv.io.tuning import Threads

__all__ = ["Bench", "compared", "io", "opened"]

ROUNDS = 5
SIZES = "64KiB,256KiB,1MiB,2MiB,16MiB"
EXTENT = 2 << 20
PIECE = 128 << 10  # blocks of a prompt that are neighbours
DEPTH = 16
DEPTHS = (1, 4, 64)  # besides, for extents
SINGLE = 64 << 10  # single reads, whose latency counts
SINGLES = 1500  # of them in a round
SHORT_PAUSE_S, LONG_PAUSE_S = 0.0002, 0.002  # between polls; the long one, still less than a step of an engine, where
# much is in flight: with .5 ms the polls themselves took most of the processor time that was measured
SHORT_S, LONG_S = 0.2, 0.5  # a run; one of those that matter most


def io(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory to measure; a temporary one.", show_default=False)
    ] = None,
    sizes: Annotated[str, typer.Option(help="Block sizes, separated by commas.")] = SIZES,
    size_gib: Annotated[float, typer.Option(min=0.1, help="Size of the file, GiB.")] = 8.0,
    engine: Annotated[str, typer.Option("--io", help="I/O engine: posix, or kvikio for GPU memory.")] = "posix",
    threads: Annotated[int, typer.Option(min=0, max=256, help="Of each direction; 0: by measurement.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw bandwidth over block size, PNG.", show_default=False)] = None,
) -> None:
    """Measure reads and writes of several sizes and depths, latency beside writes, CPU time, and what records cost.

    Each figure stands beside fio's (io_uring) on the same file, taken in turn; the ratio is the median of the rounds'.
    The file is written over once before, and removed afterwards. With --io kvikio: GPU memory to disk and back, beside
    our own engine.
    """
    from gdskv.cli import bench_kvikio
    from gdskv.cli.bench_records import records
    from gdskv.errors import ConfigError
    from gdskv.units import parse_size

    if engine not in ("posix", "kvikio"):
        raise ConfigError(f"--io={engine} is not an engine here. Use posix or kvikio.")
    blocks = [parse_size(text) for text in sizes.split(",")]
    size = int(size_gib * (1 << 30)) // EXTENT * EXTENT
    for block in blocks:
        if block % 4096 or not 4096 <= block <= size // DEPTH:
            raise ConfigError(
                f"--sizes={block} is no multiple of 4096 from 4096 to {size // DEPTH}. Choose such sizes."
            )
    with ExitStack() as stack:
        if plot is not None:
            benchlib.pyplot()  # says now what is missing, not in the end
        folder = stack.enter_context(console.workplace(directory))
        figures = 2 * len({*blocks, EXTENT}) + 2 * len(DEPTHS) + 7
        figures = bench_kvikio.figures(blocks) if engine == "kvikio" else figures
        step = stack.enter_context(console.progress("bench io", 2 + figures * ROUNDS))
        if engine == "kvikio":
            results, facts = bench_kvikio.kvikio(folder, size, blocks, threads, step)
        else:
            with opened(folder, size, max(blocks), step, threads=threads) as bench:
                results = [*_extents(bench), *_bandwidth(bench, blocks), *_latency(bench)]
                facts = bench.facts()
            results += records(folder, ROUNDS, step)
    if plot is not None:
        _plot(plot, results, blocks, facts["reference"], facts.get("mode", ""))
    benchlib.show("io", results, json=json, **facts)


@dataclass
class Bench:
    """A slab, memory, engines on both, and the reference."""

    engine: IOEngine
    plain: IOEngine
    """Without checksums."""
    reference: Reference
    slabs: list[Slab]
    file: Path
    memory: int
    """Address."""
    memory_bytes: int
    small: int
    """Address of memory in pages of 4 KiB, for DEPTH extents, as other programs have it."""
    area: tuple[int, int]
    """Bytes of the slab that may be used."""
    place: dict[str, str]
    threads: Threads
    first_gb_s: float
    again_gb_s: float
    step: Callable[[int], None]
    at: int = 0

    def facts(self) -> dict[str, Any]:
        """What stands beside the figures."""
        return {
            "reference": self.reference.name,
            "rounds": ROUNDS,
            "file_bytes": self.area[1],
            "directory": self.place,
            "threads": {"read": self.threads.read, "write": self.threads.write},
        }

    def run(
        self,
        ops: tuple[int, ...],
        block: int,
        depth: int,
        seconds: float,
        *,
        engine: IOEngine | None = None,
        extent: int = 0,
        memory: int = 0,
        pause: Callable[[], None] | None = None,
    ) -> Moved:
        """As a reference's run; blocks are neighbours, `extent` bytes of them at a time."""
        from gdskv.cli.reference import Moved
        from gdskv.io.measure import stream

        extent = extent or block
        total = max(int(self.again_gb_s * 1e9 * seconds), 4 * depth * extent)
        engine = engine or self.engine
        cpu = time.process_time()
        took = stream(
            engine,
            ops,
            0,
            self.area,
            memory or self.memory,
            total,
            start=self.at,
            piece=block,
            extent=extent,
            depth=depth,
            pause=pause or partial(time.sleep, LONG_PAUSE_S if depth * extent >= DEPTH << 20 else SHORT_PAUSE_S),
        )
        return Moved(total / took / 1e9, (time.process_time() - cpu) * 1e12 / total, 0.0)

    def theirs(self, op: str, block: int, depth: int, seconds: float) -> Moved:
        """The reference's run, at the same place."""
        return self.reference.run(op, block, depth, seconds, self.at)

    def beside(
        self, ours: Callable[[], Moved], theirs: Callable[[], Moved], each: Callable[[int], None] = lambda number: None
    ) -> tuple[list[Moved], list[Moved]]:
        """A B A B: the runs of ROUNDS rounds, each at another place of the file."""
        a, b = [], []
        for number in range(ROUNDS):
            span = self.area[1] - self.area[0]
            self.at = (self.at + span * 3 // 8) % span // EXTENT * EXTENT  # no cache has just been there
            each(number)
            a.append(ours())
            b.append(theirs())
            self.step(1)
        return a, b


@contextmanager
def opened(folder: Path, size: int, largest: int, step: Callable[[int], None], *, threads: int = 0) -> Iterator[Bench]:
    import numpy as np

    from gdskv.cli.reference import choose
    from gdskv.io.base import WRITE
    from gdskv.io.measure import stream
    from gdskv.io.posix import PosixEngine
    from gdskv.io.tuning import Threads, measure
    from gdskv.layout import KVLayout
    from gdskv.pools.device import DevicePool
    from gdskv.pools.disk import SLAB_HEADER, SLAB_NAME, DiskPool

    digest = bytes(16)
    with ExitStack() as stack:
        disk = DiskPool([folder], size, EXTENT, digest)
        stack.callback(disk.close)
        extents = max(-(-DEPTH * largest // EXTENT), DEPTH, *DEPTHS)
        device = DevicePool(extents, KVLayout.raw(EXTENT))
        stack.callback(device.close)
        dice = np.random.default_rng(3)
        for slot in range(extents):
            device.view(slot)[:] = np.frombuffer(dice.bytes(EXTENT), np.uint8)  # a disk may know zeros
        pages = mmap.mmap(-1, DEPTH * EXTENT)  # unmapped when nothing refers to it
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        small = np.frombuffer(pages, np.uint8)
        small[:] = 1
        # As a store does it when a directory is new
        best = Threads(threads, threads, {}, {}) if threads else measure(disk.slabs[0].fd, SLAB_HEADER)
        engines = [
            PosixEngine(disk.slabs, checksums=checksums, read_threads=best.read, write_threads=best.write)
            for checksums in (True, False)
        ]
        for engine in engines:
            stack.callback(engine.close, 10.0)
        area = (SLAB_HEADER, disk.slabs[0].size)
        rates = []
        for _ in range(2):
            rates.append(size / stream(engines[0], (WRITE,), 0, area, device.base, size, depth=DEPTH) / 1e9)
            step(1)
        info = disk.directories[0]
        file = folder / digest.hex() / SLAB_NAME
        yield Bench(
            engine=engines[0],
            plain=engines[1],
            reference=choose(file, area[1], info.mode == "direct"),
            slabs=disk.slabs,
            file=file,
            memory=device.base,
            memory_bytes=device.bytes,
            small=small.ctypes.data,
            area=area,
            place=console.places([info])[0],
            threads=best,
            first_gb_s=rates[0],
            again_gb_s=rates[1],
            step=step,
        )
        del small


def compared(name: str, ours: list[Moved], theirs: list[Moved], reference: str, of: str = "gb_s") -> Result:
    """Medians, and the median of the rounds' ratios: times better than the reference."""
    a, b = ([float(getattr(moved, of)) for moved in side] for side in (ours, theirs))
    more_is_better = of == "gb_s"
    ratios = [x / y if more_is_better else y / x for x, y in zip(a, b, strict=True) if x and y]
    unit = {"gb_s": "GB/s", "cpu_ms_gb": "ms/GB", "p99_us": "us"}[of]
    return Result(name, median(a), unit, median(b), reference, median(ratios) if ratios else None)


def _ops() -> list[tuple[str, int]]:
    from gdskv.io.base import READ, WRITE

    return [("read", READ), ("write", WRITE)]


def _extents(bench: Bench) -> list[Result]:
    """The figures that matter most, and processor time: without checksums beside the reference's; what these add."""
    bandwidth, processor = [], []
    for name, op in _ops():
        plain: list[Moved] = []
        ours = partial(bench.run, (op,), EXTENT, DEPTH, LONG_S)
        with_sums, theirs = bench.beside(
            ours,
            partial(bench.theirs, name, EXTENT, DEPTH, LONG_S),
            lambda _, ours=ours, plain=plain: plain.append(ours(engine=bench.plain)),  # type: ignore[misc]
        )
        reference = bench.reference.name
        bandwidth.append(compared(f"{name} 2MiB qd16", with_sums, theirs, reference))
        processor.append(compared(f"cpu of {name} checksums off", plain, theirs, reference, "cpu_ms_gb"))
        processor.append(compared(f"cpu of {name} checksums on", with_sums, plain, "checksums off", "cpu_ms_gb"))
        added = median(a.cpu_ms_gb - b.cpu_ms_gb for a, b in zip(with_sums, plain, strict=True))
        processor.append(Result(f"cpu of {name} checksums alone", added, "ms/GB"))
    return bandwidth + processor


def _bandwidth(bench: Bench, blocks: list[int]) -> list[Result]:
    """Other sizes and depths, both directions at once, other memory, blocks that are neighbours, and fresh space."""
    from gdskv.io.base import READ, WRITE
    from gdskv.units import format_size

    runs: list[tuple[str, tuple[int, ...], int, int]] = []
    runs += [(name, (op,), block, DEPTH) for block in blocks if block != EXTENT for name, op in _ops()]
    runs += [(name, (op,), EXTENT, depth) for depth in DEPTHS for name, op in _ops()]
    runs += [("rw", (READ, WRITE), EXTENT, DEPTH)]
    results = []
    for name, ops, block, depth in runs:
        ours, theirs = bench.beside(
            partial(bench.run, ops, block, depth, SHORT_S), partial(bench.theirs, name, block, depth, SHORT_S)
        )
        title = "mixed" if name == "rw" else name
        results.append(compared(f"{title} {format_size(block)} qd{depth}", ours, theirs, bench.reference.name))
    for name, op in _ops():
        ours, theirs = bench.beside(
            partial(bench.run, (op,), EXTENT, DEPTH, SHORT_S, memory=bench.small),
            partial(bench.theirs, name, EXTENT, DEPTH, SHORT_S),
        )
        results.append(compared(f"{name} 2MiB qd16 small pages", ours, theirs, bench.reference.name))
    for name, op in _ops():
        ours, theirs = bench.beside(
            partial(bench.run, (op,), PIECE, DEPTH, SHORT_S, extent=EXTENT),
            partial(bench.run, (op,), EXTENT, DEPTH, SHORT_S),
        )
        results.append(compared(f"{name} 128KiB consecutive", ours, theirs, f"{name} 2MiB qd16"))
    first, again = bench.first_gb_s, bench.again_gb_s
    results.append(Result("first write 2MiB qd16", first, "GB/s", again, "written over once", first / again))
    return results


def _latency(bench: Bench) -> list[Result]:
    """Single reads on an idle disk and while writes saturate it, and what is left of the writes."""
    import numpy as np

    from gdskv.cli.reference import Moved
    from gdskv.io.base import WRITE
    from gdskv.io.measure import latencies

    written: list[float] = []
    p50: list[list[float]] = [[], []]

    def single(writes: int) -> Moved:
        seed = len(written)
        taken, rate = latencies(
            bench.engine, 0, bench.area, bench.memory, SINGLES, length=SINGLE, writes=writes, seed=seed
        )
        p50[writes > 0].append(float(np.median(taken)) * 1e6)
        if writes:
            written.append(rate / 1e9)
        return Moved(0.0, 0.0, float(np.percentile(taken, 99)) * 1e6)

    alone: list[Moved] = []
    theirs: list[Moved] = []

    def others(number: int) -> None:
        theirs.append(bench.reference.run("read", SINGLE, 1, SHORT_S, 0, random=True))
        alone.append(bench.run((WRITE,), SINGLE, DEPTH, SHORT_S, extent=EXTENT))

    idle, beside = bench.beside(lambda: single(0), lambda: single(DEPTH), others)
    kept = [w / a.gb_s for w, a in zip(written, alone, strict=True)]
    return [
        compared("read 64KiB p99 idle", idle, theirs, bench.reference.name, "p99_us"),
        compared("read 64KiB p99 beside writes", beside, idle, "read 64KiB p99 idle", "p99_us"),
        Result(
            "read 64KiB p50 beside writes",
            median(p50[1]),
            "us",
            median(p50[0]),
            "idle",
            median(p50[0]) / median(p50[1]),
        ),
        Result(
            "write beside reads", median(written), "GB/s", median(a.gb_s for a in alone), "writes alone", median(kept)
        ),
    ]


def _plot(path: Path, results: list[Result], blocks: list[int], reference: str, mode: str) -> None:
    """Bandwidth over block size, both sides."""
    from gdskv.units import format_size

    pyplot = benchlib.pyplot()
    found = {result.name: result for result in results}
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, colour in (("read", "tab:blue"), ("write", "tab:orange")):
        suffix = f" kvikio {mode}" if mode else ""
        sizes = sorted({*blocks, EXTENT})
        points = [(block, found[f"{name} {format_size(block)} qd{DEPTH}{suffix}"]) for block in sizes]
        at = [block for block, _ in points]
        axes.plot(at, [r.value for _, r in points], "o-", color=colour, label=f"{name}, gdskv")
        axes.plot(at, [r.reference for _, r in points], "s--", color=colour, label=f"{name}, {reference}", alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [format_size(block) for block in at])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"block size, {DEPTH} in flight")
    axes.set_ylabel("GB/s")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
