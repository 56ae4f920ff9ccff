"""The CUDA driver double, cases_hostdriver.py, in a process of its own: nothing else here must ever load it."""

from __future__ import annotations

from pathlib import Path

from hostdriver import run_cases


def test_the_driver_double_does_what_the_driver_does(tmp_path: Path, summary: list[str]) -> None:
    out = run_cases("cases_hostdriver.py", tmp_path)
    summary.append(f"hostdriver: {out.strip().splitlines()[-1]}")
