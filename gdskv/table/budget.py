"""The write budget: how many blocks may be written to disk now. Off unless it was given a rate.

A bucket of tokens, one a block, that fills with the table's time: in any hour no more is written than the hour's share
and what the bucket holds. A part of the bucket is for retained blocks alone. Reads no clock.
"""

from __future__ import annotations

from gdskv._jit import jit

from .learned import BURST, FILLED_AT, PER_NS, PRICE, TOKENS
from .state import NOW, Arrays

RESERVE = 0.25  # of the bucket, for retained blocks
STEP = 1.01  # by which the price goes up or down with a request
LEAST, MOST = 1e-3, 1e3  # price, in mean values of a block


@jit
def fill(a: Arrays) -> None:
    """Time has passed."""
    if a.lf[PER_NS] > 0.0:
        a.lf[TOKENS] = min(a.lf[BURST], a.lf[TOKENS] + (a.m[NOW] - a.lm[FILLED_AT]) * a.lf[PER_NS])
        a.lm[FILLED_AT] = a.m[NOW]


@jit
def affords(a: Arrays, spoken_for: int, kept: bool) -> bool:
    """May one more block be written, beside those spoken for? `kept`: it is retained."""
    if a.lf[PER_NS] == 0.0:
        return True
    return a.lf[TOKENS] - spoken_for - (0.0 if kept else RESERVE * a.lf[BURST]) >= 1.0


@jit
def spend(a: Arrays, n: int) -> None:
    """`n` blocks are written."""
    if a.lf[PER_NS] > 0.0:
        a.lf[TOKENS] -= n


@jit
def haggle(a: Arrays) -> None:
    """A request was asked: while the bucket is below half, a block must be worth more to be written, and else less."""
    if a.lf[PER_NS] > 0.0:
        low = a.lf[TOKENS] < 0.5 * (1.0 + RESERVE) * a.lf[BURST]
        a.lf[PRICE] = max(LEAST, min(MOST, a.lf[PRICE] * STEP if low else a.lf[PRICE] / STEP))
