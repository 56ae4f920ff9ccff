"""BlockManager against a plain dict, at random: no wrong bytes, nothing stuck, nothing leaked, whatever fails.

`--soak MINUTES` goes on with new seeds for that long. A failure names its seed and the shortest sequence found that
still fails; `attempt(world, seed, steps, Totals())` carries it out again.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence

import pytest
from modelled import Run, Step, Totals, World, attempt, make_steps
from shuffled import shrink

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else ""
SIZES = [
    *[(1, 1, 1), (1, 0, 1), (2, 1, 1), (1, 1, 8), (4, 0, 0), (4, 4, 0), (4, 0, 16), (3, 2, 5), (5, 1, 12)],
    *[(8, 8, 32), (8, 4, 64), (16, 8, 64)],
]


def some_world(rng: random.Random, folder: str = IN_MEMORY) -> World:
    """Sizes down to a slot a tier, settings, and how much goes wrong."""
    device, host, disk = rng.choice(SIZES)
    policy = rng.choice(["lru", "hazard", "hazard"])
    spills = ["all", "all", "reused", "retained"] if policy == "lru" else ["all", "learned", "learned", "retained"]
    return World(
        device,
        host,
        disk,
        directories=rng.choice([1, 1, 2]) if disk > 2 else 1,
        read_faults=rng.choice([0, 0, 0.1, 0.4]),
        write_faults=rng.choice([0, 0, 0, 0.1, 0.5]),
        copy_faults=rng.choice([0, 0, 0, 0.1]),
        lazy=rng.choice([0, 0.3, 0.7]),
        depth=rng.choice([1, 3, 4096, 4096]),
        spill=rng.choice(spills),
        policy=policy,
        memory_policy=rng.choice(["lru", "hazard"]),
        on_expiry=rng.choice(["demote", "forget"]),
        protect=rng.random() < 0.2,
        retained=rng.choice([0.25, 0.5, 1.0]),
        tenant=rng.choice([0.5, 1.0]),
        write_queue=rng.choice([1, 3, 4096]),
        host_clean=rng.choice([0, 0.1, 1.0]),
        docs=rng.choice([3, 12, 24]),
        folder=folder,
    )


@pytest.fixture(scope="module")
def totals(summary: list[str]) -> Iterator[Totals]:
    """Counts of all runs of this file, shown at the end of the test output."""
    counts = Totals()
    yield counts
    summary.append(f"manager beside a dict: {counts}")


def check(world: World, seed: int, steps: Sequence[Step], totals: Totals) -> Run:
    """Carry out the steps; if they fail, say with which seed, and the shortest sequence that fails as well."""
    try:
        return attempt(world, seed, steps, totals)
    except Exception as error:
        kind = type(error)

        def fails(some: Sequence[Step]) -> bool:
            try:
                attempt(world, seed, some, Totals())
            except kind:
                return True
            except Exception:
                return False
            return False

        short = shrink(steps, fails)
        text = "\n".join(f"    {step}," for step in short)
        raise AssertionError(f"{error}\nseed {seed}, {world}\n{len(short)} of {len(steps)} steps:\n{text}") from error


@pytest.mark.parametrize("seed", range(48))
def test_any_sequence_gets_right_answers_under_any_fault(seed: int, totals: Totals) -> None:
    rng = random.Random(seed)
    check(some_world(rng), seed, make_steps(rng, 400), totals)


@pytest.mark.parametrize("seed", range(100, 104))
def test_so_it_does_on_a_file_system_of_the_node(seed: int, totals: Totals) -> None:
    rng = random.Random(seed)
    check(some_world(rng, folder=""), seed, make_steps(rng, 100), totals)


@pytest.mark.parametrize("seed", range(200, 204))
def test_with_room_for_all_everything_committed_is_found(seed: int, totals: Totals) -> None:
    rng = random.Random(seed)
    sizes = rng.choice([(64, 0, 0), (8, 120, 0), (8, 0, 120), (8, 4, 120)])
    world = World(
        *sizes, roomy=True, docs=4, retained=1.0, folder=IN_MEMORY, on_expiry=rng.choice(["demote", "forget"])
    )
    check(world, seed, make_steps(rng, 300), totals)


@pytest.mark.parametrize("seed", range(300, 306))
def test_when_transfers_end_does_not_change_what_is_decided(seed: int, totals: Totals) -> None:
    rng = random.Random(seed)
    sizes = rng.choice([(4, 4, 16), (3, 2, 5), (8, 8, 32)])
    policy = rng.choice(["lru", "hazard"])
    world = World(
        *sizes,
        patient=True,
        folder=IN_MEMORY,
        on_expiry=rng.choice(["demote", "forget"]),
        policy=policy,
        memory_policy=policy,
        spill="learned" if policy == "hazard" else "all",
    )
    steps = make_steps(rng, 300)
    runs = [check(world._replace(lazy=lazy), seed + i, steps, totals) for i, lazy in enumerate((0.0, 0.9))]
    assert runs[0].decisions == runs[1].decisions


def test_soak(request: pytest.FixtureRequest, totals: Totals) -> None:
    minutes = request.config.getoption("soak")
    if not minutes:
        pytest.skip("give --soak MINUTES")
    end = time.monotonic() + 60 * minutes
    seed = int(time.time()) * 1000
    while time.monotonic() < end:
        seed += 1
        rng = random.Random(seed)
        check(some_world(rng), seed, make_steps(rng, 500), totals)
