"""gdskv: a KV-cache block manager with three tiers (GPU memory, host memory, local disk).

The public names and nothing else. Each is imported when it is first asked for, so that ``import gdskv`` stays quick
and needs neither CUDA nor an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdskv.config import CacheConfig, Sizing
    from gdskv.errors import (
        ConfigError,
        DirectoryBusy,
        DirectoryError,
        GdskvError,
        KeyFormatError,
        LayoutError,
        ModelError,
        RetentionError,
        StoreClosed,
        TraceError,
    )
    from gdskv.keys import block_keys, extend_keys, keys_from_hashes
    from gdskv.layout import KVLayout, Namespace
    from gdskv.manager import BlockManager, Matched, Request
    from gdskv.pools.pages import DevicePages
    from gdskv.retention import Retention, TokenRange
    from gdskv.store import Done, Found, KVStore, Rejected, Ticket

__version__ = "0.1.0"

_HOME = {
    "BlockManager": "manager",
    "CacheConfig": "config",
    "ConfigError": "errors",
    "DevicePages": "pools.pages",
    "DirectoryBusy": "errors",
    "DirectoryError": "errors",
    "Done": "store",
    "Found": "store",
    "GdskvError": "errors",
    "KVLayout": "layout",
    "KVStore": "store",
    "KeyFormatError": "errors",
    "LayoutError": "errors",
    "Matched": "manager",
    "ModelError": "errors",
    "Namespace": "layout",
    "Rejected": "store",
    "Request": "manager",
    "Retention": "retention",
    "RetentionError": "errors",
    "Sizing": "config",
    "StoreClosed": "errors",
    "Ticket": "store",
    "TokenRange": "retention",
    "TraceError": "errors",
    "block_keys": "keys",
    "extend_keys": "keys",
    "keys_from_hashes": "keys",
}

__all__ = [
    "BlockManager",
    "CacheConfig",
    "ConfigError",
    "DevicePages",
    "DirectoryBusy",
    "DirectoryError",
    "Done",
    "Found",
    "GdskvError",
    "KVLayout",
    "KVStore",
    "KeyFormatError",
    "LayoutError",
    "Matched",
    "ModelError",
    "Namespace",
    "Rejected",
    "Request",
    "Retention",
    "RetentionError",
    "Sizing",
    "StoreClosed",
    "Ticket",
    "TokenRange",
    "TraceError",
    "block_keys",
    "extend_keys",
    "keys_from_hashes",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'gdskv' has no attribute {name!r}")
    value = getattr(import_module(f"gdskv.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
