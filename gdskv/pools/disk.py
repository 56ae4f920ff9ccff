"""The disk tier's files: one preallocated slab in each directory, cut into slots, with a hard cap checked at open.

Knows files and file systems; must not know which block is in which slot, nor move any bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gdskv.errors import DirectoryError
from gdskv.io.base import ALIGNMENT, Slab
from gdskv.pools.lock import DirectoryLock
from gdskv.units import format_size

__all__ = ["SLAB_NAME", "DirectoryInfo", "DiskPool"]

SLAB_NAME = "blocks.slab"
"""In ``<directory>/<namespace digest in hex>/``; what tells later processes about the slots will stand beside it."""

SLAB_HEADER = 4096
"""Bytes before the first slot: who the slab is, so that files that were swapped or mixed are noticed."""

_NAMESPACE = re.compile("[0-9a-f]{32}")
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}


class DirectoryInfo(NamedTuple):
    """What one directory of the pool got."""

    path: Path
    file_system: str
    mode: str
    """``"direct"`` (O_DIRECT) or ``"buffered"`` (through the page cache)."""
    why: str
    blocks: int
    bytes: int


class DiskPool:
    """Slots on disk, numbered through directory after directory.

    Space is taken at open and no more is ever used. A slab that an earlier owner left under the same namespace is used
    again, because a file that was written over before is faster than fresh extents; its content is not.

    Parameters
    ----------
    directories
        Where slabs go; each holds an equal share of the slots, give or take one.
    disk_bytes
        All slots together take at most that. A slab's header comes on top.
    slot_bytes
        Bytes of a slot, a multiple of 4096.
    digest
        The namespace's 16 bytes.
    min_free
        What must stay free on each file system: a share of it below 1, or bytes.

    Raises
    ------
    DirectoryError
        A directory is missing, is not one, cannot be written, has too little space, or cannot preallocate.
        Then nothing is left behind.
    DirectoryBusy
        A directory has another owner.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        disk_bytes: int,
        slot_bytes: int,
        digest: bytes,
        min_free: float | int = 0.05,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.blocks = disk_bytes // slot_bytes
        self.bytes_asked = disk_bytes
        self.bytes_used = self.blocks * slot_bytes
        paths = [Path(d) for d in directories]
        if self.blocks < len(paths) or not paths:
            raise DirectoryError(
                f"disk_bytes={format_size(disk_bytes)} is less than one block of {format_size(slot_bytes)} for each of "
                f"{len(paths)} directories. Raise disk_bytes to at least {len(paths) * slot_bytes}."
            )
        even, more = divmod(self.blocks, len(paths))
        shares = [even + (i < more) for i in range(len(paths))]
        self.first_slot: list[int] = [sum(shares[:i]) for i in range(len(paths))]
        """Number of the first slot of each slab."""
        self.slabs: list[Slab] = []
        self.directories: list[DirectoryInfo] = []
        self._owner = os.getpid()
        self._undo = contextlib.ExitStack()
        """Gives back what was taken on failure: files and folders that were made here."""
        self._locks: list[DirectoryLock] = []
        try:
            for path in paths:
                _check_directory(path)
                self._locks.append(DirectoryLock(path))
            files = [path / digest.hex() / SLAB_NAME for path in paths]
            _check_others(files, self.bytes_used, disk_bytes)
            _check_space(files, shares, slot_bytes, disk_bytes, min_free)
            for lane, (path, file, share) in enumerate(zip(paths, files, shares, strict=True)):
                self._open_slab(lane, path, file, share)
        except BaseException:
            for slab in self.slabs:
                os.close(slab.fd)
            self._undo.close()
            self._release()
            raise
        self._undo.pop_all()

    def locate(self, slot: int) -> tuple[int, int]:
        """Index of the slab that holds a slot, and the slot's offset in it, in bytes."""
        if not 0 <= slot < self.blocks:
            raise IndexError(f"slot {slot} is not among the disk pool's {self.blocks}")
        slab = max(i for i, first in enumerate(self.first_slot) if first <= slot)
        return slab, SLAB_HEADER + (slot - self.first_slot[slab]) * self.slot_bytes

    def trim(self) -> None:
        """Cut slabs that were larger under an earlier capacity, once what is worth keeping was moved."""
        for slab in self.slabs:
            if os.fstat(slab.fd).st_size > slab.size:
                os.ftruncate(slab.fd, slab.size)

    def close(self) -> None:
        """Close the files and let the directories go. Nothing may move any more. The slabs stay, for the next owner."""
        if self._owner != os.getpid():
            return  # a forked child: all of it belongs to the parent
        for slab in self.slabs:
            os.close(slab.fd)
        self.slabs = []
        self._release()

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks = []

    def _open_slab(self, lane: int, path: Path, file: Path, share: int) -> None:
        size = SLAB_HEADER + share * self.slot_bytes
        file_system = _file_system(path)
        try:
            if not file.parent.is_dir():
                file.parent.mkdir()
                self._undo.callback(_quietly, file.parent.rmdir)
            if file.exists():
                self._undo.callback(_quietly, os.truncate, file, min(size, file.stat().st_size))
            else:
                self._undo.callback(_quietly, file.unlink)
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryError(
                f"{file} cannot be opened: {error.strerror}. Make {path} writable, or choose another directory."
            ) from error
        self.slabs.append(Slab(fd, lane, False, size))
        preallocate(fd, size, path, file_system)
        direct, why = _try_direct(file, file_system)
        if direct is not None:
            os.close(fd)
            self.slabs[-1] = Slab(direct, lane, True, size)
        mode = "buffered" if direct is None else "direct"
        self.directories.append(DirectoryInfo(path, file_system, mode, why, share, size))


