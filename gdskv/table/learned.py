"""The arrays of what is learned of reuse, of the lists by value and of the shadow caches: records, sizes, places.

Data only: `learn`, `byvalue` and `shadow` are the functions over it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# A block's class, set anew each time it is asked: uses before (0, 1, 2-3, 4 or more) x new blocks of the request, in
# steps of 2^(2/3) x a bit (see `learn.class_of`); and one for the last block of a prompt, never used before.
USES, SIZES = 4, 11
LAST = USES * SIZES * 2
CLASSES = LAST + 1
ALL = USES + 1  # among the groups of classes: one per use count, one for LAST, and all together
BUCKETS = 40  # of age, two an octave
BINS = 64  # of value, four an octave
MIDDLE = 32  # bin of the mean value

MOVES = 16  # blocks found to stand in another list than they should, per victim
HAND = 8  # slots looked at again per block asked
REFUSE = 1.4  # a block enters if its value exceeds the victim's by this factor
REFUSE_SPILL = 3.5  # the same of a block that leaves memory, where it had its chance

SAMPLES = 16384  # keys followed
LEAST_SHIFT = 2  # of so many bits of a key's hash that have to be zero; more where the table is larger
COVER = 3  # times the capacity for which the followed keys have to stand
LEAST_GHOSTS = 65536  # keys remembered that are not there; a table's entries, if those are more

# Scalars of the learner, in `lm`. TRUST: the order by value is ahead of that by last use. PUT_OFF: blocks asked
# from which is still to be learned; FOUND: those of them that were there; SAMPLED: those in the sample of the shadows.
ASKED, REQUESTS, SHIFT, WATCH_HAND, CLASS_HAND, SAME_KEY, SAME_LENGTH, TRUST, FILLED_AT = range(9)
PUT_OFF, FOUND, SAMPLED, LM_SIZE = range(9, 13)
# Real numbers, in `lf`. TOKENS to PRICE are the write budget's: blocks that may be written now, those that come per ns,
# the most that are kept, and what a block must be worth to be written, in mean values.
MEAN, LEAD, SPAN, BAR, TOKENS, PER_NS, BURST, PRICE, LF_SIZE = range(9)

WATCH = np.dtype(
    [
        ("key", "<u8"),  # its hash; 0 = empty
        ("last", "<i8"),  # when it was asked last
        ("paid", "<i8"),  # age up to which its time has been counted
        ("klass", "<i8"),
    ]
)

WORTH = np.dtype([("asked", "<u4"), ("uses", "<u2"), ("klass", "u1"), ("_", "u1")])  # per entry
PLACE = np.dtype(
    [("prev", "<i4"), ("next", "<i4"), ("asked", "<u4"), ("where", "<i2"), ("klass", "u1"), ("_", "u1")]
)  # per slot: where it stands in the lists by value (priority list * BINS + bin, or NONE), and by what

# Scalars of each shadow, in `sm`.
S_FIRST, S_CAP, S_FREE, S_HAND, S_LRU, S_HITS, S_ASKED, S_SIZE = range(8)
SHADOW = np.dtype(
    [
        ("key", "<u8"),
        ("last", "<i8"),
        ("parent", "<i4"),
        ("kids", "<i4"),
        ("prev", "<i4"),  # by value
        ("next", "<i4"),
        ("before", "<i4"),  # by last use
        ("after", "<i4"),
        ("same", "<i4"),  # next block of the same hash bucket, or next free one
        ("where", "<i2"),  # list by value; NONE: not a leaf
        ("klass", "u1"),
        ("used", "u1"),  # 0 free, 1 listed, 2 in the request's hands
    ],
    align=True,
)
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # sizes of which the curve tells, as shares of what there is
OWN = 2  # place of 1.0 among them
RIVAL = len(SCALES)  # one more shadow of the table's own size, by last use
SHADOW_BLOCKS = 1024  # of the shadow of the table's own size, at most
NOTES = 8192  # keys of a request that are noted, to learn from them later
SHADOW_KEYS = 8192  # sampled keys of one request, at most


def new_learned(learns: bool, sizes: tuple[int, ...], lists: int) -> dict[str, NDArray[Any]]:
    """Arrays for tiers of `sizes` blocks; of length 1 where they are not used."""
    total = sum(sizes)
    one = 1 if learns else 0
    shift = LEAST_SHIFT
    while SAMPLES << shift < COVER * total:
        shift += 1
    lm = np.zeros(LM_SIZE, np.int64)
    lm[SHIFT] = shift
    lf = np.zeros(LF_SIZE)
    lf[MEAN], lf[PRICE] = 1e-9, 0.1
    ghosts = max(LEAST_GHOSTS, 1 << (total - 1).bit_length()) if learns else 4
    places = np.zeros(total + 1 if learns else 1, PLACE)
    places["where"] = places["prev"] = places["next"] = -1
    return {
        "lm": lm,
        "lf": lf,
        "lx": np.zeros((CLASSES, BUCKETS)),
        "lh": np.zeros((CLASSES, BUCKETS)),
        "lv": np.zeros((CLASSES, BUCKETS)),
        "lb": np.full((CLASSES, BUCKETS), MIDDLE, np.uint8),
        "ls": np.zeros((ALL + 1, 2, BUCKETS)),
        "lw": np.zeros(SAMPLES * one or 1, WATCH),
        "lg": np.zeros(ghosts, np.uint64),
        "w": np.zeros(total + 1 if learns else 1, WORTH),
        "b": places,
        "be": np.full((3 * lists if learns else 1, BINS, 2), -1, np.int32),
        "bb": np.zeros(3 * lists if learns else 1, np.uint64),
        "hand": np.zeros(3, np.int64),
        "nk": np.zeros((NOTES, 2), np.uint64),
        "ne": np.zeros(NOTES, np.int32),
        **new_shadows(sizes, learns),
    }


KEPT = ("lx", "lh", "lv", "lb", "ls")  # arrays that outlive the process, with MEAN and REQUESTS
SHAPE = CLASSES << 16 | BUCKETS << 8 | BINS  # tells kept arrays of one layout from those of another


def to_bytes(a: Any) -> bytes:
    """What was learned."""
    numbers = np.array([a.lf[MEAN], a.lm[REQUESTS]], np.float64)
    return b"".join([numbers.tobytes(), *(getattr(a, name).tobytes() for name in KEPT)])


def from_bytes(a: Any, content: bytes) -> bool:
    """Go on from what an earlier table has learned; False, and nothing is changed, if those cannot be its numbers."""
    at, found = 16, {}
    for name in KEPT:
        mine = getattr(a, name)
        part = content[at : at + mine.nbytes]
        if len(part) != mine.nbytes:
            return False
        found[name] = np.frombuffer(part, mine.dtype).reshape(mine.shape)
        at += mine.nbytes
    mean, requests = np.frombuffer(content[:16], np.float64)
    sound = at == len(content) and mean > 0 and 0 <= requests < 2**53 and (found["lb"] < BINS).all()
    if not sound or not all(np.isfinite(part).all() and (part >= 0).all() for part in found.values()):
        return False
    for name, part in found.items():
        getattr(a, name)[:] = part
    a.lf[MEAN], a.lm[REQUESTS] = mean, int(requests)
    return True


def new_shadows(sizes: tuple[int, ...], learns: bool) -> dict[str, NDArray[Any]]:
    """Shadows of tiers of `sizes` blocks, by the order that there is, and the rival by last use. What is scaled is the
    disk tier, or all of memory where there is none."""
    total, shift = sum(sizes), 0
    fixed = total - sizes[-1] if sizes[-1] else 0
    while total >> shift > SHADOW_BLOCKS:
        shift += 1
    caps = [max(1, (fixed + int((total - fixed) * scale)) >> shift) for scale in SCALES]
    if learns:
        caps.append(max(1, total >> shift))
    sm = np.zeros((len(caps), S_SIZE), np.int64)
    sb = np.zeros(sum(caps), SHADOW)
    sb["where"] = -1
    first = 0
    for m, cap in enumerate(caps):
        sm[m, [S_FIRST, S_CAP, S_FREE, S_LRU]] = first, cap, first, not learns or m == RIVAL
        sb["same"][first : first + cap] = np.arange(first + 1, first + cap + 1)
        first += cap
        sb["same"][first - 1] = -1
    return {
        "sm": sm,
        "sb": sb,
        "se": np.full((len(caps), BINS + 1, 2), -1, np.int32),
        "sx": np.full(2 * len(sb), -1, np.int32),
        "sk": np.zeros(SHADOW_KEYS, np.uint64),
        "sc": np.zeros(SHADOW_KEYS, np.int32),
        "sp": np.zeros(SHADOW_KEYS, np.int32),
        "sh": np.full(1, shift, np.int64),
    }
