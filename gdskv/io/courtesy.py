"""Whether a calling thread is in one of our calls at this moment, so that I/O threads let it finish first.

Must not know who calls and what the threads do. One word for the whole process, seen without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

__all__ = ["IN_CALL", "in_call"]

IN_CALL = np.zeros(8, np.int64)
"""(8,) int64, a line of memory of its own; the first word is 1 while a call runs."""
_word = IN_CALL.data  # a write to it costs a third of one to the array

F = TypeVar("F", bound=Callable[..., Any])


def in_call(method: F) -> F:
    """Mark the time that a method takes. Of calls within calls, or in several threads, the first one counts."""

    @wraps(method)
    def marked(*arguments: Any, **named: Any) -> Any:
        if _word[0]:
            return method(*arguments, **named)
        _word[0] = 1
        try:
            return method(*arguments, **named)
        finally:
            _word[0] = 0

    return cast("F", marked)
