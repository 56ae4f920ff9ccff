"""One owner for each directory: a lock that ends with its process, and says who holds it.

Knows files and processes; must not know what the directory is for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from gdskv.errors import DirectoryBusy, DirectoryError

__all__ = ["DirectoryLock"]

NAME = "gdskv.lock"

# A record lock of POSIX belongs to the process: a second open here would get it, and closing that would lose it.
_held: dict[tuple[int, int], int] = {}
"""(device, inode) of each directory that this process holds -> the process, so that a forked child does not count."""


class DirectoryLock:
    """Holds a directory for this process until `release`, or until the process ends in whatever way.

    Raises
    ------
    DirectoryBusy
        Another live process holds it, or this one does already.
    DirectoryError
        The lock file cannot be made: the directory cannot be written, or its file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        status = os.stat(directory)
        self._key = (status.st_dev, status.st_ino)
        self._owner = os.getpid()
        if _held.get(self._key) == self._owner:
            raise DirectoryBusy(f"{directory} is in use by this process already. {_REMEDY}")
        self._fd = self._acquire(directory)
        _held[self._key] = self._owner
        holder = {"pid": self._owner, "since": time.time(), "host": socket.gethostname(), "boot": _boot_id()}
        with contextlib.suppress(OSError):  # a full disk; the lock holds, others only cannot say who has it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(holder).encode(), 0)

    def _acquire(self, directory: Path) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise DirectoryError(
                    f"{directory} cannot be written: {error.strerror}. Make it writable, or choose another directory."
                ) from error
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                        return fd
            except OSError as error:
                holder = _who(fd)
                os.close(fd)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise DirectoryBusy(f"{directory} is in use by {holder}. {_REMEDY}") from None
                raise DirectoryError(
                    f"{directory} cannot be locked: {error.strerror}. Use a directory on a local file system."
                ) from error
            os.close(fd)  # its last owner removed the file between our open and our lock: take the new one

    def release(self) -> None:
        """Let the directory go and remove the lock file."""
        if _held.get(self._key) != self._owner or self._owner != os.getpid():
            return  # released before, or inherited by a forked child, which holds nothing
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._fd)
        del _held[self._key]


_REMEDY = "One process per directory: choose another, or stop that one."


def _who(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        since = time.localtime(holder["since"])
        form = "%H:%M" if since[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M"
        where = "" if holder["host"] == socket.gethostname() else f" on {holder['host']}"
        return f"process {holder['pid']}{where} since {time.strftime(form, since)}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written yet
        return "another process"


def _boot_id() -> str:
    """What tells this start of the machine from another; empty where the kernel does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
