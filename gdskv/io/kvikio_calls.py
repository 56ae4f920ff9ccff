"""KvikIO's own interface as the engine uses it: its settings, files, buffers, and what its errors mean.

Knows KvikIO only; must not know transfers. Importing it works without KvikIO.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from gdskv.io.base import Slab

__all__ = ["Buffer", "configure", "errno_of", "open_file"]

_ERRNO = {os.strerror(code): code for code in errno.errorcode}


class Buffer:
    """Memory as KvikIO takes it; the driver, not the interface, says whether it is of the host or of a device."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}


def configure(threads: int, bounce: int, direct_io: bool) -> None:
    """All of KvikIO's settings that gdskv needs, in one place. They are the process's.

    Parameters
    ----------
    threads
        What the pool must have at least, so that nothing handed over waits for a thread.
    bounce
        Bytes of a bounce buffer, one per thread in compatibility mode: a whole extent goes through in one step.
    direct_io
        Whether compatibility mode uses O_DIRECT, in both directions; KvikIO's default is only for writes.
    """
    import kvikio.defaults as defaults

    wanted: dict[str, Any] = {
        "gds_threshold": 0,  # below it KvikIO moves bytes on the calling thread
        "bounce_buffer_size": bounce,
        "auto_direct_io_read": direct_io or bool(defaults.get("auto_direct_io_read")),
        "auto_direct_io_write": True,
    }
    if threads > int(defaults.get("num_threads")):  # setting it waits for what runs, so only when it must
        wanted["num_threads"] = threads
    defaults.set(wanted)


def open_file(slab: Slab) -> Any:
    import kvikio

    try:
        return kvikio.CuFile(f"/proc/self/fd/{slab.fd}", "r+")
    except RuntimeError as error:
        raise OSError(errno_of(str(error)), f"KvikIO cannot open a slab: {error}") from None


def errno_of(message: str) -> int:
    """The errno in what KvikIO says of a failure; 0 for the end of the file, EIO for what has no errno.

    It writes ``POSIX error on pread: <strerror>``, ``CUDA error at: <place>: <name>(<meaning>)`` and
    ``cuFile error: <name>``; of CUDA's errors only the lack of memory has an errno of its own.
    """
    reason = message.strip().rpartition(": ")[2]
    if reason == "EOF":
        return 0
    if "POSIX error: Operation not permitted" in message:
        return errno.EBADF  # KvikIO's words for it
    if "OUT_OF_MEMORY" in message:
        return errno.ENOMEM
    return _ERRNO.get(reason, errno.EIO)
