"""The errors that gdskv raises: one small tree under :class:`GdskvError`.

Holds names only and must not import anything, so that every part may raise them.
Each message is one line that names the value that is wrong, the limit, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DirectoryBusy",
    "DirectoryError",
    "GdskvError",
    "KeyFormatError",
    "LayoutError",
    "ModelError",
    "RetentionError",
    "StoreClosed",
    "TraceError",
]


class GdskvError(Exception):
    """Everything that gdskv raises on purpose."""


class ConfigError(GdskvError, ValueError):
    """A setting has a wrong value, or two settings contradict each other."""


class LayoutError(GdskvError, ValueError):
    """A block's layout or its namespace is not possible."""


class KeyFormatError(GdskvError, ValueError):
    """Token ids, content ids or an engine's hashes cannot be turned into block keys."""


class RetentionError(GdskvError, ValueError):
    """A retention is not possible: a range, a priority or a ttl is wrong."""


class DirectoryError(GdskvError, OSError):
    """A directory of the disk tier cannot be used."""


class DirectoryBusy(DirectoryError):
    """A directory of the disk tier belongs to another live owner."""


class StoreClosed(GdskvError, RuntimeError):
    """A closed store or manager was called."""


class TraceError(GdskvError, ValueError):
    """A trace file cannot be read, or one of its lines is wrong."""


class ModelError(GdskvError, ValueError):
    """A path or an object is not a model that can be run."""
