"""What a directory holds, read without owning it and without changing anything; and how a namespace leaves it.

Knows files and records; must not open a store.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.directory import records, superblock
from gdskv.directory.directory import HEADER, IDENTITIES, STATES
from gdskv.directory.records import IDENTITY, REMEMBERED, STATE_RECORD
from gdskv.directory.superblock import Superblock
from gdskv.errors import DirectoryError
from gdskv.pools.disk import SLAB_NAME, namespace_folders

__all__ = ["Held", "clear", "superblocks", "survey"]


class Held(NamedTuple):
    """A namespace in a directory."""

    folder: Path
    superblock: Superblock | None
    why: str
    """Why there is no superblock to go by; empty if there is one."""
    blocks: NDArray[np.void]
    """dtype REMEMBERED."""
    bytes: int
    """What its files take on the file system."""

    @property
    def opened(self) -> int:
        """Wall clock of the last open, ns; 0 if nobody knows."""
        return self.superblock.opened if self.superblock is not None else 0


def survey(directory: Path) -> list[Held]:
    """The namespaces in a directory, the most recently opened first.

    Raises
    ------
    DirectoryError
        It is no directory, or cannot be read.
    """
    try:
        held = [_held(folder) for folder in namespace_folders(directory)]
    except OSError as error:
        raise DirectoryError(
            f"{directory} cannot be read: {error.strerror}. Name a directory of the disk tier."
        ) from None
    return sorted(held, key=lambda one: (-one.opened, one.folder.name))


def superblocks(directory: Path) -> list[Superblock]:
    """The superblocks in a directory that can be read; none where there is no directory."""
    found = []
    with contextlib.suppress(OSError):
        for folder in namespace_folders(directory):
            with contextlib.suppress(OSError, UnicodeDecodeError, DirectoryError):
                path = folder / superblock.NAME
                found.append(superblock.parse(path.read_text(encoding="utf-8"), path))
    return [one for one in found if isinstance(one, Superblock)]


def clear(held: Held) -> None:
    """Remove a namespace's files. The directory's lock must be held."""
    shutil.rmtree(held.folder)


def _held(folder: Path) -> Held:
    size = 0
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            size += path.stat().st_blocks * 512
    nothing = np.zeros(0, REMEMBERED)
    try:
        text = (folder / superblock.NAME).read_text(encoding="utf-8")
        found = superblock.parse(text, folder / superblock.NAME)
    except DirectoryError as error:
        return Held(folder, None, str(error), nothing, size)
    except (OSError, UnicodeDecodeError):
        found = "no superblock that can be read"
    if isinstance(found, str):
        return Held(folder, None, found, nothing, size)
    identities = _records(folder / IDENTITIES, found.blocks, IDENTITY)
    states = _records(folder / STATES, found.blocks, STATE_RECORD)
    names = {
        (folder / name).open("rb").read(32) for name in (IDENTITIES, STATES, SLAB_NAME) if (folder / name).exists()
    }
    if names != {found.slab.encode()}:
        return Held(folder, found, "slab and records do not belong together", nothing, size)
    return Held(folder, found, "", records.remembered(identities, states, found.slot_bytes)[0], size)


def _records(path: Path, n: int, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Records of `n` slots; those that the file does not reach to are empty."""
    out = np.zeros(n, dtype)
    with contextlib.suppress(OSError):
        read = np.fromfile(path, dtype, n, offset=HEADER)
        out[: len(read)] = read
    return out
