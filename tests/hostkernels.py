"""The kernels compiled for the CPU with cuda/hostgrid, a double of a GPU: how tests build, load and run them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from hostdriver import TESTS, missing

from gdskv.io.kernels import NAMES, Job, Plan, source
from gdskv.pools.pages import DevicePages

HEADER = TESTS.parent / "cuda" / "hostgrid"
FLAGS = ["-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-fPIC", "-shared"]


class HostKernels:
    """The kernels as a library of this process: a struct of a function and its parameter's bytes for each name."""

    def __init__(self, folder: Path) -> None:
        compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
        if compiler is None:
            missing("no C++ compiler (c++, g++ or clang++) to build the kernels for the CPU with")
        code, library = folder / "kernels.cpp", folder / "kernels.so"
        code.write_text(source())
        command = [
            str(compiler),
            "-std=c++17",
            *FLAGS,
            "-fvisibility=hidden",
            f"-I{HEADER}",
            "-o",
            str(library),
            str(code),
        ]
        subprocess.run(command, check=True)
        self.lib = ctypes.CDLL(str(library))
        self.handles = {name: ctypes.addressof(ctypes.c_char.in_dll(self.lib, name)) for name in NAMES}
        """As :func:`gdskv.io.kernels.load` gives them, for the driver double."""

    def run(
        self, way: str, pages: DevicePages, rows: Any, extents: np.ndarray, *, checksums: bool = True
    ) -> np.ndarray:
        """Gather or scatter here and now, between `pages` and ``extents`` (blocks, bytes); their checksums."""
        plan = Plan(pages, extents.shape[1], checksums)
        rows = np.ascontiguousarray(rows, np.uint32)
        addresses = (extents.ctypes.data + np.arange(len(extents)) * extents.strides[0]).astype(np.uint64)
        sums = np.full((len(extents), plan.chunks), 0xAAAAAAAA, np.uint32)
        job = Job.from_buffer_copy(plan.job)
        job.pieces, job.pages, job.extents = pages.pieces.ctypes.data, rows.ctypes.data, addresses.ctypes.data
        job.tables = plan.tables.ctypes.data if checksums else 0
        job.factors, job.sums = plan.factors.ctypes.data, sums.ctypes.data
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        pointer = ctypes.cast(self.handles[f"{way}_{pages.grain}"], ctypes.POINTER(run))
        pointer[0](ctypes.addressof(job), plan.chunks, len(extents))
        return plan.crc(sums) if checksums else np.zeros(len(extents), np.uint32)

    def backwards(self, on: bool) -> None:
        """Whether the threads of a block run in falling order."""
        self.lib.hostgrid_backwards(int(on))
