"""``jit``: Numba's ``njit`` with its compiled code kept on disk where that is possible.

Knows Numba only and must not import anything of the project, because ``table`` uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, overload

import numba

__all__ = ["jit"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def jit(function: F, /) -> F: ...


@overload
def jit(*, cache: bool = True, **options: Any) -> Callable[[F], F]: ...


def jit(function: F | None = None, /, *, cache: bool = True, **options: Any) -> F | Callable[[F], F]:
    """Compile a function with ``numba.njit``, cached on disk by default.

    Use it bare (``@jit``) or with the options of ``numba.njit`` (``@jit(nogil=True)``).

    Parameters
    ----------
    cache
        Keep the machine code beside the source, or in Numba's user cache. Where neither can be written, as in a
        read-only installation of a user without a home, the function is compiled anew in each process instead of
        failing at import.
    **options
        Handed to ``numba.njit``: ``nogil``, ``inline``, ``fastmath``, ``boundscheck``, ...
    """

    options.setdefault("no_cfunc_wrapper", True)  # nobody takes these functions' addresses: a tenth less to compile

    def decorate(target: F) -> F:
        if cache:
            try:
                return _once(_stamped(numba.njit(cache=True, **options)(target), target))  # type: ignore[no-any-return]
            except RuntimeError as error:  # Numba looks for a writable folder when it decorates
                if "cannot cache function" not in str(error):
                    raise
        return _once(numba.njit(**options)(target))  # type: ignore[no-any-return]

    return decorate if function is None else decorate(function)


def _stamped(dispatcher: Any, target: Callable[..., Any]) -> Any:
    """Let the cached code be out of date as soon as any file of the function's folder has changed: Numba looks at the
    function's own file only, and would go on running what it had inlined from a neighbour."""
    index: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(index, "_source_stamp"):
        folder = os.path.dirname(os.path.abspath(target.__code__.co_filename))
        index._source_stamp = (index._source_stamp, _stamp(folder))
    return dispatcher


@cache
def _stamp(folder: str) -> tuple[tuple[str, int, int], ...]:
    with os.scandir(folder) as files:
        return tuple(sorted((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.name.endswith(".py")))


def _once(dispatcher: Any) -> Any:
    """Have compiled callers hand over any signed or short integer, a literal one too, as int64.

    Numba would compile a callee anew for each mix of widths and each literal that it is called with, several times over
    in all, and most of the time of a first start is that.
    """
    template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: template(tuple(map(_plain, args)), kws)
    return dispatcher


def _plain(kind: Any) -> Any:
    types: Any = numba.types
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and (kind.signed or kind.bitwidth < 32) else kind
