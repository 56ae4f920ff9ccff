"""A process that is killed at any instant leaves a directory that the next one opens, with right bytes or none."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults import audit, book, open_engine, open_store, settings, work

import gdskv


def run_and_kill(job: Callable[[], None], seconds: float) -> None:
    """Run `job` in a forked child, which has this process's compiled code, and kill it after that time."""
    child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # it was to be killed; the parent looks
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"


def serve(config: gdskv.CacheConfig, seed: int) -> Callable[[], None]:
    def job() -> None:
        work(open_engine(config), np.random.default_rng(seed))

    return job


def warm_up(config: gdskv.CacheConfig) -> None:
    """Have in this process what all children run compiled."""
    engine = open_engine(config)
    with engine.kv:
        work(engine, np.random.default_rng(99), requests=100)


@pytest.fixture
def soak(pytestconfig: pytest.Config) -> int:
    """How many times more than in an ordinary run."""
    return 10 if pytestconfig.getoption("soak") else 1


@pytest.mark.parametrize(
    ("kills", "directories", "more"),
    [
        (40, 1, {}),
        (20, 1, {"policy": "hazard", "memory_policy": "hazard"}),
        (25, 2, {"spill": "reused"}),
        (25, 1, {"durability": "fsync"}),
    ],
    ids=["lazy", "learned", "two directories", "fsync"],
)
def test_a_killed_process_leaves_right_bytes_or_none(
    tmp_path: Path, soak: int, kills: int, directories: int, more: dict[str, str]
) -> None:
    places = [tmp_path / str(i) for i in range(directories)]
    for place in places:
        place.mkdir()
    config = settings(*places, **more)
    warm_up(config)
    chance = random.Random(directories)
    for number in range(kills * soak):
        run_and_kill(serve(config, number), chance.uniform(0.0, 0.15))
        store = open_store(config)
        recovered = store.ledger.recovered
        found = audit(store)
        book(
            "kill",
            injected=1,
            blocks_recovered=recovered.blocks,
            served_right=len(found.right),
            refused=found.refused,
            wrong=found.wrong,
        )
        assert found.wrong == 0, f"after kill {number}"
        assert recovered.why == (), f"after kill {number}"
        store.check()
        store.close()


def test_seventy_kills_in_a_row_leave_no_residue(tmp_path: Path, soak: int) -> None:
    """D5 of the cases: left-overs of dead owners are taken over by the next one."""
    config = settings(tmp_path)
    warm_up(config)
    chance = random.Random(7)
    for number in range(70 * soak):
        run_and_kill(serve(config, number), chance.uniform(0.0, 0.08))
        book("kill, again and again", injected=1)
    with open_store(config) as store:
        assert audit(store).wrong == 0
        size = store.disk_pool.directories[0].bytes
    left = sorted(str(path.relative_to(tmp_path / store.digest.hex())) for path in tmp_path.glob("*/*"))
    assert left == ["blocks.slab", "learned", "slots.dir", "state.dir", "superblock"]
    assert [path.name for path in tmp_path.iterdir()] == [store.digest.hex()]
    assert (tmp_path / store.digest.hex() / "blocks.slab").stat().st_size == size


def test_a_kill_while_a_smaller_disk_is_opened_costs_blocks_and_never_bytes(tmp_path: Path, soak: int) -> None:
    warm_up(settings(tmp_path))
    chance = random.Random(11)
    sizes = (48, 24, 96, 32)
    for number in range(12 * soak):
        config = settings(tmp_path, disk=sizes[number % 4])
        run_and_kill(serve(config, number), chance.uniform(0.0, 0.12))
        store = open_store(config)
        found = audit(store)
        book("kill while resizing", injected=1, served_right=len(found.right), refused=found.refused, wrong=found.wrong)
        assert found.wrong == 0
        store.close()
