"""Which slots have changed since they were last remembered, or told of: the cheap half of the journal and of events.

Called from everywhere. Knows the arrays only; what is made of a change is decided elsewhere.
"""

from __future__ import annotations

from gdskv._jit import jit

from .state import BASE, CAP, DISK, JOURNAL, JTAIL, NONE, TELLS, TTAIL, Arrays

# What is to be written of a slot, in `jf`; BUSY while it is being written.
FILL, STATE, BUSY = 1, 2, 4


@jit
def note(a: Arrays, g: int, what: int) -> None:
    """Something about disk slot `g` is to be remembered."""
    if a.m[JOURNAL] == 0:
        return
    k = g - a.m[BASE + DISK]
    f = a.jf[k]
    if f & (FILL | STATE) == 0:
        a.jr[a.m[JTAIL] % a.m[CAP + DISK]] = k
        a.m[JTAIL] += 1
    a.jf[k] = f | what


@jit
def note_state(a: Arrays, n: int) -> None:
    """Priority, deadline or use of entry `n` has changed."""
    g = a.e[n].slot[DISK]
    if g != NONE:
        note(a, g, STATE)


@jit
def tell(a: Arrays, g: int) -> None:
    """Slot `g` may serve another block than a listener knows of. A slot is queued once, so the ring cannot run over."""
    if a.m[TELLS] == 0 or a.tl[g].queued:
        return
    a.tl[g].queued = 1
    a.tq[a.m[TTAIL] % len(a.tq)] = g
    a.m[TTAIL] += 1
