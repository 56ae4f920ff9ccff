"""What the leader's table has learned is kept by rank 0, and serves the next leader."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ranked import Engine

from gdskv.directory import learned
from gdskv.ledger import Ledger
from gdskv.ranks.leader import TELL_AT_REST, TELL_LEARNED
from gdskv.table import BlockTable
from gdskv.table.learned import ASKED, REQUESTS, SHAPE


def table(engine: Engine) -> BlockTable:
    assert engine.leader.store is not None
    return engine.leader.store.table


def counted(engine: Engine) -> tuple[int, int]:
    stats = engine.leader.stats()
    return stats["learned_loaded"], stats["learned_discarded"]


def serve(engine: Engine, requests: int, seed: int = 0) -> list[int]:
    """Few documents come back, and most do not; how many blocks of each request were there."""
    dice = np.random.default_rng(seed)
    found = []
    for i in range(requests):
        often = dice.random() < 0.4
        doc, n = (int(dice.integers(4)), 5) if often else (1000 * (seed + 1) + i, int(dice.integers(1, 4)))
        found.append(engine.get(doc, n))
        engine.put(doc, n)
        engine.drained()
    return found


def at_rest(engine: Engine) -> None:
    """Rank 0 is told what was learned."""
    engine.drained()
    engine.step(1.5 * TELL_AT_REST)


def served(folder: Path, requests: int = 20) -> bytes:
    """What is kept by a run that ends well."""
    engine = Engine(folder, 2)
    engine.opened()
    serve(engine, requests)
    at_rest(engine)
    told = table(engine).learned()
    engine.close()
    return told


def test_a_request_is_learned_from_once_whether_it_finds_anything_or_not(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, record=tmp_path / "asked.jsonl")
    engine.opened()
    learned_of = table(engine).arrays.lm

    def asked(doc: int, n: int) -> tuple[int, int]:
        requests, blocks = int(learned_of[REQUESTS]), int(learned_of[ASKED])
        for _ in range(3):  # the engine asks until it has room
            engine.tiers(doc, n)
        engine.get(doc, n)
        engine.drained()
        engine.step(0.0)
        return int(learned_of[REQUESTS]) - requests, int(learned_of[ASKED]) - blocks

    assert asked(1, 5) == (1, 5), "nothing of it is there"
    engine.put(1, 3)
    engine.drained()
    assert asked(2, 4) == (1, 4)
    assert asked(1, 5) == (1, 5), "three blocks of it are there, and they were loaded"
    engine.leader.forget()  # the session is over, and all of it is written down
    engine.close()
    assert len((tmp_path / "asked.jsonl").read_text().splitlines()) == 3


def kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"{learned.NAME}*"))


def test_what_was_learned_outlives_leader_and_ranks_and_decides_the_same(tmp_path: Path) -> None:
    told = served(tmp_path / "kept", 100)
    (file,) = kept(tmp_path)
    assert "rank0" in file.parts, "and no other rank keeps any"
    for name in ("given", "cold"):
        shutil.copytree(tmp_path / "kept", tmp_path / name)
        kept(tmp_path / name)[0].unlink()
    runs = {}
    for name, by_file in (("kept", 1), ("given", 0), ("cold", 0)):
        engine = Engine(tmp_path / name, 2)
        engine.leader._learned = told if name == "given" else b""
        engine.opened()
        assert counted(engine) == (by_file, 0)
        assert (table(engine).learned() == told) == (name != "cold")
        runs[name] = serve(engine, 60, seed=1)
        engine.close()
    assert runs["kept"] == runs["given"] != runs["cold"]


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[:100] + bytes([d[100] ^ 1]) + d[101:], lambda d: d[:-1], lambda d: d[:8] + b"\2" + d[9:]],
    ids=["flipped bit", "cut", "other version"],
)
def test_a_file_that_cannot_be_used_is_a_cold_start_and_is_counted(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    served(tmp_path)
    (file,) = kept(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    engine = Engine(tmp_path, 2)
    engine.opened()
    assert counted(engine) == (0, 1) and not table(engine).arrays.lh.any()
    engine.close()


def test_a_whole_file_of_what_no_table_can_have_learned_is_counted_too(tmp_path: Path) -> None:
    told = served(tmp_path)
    (file,) = kept(tmp_path)
    learned.save(file.parent, SHAPE, told[:-1])
    engine = Engine(tmp_path, 2)
    engine.opened()
    assert counted(engine) == (0, 1) and not table(engine).arrays.lh.any()
    engine.close()


def test_after_a_kill_the_last_that_was_told_serves(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, start="spawn")
    engine.opened()
    serve(engine, 20)
    at_rest(engine)
    told = table(engine).learned()
    engine.until(lambda: [p.name for p in kept(tmp_path)] == [learned.NAME])  # rank 0 writes it meanwhile
    serve(engine, 3, seed=1)
    assert table(engine).learned() != told
    for rank in engine.ranks:
        rank.kill()
    again = Engine(tmp_path, 2)
    again.opened()
    assert counted(again) == (1, 0) and table(again).learned() == told
    again.close()


def test_what_comes_while_the_file_is_being_written_is_written_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "save_learned", lambda *_: None)
    told = served(tmp_path)
    (file,) = kept(tmp_path)
    assert learned.load(file.parent, SHAPE) == told


def test_what_a_lost_session_has_learned_goes_before_what_is_kept_and_is_told_next(tmp_path: Path) -> None:
    told = served(tmp_path)
    (file,) = kept(tmp_path)
    older = file.read_bytes()
    engine = Engine(tmp_path, 2)
    engine.opened()
    serve(engine, 5, seed=1)
    at_rest(engine)
    latest = table(engine).learned()
    engine.ranks[0].call("close")
    file.write_bytes(older)
    engine.replace(0)
    engine.until(lambda: engine.leader.counters["sessions"] == 2)
    assert table(engine).learned() == latest != told and counted(engine) == (0, 0)
    at_rest(engine)
    engine.close()
    engine = Engine(tmp_path, 2)
    engine.opened()
    assert table(engine).learned() == latest and counted(engine) == (1, 0)
    engine.close()


def test_it_is_told_every_so_often_and_only_if_something_was_asked_since(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1)
    engine.opened()
    engine.put(0, 4)
    engine.drained()
    told = {}
    for tick in range(480):  # of 1/8 s
        if tick in (160, 164) or 240 <= tick < 360:
            assert engine.get(tick, 1) == 0
        if tick >= 240:
            engine.leader._left_to_flush = 1  # not at rest any more
        content = engine.leader.orders(now=round(engine.now) + tick / 8).learned
        told |= {tick: content} if content else {}
    often, late = 160 + 8 * TELL_AT_REST, 8 * TELL_LEARNED
    assert list(told) == [160, often, often + late, often + 2 * late, often + 3 * late]
    assert {len(content) for content in told.values()} == {len(table(engine).learned())} and len(told[160]) < 91 << 10
    engine.close()


def test_under_lru_nothing_is_told_and_nothing_kept(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1, policy="lru")
    engine.opened()
    engine.put(0, 4)
    engine.drained()
    engine.step(TELL_LEARNED)
    engine.close()
    assert not kept(tmp_path)
