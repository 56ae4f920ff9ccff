"""What the adapters of several engines take from settings and requests alike.

Knows text, files and numbers only; must not import an engine.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

from gdskv.retention import Retention, TokenRange

__all__ = ["digest", "files_digest", "retention_of"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")


def files_digest(path: str) -> str:
    """What tells two states of a local model or adapter apart: names, sizes and times of its files. Empty if `path` is
    no directory here."""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    files = sorted(f for f in folder.iterdir() if f.suffix in _WEIGHTS)
    return digest("\n".join(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files))


def digest(text: str) -> str:
    """32 hexadecimal digits."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


def retention_of(params: Any) -> Retention | None:
    """A request's retention, from ``params["gdskv"]`` of the parameters that an engine passes through.

    The names are those of `Retention`; `ranges` is a list of objects with the names of `TokenRange`.

    Raises
    ------
    RetentionError, TypeError
        A value is wrong, or a name is not known.
    """
    wish = (params or {}).get("gdskv")
    if not wish:
        return None
    wish = dict(wish)
    if "ranges" in wish:
        wish["ranges"] = tuple(TokenRange(**part) for part in wish["ranges"])
    return Retention(**wish)
