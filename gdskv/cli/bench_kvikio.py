"""``gdskv bench io --io kvikio``: GPU memory to disk and back through KvikIO, beside our own engine on the same file.

Where NVIDIA's gdsio is installed it moves the same bytes too. Over a double of the CUDA driver every result says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdskv.cli.bench_io import (
    DEPTH,
    DEPTHS,
    EXTENT,
    LONG_PAUSE_S,
    LONG_S,
    SHORT_PAUSE_S,
    SHORT_S,
    Bench,
    compared,
    opened,
)
from gdskv.cli.benchlib import Result
from gdskv.errors import ConfigError

if TYPE_CHECKING:
    from gdskv.cli.reference import Moved

__all__ = ["Gdsio", "figures", "kvikio"]

GDSIO = "/usr/local/cuda/gds/tools/gdsio"


class Gdsio:
    """NVIDIA's own measure of GPUDirect Storage, from and to GPU memory."""

    def __init__(self, program: str, file: Path, size: int) -> None:
        self.name = "gdsio"
        self._program, self._file, self._size = program, file, size

    @classmethod
    def find(cls, file: Path, size: int) -> Gdsio | None:
        """It, if it is installed."""
        program = shutil.which("gdsio") or (GDSIO if os.access(GDSIO, os.X_OK) else None)
        return cls(program, file, size) if program else None

    def run(self, op: str, block: int, depth: int) -> Moved:
        """A second of reads or writes by `depth` threads. OSError where its output says no bandwidth."""
        from gdskv.cli.reference import Moved

        command = [self._program, "-f", str(self._file), "-d", "0", "-x", "0", "-I", "0" if op == "read" else "1"]
        command += ["-w", str(depth), "-s", str(self._size), "-i", str(block), "-T", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rate = re.search(r"Throughput: ([\d.]+) GiB/sec", done.stdout)
        if rate is None:
            said = " ".join((done.stdout + done.stderr).split())
            raise OSError(f"gdsio measured nothing: {said[:200] or f'exit code {done.returncode}'}")
        return Moved(float(rate[1]) * (1 << 30) / 1e9, 0.0, 0.0)


def kvikio(
    folder: Path, size: int, blocks: list[int], threads: int, step: Callable[[int], None]
) -> tuple[list[Result], dict[str, Any]]:
    """Bandwidth by size and by depth, both directions.

    Parameters
    ----------
    folder
        Where the file goes.
    size
        Of the file, bytes.
    blocks
        Bytes of a transfer.
    threads
        Of each direction; 0: what each engine chooses.
    step
        Told about progress.

    Returns
    -------
    results, facts

    Raises
    ------
    ConfigError
        KvikIO cannot be had, or cannot use the folder.
    """
    from gdskv.io import cuda
    from gdskv.io.modes import probe

    mode = probe(folder)
    driver = cuda.load()
    if mode.name == "posix" or driver is None:
        raise ConfigError(
            f"--io=kvikio cannot be measured here: {mode.why}. See gdskv doctor {folder}, or use --io=posix."
        )
    from gdskv.io.kvikio import KvikioEngine

    with ExitStack() as stack:
        bench = stack.enter_context(opened(folder, size, max(blocks), step, threads=threads))
        length = max(DEPTH * max(blocks), max(DEPTHS) * EXTENT)
        stream = cuda.CopyStream(driver, 0, 1)
        stack.callback(stream.close)
        with stream:
            memory = driver.allocate(length)
        stack.callback(_free, driver, stream, memory)
        done = stream.start(memory, bench.memory, min(length, bench.memory_bytes))
        while not stream.done(done):
            pass
        engine = KvikioEngine(
            bench.slabs,
            direct=[mode.name == "direct"],
            device_memory=[(memory, length)],
            read_threads=threads,
            write_threads=threads,
            largest=max(blocks),
        )
        stack.callback(engine.close, 10.0)
        gdsio = Gdsio.find(bench.file, bench.area[1])
        results = _figures(bench, partial(bench.run, engine=engine, memory=memory), blocks, gdsio, mode.name)
        facts = bench.facts() | {
            "reference": "posix engine, host memory",
            "engine": "kvikio",
            "mode": mode.name,
            "why": mode.why,
            "hostdriver": driver.double,
            "gdsio": gdsio is not None,
            "page_cache": "O_DIRECT on both sides" if bench.slabs[0].direct else "both sides through the page cache",
        }
    return results, facts


def figures(blocks: list[int]) -> int:
    """How many there are."""
    return 2 * (len({*blocks, EXTENT}) + len(DEPTHS) + 1)


def _figures(
    bench: Bench, run: Callable[..., Moved], blocks: list[int], gdsio: Gdsio | None, mode: str
) -> list[Result]:
    from gdskv.io.base import READ, WRITE
    from gdskv.units import format_size

    runs = [(block, DEPTH, SHORT_PAUSE_S) for block in dict.fromkeys([EXTENT, *blocks])]
    runs += [(EXTENT, depth, SHORT_PAUSE_S) for depth in DEPTHS] + [(EXTENT, DEPTH, LONG_PAUSE_S)]
    results = []
    for block, depth, seconds_between in runs:
        pause = partial(time.sleep, seconds_between)
        seconds = LONG_S if (block, depth) == (EXTENT, DEPTH) else SHORT_S
        for name, op in (("read", READ), ("write", WRITE)):
            others: list[Moved] = []

            def third(_: int, others: list[Moved] = others, job: tuple[str, int, int] = (name, block, depth)) -> None:
                if gdsio is not None:
                    others.append(gdsio.run(*job))

            ours, posix = bench.beside(
                partial(run, (op,), block, depth, seconds, pause=pause),
                partial(bench.run, (op,), block, depth, seconds, pause=pause),
                third,
            )
            title = f"{name} {format_size(block)} qd{depth} kvikio {mode}"
            if seconds_between == LONG_PAUSE_S:
                title += " polled every 2 ms"
            results.append(compared(title, ours, posix, "posix engine, host memory"))
            results.append(compared(f"cpu of {title}", ours, posix, "posix engine, host memory", "cpu_ms_gb"))
            if others:
                results.append(compared(f"{title} beside gdsio", ours, others, "gdsio"))
    return results


def _free(driver: Any, stream: Any, memory: int) -> None:
    with stream:
        driver.free(memory)
