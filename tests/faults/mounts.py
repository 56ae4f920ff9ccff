"""File systems of a test's own: images on loop devices, tmpfs, overlay. Needs root; a test that cannot mount skips."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20
MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}


def run(*command: object) -> None:
    """Run a command; the test skips where it cannot be."""
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def mounted(kind: str, root: Path, size: int = 320 * MIB) -> Iterator[Path]:
    """A file system of that kind, of about that size, below `root`."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    place = root / f"on-{kind}"
    place.mkdir()
    if kind == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", place)
    elif kind == "overlay":
        parts = [root / name for name in ("lower", "upper", "work")]
        for part in parts:
            part.mkdir()
        options = "lowerdir={},upperdir={},workdir={}".format(*parts)
        run("mount", "-t", "overlay", "-o", options, "overlay", place)
    else:
        image = root / f"{kind}.image"
        with open(image, "wb") as file:
            file.truncate(size)
        run(*MAKE[kind], image)
        run("mount", "-o", "loop", image, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
