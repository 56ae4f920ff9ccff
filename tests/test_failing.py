"""A disk that fails, stalls or goes away costs its blocks and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import Command
from doubles import Fail, FaultEngine, _Wrapper
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, tokens

import gdskv
from gdskv.doctor.history import history
from gdskv.io.base import READ, WRITE, IOEngine, Results, Transfers

Rule = Callable[[np.void], Fail | None]


def manager(tmp_path: Path, rule: Rule | None = None, *, directories: int = 2, disk: int = 64, **more) -> Engine:
    """An engine over that many directories, whose transfers fail as `rule` says."""
    places = [tmp_path / str(i) for i in range(directories)]
    for place in places:
        place.mkdir(exist_ok=True)
    config = gdskv.CacheConfig(
        device_bytes=8 * BLOCK,
        host_bytes=more.pop("host", 8) * BLOCK,
        disk_bytes=disk * BLOCK,
        directories=places,
        min_free=0,
        **more,
    )
    io = None if rule is None else (lambda engine: FaultEngine(engine, rule))
    return Engine(gdskv.BlockManager(config, LAYOUT, NAMESPACE, wall=1000.0, io=io))


class Broken:
    """A rule: writes to a directory's files fail while it is on; of two directories unless said otherwise."""

    def __init__(self, directory: int = 0, directories: int = 2, op: int = WRITE, error: int = errno.EIO) -> None:
        self.on, self.op, self.error = True, op, error
        self.directory, self.directories = directory, directories

    def __call__(self, transfer: np.void) -> Fail | None:
        hit = transfer["op"] == self.op and transfer["slab"] % self.directories == self.directory
        return Fail(self.error) if self.on and hit else None


def states(engine: Engine) -> list[bool]:
    return [state.read_only for state in engine.kv.store.ledger.health.states]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_repeated_write_errors_close_a_directory_and_the_others_carry_on(tmp_path: Path, error: int) -> None:
    rule = Broken(error=error)
    engine = manager(tmp_path, rule, disk=256)
    with engine.kv:
        for doc in range(8):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        stats = engine.kv.stats()
        assert states(engine) == [True, False]
        assert stats["directories_read_only"] == 1
        assert stats["read_only_periods"] >= 1
        assert stats["write_errors"] >= 3
        assert stats["disk_used"] > 0
        for doc in range(8):
            engine.run(doc, 8 * TOKENS)
        assert engine.verified > 0


def test_a_directory_that_works_again_is_written_again_and_its_records_are_whole(tmp_path: Path) -> None:
    rule = Broken()
    engine = manager(tmp_path, rule)
    with engine.kv:
        for doc in range(4):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        assert states(engine) == [True, False]
        rule.on = False
        engine.now += 1000.0
        for doc in range(4, 12):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        assert states(engine) == [False, False]
        assert engine.kv.store.ledger.complete
        used = engine.kv.stats()["disk_used"]
    again = manager(tmp_path)
    with again.kv:
        assert again.kv.store.ledger.recovered.blocks >= used


def test_doctor_and_inspect_tell_what_earlier_owners_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = manager(tmp_path, Broken())
    with engine.kv:
        for doc in range(4):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        stats = engine.kv.stats()
    bad, good = engine.kv.store.config.directories
    command = Command(monkeypatch, capsys)
    (entry,) = command("inspect", bad, "--json").json["namespaces"]
    assert (entry["write_errors"], entry["read_only_periods"]) == (stats["write_errors"], stats["read_only_periods"])
    assert [finding.value for finding in history(bad)] == [
        f"{stats['write_errors']} writes failed and it was read-only {stats['read_only_periods']} times, "
        "as of the last close"
    ]
    assert history(good) == history(tmp_path / "none") == []
    assert "remedy: look at the drive" in command("doctor", bad).out


