"""``gdskv bench table`` under pytest-benchmark: the block table, small."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

ARGUMENTS = ("bench", "table", "--entries", "100000", "--json")


def test_bench_table(benchmark: Any) -> None:
    """The whole command, once; its figures stand in the benchmark's extra information."""

    def run() -> str:
        command = [sys.executable, "-m", "gdskv.cli", *ARGUMENTS]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = json.loads(benchmark.pedantic(run, rounds=1, iterations=1))
    assert found["results"]
    benchmark.extra_info.update({result["name"]: result["value"] for result in found["results"]})
