"""Failing, partial and hanging system calls: cases_io_faults.py in its own process, whose libc calls it replaces."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_the_engine_over_system_calls_that_fail() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "cases_io_faults.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


HANG = """
import ctypes, sys, time
from llvmlite import binding
binding.add_symbol("preadv", ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p).value)
import numpy as np
from gdskv.io.base import TRANSFER, Slab
from gdskv.io.posix import PosixEngine
engine = PosixEngine([Slab(0, 0, False, 1 << 20)])
batch = np.zeros(1, TRANSFER)
batch["length"], batch["address"] = 4096, np.zeros(4096, np.uint8).ctypes.data
engine.submit(batch)
time.sleep(0.1)
if sys.argv[1] == "close":
    print(engine.close(0.1))
print("end", time.time())
"""


def test_a_process_whose_device_hangs_ends_all_the_same() -> None:
    for how in ("close", "leave"):
        done = subprocess.run([sys.executable, "-c", HANG, how], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.split()
        assert lines[0] == ("False" if how == "close" else "end")
        assert time.time() - float(lines[-1]) < 30
