"""``gdskv bench engine`` prints one object: time to the first token from each place, beside vLLM's own tiers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import environment


def test_the_bench_measures_every_place_beside_vllms_own_tiers(tmp_path: Path) -> None:
    code = "import sys; from gdskv.cli import main; sys.argv[0] = 'gdskv'; main()"
    command = [sys.executable, "-c", code, "bench", "engine", "--dir", str(tmp_path), "--tokens", "320"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--json"], capture_output=True, text=True, env=environment(), timeout=400
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    results = {r["name"]: r for r in figures["results"]}
    assert [f"first token {place}" in results for place in ("cold", "gpu pool", "host", "disk")] == [True] * 4
    assert all(r["value"] > 0 and r["ratio"] > 0 for r in results.values())  # a reference in every row
    for place in ("host", "disk"):
        assert "double" in results[f"first token {place}"]["reference_name"]
        assert results[f"first token {place} beside cold"]["reference"] == results["first token cold"]["value"]
    assert (figures["tokens"], figures["cached_tokens"]) == (
        336,
        320,
    )  # the same on both sides, or it ends with an error
    assert figures["bytes"] == 10 << 20 and list(tmp_path.iterdir()) == []