def test_a_directory_that_stays_broken_is_tried_less_and_less_often(tmp_path: Path) -> None:
    engine = manager(tmp_path, Broken(directories=1), directories=1)
    with engine.kv:
        for doc in range(40):
            engine.now += 9.0
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        (state,) = engine.kv.store.ledger.health.states
        assert 3 <= state.closures <= 9  # 400 s, with waits of 1, 2, 4, ... s
        assert state.retry_at > engine.kv.store.table.now or not state.read_only


def test_a_read_only_disk_keeps_its_blocks_and_the_engine_serves(tmp_path: Path) -> None:
    rule = Broken(directories=1)
    rule.on = False
    engine = manager(tmp_path, rule, directories=1, disk=32)
    with engine.kv:
        for doc in range(4):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        rule.on = True
        for doc in range(10, 30):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        assert states(engine) == [True]
        before = engine.kv.stats()
        for doc in range(30, 40):
            engine.run(doc, 8 * TOKENS)
        after = engine.kv.stats()
        assert after["disk_used"] == before["disk_used"] > 0
        assert after["rejected"] == 0


def test_a_lost_directory_costs_only_its_blocks(tmp_path: Path) -> None:
    rule = Broken(op=READ)
    rule.on = False
    engine = manager(tmp_path, rule, disk=256, stripe_width=1)
    with engine.kv:
        for doc in range(24):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        rule.on = True
        failed, came = 0, 0
        for doc in range(20):
            request = engine.run(doc, 8 * TOKENS)
            failed += len(request.failed)
            came += request.matched.disk // TOKENS - len(request.failed)
        assert failed > 0
        assert came > 0


def test_a_read_that_fails_once_is_not_noticed(tmp_path: Path) -> None:
    """R10 of the cases: it is retried before it is a miss."""
    seen: set[tuple[int, int]] = set()

    def rule(transfer: np.void) -> Fail | None:
        place = (int(transfer["slab"]), int(transfer["offset"]))
        if transfer["op"] != READ or place in seen:
            return None
        seen.add(place)
        return Fail(errno.EIO)

    engine = manager(tmp_path, rule)
    with engine.kv:
        for doc in [*range(5), *range(5)]:
            assert len(engine.run(doc, 8 * TOKENS).failed) == 0
        stats = engine.kv.stats()
        assert stats["reads_again"] == len(seen) > 0
        assert stats["failed_reads"] == stats["transient_errors"] == 0


def test_a_transient_read_error_is_a_miss_once_and_the_block_stays(tmp_path: Path) -> None:
    """R10 of the cases: one transient read error does not delete a good block."""
    rule = Broken(directories=1, op=READ)
    rule.on = False
    engine = manager(tmp_path, rule, directories=1)
    with engine.kv:
        for doc in range(5):
            engine.run(doc, 8 * TOKENS)
        engine.drain()
        rule.on = True
        first = engine.run(0, 8 * TOKENS)
        assert len(first.failed) > 0
        rule.on = False
        for doc in range(10, 14):
            engine.run(doc, 8 * TOKENS)
        engine.now += 10.0
        assert engine.run(0, 8 * TOKENS).matched.disk == 8 * TOKENS
        assert engine.kv.stats()["quarantined"] == 0


class HeldReads(_Wrapper):
    """A device that takes reads and does not answer them until `release`."""

    def __init__(self, inner: IOEngine) -> None:
        super().__init__(inner)
        self.on = False
        self.kept: list[Transfers] = []

    def submit(self, transfers: Transfers) -> int:
        reads = transfers["op"] == READ
        if not (self.on and reads.any()):
            return self.inner.submit(transfers)
        first = int(np.flatnonzero(reads)[0])
        if first:
            return self.inner.submit(transfers[:first])
        n = int(np.flatnonzero(~reads)[0]) if not reads.all() else len(transfers)
        self.kept.append(transfers[:n].copy())
        return n

    def release(self) -> None:
        self.on = False
        for kept in self.kept:
            assert self.inner.submit(kept) == len(kept)
        self.kept = []

    @property
    def in_flight(self) -> int:
        return self.inner.in_flight + sum(map(len, self.kept))

    def poll(self, out: Results) -> int:
        return self.inner.poll(out)


