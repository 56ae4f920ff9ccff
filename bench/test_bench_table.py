"""The block table under pytest-benchmark: its calls at a million blocks, and all of ``gdskv bench table``, small."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from gdskv.cli.bench_table import CHAIN, Chains, fill, inserter
from gdskv.table import BlockTable

ARGUMENTS = ("bench", "table", "--entries", "100000", "--json")
CHAINS = Chains(1_000_000)


@pytest.fixture(scope="module")
def full() -> BlockTable:
    """A table whose one tier is full."""
    return fill(CHAINS, lambda _: None)


def test_match(benchmark: Any, full: BlockTable) -> None:
    """A chain of 2,048 blocks that are all there, another one each time."""
    chains = itertools.cycle([CHAINS.keys(n) for n in range(len(CHAINS) - 1)])
    entries, _ = benchmark(lambda: full.match(next(chains)))
    assert len(entries) == CHAIN


def test_insert_and_evict(benchmark: Any, full: BlockTable) -> None:
    """begin, commit and release of 2,048 new blocks, which make as many others leave."""
    numbers = itertools.count(len(CHAINS))
    insert = inserter(full)
    benchmark.pedantic(insert, setup=lambda: ((CHAINS.keys(next(numbers)),), {}), rounds=200, warmup_rounds=5)
    full.check()


def test_bench_table(benchmark: Any) -> None:
    """The whole command, once; its figures stand in the benchmark's extra information."""

    def run() -> str:
        command = [sys.executable, "-m", "gdskv.cli", *ARGUMENTS]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = json.loads(benchmark.pedantic(run, rounds=1, iterations=1))
    assert found["results"]
    benchmark.extra_info.update({result["name"]: result["value"] for result in found["results"]})