def _quietly(undo: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(OSError):  # the reason to undo is what the caller shall see
        undo(*arguments)


def _check_directory(path: Path) -> None:
    try:
        if path.is_dir():
            return
        missing = not path.exists()
    except OSError as error:
        raise DirectoryError(f"{path} cannot be looked at: {error.strerror}. Choose another directory.") from error
    if missing:
        raise DirectoryError(f"{path} does not exist. Create it (mkdir -p {path}), or choose another directory.")
    raise DirectoryError(f"{path} is not a directory. Name a directory; gdskv makes its files in it.")


def _check_space(files: list[Path], shares: list[int], slot_bytes: int, disk_bytes: int, min_free: float | int) -> None:
    """Refuse what does not fit, before anything is taken. Directories on one file system share its space."""
    groups: dict[int, list[int]] = {}
    for i, file in enumerate(files):
        groups.setdefault(os.stat(file.parent.parent).st_dev, []).append(i)
    most = disk_bytes
    refusal = ""
    for members in groups.values():
        path = files[members[0]].parent.parent
        system = os.statvfs(path)
        total = system.f_blocks * system.f_frsize
        kept = int(min_free * total) if min_free < 1 else int(min_free)
        reusable = sum(os.stat(files[i]).st_blocks * 512 for i in members if files[i].exists())
        free = system.f_bavail * system.f_frsize + reusable
        room = max(0, free - kept - len(members) * SLAB_HEADER)
        # All directories get an equal share, so the tightest file system limits the whole
        most = min(most, room // slot_bytes // len(members) * len(files) * slot_bytes)
        if sum(shares[i] for i in members) * slot_bytes > room:
            share = f"{100 * min_free:.3g}% ({format_size(kept)})" if min_free < 1 else format_size(kept)
            refusal = refusal or f"{path}: {format_size(free)} free, {share} must stay free"
    if refusal:
        remedy = f"Lower disk_bytes to at most {format_size(most)}, or" if most else "Free some space, or lower"
        raise DirectoryError(f"disk_bytes={format_size(disk_bytes)} does not fit {refusal}. {remedy} min_free.")


def _check_others(files: list[Path], own: int, disk_bytes: int) -> None:
    """Refuse where what other namespaces hold in these directories does not fit beside this one in `disk_bytes`."""
    held = {path: size for file in files for path in [file.parent.parent] if (size := _others(file))}
    if not held or own + sum(held.values()) <= disk_bytes:
        return
    path = next(iter(held))
    raise DirectoryError(
        f"disk_bytes={format_size(disk_bytes)} does not hold this namespace's {format_size(own)} beside the "
        f"{format_size(sum(held.values()))} of other namespaces in {', '.join(map(str, held))}. Use other directories, "
        f"or remove the one that was opened longest ago: gdskv inspect {path} --reclaim"
    )


def _others(file: Path) -> int:
    """Bytes of the slots of other namespaces in a slab's directory."""
    slabs = [folder / SLAB_NAME for folder in namespace_folders(file.parent.parent) if folder != file.parent]
    return sum(max(0, os.stat(slab).st_size - SLAB_HEADER) for slab in slabs if slab.exists())


def namespace_folders(directory: Path) -> list[Path]:
    """Folders of namespaces in a directory: named by a digest of 16 bytes."""
    return [path for path in directory.iterdir() if _NAMESPACE.fullmatch(path.name) and path.is_dir()]


def preallocate(fd: int, size: int, path: Path, file_system: str) -> None:
    """Take the space with fallocate(2), whose absence shows; posix_fallocate of glibc would write all bytes instead."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        why = ctypes.get_errno()
        if why == errno.EINTR:
            continue
        if why in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise DirectoryError(
                f"{path} is on {file_system}, which cannot preallocate a file. Use a directory on ext4 or xfs."
            )
        raise DirectoryError(
            f"{path} did not give {format_size(size)}: {os.strerror(why)}. Lower disk_bytes, or free some space."
        )


def read_uuid(fd: int) -> str:
    """What a slab says it is; 32 characters."""
    with mmap.mmap(-1, SLAB_HEADER) as page:
        os.preadv(fd, [page], 0)
        return bytes(page[:32]).decode("ascii", "replace")


def write_uuid(fd: int, name: str) -> None:
    """Let a slab say what it is; 32 characters."""
    with mmap.mmap(-1, SLAB_HEADER) as page:
        page[:32] = name.encode("ascii")
        os.pwritev(fd, [page], 0)


def _try_direct(file: Path, file_system: str) -> tuple[int | None, str]:
    """Open with O_DIRECT and prove it: write a page at the start and read it back. None where that does not work.

    A page that says who the slab is gets the same bytes again, so that a process killed meanwhile does not spoil it."""
    if file_system in _IN_MEMORY:
        return None, f"{file_system} keeps files in memory"
    try:
        fd = os.open(file, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return None, f"{file_system} does not open files with O_DIRECT ({error.strerror})"
    with mmap.mmap(-1, 3 * ALIGNMENT) as pages, memoryview(pages) as view:
        kept, written, read = (view[i : i + ALIGNMENT] for i in range(0, 3 * ALIGNMENT, ALIGNMENT))
        try:
            moved = [os.preadv(fd, [kept], 0)]
            written[:] = kept if any(kept) else os.urandom(ALIGNMENT)
            moved += [os.pwritev(fd, [written], 0), os.preadv(fd, [read], 0), os.pwritev(fd, [kept], 0)]
            good = moved == [ALIGNMENT] * 4 and read == written
            why = "" if good else "a page reads back as it was not written"
        except OSError as error:
            why = str(error.strerror)
        finally:
            for part in (kept, written, read):
                part.release()
    if not why:
        return fd, "verified by writing and reading a page"
    os.close(fd)
    return None, f"O_DIRECT on {file_system} fails: {why}"


def _file_system(path: Path) -> str:
    """Type of the file system that holds a directory: ``ext4``, ``xfs``, ``tmpfs``, ..."""
    best, name = "", "an unknown file system"
    here = str(path.resolve()) + "/"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            mount, _, system = line.partition(" - ")
            point = mount.split()[4].replace("\\040", " ").rstrip("/") + "/"
            if here.startswith(point) and len(point) >= len(best):
                best, name = point, system.split()[0]
    return name