def test_a_request_whose_blocks_do_not_come_in_time_computes_them(tmp_path: Path) -> None:
    held: list[HeldReads] = []

    def wrap(engine: IOEngine) -> IOEngine:
        held.append(HeldReads(engine))
        return held[0]

    config = gdskv.CacheConfig(
        device_bytes=16 * BLOCK,
        host_bytes=8 * BLOCK,
        disk_bytes=64 * BLOCK,
        directories=[tmp_path],
        min_free=0,
        io_timeout=5.0,
    )
    kv = gdskv.BlockManager(config, LAYOUT, NAMESPACE, io=wrap)
    engine = Engine(kv)
    for doc in range(6):
        engine.run(doc, 6 * TOKENS)
    engine.drain()
    held[0].on = True
    request = engine.begin(0, 6 * TOKENS)
    assert isinstance(request, gdskv.Request)
    assert request.matched.disk > 0
    old = set(request.blocks.tolist())
    for _ in range(20):
        engine.now += 0.1
        kv.poll(now=engine.now)
        assert not kv.is_ready(request)
    engine.now += 5.0
    engine.wait(request)
    assert len(request.failed) == request.matched.disk // TOKENS
    kept = old - set(request.blocks.tolist())
    assert kv.stats()["timed_out"] == len(kept) > 0
    engine.finish(request)
    for doc in range(20, 24):  # the slots that the device may still write to are in nobody's hands
        other = engine.begin(doc, 6 * TOKENS)
        assert isinstance(other, gdskv.Request)
        assert not kept & set(other.blocks.tolist())
        engine.finish(other)
    assert kv.stats()["device_leased"] == len(kept)
    held[0].release()
    engine.drain()
    kv.poll(now=engine.now)
    assert kv.stats()["device_leased"] == 0
    kv.check()
    for doc in range(6):
        engine.now += 10.0
        engine.run(doc, 6 * TOKENS)
    kv.close()


def test_a_forked_child_may_not_use_the_store_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    engine = manager(tmp_path, directories=1)
    engine.run(0, 4 * TOKENS)
    ask, answer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.kv.match(tokens(0, TOKENS), now=1.0)
            os.write(answer, b"used")
        except gdskv.StoreClosed as error:
            engine.kv.close()
            os.write(answer, str(error).encode())
        signal.pause()
    try:
        said = os.read(ask, 4096).decode()
        assert f"belongs to process {os.getpid()}" in said
        engine.run(1, 4 * TOKENS)  # the child's close took nothing from here
        engine.kv.close()
        with manager(tmp_path, directories=1).kv as kv:  # while the child lives
            assert kv.store.ledger.recovered.blocks == 8
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("stuck", [False, True])
def test_the_interpreter_ends_in_bounded_time_with_transfers_in_flight(tmp_path: Path, stuck: bool) -> None:
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import gdskv
from doubles import DelayEngine, StuckEngine
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config
wrap = (lambda e: StuckEngine(e)) if {stuck} else (lambda e: DelayEngine(e, 60.0))
kv = gdskv.BlockManager(config(Path({str(tmp_path)!r})), LAYOUT, NAMESPACE, io=wrap)
requests = [kv.begin(keys=__import__("numpy").full((1, 2), i + 1, "u8"), now=0.0) for i in range(8)]
for i, r in enumerate(requests):
    kv.commit(r, now=0.0); kv.release(r, now=0.0)
for i in range(8):
    r = kv.begin(keys=__import__("numpy").full((1, 2), i + 100, "u8"), now=1.0)
assert kv.stats()["in_flight"] + kv.stats()["deferred"] > 0
print("ends", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ends\n"
    start = time.monotonic()
    assert process.wait(60) == 0
    assert time.monotonic() - start < 60
