"""Files that were damaged, swapped, mixed or put back from another time cost blocks and never bytes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from faults import audit, book, open_engine, open_store, settings, work
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, payload

import gdskv

FILES = ("blocks.slab", "slots.dir", "state.dir", "superblock")


def fill(directory: Path, seed: int, **more: object) -> None:
    """Leave a directory that was used for a while and closed."""
    engine = open_engine(settings(directory, **more))
    with engine.kv:
        work(engine, np.random.default_rng(seed), requests=80)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories of one namespace with a past each; "earlier" is the first one some requests ago."""
    root = tmp_path_factory.mktemp("used")
    for name, seed in (("a", 1), ("b", 2)):
        (root / name).mkdir()
        fill(root / name, seed)
    shutil.copytree(root / "a", root / "earlier")
    fill(root / "a", 3)
    return root


def flip(data: bytearray, chance: random.Random, _: bytes) -> None:
    for _ in range(chance.choice((1, 1, 8, 200))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def zero(data: bytearray, chance: random.Random, _: bytes) -> None:
    start, length = span(data, chance)
    data[start : start + length] = bytes(length)


def swap(data: bytearray, chance: random.Random, _: bytes) -> None:
    start, length = span(data, chance)
    other = aligned(chance.randrange(len(data) - length + 1), length)
    a, b = data[start : start + length], data[other : other + length]
    data[start : start + length], data[other : other + length] = b, a


def duplicate(data: bytearray, chance: random.Random, _: bytes) -> None:
    start, length = span(data, chance)
    other = aligned(chance.randrange(len(data) - length + 1), length)
    data[other : other + length] = data[start : start + length]


def truncate(data: bytearray, chance: random.Random, _: bytes) -> None:
    del data[chance.randrange(len(data)) :]


def graft(data: bytearray, chance: random.Random, foreign: bytes) -> None:
    """Put a range from the same file of another time or directory there."""
    start, length = span(data, chance)
    data[start : start + length] = foreign[start : start + length].ljust(length, b"\0")


def replace(data: bytearray, chance: random.Random, foreign: bytes) -> None:
    data[:] = foreign


DAMAGES = (flip, zero, swap, duplicate, truncate, graft, replace)


def span(data: bytearray, chance: random.Random) -> tuple[int, int]:
    """A range to damage, often a whole record or block."""
    length = min(len(data), chance.choice((8, 32, 64, 512, 4096, 8192, 1 + chance.randrange(len(data)))))
    return aligned(chance.randrange(len(data) - length + 1), length), length


def aligned(start: int, length: int) -> int:
    return start // length * length if length in (32, 64, 512, 4096) else start


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_costs_blocks_and_never_bytes(used: Path, tmp_path: Path, damage, pytestconfig: pytest.Config) -> None:
    chance = random.Random(damage.__name__)
    for number in range(60 * (10 if pytestconfig.getoption("soak") else 1)):
        place = tmp_path / "damaged"
        shutil.copytree(used / "a", place)
        for _ in range(chance.choice((1, 1, 3))):
            name = FILES[chance.randrange(4)]
            path = next(place.glob(f"*/{name}"))
            other = next((used / chance.choice(("b", "earlier"))).glob(f"*/{name}"))
            data = bytearray(path.read_bytes())
            if data:
                damage(data, chance, other.read_bytes())
                path.write_bytes(data)
        store = open_store(settings(place))
        found = audit(store)
        book(
            f"corrupt, {damage.__name__}",
            injected=1,
            served_right=len(found.right),
            refused=found.refused,
            wrong=found.wrong,
        )
        assert found.wrong == 0, f"damage {number}"
        store.check()
        store.close()
        engine = open_engine(settings(place))
        with engine.kv:
            work(engine, np.random.default_rng(number), requests=5)
            engine.kv.check()
        shutil.rmtree(place)


def test_the_audit_sees_wrong_bytes(tmp_path: Path) -> None:
    """Without checksums nothing stands between a lying disk and the engine; then the audit must say so."""
    fill(tmp_path, 1, checksums=False)
    slab = next(tmp_path.glob("*/blocks.slab"))
    data = bytearray(slab.read_bytes())
    for at in range(4096, len(data), BLOCK):
        data[at] ^= 1
    slab.write_bytes(data)
    with open_store(settings(tmp_path, checksums=False)) as store:
        assert audit(store).wrong > 0


def test_blocks_paged_out_never_come_back_with_another_blocks_content(tmp_path: Path) -> None:
    """W3 of the cases: two blocks' payloads change places on disk; both are found out."""
    with open_engine(settings(tmp_path)).kv as kv:
        Engine(kv).run(0, 2 * TOKENS)
    slab = next(tmp_path.glob("*/blocks.slab"))
    data = slab.read_bytes()
    first, second = data[4096 : 4096 + BLOCK], data[4096 + BLOCK : 4096 + 2 * BLOCK]
    slab.write_bytes(data[:4096] + second + first + data[4096 + 2 * BLOCK :])
    with open_store(settings(tmp_path)) as store:
        found = audit(store)
    assert (len(found.right), found.refused, found.wrong) == (0, 2, 0)


def test_a_failed_store_is_never_visible(tmp_path: Path) -> None:
    """W2 of the cases: what could not be written is not found, now or after a restart."""
    from doubles import Fail, FaultEngine

    from gdskv.io.base import WRITE

    def rule(transfer: np.void) -> Fail | None:
        return Fail() if transfer["op"] == WRITE and transfer["slab"] == 0 else None

    engine = open_engine(settings(tmp_path), io=lambda e: FaultEngine(e, rule))
    with engine.kv:
        work(engine, np.random.default_rng(5), requests=40)
        engine.drain()
        assert engine.kv.stats()["failed_writes"] > 0
        assert engine.kv.stats()["disk_used"] == 0
        for doc in range(24):
            engine.now += 100.0
            assert engine.kv.match(np.arange(8 * TOKENS) + doc * 1_000_000, now=engine.now).disk == 0
    with open_store(settings(tmp_path)) as store:
        assert store.ledger.recovered.blocks == 0


@pytest.mark.parametrize(
    "other",
    [
        gdskv.Namespace(model="other"),
        gdskv.Namespace(model="test", revision="2"),
        gdskv.Namespace(model="test", rope="yarn:8"),
        gdskv.Namespace(model="test", adapter="lora"),
        gdskv.Namespace(model="test", rank=1, tp=2),
    ],
    ids=["model", "revision", "rope", "adapter", "rank"],
)
def test_after_a_restart_another_kind_of_bytes_is_cold(tmp_path: Path, other: gdskv.Namespace) -> None:
    """W4 and W5 of the cases: the digest covers all that shapes bytes, and the superblock is held against it."""
    fill(tmp_path, 1)
    digest = NAMESPACE.digest(LAYOUT).hex()
    with pytest.raises(gdskv.DirectoryError, match="--reclaim"):
        open_store(settings(tmp_path), other)
    (tmp_path / digest).rename(tmp_path / other.digest(LAYOUT).hex())  # as if somebody moved it
    with open_store(settings(tmp_path), other) as store:
        assert store.ledger.recovered.blocks == 0
        assert "another namespace's" in store.ledger.recovered.why[0]


def test_a_layout_of_equal_size_is_another_namespace(tmp_path: Path) -> None:
    """W5 of the cases: float16 and bfloat16 take the same bytes."""
    digests = {
        gdskv.Namespace(model="test").digest(gdskv.KVLayout(2, 2, 64, dtype, 16)) for dtype in ("float16", "bfloat16")
    }
    assert len(digests) == 2


def test_every_payload_is_told_from_every_other() -> None:
    """What the audits go by: no two keys of a workload ask for the same bytes."""
    from gdskv.keys import block_keys

    keys = np.concatenate([block_keys(np.arange(128) + doc * 1_000_000, TOKENS) for doc in range(24)])
    assert len({payload(key).tobytes() for key in keys}) == len(keys) == 24 * 8
