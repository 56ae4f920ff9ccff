"""What a table has learned of reuse, kept beside the records of the first directory for the next open.

Knows one small file of numbers, replaced as a whole. What is damaged or of another version is not used.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from gdskv.io.crc import crc32c_bytes

__all__ = ["NAME", "VERSION", "load", "save"]

NAME = "learned"
VERSION = 1
_HEADER = struct.Struct("<8sIIII")  # magic, version, shape, length, CRC-32C of the rest
_MAGIC = b"gdskvlrn"


def save(folder: Path, shape: int, content: bytes) -> bool:
    """Replace the file; False if it could not be written, and then the older one stays.

    Parameters
    ----------
    folder
        Of the namespace in the first directory.
    shape
        Number that tells tables of one layout from those of another.
    content
        The numbers.
    """
    new = folder / (NAME + ".new")
    header = _HEADER.pack(_MAGIC, VERSION, shape, len(content), crc32c_bytes(content))
    try:
        new.write_bytes(header + content)
        os.replace(new, folder / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        return False
    return True


def load(folder: Path, shape: int) -> bytes | str:
    """The numbers, or why there are none to use; empty if none were ever saved."""
    with contextlib.suppress(OSError):
        (folder / (NAME + ".new")).unlink()  # of an owner that died while replacing it
    try:
        data = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(data) < _HEADER.size:
        return "is cut short"
    magic, version, layout, length, crc = _HEADER.unpack_from(data)
    content = data[_HEADER.size :]
    if magic != _MAGIC or (version, layout) != (VERSION, shape):
        return "is of another version"
    if len(content) != length or crc32c_bytes(content) != crc:
        return "is damaged"
    return content
