"""``gdskv bench recovery``: opening a store over the records of many blocks, beside reading the same files.

The records are of a made-up directory, whose slab is preallocated and never written: an open reads no payloads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdskv.cli import benchlib, console

if TYPE_CHECKING:
    from gdskv.store import KVStore

__all__ = ["recovery"]

CHAIN = 256  # blocks of a prompt
ROUNDS = 5
READ_BYTES = 1 << 20  # per call of the plain loop


def recovery(
    records: Annotated[int, typer.Option(min=CHAIN, help="Blocks on disk; a tenth of it is measured too.")] = 1_000_000,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the directory; 4 KiB a block is taken.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure an open after a crash: from nothing to a store that serves, with no page of the records in memory."""
    sizes = [records, max(CHAIN, records // 10)]
    results = []
    with (
        console.progress("bench recovery", len(sizes) * 2 * (ROUNDS + 1)) as step,
        console.workplace(directory) as root,
    ):
        for n in sizes:
            results.append(measure(root / str(n), n, step))
    benchlib.show("recovery", results, json=json, rounds=ROUNDS)


def measure(root: Path, n: int, step: Callable[[int], None]) -> benchlib.Result:
    """Make a directory with `n` blocks and open it, in turn with reading its record files."""
    root.mkdir()
    store = open_store(root, n)
    write_records(store, n)

    def ours(_: int) -> float:
        forget_pages(files(root))
        opened: list[KVStore] = []
        took = benchlib.seconds(lambda: opened.append(open_store(root, n)))
        (found,) = opened
        assert found.ledger is not None
        if found.ledger.recovered.blocks != n:
            raise AssertionError(f"{found.ledger.recovered} of {n} blocks")
        found.close()
        return took

    def theirs(_: int) -> float:
        forget_pages(files(root))
        return benchlib.seconds(lambda: [read_all(path) for path in files(root)])

    took, reference = benchlib.interleave(ours, theirs, rounds=ROUNDS, step=step)
    return benchlib.Result.of(f"recovery {n}", took, "s", reference, "reading the files in a plain loop")


def open_store(root: Path, n: int) -> KVStore:
    """A store with a disk tier of `n` blocks of one page, the smallest there are."""
    from gdskv.config import CacheConfig
    from gdskv.io.base import ALIGNMENT
    from gdskv.layout import KVLayout, Namespace
    from gdskv.store import KVStore

    config = CacheConfig(disk_bytes=n * ALIGNMENT, directories=[root], min_free=0, host_bytes=64 * ALIGNMENT)
    return KVStore(config, KVLayout.raw(ALIGNMENT, 16), Namespace(model="bench recovery"), wall=1e9)


def write_records(store: KVStore, n: int) -> None:
    """Close a store, leaving records as if `n` blocks, in chains of CHAIN, had been spilled in some order of use; every
    seventh chain is retained."""
    import numpy as np

    from gdskv.directory.records import FILL, IS_ROOT, PRESENT, STATE
    from gdskv.table import CHANGE

    random = np.random.default_rng(19)
    changes = np.zeros(n, CHANGE)
    changes["k0"], changes["k1"] = random.integers(1, 1 << 64, (2, n), np.uint64)
    changes["p0"][1:], changes["p1"][1:] = changes["k0"][:-1], changes["k1"][:-1]
    place = np.arange(n)
    root = place % CHAIN == 0
    changes["p0"][root] = changes["p1"][root] = 0
    changes["flags"] = np.where(root, PRESENT | IS_ROOT, PRESENT)
    changes["slot"], changes["what"], changes["uses"] = place, FILL | STATE, 1
    changes["last"] = random.permutation(-(-n // CHAIN))[place // CHAIN] * CHAIN + CHAIN - place % CHAIN
    changes["priority"] = 35
    changes["deadline"] = np.where(place // CHAIN % 7 == 0, 3600 * 10**9, 0)
    from gdskv.ledger import Ledger

    assert isinstance(store.ledger, Ledger)
    (directory,) = store.ledger.directories
    directory.encode(changes, 10**18, 0, np.zeros(1, np.uint32))
    folder = directory.folder
    store.close()
    for name, array in (("slots.dir", directory.identities), ("state.dir", directory.states)):
        with open(folder / name, "r+b") as file:
            file.seek(4096)
            file.write(array.tobytes())


def files(root: Path) -> list[Path]:
    """The record files."""
    return sorted(root.glob("*/*.dir"))


def forget_pages(paths: list[Path]) -> None:
    """Let the kernel drop what it holds of files, as after a start of the machine."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(path: Path) -> int:
    """Bytes of a file, read from its start to its end."""
    total = 0
    with open(path, "rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            total += len(part)
    return total
