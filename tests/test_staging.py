"""The ring of staging buffers, cases_staging.py, over the real KvikIO and the CUDA driver double."""

from __future__ import annotations

from pathlib import Path

from hostdriver import run_cases
from test_io_kvikio import kvikio  # noqa: F401


def test_the_staging_ring_keeps_its_promises(kvikio: None, tmp_path: Path, summary: list[str]) -> None:  # noqa: F811
    out = run_cases("cases_staging.py", tmp_path, KVIKIO_COMPAT_MODE="ON")
    summary.append(f"staging ring over KvikIO over hostdriver: {out.strip().splitlines()[-1]}")


def test_a_store_over_pages_keeps_its_promises(kvikio: None, tmp_path: Path, summary: list[str]) -> None:  # noqa: F811
    out = run_cases("cases_staging_store.py", tmp_path, KVIKIO_COMPAT_MODE="ON")
    summary.append(f"KVStore over pages over KvikIO over hostdriver: {out.strip().splitlines()[-1]}")
