"""The other side of ``gdskv bench io``: fio, or where that is missing threads that read and write in a plain loop.

Knows a file and how to move bytes of it without gdskv; must not know what is measured.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = ["Fio", "Loop", "Moved", "Reference", "choose"]

_MS = 1_000


class Moved(NamedTuple):
    """What a run came to."""

    gb_s: float
    """10**9 bytes a second."""
    cpu_ms_gb: float
    """Milliseconds of processor time per 10**9 bytes, user and system."""
    p99_us: float
    """99th percentile of the time of one read or write, microseconds."""


class Reference(Protocol):
    """A way to move a file's bytes that has nothing to do with gdskv."""

    name: str
    """What it is, for beside its figures."""

    def run(self, op: str, block: int, depth: int, seconds: float, start: int, *, random: bool = False) -> Moved:
        """Read, write, or ("rw") half of each, blocks of `block` bytes with `depth` in flight, from offset `start` on
        and around."""
        ...


def choose(file: Path, size: int, direct: bool) -> Reference:
    """fio if it runs here, else a loop."""
    if shutil.which("fio"):
        fio = Fio(file, size, direct)
        try:
            fio.run("read", 4096, 1, 0.001, 0)
            return fio
        except (OSError, ValueError, subprocess.SubprocessError):  # one without io_uring, or a kernel without it
            pass
    return Loop(file, size, direct)


class Fio:
    """fio with io_uring and its defaults, but that buffers of writes stay as they are, which takes less CPU."""

    def __init__(self, file: Path, size: int, direct: bool) -> None:
        self.name = f"fio io_uring {'direct' if direct else 'buffered'}"
        self._file, self._size = file, size
        self._fixed = ["--name=bench", "--ioengine=io_uring", f"--direct={int(direct)}", f"--filename={file}"]
        self._fixed += ["--time_based", "--scramble_buffers=0", "--output-format=json"]

    def run(self, op: str, block: int, depth: int, seconds: float, start: int, *, random: bool = False) -> Moved:
        command = ["fio", *self._fixed, f"--rw={'rand' if random else ''}{op}", f"--bs={block}", f"--iodepth={depth}"]
        command += [f"--runtime={int(seconds * _MS) or 1}ms", f"--offset={start}", f"--size={self._size - start}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self._file.parent)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        sides = [job[way] for way in ("read", "write") if job[way]["total_ios"]]
        size, took = sum(side["io_bytes"] for side in sides), job["job_runtime"] / _MS
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * took
        p99 = max((side["clat_ns"].get("percentile", {}).get("99.000000", 0) for side in sides), default=0)
        rate = sum(side["bw_bytes"] for side in sides) / 1e9
        return Moved(rate, cpu * 1e12 / max(size, 1), p99 / 1e3)


class Loop:
    """As many threads as there shall be calls in flight, each with one pread or pwrite after the other."""

    def __init__(self, file: Path, size: int, direct: bool) -> None:
        self.name = f"threads with pread and pwrite, {'O_DIRECT' if direct else 'buffered'}"
        self._file, self._size, self._flags = file, size, os.O_RDWR | (os.O_DIRECT if direct else 0)

    def run(self, op: str, block: int, depth: int, seconds: float, start: int, *, random: bool = False) -> Moved:
        from random import Random

        import numpy as np

        fd = os.open(self._file, self._flags)
        places, lock, dice = -(-(self._size - start) // block), threading.Lock(), Random(7)
        turn = [0]
        took: list[float] = []
        errors: list[OSError] = []

        def place() -> tuple[int, int]:
            with lock:
                turn[0] += 1
                where = dice.randrange(places) if random else turn[0] % places
                return turn[0], start + min(where * block, self._size - start - block)

        def work() -> None:
            with mmap.mmap(-1, block) as memory:
                while time.perf_counter() < end:
                    number, offset = place()
                    writes = op == "write" or (op == "rw" and number % 2)
                    call: Callable[..., int] = os.pwritev if writes else os.preadv
                    before = time.perf_counter()
                    try:
                        call(fd, [memory], offset)
                    except OSError as error:
                        errors.append(error)
                        return
                    took.append(time.perf_counter() - before)

        begin, cpu = time.perf_counter(), time.process_time()
        end = begin + seconds
        try:
            threads = [threading.Thread(target=work) for _ in range(depth)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            os.close(fd)
        if errors:
            raise errors[0]
        size = len(took) * block
        cpu = time.process_time() - cpu
        p99 = float(np.percentile(took, 99)) * 1e6 if took else 0.0
        return Moved(size / (time.perf_counter() - begin) / 1e9, cpu * 1e12 / max(size, 1), p99)
