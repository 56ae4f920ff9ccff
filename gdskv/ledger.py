"""``Ledger``: keeps the directories' records in step with the table, and makes a table from them at open.

Between the table's journal and the record files; never waits for a device. Must not know requests or engines.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gdskv._jit import jit
from gdskv.directory import Directory, learned, open_directories, records
from gdskv.directory.directory import tenant_crc
from gdskv.directory.records import IDENTITY, IS_BAD, PRESENT, STATE_RECORD, TO_FORGET
from gdskv.directory.verify import verify
from gdskv.failing import Health
from gdskv.io.base import TRANSFER, WRITE, Slab
from gdskv.pools.disk import SLAB_HEADER, DiskPool
from gdskv.table import CHANGE, BlockTable
from gdskv.table.learned import SHAPE

ROUND = 512  # records brought up to date per call
IDENTITY_BYTES, STATE_BYTES = IDENTITY.itemsize, STATE_RECORD.itemsize
FILL = 1


@jit
def _in_runs(
    slots: np.ndarray,
    chosen: np.ndarray,
    tag: int,
    state: int,
    first: int,
    size: int,
    offset: int,
    address: np.uint64,
    slab: int,
    runs: np.ndarray,
    pending: np.ndarray,
    out: np.ndarray,
    n: int,
) -> int:
    """Describe writes of the `chosen` slots' records, neighbours as one, behind the first `n` of `out`; how many there
    are then. `slots` are in order."""
    i = 0
    while i < len(slots):
        if not chosen[i]:
            i += 1
            continue
        end = i + 1
        while end < len(slots) and chosen[end] and slots[end] == slots[end - 1] + 1:
            end += 1
        slot, k = np.int64(slots[i]), np.int64(slots[i]) - first
        o = out[n]
        o.tag, o.op, o.slab, o.target = tag + 2 * slot + state, WRITE, slab, np.uint64(0)
        o.offset, o.address, o.length = offset + k * size, address + np.uint64(k * size), (end - i) * size
        runs[2 * slot + state] = end - i
        for j in range(i, end):
            pending[slots[j]] += 1
        n += 1
        i = end
    return n


@jit
def _landed(
    at: np.ndarray, moved: np.ndarray, runs: np.ndarray, pending: np.ndarray, failed: np.ndarray, done: np.ndarray
) -> tuple[int, int, int]:
    """Results of runs of records: twice the first slot, plus one for states, and bytes. Slots none of whose records is
    under way any more go to `done`: those that are written to its head, the others to its end. How many of each, and of
    records that were not written."""
    good, lost, failures = 0, 0, 0
    for i in range(len(at)):
        n = np.int64(runs[at[i]])
        bad = moved[i] != n * (STATE_BYTES if at[i] & 1 else IDENTITY_BYTES)
        if bad:
            failures += n
        for slot in range(at[i] >> 1, (at[i] >> 1) + n):
            if bad:
                failed[slot] = True
            pending[slot] -= 1
            if pending[slot] != 0:
                continue
            if failed[slot]:
                failed[slot] = False
                lost += 1
                done[len(done) - lost] = slot
            else:
                done[good] = slot
                good += 1
    return good, lost, failures


class Recovered(NamedTuple):
    """What an open brought back, and what it did not."""

    blocks: int
    forgotten: int
    """Past a deadline at which they were to be forgotten."""
    dropped: int
    """No longer fit, or hung on what is gone."""
    moved: int
    """Payloads copied, because the slab is smaller than it was."""
    broken: int
    """Payloads that are not what their records say, where all are read at open."""
    why: tuple[str, ...]
    """Per directory that came back empty or in part: which, and why."""


class Journaled(Protocol):
    """What a ledger needs of a table: where changes come from, and where what came back goes."""

    transfers: int

    @property
    def unremembered(self) -> int: ...
    @property
    def learns(self) -> bool: ...
    def learned(self) -> bytes: ...
    def learn_from(self, content: bytes) -> bool: ...
    def curve(self) -> dict[float, float]: ...
    def tenant(self, name: str) -> int: ...
    def remember(self) -> None: ...
    def restore(self, blocks: NDArray[Any], by_use: NDArray[np.int64]) -> int: ...
    def free_among(self, slots: NDArray[np.int32]) -> NDArray[np.int32]: ...
    def record_again(self, slots: NDArray[np.int32]) -> None: ...
    def changes(self, out: NDArray[Any]) -> int: ...
    def all_written(self, slots: NDArray[np.int32]) -> None: ...
    def written(self, slot: int, what: int, ok: bool) -> None: ...


class Records(Protocol):
    """What a store needs of whoever keeps the disk tier's records: a `Ledger`, or the ledgers of several ranks."""

    health: Health
    recovered: Recovered
    failed_records: int
    durable_records: int
    learned_loaded: int
    learned_discarded: int

    @property
    def complete(self) -> bool: ...
    @property
    def settled(self) -> bool: ...
    def tenant(self, table: BlockTable, name: str) -> int: ...
    def recover(self, table: BlockTable) -> None: ...
    def collect(self, table: BlockTable, now: int) -> NDArray[Any]: ...
    def finish(self, table: BlockTable, results: NDArray[Any]) -> None: ...
    def catch_up(self, table: BlockTable) -> None: ...
    def close(self, table: BlockTable, *, clean: bool, counters: dict[str, int]) -> None: ...
    def abandon(self) -> None: ...


