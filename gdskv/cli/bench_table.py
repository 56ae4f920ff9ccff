"""``gdskv bench table``: match and insert+evict of the block table at many entries, beside Python's own dicts.

Keys are random: digests look like that. Knows the table and nothing below it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdskv.cli import benchlib, console

if TYPE_CHECKING:
    from gdskv.table import BlockTable

__all__ = ["table"]

CHAIN = 2048  # blocks of a request
CHAINS = 128  # per round and side
ROUNDS = 7
OTHERS = 100  # rounds whose chains no other round inserts


def table(
    entries: Annotated[int, typer.Option(min=2 * CHAIN, help="Blocks in the table.")] = 10_000_000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a match of 2,048 blocks, and insert+evict of blocks in a full table by last use and by learned value; all
    in ns a block."""
    from gdskv.table.learned import TRUST

    chains = Chains(entries)
    with console.progress("bench table", 2 * len(chains) + 3 * 2 * (ROUNDS + 1)) as step:
        full = fill(chains, step)
        lookup = {key: READY for n in range(len(chains)) for key in chains.as_bytes(n)}
        ours, theirs = benchlib.interleave(
            lambda n: match_ns(full, chains, n), lambda n: dict_match_ns(lookup, chains, n), rounds=ROUNDS, step=step
        )
        matched = benchlib.Result.of(
            f"match {CHAIN} of {entries}", ours, "ns/block", theirs, "dict keyed by bytes, state checked"
        )
        lru = OrderedDict(lookup)
        lookup.clear()
        ours, theirs = benchlib.interleave(
            lambda n: insert_ns(full, chains, n), lambda n: dict_insert_ns(lru, chains, n), rounds=ROUNDS, step=step
        )
        inserted = benchlib.Result.of(f"insert+evict {entries}", ours, "ns/block", theirs, "OrderedDict as LRU")
        learning = fill(chains, step, "hazard")
        learning.arrays.lm[TRUST] = 1
        ours, theirs = benchlib.interleave(
            lambda n: insert_ns(learning, chains, n),
            lambda n: insert_ns(full, chains, n + OTHERS),
            rounds=ROUNDS,
            step=step,
        )
        hazard = benchlib.Result.of(
            f"hazard insert+evict {entries}", ours, "ns/block", theirs, "insert+evict by last use"
        )
    full.check()
    learning.check()
    benchlib.show("table", [matched, inserted, hazard], json=json, rounds=ROUNDS, blocks_per_round=CHAIN * CHAINS)


READY = 2


class Chains:
    """Random keys of `entries` blocks in chains of CHAIN, the last one shorter; always the same ones."""

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return -(-self.entries // CHAIN)

    def keys(self, n: int) -> Any:
        """Keys of chain `n`; those with n >= len(self) are of blocks that are not in the table at first."""
        import numpy as np

        blocks = min(CHAIN, self.entries - n * CHAIN) if n < len(self) else CHAIN
        return np.random.default_rng((17, n)).integers(1, 1 << 64, (blocks, 2), np.uint64)

    def as_bytes(self, n: int) -> list[bytes]:
        """The same as 16-byte strings, fresh objects each time."""
        raw = self.keys(n).tobytes()
        return [raw[i : i + 16] for i in range(0, len(raw), 16)]

    def asked(self, round_number: int) -> list[int]:
        """Chains of full length to ask for in a round, other ones in each."""
        import numpy as np

        whole = self.entries // CHAIN
        return [int(n) for n in np.random.default_rng((18, round_number)).integers(0, whole, CHAINS)]

    def new(self, round_number: int) -> range:
        """Chains to insert in a round."""
        first = len(self) + round_number * CHAINS
        return range(first, first + CHAINS)


def fill(chains: Chains, step: Callable[[int], None], policy: str = "lru") -> BlockTable:
    """A table with all blocks of the chains in its device tier, which is full."""
    from gdskv.table import BlockTable

    full = BlockTable(chains.entries, 0, 0, transfers=4 * CHAIN, memory_policy=policy)
    insert = inserter(full)
    for n in range(len(chains)):
        insert(chains.keys(n))
        step(1)
    return full


def inserter(full: BlockTable) -> Callable[[Any], None]:
    """A function that takes a chain of keys through begin, commit and release."""
    import numpy as np

    priority, ttl = np.full(CHAIN, 35, np.uint8), np.zeros(CHAIN, np.int64)

    def insert(keys: Any) -> None:
        n = len(keys)
        begun = full.begin(keys, n)
        full.commit(keys, begun.slots, priority[:n], ttl[:n], False)  # type: ignore[union-attr]
        full.release(begun.slots)  # type: ignore[union-attr]

    return insert


def match_ns(full: BlockTable, chains: Chains, round_number: int) -> float:
    """Time of a match in the table, ns a block."""
    asked = [chains.keys(n) for n in chains.asked(round_number)]

    def job() -> None:
        for keys in asked:
            entries, _ = full.match(keys)
            if len(entries) != CHAIN:
                raise AssertionError(f"{len(entries)} of {CHAIN} blocks found")

    return benchlib.seconds(job) * 1e9 / (CHAIN * CHAINS)


def dict_match_ns(lookup: dict[bytes, int], chains: Chains, round_number: int) -> float:
    """The same in a dict: stops at the first key that is missing or not ready, lists what was found."""
    asked = [chains.as_bytes(n) for n in chains.asked(round_number)]

    def job() -> None:
        get = lookup.get
        for keys in asked:
            found = []
            for key in keys:
                state = get(key)
                if state is None or state < READY:
                    break
                found.append(state)
            if len(found) != CHAIN:
                raise AssertionError(f"{len(found)} of {CHAIN} blocks found")

    return benchlib.seconds(job) * 1e9 / (CHAIN * CHAINS)


def insert_ns(full: BlockTable, chains: Chains, round_number: int) -> float:
    """Time of begin, commit and release of new chains in a full table, each of which makes as many blocks leave."""
    new = [chains.keys(n) for n in chains.new(round_number)]
    insert = inserter(full)

    def job() -> None:
        for keys in new:
            insert(keys)

    return benchlib.seconds(job) * 1e9 / (CHAIN * CHAINS)


def dict_insert_ns(lru: OrderedDict[bytes, int], chains: Chains, round_number: int) -> float:
    """The same in an OrderedDict that moves what is used to its end and drops from its front."""
    new = [chains.as_bytes(n) for n in chains.new(round_number)]

    def job() -> None:
        for keys in new:
            for key in keys:
                if key in lru:
                    lru.move_to_end(key)
                else:
                    lru.popitem(last=False)
                    lru[key] = READY

    return benchlib.seconds(job) * 1e9 / (CHAIN * CHAINS)
