"""A power cut: of what was written and not synced any part may be there, whole or torn. Never wrong bytes, and with
durability="fsync" never a lost block that was reported durable."""

from __future__ import annotations

import ctypes
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest
from doubles import _Wrapper
from faults import audit, book, die, open_engine, open_store, settings, work

from gdskv.directory.records import IDENTITY, PRESENT
from gdskv.io.base import WRITE, IOEngine, Results, Transfers

PAYLOAD_GRAIN, RECORD_GRAIN = 512, 8
FILES = ("blocks.slab", "slots.dir", "state.dir")


class Write(NamedTuple):
    """A write as it was handed over; with no bytes, a sync of its file."""

    file: int
    offset: int
    content: bytes
    handed: int
    """Number of the event."""


class TapeEngine(_Wrapper):
    """Records the bytes of every write, and in which order writes were handed over and done."""

    def __init__(self, inner: IOEngine) -> None:
        super().__init__(inner)
        self.clock = 0
        self.writes: list[Write] = []
        self.done: dict[int, int] = {}
        """Number of a write -> number of the event at which it was done."""
        self._of_tag: dict[int, int] = {}

    def submit(self, transfers: Transfers) -> int:
        writes = transfers[transfers["op"] == WRITE]
        contents = {int(t["tag"]): ctypes.string_at(int(t["address"]), int(t["length"])) for t in writes}
        accepted = self.inner.submit(transfers)
        for t in transfers[:accepted][transfers[:accepted]["op"] == WRITE]:
            tag = int(t["tag"])
            self._of_tag[tag] = len(self.writes)
            self.writes.append(Write(int(t["slab"]), int(t["offset"]), contents[tag], self.clock))
            self.clock += 1
        return accepted

    def poll(self, out: Results) -> int:
        n = self.inner.poll(out)
        for result in out[:n]:
            number = self._of_tag.pop(int(result["tag"]), None)
            if number is not None:
                assert result["moved"] == len(self.writes[number].content)
                self.done[number] = self.clock
                self.clock += 1
        return n


class Tape(NamedTuple):
    """A run: the files before its first write, and all of its writes."""

    start: Path
    writes: list[Write]
    done: dict[int, int]
    end: int

    def synced(self, cut: int) -> np.ndarray:
        """Which writes a cut cannot undo: those done before a sync of their file began that was done before the cut."""
        latest = [-1, -1, -1]  # per file, when the last sync that counts began
        for number, write in enumerate(self.writes):
            if not write.content and self.done.get(number, cut) < cut:
                latest[write.file] = max(latest[write.file], write.handed)
        return np.array([self.done.get(i, self.end) < latest[w.file] for i, w in enumerate(self.writes)])

    def must_come_back(self, cut: int) -> set[tuple[int, int]]:
        """Keys of blocks whose payload and record a cut cannot undo, and to whose slots nothing was done since."""
        synced = self.synced(cut)
        payload: dict[int, int] = {}
        record: dict[int, tuple[int, int]] = {}  # number of the write, and place in it: neighbours are written as one
        for number, write in enumerate(self.writes):
            if write.handed >= cut or not write.content:
                continue
            if write.file == 0:
                payload[(write.offset - 4096) // 4096] = number
            elif write.file == 1:
                for i in range(len(write.content) // 64):
                    record[(write.offset - 4096) // 64 + i] = (number, i)
        keys = set()
        for slot, (number, i) in record.items():
            if synced[number] and slot in payload and synced[payload[slot]]:
                r = np.frombuffer(self.writes[number].content, IDENTITY)[i]
                if r["flags"] & PRESENT:
                    keys.add((int(r["k0"]), int(r["k1"])))
        return keys


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A directory in memory where there is one: thousands of opens need no disk."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=shm, prefix="gdskv-test-") as folder:
        yield Path(folder)


def record(folder: Path, seed: int, **more: object) -> Tape:
    """Run a workload that is never closed."""
    live = folder / "live"
    live.mkdir()
    tapes: list[TapeEngine] = []

    def wrap(engine: IOEngine) -> IOEngine:
        tapes.append(TapeEngine(engine))
        return tapes[0]

    engine = open_engine(settings(live, **more), io=wrap)
    shutil.copytree(live, folder / "start")
    work(engine, np.random.default_rng(seed), requests=80)
    die(engine.kv.store)
    shutil.rmtree(live)
    return Tape(folder / "start", tapes[0].writes, tapes[0].done, tapes[0].clock)


def torn(content: bytes, before: bytes, grain: int, chance: random.Random) -> bytes:
    """Each grain of a write is there or is not."""
    out = bytearray(before)
    share = chance.choice((0.1, 0.5, 0.9))
    for at in range(0, len(content), grain):
        if chance.random() < share:
            out[at : at + grain] = content[at : at + grain]
    return bytes(out)


def some_of_it(tape: Tape, cut: int, chance: random.Random) -> Callable[[int], str]:
    """What becomes of each write that the cut may undo: a plain prefix, any subset, or a subset with torn ones."""
    manner = chance.choice(("prefix", "subset", "torn"))
    share = chance.random()

    def fate(number: int) -> str:
        if manner == "prefix":
            return "whole" if tape.done.get(number, tape.end) < cut else chance.choice(("none", "torn"))
        if chance.random() >= share:
            return "none"
        return "torn" if manner == "torn" and chance.random() < 0.5 else "whole"

    return fate


def replay(tape: Tape, cut: int, chance: random.Random, to: Path) -> None:
    """Make the files as a cut at that event may leave them."""
    shutil.copytree(tape.start, to)
    files = [next(to.glob(f"*/{name}")).open("r+b", buffering=0) for name in FILES]
    synced = tape.synced(cut)
    fate = some_of_it(tape, cut, chance)
    for number, write in enumerate(tape.writes):
        if write.handed >= cut or not write.content:
            continue
        what = "whole" if synced[number] else fate(number)
        file = files[write.file]
        content = write.content
        if what == "torn":
            file.seek(write.offset)
            before = file.read(len(content)).ljust(len(content), b"\0")
            content = torn(content, before, PAYLOAD_GRAIN if write.file == 0 else RECORD_GRAIN, chance)
        if what != "none":
            file.seek(write.offset)
            file.write(content)
    for file in files:
        file.close()


@pytest.mark.parametrize("durability", ["lazy", "fsync"])
@pytest.mark.parametrize(("seed", "policy"), [(1, "lru"), (2, "hazard")])
def test_a_power_cut_leaves_right_bytes_or_none(
    memory: Path, pytestconfig: pytest.Config, durability: str, seed: int, policy: str
) -> None:
    tape = record(memory, seed, durability=durability, policy=policy)
    chance = random.Random(seed)
    promised = 0
    for number in range(550 * (10 if pytestconfig.getoption("soak") else 1)):
        cut = chance.randrange(tape.end + 1)
        place = memory / "cut"
        replay(tape, cut, chance, place)
        store = open_store(settings(place, durability=durability))
        found = audit(store)
        must = tape.must_come_back(cut) if durability == "fsync" else set()
        promised += len(must)
        lost = must - found.right
        book(
            f"cut, {durability}",
            injected=1,
            blocks_recovered=store.ledger.recovered.blocks,
            served_right=len(found.right),
            refused=found.refused,
            durable=len(must),
            durable_and_lost=len(lost),
            wrong=found.wrong,
        )
        assert found.wrong == 0, f"cut {number} at event {cut}"
        assert not lost, f"cut {number} at event {cut}"
        store.check()
        die(store)
        shutil.rmtree(place)
    assert promised > 0 or durability == "lazy"