class Ledger:
    """Records of the disk tier.

    Parameters
    ----------
    pool : DiskPool
    fields : dict
        The namespace, readable.
    digest : bytes
    now, wall : int
        Nanoseconds on the caller's clock and on the wall's, at the same instant. No `now`: the caller's times are the
        wall clock's.
    checksums : bool
        Without them, what was not closed cleanly is not believed.
    durable : bool
        "fsync": a committed spill survives a power cut.
    verify : bool
        Read and check all payloads at open.
    """

    def __init__(
        self,
        pool: DiskPool,
        fields: dict[str, str],
        digest: bytes,
        *,
        now: int | None,
        wall: int,
        checksums: bool,
        durable: bool,
        verify: bool = False,
    ) -> None:
        self._pool = pool
        self._opened = time.monotonic_ns()
        self._verify = verify
        self.directories: list[Directory] = open_directories(
            pool, fields, digest, wall, trust_unclean=checksums, sync=durable or not checksums
        )
        self.wall = max(d.wall for d in self.directories)
        self._now_to_wall = self.wall - now if now is not None else 0
        self._durable = durable
        self._crcs = np.zeros(4096, np.uint32)  # per tenant of the table
        self._of_crc: dict[int, int] = {0: 0}
        self._names: list[str] = []
        self._pending = np.zeros(pool.blocks, np.uint8)  # records of a slot being written
        self._runs = np.zeros(2 * pool.blocks, np.uint16)  # records of a write, by twice its first slot, + 1 for states
        self._done = np.empty(pool.blocks, np.int32)
        self._out = np.zeros(2 * ROUND, TRANSFER)
        self._failed = np.zeros(pool.blocks, np.bool_)
        self._behind = np.zeros(pool.blocks, np.bool_)  # records that wait until their directory takes writes again
        self.health = Health(pool.first_slot, pool.blocks)
        self._changes = np.zeros(ROUND, CHANGE)
        self._unsynced = 0
        self._syncing = 0
        self._sync_batch = 0
        self.failed_records = 0
        self.durable_records = 0
        self.learned_loaded = self.learned_discarded = 0
        self._saving: threading.Thread | None = None  # writes what was learned; it touches nothing else here
        self.recovered = Recovered(0, 0, 0, 0, 0, ())

    def slabs(self) -> list[Slab]:
        """Record files for the I/O engine, to stand behind the pool's slabs: all identities, then all states."""
        both = [d.slabs(self._pool.slabs[i].lane) for i, d in enumerate(self.directories)]
        return [b[0] for b in both] + [b[1] for b in both]

    def threads(self) -> list[tuple[int, int]]:
        """Threads to read and to write with, per directory; 0 where nobody knows."""
        return [d.threads() for d in self.directories]

    def tenant(self, table: Journaled, name: str) -> int:
        """The table's number of a tenant; the same as before a restart."""
        crc = tenant_crc(name)
        if crc not in self._of_crc:
            number = table.tenant(name)
            self._of_crc[crc], self._crcs[number] = number, crc
            self._names.append(name)
        return self._of_crc[crc]

    def number_tenants(self, names: dict[int, str]) -> None:
        """Take over the numbers that a table elsewhere gives to tenants."""
        for number, name in names.items():
            crc = int(name[1:], 16) if name.startswith("#") else tenant_crc(name)
            self._of_crc[crc], self._crcs[number] = number, crc
            if not name.startswith("#"):
                self._names.append(name)

    @property
    def next_fill(self) -> int:
        """Above every number of a fill in these directories."""
        return max(d.superblock.next_fill for d in self.directories)

    @next_fill.setter
    def next_fill(self, number: int) -> None:
        for directory in self.directories:
            directory.superblock.next_fill = max(directory.superblock.next_fill, number)

    # ---- at open

    def recover(self, table: Journaled) -> None:
        """Fill the table with what the records tell of, and go on recording from there."""
        for directory in self.directories:
            for name in directory.superblock.tenants:
                self.tenant(table, name)
        why = tuple(f"{d.recovery.path}: {d.recovery.why}" for d in self.directories if d.recovery.why)
        parts, again = [], []
        forgotten = dropped = broken = 0
        moved: list[int] = []
        for index, d in enumerate(self.directories):
            blocks = d.recovery.blocks
            if self._verify:
                broken += self._drop_broken(index, d)
            if d.shrunk:
                dropped += self._fit(index, d, moved)
            freed = np.empty(len(blocks), np.int32)
            counts = records.sort_out(blocks, d.blocks, d.first, self.wall, self._now_to_wall, freed)
            parts.append(blocks[: counts[0]])
            again.append(freed[: counts[1]])
            forgotten += counts[2]
        blocks = parts[0] if len(parts) == 1 else np.concatenate(parts)
        tenants = np.ascontiguousarray(blocks["tenant"])
        owned = np.flatnonzero(tenants)
        crcs, which = np.unique(tenants[owned], return_inverse=True)
        for crc in crcs.tolist():
            if crc not in self._of_crc:  # its name was not written before the crash
                number = table.tenant(f"#{crc:08x}")
                self._of_crc[crc], self._crcs[number] = number, crc
        blocks["tenant"][owned] = np.array([self._of_crc[crc] for crc in crcs.tolist()], np.uint32)[which]
        table.remember()
        back = table.restore(blocks, np.argsort(np.ascontiguousarray(blocks["last"]), kind="stable"))
        gone = table.free_among(blocks["slot"]) if back < len(blocks) else np.empty(0, np.int32)
        table.record_again(np.concatenate([*again, np.array(moved, np.int32), gone]).astype(np.int32))
        self.recovered = Recovered(back, forgotten, dropped + len(gone), len(moved), broken, why)
        for directory in self.directories:
            directory.begin()
        self._pool.trim()
        if table.learns:
            content = learned.load(self.directories[0].folder, SHAPE)
            fits = isinstance(content, bytes) and table.learn_from(content)
            self.learned_loaded += fits
            self.learned_discarded += not fits and content != ""

    def _drop_broken(self, index: int, directory: Directory) -> int:
        """Read all payloads; those that are not what their records say are dropped. How many."""
        blocks = directory.recovery.blocks
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"verify {directory.recovery.path}", total=len(blocks))
            fd = self._pool.slabs[index].fd
            good = verify(fd, blocks, directory.slot_bytes, step=lambda n: bar.advance(task, n))
        blocks["flags"][~good] = 0
        return int((~good).sum())

    def _fit(self, index: int, directory: Directory, moved: list[int]) -> int:
        """The slab is smaller than it was: keep the most valuable blocks and move those that stand beyond its end into
        slots of others that go; `moved` gets these. How many were dropped."""
        blocks = directory.recovery.blocks
        bad = (blocks["flags"] & IS_BAD) != 0
        keep = ~bad & (blocks["flags"] & PRESENT != 0)
        lapsed = (blocks["deadline"] != 0) & (blocks["deadline"] <= self.wall)
        keep &= ~(lapsed & (blocks["flags"] & TO_FORGET != 0))
        inside = blocks["slot"] < directory.blocks
        room = directory.blocks - int((bad & inside).sum())
        live = np.where(lapsed, 0, blocks["deadline"])
        order = np.lexsort((blocks["last"], blocks["priority"], live))[::-1]
        order = order[keep[order]]
        gone = order[room:]
        blocks["flags"][gone] = 0
        dropped = len(gone)
        taken = np.zeros(directory.blocks, np.bool_)
        taken[blocks["slot"][inside & ((blocks["flags"] & PRESENT != 0) & keep | bad)]] = True
        free = np.flatnonzero(~taken)
        beyond = np.flatnonzero(keep & (blocks["flags"] & PRESENT != 0) & ~inside)
        fd, size = self._pool.slabs[index].fd, directory.slot_bytes
        with mmap.mmap(-1, size) as page:
            for target, i in zip(free.tolist(), beyond.tolist(), strict=False):
                good = os.preadv(fd, [page], SLAB_HEADER + int(blocks["slot"][i]) * size) == size
                if good and os.pwritev(fd, [page], SLAB_HEADER + target * size) == size:
                    blocks["slot"][i] = target
                    moved.append(directory.first + target)
                else:
                    blocks["flags"][i] = 0
                    dropped += 1
        return dropped

    # ---- while open

    def collect(self, table: Journaled, now: int) -> NDArray[Any]:
        """Writes of records that have changed, at most ROUND slots' at a time, and what makes them durable."""
        out = []
        n = table.changes(self._changes) if table.unremembered else 0
        if n:
            changes = self._changes[np.argsort(self._changes["slot"][:n])]  # neighbours move as one
            if self.health.any_closed:
                closed = self.health.closed(changes["slot"])
                self._hold(table, changes["slot"][closed])
                changes = changes[~closed]
            out.append(self._writes(table, changes, now))
        if self._durable and self._unsynced and not self._syncing:
            out.append(self._syncs(table))
        return out[0] if len(out) == 1 else np.concatenate(out) if out else np.zeros(0, TRANSFER)

    def _writes(self, table: Journaled, changes: NDArray[Any], now: int) -> NDArray[Any]:
        n = 0
        for index, directory in enumerate(self.directories):
            lo, hi = np.searchsorted(changes["slot"], [directory.first, directory.first + directory.blocks])
            if lo == hi:
                continue
            part = changes[lo:hi]
            directory.encode(part, self._now_to_wall, now, self._crcs)
            slots = np.ascontiguousarray(part["slot"])
            for state, chosen in ((0, (part["what"] & FILL) != 0), (1, np.ones(len(part), np.bool_))):
                offset, address, size = directory.records_at(state == 1)
                slab = len(self.directories) * (1 + state) + index
                where = (table.transfers, state, directory.first, size, offset, address, slab)
                n = _in_runs(slots, chosen, *where, self._runs, self._pending, self._out, n)
        return self._out[:n]

    def _syncs(self, table: Journaled) -> NDArray[Any]:
        """A flush of every file: writes of no bytes."""
        n = 3 * len(self.directories)
        out = np.zeros(n, TRANSFER)
        out["tag"] = table.transfers + 2 * self._pool.blocks + np.arange(n)
        out["op"], out["slab"] = WRITE, np.arange(n)
        self._syncing, self._sync_batch, self._unsynced = n, self._unsynced, 0
        return out

    def finish(self, table: Journaled, results: NDArray[Any]) -> None:
        """Take in results whose tags are this ledger's."""
        at = results["tag"] - table.transfers
        syncs = at >= 2 * self._pool.blocks
        if syncs.any():
            self._syncing -= int(syncs.sum())
            if (results["moved"][syncs] < 0).any():
                self.failed_records += self._sync_batch
                self._sync_batch = 0
            elif not self._syncing:
                self.durable_records += self._sync_batch
            at, results = at[~syncs], results[~syncs]
        done = self._done
        good, lost, failed = _landed(at, results["moved"], self._runs, self._pending, self._failed, done)
        self.failed_records += failed
        if lost:
            slots = done[len(done) - lost :]
            closed = self.health.closed(slots)
            self._hold(table, slots[closed])
            for slot in slots[~closed].tolist():
                table.written(slot, 3, False)
        table.all_written(done[:good])
        self._unsynced += good

    def _hold(self, table: Journaled, slots: NDArray[Any]) -> None:
        self._behind[slots] = True
        table.all_written(slots.astype(np.int32))

    def catch_up(self, table: Journaled) -> None:
        """Let the records be written that waited, but for those of directories that are read-only."""
        slots = np.flatnonzero(self._behind)
        slots = slots[~self.health.closed(slots)]
        self._behind[slots] = False
        table.record_again(slots.astype(np.int32))

    def save_learned(self, table: Journaled) -> None:
        """Write what was learned, unless the last time has not ended. A thread does it: the file is replaced, for which
        a busy disk takes long."""
        if self._saving is None or not self._saving.is_alive():
            arguments = (self.directories[0].folder, SHAPE, table.learned())
            self._saving = threading.Thread(target=learned.save, args=arguments, name="gdskv-learned", daemon=True)
            self._saving.start()

    @property
    def complete(self) -> bool:
        """Do the files tell all of what the table holds on disk, but for what is under way?"""
        return not self._behind.any()

    @property
    def settled(self) -> bool:
        """Is every record written, and durable where that was asked for?"""
        return not (self._pending.any() or self._syncing or (self._durable and self._unsynced))

    def close(self, table: Journaled, *, clean: bool, counters: dict[str, int]) -> None:
        """Close the directories' files."""
        if self._saving is not None:
            self._saving.join()
        if table.learns and (content := table.learned()):
            learned.save(self.directories[0].folder, SHAPE, content)
        share = len(self.directories)
        written = sum(v for k, v in counters.items() if k.startswith("write_bytes"))
        read = sum(v for k, v in counters.items() if k.startswith("read_bytes"))
        open_ns = time.monotonic_ns() - self._opened
        curve = {f"{scale:g}": f"{ratio:.4f}" for scale, ratio in table.curve().items()}
        for directory, state in zip(self.directories, self.health.states, strict=True):
            directory.close(
                clean=clean,
                tenants=self._names,
                written=written // share,
                read_=read // share,
                errors=state.write_errors,
                closures=state.closures,
                open_ns=open_ns,
                curve=curve,
            )

    def abandon(self) -> None:
        """Let the files go as they are: a device still holds transfers."""
        for directory in self.directories:
            directory.abandon()
