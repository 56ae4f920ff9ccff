"""The parsers of what a file says take any bytes: they answer or refuse in words, and the table made of it is sound."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from faults import book
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdskv.directory import records, superblock
from gdskv.directory.records import IDENTITY, REMEMBERED, STATE_RECORD
from gdskv.errors import DirectoryError
from gdskv.io.crc import crc32c_bytes
from gdskv.table import CHANGE, BlockTable

EXAMPLES = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PATH = Path("/kv/digest/superblock")
GOOD = superblock.Superblock("00" * 16, {"model": "m"}, 4096, 8, 0, 1, "a" * 32)


def text_of(values: object) -> str:
    body = json.dumps(values)
    return f"{body}\n{crc32c_bytes(body.encode()):08x}\n"


def parse(text: str) -> superblock.Superblock | str | None:
    book("fuzz, superblock", injected=1, wrong=0)
    try:
        return superblock.parse(text, PATH)
    except DirectoryError as error:
        assert "--clear" in str(error)
        return None


@EXAMPLES
@given(st.text())
def test_any_text_is_no_superblock(text: str) -> None:
    assert isinstance(parse(text), str)


@EXAMPLES
@given(st.integers(0, 10_000), st.characters(codec="ascii"))
def test_a_superblock_with_one_wrong_character_is_damaged(at: int, character: str) -> None:
    import dataclasses

    text = text_of(dataclasses.asdict(GOOD))
    at %= len(text) - 1
    changed = text[:at] + character + text[at + 1 :]
    assert isinstance(parse(changed), str) or changed.split()[:-1] == text.split()[:-1]
    assert isinstance(parse(changed), str) or changed.split()[-1].lower() == text.split()[-1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@EXAMPLES
@given(
    st.dictionaries(
        st.sampled_from([*superblock.Superblock.__dataclass_fields__, "more"]), json_values, max_size=14
    ).map(lambda values: {"format": 1} | values)
)
def test_a_whole_superblock_with_wrong_fields_is_damaged(values: dict[str, object]) -> None:
    import dataclasses

    found = parse(text_of(dataclasses.asdict(GOOD) | values))
    if isinstance(found, superblock.Superblock):
        assert isinstance(found.blocks, int)
        assert isinstance(found.tenants, list)
        assert all(isinstance(name, str) for name in found.tenants)


@EXAMPLES
@given(st.binary(min_size=96, max_size=96 * 40), st.integers(0, 2**32))
def test_random_records_are_none(noise: bytes, seed: int) -> None:
    n = len(noise) // 96
    identities = np.frombuffer(noise[: 64 * n], IDENTITY).copy()
    states = np.frombuffer(noise[64 * n : 96 * n], STATE_RECORD).copy()
    identities["version"] = records.VERSION
    found, _, _ = records.remembered(identities, states, 4096)
    book("fuzz, random records", injected=n, wrong=len(found))
    assert len(found) == 0


def some_records(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Records of `n` slots as a store may have written them, or as nobody would: parents in circles, keys twice."""
    changes = np.zeros(n, CHANGE)
    keys = rng.integers(1, max(2, n), (n, 2), np.uint64)
    keys[:, 1] = 7
    changes["k0"], changes["k1"] = keys[:, 0], keys[:, 1]
    parents = rng.integers(0, max(2, n), n, np.uint64)
    changes["p0"], changes["p1"] = parents, np.where(parents == 0, 0, 7)
    changes["slot"] = np.arange(n)
    changes["what"], changes["uses"] = 3, rng.integers(0, 5, n)
    changes["last"] = rng.integers(0, 100, n)
    changes["priority"] = rng.integers(0, 101, n)
    changes["deadline"] = np.where(rng.random(n) < 0.4, rng.integers(1, 200, n), 0)
    changes["flags"] = rng.choice([0, 1, 1, 1, 3, 5, 8], n)
    changes["tenant"] = rng.integers(0, 3, n)
    identities, states = np.zeros(n, IDENTITY), np.zeros(n, STATE_RECORD)
    records.encode(changes, n, 0, 1, 1000, 1050, 4096, np.arange(3, dtype=np.uint32), identities, states)
    return identities, states


@EXAMPLES
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 20))
def test_whatever_records_say_the_table_is_sound(seed: int, n: int, flips: int) -> None:
    rng = np.random.default_rng(seed)
    identities, states = some_records(rng, n)
    touched = set()
    for array in (identities, states):
        raw = array.view(np.uint8)
        for _ in range(flips):
            at = int(rng.integers(len(raw)))
            raw[at] ^= np.uint8(1 << rng.integers(8))
            if array is identities:
                touched.add(at // 64)
    before, _ = some_records(np.random.default_rng(seed), n)
    found, _, _ = records.remembered(identities, states, 4096)
    wrong = 0
    for block in found:
        slot = int(block["slot"])
        wrong += any(block[name] != before[slot][name] for name in ("k0", "k1", "p0", "p1", "crc", "fill"))
    book("fuzz, mutated records", injected=2 * flips, wrong=wrong)
    assert wrong == 0
    table = BlockTable(0, 4, n)
    table.advance(50)
    table.remember()
    freed = np.empty(n, np.int32)
    kept, _, _ = records.sort_out(found, n, 0, 1050, 1000, freed)
    blocks = np.ascontiguousarray(found[:kept])
    assert blocks.dtype == REMEMBERED
    back = table.restore(blocks, np.argsort(blocks["last"], kind="stable"))
    assert back <= kept
    table.check(closed=False)
    keys = np.stack([blocks["k0"], blocks["k1"]], axis=1)
    for key in keys:
        table.match(key[None])
    table.advance(10_000)
    table.check(closed=False)
