"""The arrays of the block table: what each record holds, and how an empty table is laid out.

Knows nothing else of the project: keys, slots and nanoseconds are all it sees. One calling thread owns all arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from . import learned
from .handle import LENGTH, Field, Handle

DEVICE, HOST, DISK = 0, 1, 2
TIERS = ("device", "host", "disk")
NONE = -1

# State of a block in a tier. A slot that has been given away needs no state of its own: the counters in SLOT hold
# back whatever would overwrite bytes that are still being read (see moves.py).
ABSENT, FILLING, READY = 0, 1, 2

# Flags of an entry.
ROOT, FORGET, MARK, COUNTED = 1, 2, 4, 8  # COUNTED: in the budget of retained blocks

# Where a slot stands in its tier's order of eviction.
UNLISTED, HELD, HEAP = -1, -2, -3  # leased or free; waiting for its children to leave; by deadline
FIRST = 0  # list of what leaves first: expired under "forget", orphans
LISTS = 102  # FIRST, then one list a priority 0..100
DEFAULT_PRIORITY = 35

ENTRY = np.dtype(
    [
        ("k0", "<u8"),
        ("k1", "<u8"),
        ("deadline", "<i8"),  # effective, ns; 0 = none; never below that of a descendant
        ("last", "<i8"),  # table clock at the last use; no two are equal, and a parent's is later than its child's
        ("parent", "<i4"),  # entry, or NONE
        ("slot", "<i4", (3,)),  # per tier, or NONE
        ("state", "u1", (3,)),
        ("priority", "u1"),  # effective
        ("uses", "<u4"),
        ("gen", "<u4"),  # of this record: a transfer or a lease from an earlier life does not touch it
        ("flags", "<u4"),
    ],
    align=True,
)  # one cache line: all that a match reads

LINK = np.dtype(
    [
        ("own_deadline", "<i8"),
        ("child", "<i4"),  # first child
        ("next", "<i4"),  # siblings
        ("prev", "<i4"),
        ("kids", "<i4", (3,)),  # children with a slot in the tier
        ("own_priority", "u1"),
        ("firm", "u1"),  # effective priority once deadlines have passed; never below a child's
        ("tenant", "<u2"),
    ],
    align=True,
)  # what a match does not read

SLOT = np.dtype(
    [
        ("entry", "<i4"),  # NONE: free, quarantined, or in a request's hands before its commit
        ("lease", "<i4"),
        ("prev", "<i4"),
        ("next", "<i4"),
        ("where", "<i4"),
        ("pos", "<i4"),  # place in the heap
        # The scoreboard: writes and reads of this slot issued and done. A transfer starts when those issued before
        # it that it depends on are done; so slots change hands at once and bytes still move in order.
        ("wi", "<u4"),
        ("wd", "<u4"),
        ("ri", "<u4"),
        ("rd", "<u4"),
        ("bad_w", "<u4"),  # number of the last write that failed
        ("crc", "<u4"),
        ("retry_at", "<i8"),  # ns; a transient read error keeps the block away until then
        ("fails", "<u4"),
        ("state", "<u4"),  # 0 free, 1 taken, 2 quarantined
    ],
    align=True,
)
FREE, TAKEN, QUARANTINED = 0, 1, 2

# What a transfer does. The store turns it into addresses and extents.
DEVICE_TO_HOST, HOST_TO_DEVICE, DISK_TO_DEVICE, DISK_TO_HOST, HOST_TO_DISK, DEVICE_TO_DISK = range(6)
HOST_TO_CALLER, DISK_TO_CALLER, CALLER_TO_HOST, CALLER_TO_DISK = range(6, 10)

XFER = np.dtype(
    [
        ("address", "<u8"),  # the caller's memory, for the last four kinds
        ("kind", "<i4"),
        ("src", "<i4"),  # slot over all tiers, or NONE
        ("dst", "<i4"),
        ("entry", "<i4"),
        ("gen", "<u4"),
        ("w_src", "<u4"),  # writes of the source that must be done
        ("w_dst", "<u4"),  # writes and reads of the destination that must be done
        ("r_dst", "<u4"),
        ("w_no", "<u4"),  # number of this write of the destination
        ("ticket", "<i4"),
        ("index", "<i4"),  # block within the ticket
        ("state", "<u2"),  # 0 free, 1 deferred, 2 launched
        ("cancelled", "<u2"),
    ],
    align=True,
)
X_FREE, X_DEFERRED, X_LAUNCHED = 0, 1, 2

# Scalars of the table, in `meta`. Entries ending in _3 are one a tier.
META = (
    "cap_3 base_3 wbase_3 sbase_3 hbase_3 free_3 region_3 regions_3 turn_3 heap_3 listed_3 leased_3 bad_3 used_3 "
    "ents ixmask clock now xcap xfree xdef orph_head orph_tail launched writing write_limit spill "
    "retry_ns grace_ns checks clean_window protect badrows xkeep retained retained_limit tenant_limit "
    "stripe journal jhead jtail to_clean clean_now by_value_3 learns bars_priority tells thead ttail"
).split()


def _places() -> dict[str, int]:
    at, out = 0, {}
    for name in META:
        width = 3 if name.endswith("_3") else 1
        out[name.removesuffix("_3").upper()] = at
        at += width
    out["SIZE"] = at
    return out


_P = _places()
CAP, BASE, WBASE, SBASE, HBASE = _P["CAP"], _P["BASE"], _P["WBASE"], _P["SBASE"], _P["HBASE"]
NFREE, NHEAP, NLISTED = _P["FREE"], _P["HEAP"], _P["LISTED"]
BY_VALUE, LEARNS, BARS_PRIORITY = _P["BY_VALUE"], _P["LEARNS"], _P["BARS_PRIORITY"]
JOURNAL, JHEAD, JTAIL = _P["JOURNAL"], _P["JHEAD"], _P["JTAIL"]
TO_CLEAN, CLEAN_NOW = _P["TO_CLEAN"], _P["CLEAN_NOW"]
TELLS, THEAD, TTAIL = _P["TELLS"], _P["THEAD"], _P["TTAIL"]
REGION0, NREGIONS, TURN, STRIPE = _P["REGION"], _P["REGIONS"], _P["TURN"], _P["STRIPE"]
NLEASED, NBAD, NUSED = _P["LEASED"], _P["BAD"], _P["USED"]
NENTS, IXMASK, CLOCK, NOW = _P["ENTS"], _P["IXMASK"], _P["CLOCK"], _P["NOW"]
XCAP, NXFREE, NXDEF, ORPH_HEAD, ORPH_TAIL = _P["XCAP"], _P["XFREE"], _P["XDEF"], _P["ORPH_HEAD"], _P["ORPH_TAIL"]
NLAUNCHED, NWRITING, WRITE_LIMIT, SPILL = _P["LAUNCHED"], _P["WRITING"], _P["WRITE_LIMIT"], _P["SPILL"]
RETRY_NS, GRACE_NS, CHECKS, CLEAN_WINDOW, PROTECT, NBADROWS, XKEEP, NRETAINED, RETAINED_LIMIT, TENANT_LIMIT = (
    _P["RETRY_NS"],
    _P["GRACE_NS"],
    _P["CHECKS"],
    _P["CLEAN_WINDOW"],
    _P["PROTECT"],
    _P["BADROWS"],
    _P["XKEEP"],
    _P["RETAINED"],
    _P["RETAINED_LIMIT"],
    _P["TENANT_LIMIT"],
)

SPILL_ALL, SPILL_REUSED, SPILL_RETAINED, SPILL_LEARNED = range(4)

# Counters, in `count`; each is a metric of the same name.
COUNTERS = (
    "matched_device matched_host matched_disk committed duplicates offloads onboards_host onboards_disk prefetches "
    "spills cleaned dropped_clean dropped_unworthy dropped_last shed_queue shed_no_slot "
    "evicted_device evicted_host evicted_disk "
    "expired forgotten orphaned adopted rejected failed_reads failed_writes failed_copies bad_payloads "
    "transient_errors quarantined lost joined retained_writes refused_protected over_budget recovered stale_slots "
    "refused_by_value refused_by_budget refused_by_budget_retained"
).split()
(
    C_MATCHED,
    _,
    _,
    C_COMMITTED,
    C_DUPLICATES,
    C_OFFLOADS,
    C_ONBOARDS_HOST,
    C_ONBOARDS_DISK,
    C_PREFETCHES,
    C_SPILLS,
    C_CLEANED,
    C_DROPPED_CLEAN,
    C_DROPPED_UNWORTHY,
    C_DROPPED_LAST,
    C_SHED_QUEUE,
    C_SHED_NO_SLOT,
    C_EVICTED,
    _,
    _,
    C_EXPIRED,
    C_FORGOTTEN,
    C_ORPHANED,
    C_ADOPTED,
    C_REJECTED,
    C_FAILED_READS,
    C_FAILED_WRITES,
    C_FAILED_COPIES,
    C_BAD_PAYLOADS,
    C_TRANSIENT,
    C_QUARANTINED,
    C_LOST,
    C_JOINED,
    C_RETAINED_WRITES,
    C_REFUSED_PROTECTED,
    C_OVER_BUDGET,
    C_RECOVERED,
    C_STALE,
    C_REFUSED_BY_VALUE,
    C_REFUSED_BY_BUDGET,
    C_REFUSED_BY_BUDGET_RETAINED,
) = range(len(COUNTERS))

REGION = np.dtype(
    [
        ("first", "<i8"),  # slot within the tier
        ("end", "<i8"),
        ("cursor", "<i8"),  # where the last run ended
        ("free", "<i8"),
        ("closed", "<i8"),  # 1: its free slots are not handed out
    ]
)  # a tier is one region; the disk tier one per directory

TOLD = np.dtype(
    [
        ("k0", "<u8"),
        ("k1", "<u8"),
        ("known", "u1"),  # 1: a listener was told that this key is in this slot's tier
        ("queued", "u1"),
    ],
    align=True,
)

ORPHAN = np.dtype([("due", "<i8"), ("entry", "<i4"), ("gen", "<u4")])
TENANTS = 4096  # told apart in the budget; later ones share the last place
ORPHANS = 4096  # waiting out their grace; one more goes to FIRST at once
UNVERIFIED = 0x80000000  # in SLOT.fails: recovered, and not read since
QUARANTINE_AFTER = 3  # transient errors of one slot


# What compiled code may take from Arrays, by the same names.
HANDLE = Handle(
    (
        Field("m", np.int64, (LENGTH,)),
        Field("c", np.int64, (LENGTH,)),
        Field("e", ENTRY, (LENGTH,)),
        Field("l", LINK, (LENGTH,)),
        Field("estack", np.int32, (LENGTH,)),
        Field("ix", np.uint64, (LENGTH,)),
        Field("s", SLOT, (LENGTH,)),
        Field("ends", np.int32, (3, LISTS, 2)),
        Field("bits", np.uint64, (3, 2)),
        Field("heap", np.int32, (LENGTH,)),
        Field("fw", np.uint64, (LENGTH,)),
        Field("fs", np.uint64, (LENGTH,)),
        Field("x", XFER, (LENGTH,)),
        Field("xstack", np.int32, (LENGTH,)),
        Field("xdef", np.int32, (LENGTH,)),
        Field("orph", ORPHAN, (LENGTH,)),
        Field("ten", np.int64, (LENGTH,)),
        Field("jr", np.int32, (LENGTH,)),
        Field("jf", np.uint8, (LENGTH,)),
        Field("rg", REGION, (LENGTH,)),
        Field("tl", TOLD, (LENGTH,)),
        Field("tq", np.int32, (LENGTH,)),
        Field("tmp", np.int32, (4, LENGTH)),
        Field("lm", np.int64, (learned.LM_SIZE,)),
        Field("lf", np.float64, (learned.LF_SIZE,)),
        Field("lx", np.float64, (learned.CLASSES, learned.BUCKETS)),
        Field("lh", np.float64, (learned.CLASSES, learned.BUCKETS)),
        Field("lv", np.float64, (learned.CLASSES, learned.BUCKETS)),
        Field("lb", np.uint8, (learned.CLASSES, learned.BUCKETS)),
        Field("ls", np.float64, (learned.ALL + 1, 2, learned.BUCKETS)),
        Field("lw", learned.WATCH, (LENGTH,)),
        Field("lg", np.uint64, (LENGTH,)),
        Field("w", learned.WORTH, (LENGTH,)),
        Field("b", learned.PLACE, (LENGTH,)),
        Field("be", np.int32, (LENGTH, learned.BINS, 2)),
        Field("bb", np.uint64, (LENGTH,)),
        Field("hand", np.int64, (3,)),
        Field("nk", np.uint64, (learned.NOTES, 2)),
        Field("ne", np.int32, (learned.NOTES,)),
        Field("sm", np.int64, (LENGTH, learned.S_SIZE)),
        Field("sb", learned.SHADOW, (LENGTH,)),
        Field("se", np.int32, (LENGTH, learned.BINS + 1, 2)),
        Field("sx", np.int32, (LENGTH,)),
        Field("sk", np.uint64, (LENGTH,)),
        Field("sc", np.int32, (LENGTH,)),
        Field("sp", np.int32, (LENGTH,)),
        Field("sh", np.int64, (1,)),
    )
)


@dataclass(eq=False)
class Arrays:
    """All state of a table; what the jitted functions take. Not to be copied: it is passed by address."""

    _numba_type_: ClassVar[Handle] = HANDLE

    m: NDArray[np.int64]  # META
    c: NDArray[np.int64]  # COUNTERS
    e: NDArray[Any]  # ENTRY[entries]
    l: NDArray[Any]  # LINK[entries]  # noqa: E741
    estack: NDArray[np.int32]  # free entries
    ix: NDArray[np.uint64]  # open addressing: tag << 32 | entry + 1; 0 = empty
    s: NDArray[Any]  # SLOT of all tiers, one after the other
    ends: NDArray[np.int32]  # [tier, list, head or tail]
    bits: NDArray[np.uint64]  # [tier, 2]: lists that are not empty
    heap: NDArray[np.int32]  # slots by deadline, of all tiers
    fw: NDArray[np.uint64]  # free slots, a bit each, of all tiers
    fs: NDArray[np.uint64]  # words of fw that are not zero
    x: NDArray[Any]  # XFER
    xstack: NDArray[np.int32]  # free transfers
    xdef: NDArray[np.int32]  # deferred transfers, in order of issue
    orph: NDArray[Any]  # ORPHAN ring
    ten: NDArray[np.int64]  # retained blocks per tenant
    jr: NDArray[np.int32]  # ring of disk slots to be remembered
    jf: NDArray[np.uint8]  # what of each
    rg: NDArray[Any]  # REGION of all tiers
    tl: NDArray[Any]  # TOLD of all tiers, where somebody listens
    tq: NDArray[np.int32]  # ring of slots about which there may be something to tell
    tmp: NDArray[np.int32]  # scratch: [chains, victims, slots]
    lm: NDArray[np.int64]  # of the learner: scalars
    lf: NDArray[np.float64]  # and real numbers
    lx: NDArray[np.float64]  # [class, age]: block-time waited
    lh: NDArray[np.float64]  # [class, age]: hits
    lv: NDArray[np.float64]  # [class, age]: value
    lb: NDArray[np.uint8]  # [class, age]: bin of the value
    ls: NDArray[np.float64]  # [group, hits or time, age]
    lw: NDArray[Any]  # WATCH
    lg: NDArray[np.uint64]  # keys remembered: tag << 32 | uses << 8 | class
    w: NDArray[Any]  # WORTH[entries]
    b: NDArray[Any]  # PLACE of all tiers
    be: NDArray[np.int32]  # lists by value: [tier and list, bin, head or tail]
    bb: NDArray[np.uint64]  # [tier and list]: bins that are not empty
    hand: NDArray[np.int64]  # per tier: slot whose value was looked at last
    nk: NDArray[np.uint64]  # notes: keys of the last request, from which is still to be learned
    ne: NDArray[np.int32]  # scratch beside them: their entries
    sm: NDArray[np.int64]  # of each shadow: scalars
    sb: NDArray[Any]  # SHADOW, one shadow after the other
    se: NDArray[np.int32]  # [shadow, list, head or tail]
    sx: NDArray[np.int32]  # first block of each hash bucket
    sk: NDArray[np.uint64]  # of the request in hand: hashes of its sampled keys
    sc: NDArray[np.int32]  # their classes
    sp: NDArray[np.int32]  # their places in a shadow
    sh: NDArray[np.int64]  # bits of the hash that are zero in the sample

    def __post_init__(self) -> None:
        self._row = HANDLE.row_of(self)
        self.address = self._row.ctypes.data

    def __reduce__(self) -> str:
        raise TypeError("the arrays of a table are not copied")


def new_arrays(
    device: int,
    host: int,
    disk: int,
    transfers: int,
    regions: Sequence[int] = (),
    by_value: Sequence[int] = (),
    events: bool = False,
) -> Arrays:
    """Lay out an empty table.

    Parameters
    ----------
    device, host, disk : int
        Slots per tier; 0 = the tier is absent.
    transfers : int
        Transfers that may be planned or in flight at once.
    regions : sequence of int
        Disk slots per directory, `disk` in all; by default one directory.
    by_value : sequence of int
        Tiers whose order among equals is by value.
    events : bool
        Somebody listens to what comes and goes.
    """
    caps = (device, host, disk)
    total = sum(caps)
    entries = total + 1
    m = np.zeros(_P["SIZE"], np.int64)
    base = wbase = sbase = 0
    words = [(c + 63) // 64 for c in caps]
    sums = [(w + 63) // 64 for w in words]
    cuts = [[device], [host], list(regions) or [disk]]
    rg = np.zeros(sum(map(len, cuts)), REGION)
    r = 0
    fw = np.zeros(sum(words) + 1, np.uint64)
    fs = np.zeros(sum(sums) + 1, np.uint64)
    for t in range(3):
        m[CAP + t], m[BASE + t], m[WBASE + t], m[SBASE + t] = caps[t], base, wbase, sbase
        m[HBASE + t], m[NFREE + t] = base, caps[t]
        _fill_bits(fw[wbase : wbase + words[t]], caps[t])
        _fill_bits(fs[sbase : sbase + sums[t]], words[t])
        m[REGION0 + t], m[NREGIONS + t] = r, len(cuts[t])
        first = 0
        for size in cuts[t]:
            rg[r] = (first, first + size, first, size, 0)
            first += size
            r += 1
        base += caps[t]
        wbase += words[t]
        sbase += sums[t]
    size = 1 << max(6, (2 * entries - 1).bit_length())
    m[IXMASK] = size - 1
    m[NENTS], m[XCAP], m[NXFREE] = entries, transfers, transfers
    for t in by_value:
        m[BY_VALUE + t] = m[LEARNS] = 1
    m[TELLS] = events
    nobody = dict.fromkeys(("entry", "prev", "next", "where", "pos"), NONE)
    return Arrays(
        m=m,
        c=np.zeros(len(COUNTERS), np.int64),
        e=_rows(entries, ENTRY, parent=NONE, slot=NONE),
        l=_rows(entries, LINK, child=NONE, next=NONE, prev=NONE),
        estack=np.arange(entries - 1, -1, -1, dtype=np.int32),
        ix=np.zeros(size, np.uint64),
        s=_rows(total + 1, SLOT, **nobody),
        ends=np.full((3, LISTS, 2), NONE, np.int32),
        bits=np.zeros((3, 2), np.uint64),
        heap=np.full(total + 1, NONE, np.int32),
        fw=fw,
        fs=fs,
        x=np.zeros(transfers, XFER),
        xstack=np.arange(transfers - 1, -1, -1, dtype=np.int32),
        xdef=np.zeros(transfers, np.int32),
        orph=np.zeros(ORPHANS, ORPHAN),
        ten=np.zeros(TENANTS, np.int64),
        jr=np.zeros(max(disk, 1), np.int32),
        jf=np.zeros(max(disk, 1), np.uint8),
        rg=rg,
        tl=np.zeros(total if events else 1, TOLD),
        tq=np.zeros(total if events else 1, np.int32),
        tmp=np.zeros((4, max(total, 1) + 1), np.int32),
        **learned.new_learned(len(by_value) > 0, caps, LISTS),
    )


def _rows(n: int, dtype: np.dtype[Any], **values: int) -> NDArray[Any]:
    """`n` equal records, zero but for `values`; written in one go, as an open waits for it."""
    row = np.zeros(1, dtype)
    for name, value in values.items():
        row[name] = value
    words = np.empty((n, dtype.itemsize // 8), np.int64)
    words[:] = row.view(np.int64)
    return words.reshape(-1).view(dtype)


def _fill_bits(words: NDArray[np.uint64], n: int) -> None:
    full, rest = divmod(n, 64)
    words[:full] = np.uint64(0xFFFFFFFFFFFFFFFF)
    if rest:
        words[full] = np.uint64((1 << rest) - 1)
