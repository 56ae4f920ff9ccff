"""The superblock of a namespace in a directory: what the files beside it are, in words, and whether they were closed.

Knows one small file. Replaced as a whole, so it is the old one or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gdskv.errors import DirectoryError
from gdskv.io.crc import crc32c_bytes

NAME = "superblock"
FORMAT = 1
HOUR = 3600 * 10**9  # ns
HOURS = 24


@dataclass
class Superblock:
    """What is known of one namespace in one directory."""

    digest: str
    """Of the namespace, hex."""
    fields: dict[str, str]
    """The namespace, readable."""
    slot_bytes: int
    blocks: int
    """Slots of this directory's slab."""
    index: int
    """Place of this directory among those that were opened together."""
    of: int
    """How many these were."""
    slab: str
    """uuid of the slab; the slab and the records carry it too."""
    clean: bool = False
    """Closed with everything written."""
    opened: int = 0
    """Wall clock at the last open, ns."""
    highest_wall: int = 0
    """Latest wall clock seen, ns: a clock that steps back does not go below it."""
    next_fill: int = 1
    bytes_written: int = 0
    """Payload written over the directory's life, as of the last close."""
    bytes_read: int = 0
    read_threads: int = 0
    """What was measured when the directory was new; 0 if nothing was."""
    write_threads: int = 0
    write_errors: int = 0
    """Over the directory's life, as of the last close."""
    closures: int = 0
    """How often it turned read-only."""
    last_written: int = 0
    """Payload written between the last open and its close."""
    last_ns: int = 0
    """Wall-clock time between these, ns; 0 where nothing was closed yet."""
    sizing_curve: dict[str, str] = field(default_factory=dict)
    """Hit ratio at shares of the disk tier's size, as of the last close."""
    hours: dict[str, int] = field(default_factory=dict)
    """Payload written in each of the last hours, by the hour's number since 1970, as of the last close."""
    tenants: list[str] = field(default_factory=list)
    format: int = FORMAT

    def count_hours(self, blocks: dict[int, int], size: int) -> None:
        """`size` bytes were written, in proportion to the `blocks` written in each hour. Hours that no last day needs
        any more are dropped."""
        newest = self.highest_wall // HOUR
        total = sum(blocks.values())
        for hour, n in (blocks if total else {newest: 1}).items():
            self.hours[str(hour)] = self.hours.get(str(hour), 0) + size * n // max(1, total)
        self.hours = {hour: n for hour, n in self.hours.items() if n and int(hour) >= newest - HOURS}

    def written_last_day(self, now: int) -> int:
        """Bytes written in the 24 hours before `now`, ns since 1970; the hour at their start counts in part."""
        newest, into = divmod(now, HOUR)
        whole = sum(n for hour, n in self.hours.items() if int(hour) > newest - HOURS)
        return whole + self.hours.get(str(newest - HOURS), 0) * (HOUR - into) // HOUR

    def write(self, folder: Path, *, sync: bool) -> None:
        """Replace the file in `folder`."""
        body = json.dumps(asdict(self), sort_keys=True)
        text = f"{body}\n{crc32c_bytes(body.encode()):08x}\n"
        new = folder / (NAME + ".new")
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, folder / NAME)
        if sync:
            for place in (folder, folder.parent):  # the names, too, must survive a power cut
                fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)


def read(folder: Path) -> Superblock | str:
    """The superblock in a folder, or why there is none to go by.

    Raises
    ------
    DirectoryError
        It is of another format version.
    """
    path = folder / NAME
    with contextlib.suppress(OSError):
        (folder / (NAME + ".new")).unlink()  # of an owner that died while replacing it
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return "no superblock"
    except (OSError, UnicodeDecodeError) as error:
        return f"superblock cannot be read ({error})"
    return parse(text, path)


def parse(text: str, path: Path) -> Superblock | str:
    """Read a superblock's text; never raises on damage, only on another version."""
    body, _, rest = text.partition("\n")
    try:
        whole = int(rest.strip(), 16) == crc32c_bytes(body.encode())
        values = json.loads(body) if whole else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return "superblock is damaged"
    if values.get("format") != FORMAT:
        raise DirectoryError(
            f"{path} has format {values.get('format')}; this version reads {FORMAT}. "
            f"Clear it with: gdskv inspect {path.parent.parent} --clear"
        )
    try:
        found = Superblock(**values)
    except TypeError:
        return "superblock is damaged"
    return found if all(_sound(getattr(found, f.name), f.type) for f in fields(found)) else "superblock is damaged"


def _sound(value: object, kind: Any) -> bool:
    if kind == "int":
        return isinstance(value, int) and 0 <= value < 1 << 63
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    if kind == "dict[str, int]":
        pairs = value.items() if isinstance(value, dict) else [("", 0)]
        return all(name.isdecimal() and len(name) < 12 and _sound(n, "int") for name, n in pairs)
    return isinstance(value, {"str": str, "bool": bool, "dict[str, str]": dict}[kind])
