"""Which way bytes of a directory can go, found out by sending some: ``direct``, ``compat`` or ``posix``, and why.

Knows KvikIO, the CUDA driver and files; must not know blocks. Direct is what was proven; all else is named a fallback.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gdskv.io import cuda

__all__ = ["Mode", "missing", "nvidia_fs_bytes", "probe"]

_PROBE = 1 << 20
_STATS = "/proc/driver/nvidia-fs/stats"


class Mode(NamedTuple):
    """How a directory's bytes move."""

    name: str
    """``"direct"``: between GPU and drive. ``"compat"``: KvikIO, through host memory. ``"posix"``: without KvikIO."""
    why: str


def missing() -> str | None:
    """What KvikIO lacks on this node, or None."""
    if importlib.util.find_spec("kvikio") is None:
        return "KvikIO is not installed"
    if cuda.load() is None:
        return "no CUDA driver (libcuda.so.1) with a device"
    try:
        import kvikio  # noqa: F401
    except Exception as error:  # a broken installation: what it raises depends on what is broken
        return f"KvikIO cannot be loaded: {error}"
    return None


def probe(directory: str | os.PathLike[str], device: int = 0) -> Mode:
    """Write, read back and compare a file in a directory through KvikIO, from GPU memory, and see which way it went.

    A success proves nothing about the way: KvikIO and cuFile both fall back without an error. So the file is opened
    with KvikIO's fallback forbidden, and "direct" needs the counters of nvidia-fs to have seen the bytes.
    """
    lacking = missing()
    if lacking is not None:
        return Mode("posix", lacking)
    driver = cuda.load()
    assert driver is not None
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".gdskv-probe-") as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
            if driver.double:
                return Mode(
                    "compat", f"hostdriver: a double of the CUDA driver; {_round(driver, device, file.name, 'ON')}"
                )
            before = nvidia_fs_bytes()
            try:
                result = _round(driver, device, file.name, "OFF")
            except RuntimeError as error:
                return Mode("compat", f"cuFile refuses the file: {reason(str(error))}")
            after = nvidia_fs_bytes()
    except (OSError, RuntimeError) as error:
        return Mode("posix", f"the probe failed: {reason(str(error))}")
    if before is not None and after is not None and after - before >= 2 * _PROBE:
        return Mode("direct", f"nvidia-fs, {result}")
    counted = "there is no nvidia-fs to count the bytes" if after is None else "nvidia-fs did not count the bytes"
    return Mode("compat", f"cuFile took the file, but {counted}: not proven direct")


def reason(message: str) -> str:
    """The part of a message of KvikIO that says what is wrong, without the place in its source."""
    short = re.sub(r"^.*?(error|failure) at: \S+: ", "", " ".join(message.split()))
    code = re.search(r"\b(50\d\d)\b", short)
    meaning = _CUFILE.get(code.group(1), "") if code else ""
    return f"{short} ({meaning})" if meaning else short


_CUFILE = {  # codes of cufile.h that users meet
    "5001": "nvidia-fs driver is not loaded",
    "5002": "invalid property in cufile.json",
    "5008": "GPU memory type not supported",
    "5011": "GPU not supported",
    "5026": "the GPU buffer is not registered",
    "5028": "cuFile I/O error",
    "5030": "cuFile cannot register files of this file system or mount",
}


def nvidia_fs_bytes(root: str = "/") -> int | None:
    """Bytes that nvidia-fs says it moved since it was loaded, reads and writes; None where it is not there.

    Its lines are such as ``Reads : n=63 ok=63 err=0 readMiB=63 io_state_err=0``: whole MiB.
    """
    try:
        text = Path(root, _STATS.lstrip("/")).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return sum(int(n) << 20 for n in re.findall(r"\b(?:read|write)MiB=(\d+)", text))


def _round(driver: cuda.Cuda, device: int, path: str, compat: str) -> str:
    """Write a pattern from device memory to a file and read it back; RuntimeError where KvikIO refuses or lies."""
    import kvikio
    import kvikio.defaults as defaults

    sent, back = ctypes.create_string_buffer(os.urandom(_PROBE), _PROBE), ctypes.create_string_buffer(_PROBE)
    settings = {"compat_mode": kvikio.CompatMode[compat], "gds_threshold": 0}
    with _device_memory(driver, device) as (stream, source, target):
        _copy(stream, source, ctypes.addressof(sent))
        with defaults.set(settings), kvikio.CuFile(path, "r+") as f:
            for call, address in ((f.pwrite, source), (f.pread, target)):
                if call(_Array(address), _PROBE, 0, _PROBE).get() != _PROBE:
                    raise RuntimeError("a transfer of the probe was short")
        _copy(stream, ctypes.addressof(back), target)
        if back.raw != sent.raw:
            raise RuntimeError("the probe read other bytes than it wrote")
    return f"verified {_PROBE >> 20} MiB"


class _Array:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (_PROBE,), "typestr": "|u1", "version": 3}


def _copy(stream: cuda.CopyStream, target: int, source: int) -> None:
    event = stream.start(target, source, _PROBE)
    while not stream.done(event):
        time.sleep(0.0001)


@contextlib.contextmanager
def _device_memory(driver: cuda.Cuda, device: int) -> Iterator[tuple[cuda.CopyStream, int, int]]:
    stream = cuda.CopyStream(driver, device, 1)
    try:
        with stream:
            base = driver.allocate(2 * _PROBE)
        try:
            yield stream, base, base + _PROBE
        finally:
            with stream:
                driver.free(base)
    finally:
        stream.close()
