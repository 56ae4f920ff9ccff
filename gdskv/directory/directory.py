"""``Directory``: the records of one slab, kept up to date through the I/O engine, and read back at the next open.

Knows its files beside the slab. Hands transfers to whoever owns the engine; waits for nothing once open.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.directory import records
from gdskv.directory.records import FILL, IDENTITY, PRESENT, REMEMBERED, STATE_RECORD
from gdskv.directory.superblock import HOUR, Superblock, read
from gdskv.errors import DirectoryError
from gdskv.io import tuning
from gdskv.io.base import Slab
from gdskv.io.crc import crc32c_bytes
from gdskv.pools.disk import SLAB_HEADER, DiskPool, preallocate, read_uuid, write_uuid

IDENTITIES, STATES = "slots.dir", "state.dir"
MEASURED = 1 << 30
"""Bytes of a slab from which on threads are chosen by measurement: it writes 64 MiB a few times over."""
HEADER = 4096
"""Bytes before the first record: the uuid of the slab that the records belong to."""


log = logging.getLogger(__name__)


class Recovery(NamedTuple):
    """What an open found in a directory."""

    path: Path
    blocks: NDArray[np.void]
    """dtype REMEMBERED; slots within the directory."""
    why: str
    """Why there is nothing, or why less than there was; empty if all is well."""
    clean: bool


class Directory:
    """Records of one directory's slab.

    Parameters
    ----------
    pool : DiskPool
    index : int
        Which of the pool's directories.
    fields : dict
        The namespace, readable.
    digest : bytes
    block_bytes : int
        Bytes of a payload.
    wall : int
        Wall clock, ns.
    trust_unclean : bool
        Go by the records although the last owner did not close: right with checksums only.
    sync : bool
        fsync at open and close, so that a power cut is never taken for a close.
    """

    def __init__(
        self,
        pool: DiskPool,
        index: int,
        fields: dict[str, str],
        digest: bytes,
        wall: int,
        *,
        trust_unclean: bool,
        sync: bool,
    ) -> None:
        info = pool.directories[index]
        self.folder = info.path / digest.hex()
        self.first, self.blocks = pool.first_slot[index], info.blocks
        self.slot_bytes = pool.slot_bytes
        self._sync = sync
        self._slab_fd = pool.slabs[index].fd
        old = read(self.folder)
        why = old if isinstance(old, str) else ""
        slab_fd = self._slab_fd
        if isinstance(old, Superblock):
            why = self._mismatch(old, digest, slab_fd, index, len(pool.directories))
            if not why and not old.clean and not trust_unclean:
                why = "not closed cleanly, and checksums are off"
        there = old.blocks if isinstance(old, Superblock) and not why else 0
        n = max(there, self.blocks)
        self.shrunk = there > self.blocks
        self._fds: list[int] = []
        try:
            for name, dtype in ((IDENTITIES, IDENTITY), (STATES, STATE_RECORD)):
                self._fds.append(self._open(self.folder / name, HEADER + n * dtype.itemsize, info.file_system))
        except BaseException:
            self._close_files()
            raise
        self._memory = [mmap.mmap(-1, max(1, n * d.itemsize)) for d in (IDENTITY, STATE_RECORD)]
        self.identities = np.frombuffer(self._memory[0], IDENTITY, n)
        self.states = np.frombuffer(self._memory[1], STATE_RECORD, n)
        blocks, fill, newest = np.zeros(0, REMEMBERED), 0, 0
        if isinstance(old, Superblock) and not why:
            self.superblock = old
            for fd, array in zip(self._fds, (self.identities, self.states), strict=True):
                _read_into(fd, array)
            blocks, fill, newest = records.remembered(self.identities[:there], self.states[:there], self.slot_bytes)
        else:
            name = uuid.uuid4().hex
            write_uuid(slab_fd, name)
            for fd in self._fds:
                os.pwrite(fd, name.encode().ljust(HEADER, b"\0"), 0)
                _zero(fd, HEADER)
            self.superblock = Superblock(
                digest.hex(), fields, self.slot_bytes, self.blocks, index, len(pool.directories), name
            )
            if isinstance(old, Superblock):
                self.superblock.bytes_written, self.superblock.bytes_read = old.bytes_written, old.bytes_read
                self.superblock.highest_wall, self.superblock.hours = old.highest_wall, old.hours
                self.superblock.write_errors, self.superblock.closures = old.write_errors, old.closures
        self._written: dict[int, int] = {}  # blocks written in each hour since the open
        self.wall = max(wall, self.superblock.highest_wall, newest)
        self.superblock.next_fill = max(self.superblock.next_fill, fill + 1)
        self.recovery = Recovery(info.path, blocks, why if why != "no superblock" else "", self.superblock.clean)

    def threads(self) -> tuple[int, int]:
        """Threads to read and to write with, measured where a large directory holds nothing yet; 0: not known."""
        s = self.superblock
        if not s.read_threads and not len(self.recovery.blocks) and self.blocks * self.slot_bytes >= MEASURED:
            try:
                found = tuning.measure(self._slab_fd, SLAB_HEADER)
            except OSError as error:
                log.warning("%s: threads could not be measured: %s", self.folder.parent, error)
            else:
                s.read_threads, s.write_threads = found.read, found.write
                log.info("%s: %d threads to read and %d to write, of %s", self.folder.parent, *found[:2], found[2:])
        return s.read_threads, s.write_threads

    def begin(self) -> None:
        """Mark the directory as in use, at its new size; from here on a crash is told from a close."""
        s = self.superblock
        s.blocks, s.clean, s.opened, s.highest_wall = self.blocks, False, self.wall, self.wall
        for fd, array in zip(self._fds, (self.identities, self.states), strict=True):
            os.ftruncate(fd, HEADER + self.blocks * array.dtype.itemsize)  # nothing is left of a larger past
        try:
            s.write(self.folder, sync=self._sync)
        except OSError as error:
            raise DirectoryError(
                f"{self.folder} cannot be written: {error.strerror}. Free some space, or make it writable."
            ) from error

    def slabs(self, lane: int) -> list[Slab]:
        """The record files as an engine sees them: identities, states."""
        return [Slab(fd, lane, False, os.fstat(fd).st_size) for fd in self._fds]

    def encode(self, changes: NDArray[Any], now_to_wall: int, now: int, tenants: NDArray[np.uint32]) -> None:
        """Bring the records in memory up to date with changes of this directory's slots."""
        s = self.superblock
        wall = now + now_to_wall
        s.highest_wall = max(s.highest_wall, wall)
        hour = s.highest_wall // HOUR
        filled = ((changes["what"] & FILL) != 0) & ((changes["flags"] & PRESENT) != 0)
        self._written[hour] = self._written.get(hour, 0) + int(np.count_nonzero(filled))
        s.next_fill = int(
            records.encode(
                changes,
                len(changes),
                self.first,
                s.next_fill,
                now_to_wall,
                wall,
                self.slot_bytes,
                tenants,
                self.identities,
                self.states,
            )
        )

    def records_at(self, state: bool) -> tuple[int, np.uint64, int]:
        """Offset in the file and address in memory of the first slot's record, and the length of each."""
        array = self.states if state else self.identities
        return HEADER, np.uint64(array.ctypes.data), array.dtype.itemsize

    def close(
        self,
        *,
        clean: bool,
        tenants: Sequence[str],
        written: int,
        read_: int,
        errors: int,
        closures: int,
        open_ns: int,
        curve: dict[str, str],
    ) -> None:
        """Say that everything is written, and let the files go."""
        s = self.superblock
        s.clean = clean
        s.write_errors += errors
        s.closures += closures
        s.tenants = sorted({*s.tenants, *(t for t in tenants if t)})
        s.bytes_written += written
        s.bytes_read += read_
        s.count_hours(self._written, written)
        s.last_written, s.last_ns, s.sizing_curve = written, max(1, open_ns), curve
        with contextlib.suppress(OSError):  # read-only by now, or gone: then it counts as not closed
            if self._sync:
                for fd in (self._slab_fd, *self._fds):
                    os.fdatasync(fd)
            s.write(self.folder, sync=self._sync)
        self._close_files()

    def abandon(self) -> None:
        """Let the files go as after a crash."""
        self._close_files()

    def _mismatch(self, old: Superblock, digest: bytes, slab_fd: int, index: int, of: int) -> str:
        if old.digest != digest.hex() or old.slot_bytes != self.slot_bytes:
            return "superblock is another namespace's"
        if (old.index, old.of) != (index, of):
            return f"it was directory {old.index + 1} of {old.of}, and is {index + 1} of {of} now"
        names = [read_uuid(slab_fd)]
        for name in (IDENTITIES, STATES):
            try:
                with open(self.folder / name, "rb") as file:
                    names.append(file.read(32).decode("ascii", "replace"))
            except OSError:
                return f"{name} is missing"
        if any(name != old.slab for name in names):
            return "slab and records do not belong together"
        return ""

    def _open(self, path: Path, size: int, file_system: str) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            preallocate(fd, size, path.parent.parent, file_system)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _close_files(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def open_directories(
    pool: DiskPool, fields: dict[str, str], digest: bytes, wall: int, *, trust_unclean: bool, sync: bool
) -> list[Directory]:
    """The records of all of a pool's directories."""
    out: list[Directory] = []
    try:
        for index in range(len(pool.directories)):
            out.append(Directory(pool, index, fields, digest, wall, trust_unclean=trust_unclean, sync=sync))
    except BaseException:
        for directory in out:
            directory.abandon()
        raise
    return out


def tenant_crc(name: str) -> int:
    """What stands for a tenant's name in a record; 0 for none."""
    return crc32c_bytes(name.encode()) if name else 0


def _read_into(fd: int, array: NDArray[np.void]) -> None:
    flat: Any = array.view(np.uint8)
    view = memoryview(flat)
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], HEADER + done)
        if got <= 0:
            break  # the file is shorter than it should be: the rest counts as empty
        done += got


def _zero(fd: int, start: int) -> None:
    """Zero a file from `start` on, keeping its length and its space."""
    size = os.fstat(fd).st_size
    chunk = bytes(1 << 20)
    for at in range(start, size, len(chunk)):
        os.pwrite(fd, chunk[: size - at], at)
