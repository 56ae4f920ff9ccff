"""What a replayed block must hold: words that follow from its key and their place, so that any mix-up is seen.

Knows keys and bytes only and must not know where a block lives.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from gdskv._jit import jit

Keys = npt.NDArray[np.uint64]

__all__ = ["Keys", "fill", "holds", "trace_keys"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)  # both from SplitMix64 (Steele, Lea, Flood 2014)
_SHIFT = np.uint64(29)


@jit
def _word(first: np.uint64, second: np.uint64, index: np.uint64) -> np.uint64:
    x: np.uint64 = (first + index * _GOLDEN) * _MIX
    word: np.uint64 = (x ^ (x >> _SHIFT)) + second
    return word


@jit
def _fill(words: npt.NDArray[np.uint64], first: np.uint64, second: np.uint64) -> None:
    for i in range(words.size):
        words[i] = _word(first, second, np.uint64(i))


@jit
def _differing(words: npt.NDArray[np.uint64], first: np.uint64, second: np.uint64) -> int:
    wrong = 0
    for i in range(words.size):
        wrong += words[i] != _word(first, second, np.uint64(i))
    return wrong


def fill(block: npt.NDArray[np.uint8], key: npt.NDArray[np.uint64]) -> None:
    """Write what the block of ``key`` must hold into ``block``, uint8[8 * n], in place."""
    _fill(block.view(np.uint64), key[0], key[1])


def holds(block: npt.NDArray[np.uint8], key: npt.NDArray[np.uint64]) -> bool:
    """Tell whether ``block``, uint8[8 * n], holds exactly what the block of ``key`` must hold."""
    return _differing(block.view(np.uint64), key[0], key[1]) == 0


def trace_keys(ids: Iterable[int], salt: bytes = b"gdskv replay") -> npt.NDArray[np.uint64]:
    """Return the 128-bit key of each hash id of a trace, uint64[n, 2].

    An id of these traces already names a whole prefix, so no chain is needed.
    """
    digests = b"".join(blake2b(int(i).to_bytes(8, "little"), digest_size=16, key=salt).digest() for i in ids)
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
