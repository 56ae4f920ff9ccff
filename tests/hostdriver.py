"""The CUDA driver double of cuda/hostdriver: how tests build it, load it in a process of their own, and talk to it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "cuda" / "hostdriver" / "hostdriver.c"


def missing(what: str) -> None:
    """Skip a test for what this machine has not; under CI=true fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def build(folder: Path) -> Path:
    """Compile the driver into a folder, which then goes before others in LD_LIBRARY_PATH."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        missing("no C compiler (cc, gcc or clang) to build the CUDA driver double with")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
    out = folder / "libcuda.so.1"
    subprocess.run([str(compiler), *flags, "-Wl,-soname,libcuda.so.1", "-o", str(out), str(SOURCE)], check=True)
    return folder


def run_cases(names: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run tests of some files in a process of their own whose libcuda is the double; return what pytest printed."""
    paths = [str(build(folder)), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(filter(None, paths)), "PYTHONPATH": str(TESTS)} | variables
    files = [str(TESTS / name) for name in names.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Driver:
    """The double as it is loaded in this process."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.lib.hostdriver_count.restype = ctypes.c_long  # only the double has it: never the real driver
        for name, words in ARGUMENTS.items():
            getattr(self.lib, name).argtypes = words

    def set(self, name: str, value: int) -> None:
        """Set one of the double's settings."""
        assert self.lib.hostdriver_set(name.encode(), value) == 0

    def count(self, name: str) -> int:
        """One of its counts."""
        return int(self.lib.hostdriver_count(name.encode()))

    def adopt(self, base: int, size: int) -> None:
        """Let memory that is ours answer as device memory."""
        assert self.lib.hostdriver_adopt(base, size) == 0

    def disown(self, base: int) -> None:
        """Let it be host memory again."""
        assert self.lib.hostdriver_disown(base) == 0


_pointer, _size, _long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long
ARGUMENTS = {
    "hostdriver_set": [ctypes.c_char_p, _long],
    "hostdriver_count": [ctypes.c_char_p],
    "hostdriver_adopt": [_pointer, _size],
    "hostdriver_disown": [_pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemFree_v2": [_pointer],
    "cuMemHostRegister_v2": [_pointer, _size, ctypes.c_uint],
    "cuMemHostUnregister": [_pointer],
    "cuMemGetAddressRange_v2": [_pointer, _pointer, _pointer],
    "cuPointerGetAttribute": [_pointer, ctypes.c_int, _pointer],
    "cuPointerGetAttributes": [ctypes.c_uint, _pointer, _pointer, _pointer],
    "cuStreamCreate": [_pointer, ctypes.c_uint],
    "cuStreamSynchronize": [_pointer],
    "cuStreamDestroy_v2": [_pointer],
    "cuMemcpyAsync": [_pointer, _pointer, _size, _pointer],
    "cuMemcpyBatchAsync": [_pointer] * 3 + [_size, _pointer, _pointer, _size, _pointer, _pointer],
    "cuStreamWaitEvent": [_pointer, _pointer, ctypes.c_uint],
    "cuLaunchKernel": [_pointer, *[ctypes.c_uint] * 7, _pointer, _pointer, _pointer],
    "cuEventCreate": [_pointer, ctypes.c_uint],
    "cuEventRecord": [_pointer, _pointer],
    "cuEventQuery": [_pointer],
    "cuEventSynchronize": [_pointer],
}
