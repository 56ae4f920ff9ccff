"""Two ranks of one model, whose directories are not of the same time: misses, never another rank's or time's bytes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from faults import BOOKS, book, settings
from harness import BLOCK, LAYOUT, TOKENS

import gdskv
from gdskv.keys import block_keys

RANKS = (0, 1)


def namespace(rank: int) -> gdskv.Namespace:
    return gdskv.Namespace(model="test", tp=2, rank=rank)


def content(rank: int, key: np.ndarray) -> np.ndarray:
    """A block's bytes on a rank: each holds other heads."""
    words = np.arange(BLOCK // 8, dtype=np.uint64)
    return (words * key[0] + key[1] + np.uint64(rank << 40)).view(np.uint8)


def keys_of(doc: int) -> np.ndarray:
    """The leader's keys are the same on every rank."""
    return block_keys(np.arange(8 * TOKENS) + doc * 1_000_000, TOKENS, namespace=b"leader")


class Pair:
    """The stores of both ranks, driven alike."""

    def __init__(self, root: Path) -> None:
        for rank in RANKS:
            (root / str(rank)).mkdir(parents=True, exist_ok=True)
        self.stores = [
            gdskv.KVStore(settings(root / str(r), device_bytes=0), LAYOUT, namespace(r), wall=1000.0) for r in RANKS
        ]

    def save(self, docs: range) -> None:
        for doc in docs:
            for rank, store in enumerate(self.stores):
                keys = keys_of(doc)
                memory = np.stack([content(rank, key) for key in keys])
                ticket = store.store(keys, source=memory, now=float(doc))
                while ticket not in [done.ticket for done in store.poll(now=float(doc))]:
                    pass

    def load(self, doc: int) -> tuple[int, int]:
        """Blocks that both ranks have, as a leader takes the shorter match; and wrong ones."""
        keys, lengths, good, wrong = keys_of(doc), [], [], 0
        for rank, store in enumerate(self.stores):
            found = store.match(keys, now=1000.0)
            memory = np.zeros((len(keys), BLOCK), np.uint8)
            lengths.append(found.length)
            good.append(np.zeros(len(keys), np.bool_))
            if not found.length:
                continue
            ticket = store.load(found, into=memory, now=1000.0)
            done = []
            while not done:
                done = [d for d in store.poll(now=1000.0) if d.ticket == ticket]
            came = np.setdiff1d(np.arange(found.length), done[0].failed)
            good[rank][came] = True
            wrong += sum(not np.array_equal(memory[i], content(rank, keys[i])) for i in came)
        return int((good[0] & good[1]).sum()), wrong

    def close(self) -> None:
        for store in self.stores:
            store.close()


SKEWS = ("one older", "one missing", "one of another run", "both swapped", "one under the other's name")


@pytest.mark.parametrize("skew", SKEWS)
def test_skewed_ranks_miss_and_never_mix(tmp_path: Path, skew: str) -> None:
    """W6 of the cases: ranks never read or overwrite each other's files."""
    chance = random.Random(skew)
    for number in range(6):
        root = tmp_path / str(number)
        pair = Pair(root)
        pair.save(range(3))
        pair.close()
        shutil.copytree(root / "0", root / "older")
        pair = Pair(root)
        pair.save(range(3, 6))
        pair.close()
        hurt = chance.choice(RANKS)
        if skew == "one older":
            hurt = 0
            shutil.rmtree(root / "0")
            shutil.copytree(root / "older", root / "0")
        elif skew == "one missing":
            shutil.rmtree(root / str(hurt))
        elif skew == "one of another run":
            other = Pair(root / "run")
            other.save(range(4, 9))
            other.close()
            shutil.rmtree(root / str(hurt))
            shutil.copytree(root / "run" / str(hurt), root / str(hurt))
        else:
            names = [namespace(rank).digest(LAYOUT).hex() for rank in RANKS]
            folders = [root / str(rank) / names[rank] for rank in RANKS]
            if skew == "both swapped":
                shutil.move(folders[0], root / "held")
                shutil.move(folders[1], root / "0" / names[0])
                shutil.move(root / "held", root / "1" / names[1])
            else:
                shutil.rmtree(folders[hurt])
                shutil.copytree(folders[1 - hurt], folders[hurt])
        pair = Pair(root)
        came = wrong = 0
        for doc in range(9):
            blocks, bad = pair.load(doc)
            came, wrong = came + blocks, wrong + bad
        pair.close()
        book(f"rank skew, {skew}", injected=1, served_right=came, wrong=wrong)
        assert wrong == 0
    served = BOOKS[f"rank skew, {skew}"]["served_right"]
    assert (served > 0) == (skew in ("one older", "one of another run"))
