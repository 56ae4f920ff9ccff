"""The real KvikIO over the CUDA driver double, in processes of their own. What they say is said with "hostdriver"."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hostdriver import missing, run_cases


@pytest.fixture
def kvikio() -> None:
    """Skip where KvikIO is not installed."""
    if importlib.util.find_spec("kvikio") is None:
        if sys.version_info < (3, 11):
            pytest.skip("KvikIO has no build for Python 3.10")
        missing("KvikIO is not installed: tools/setup installs it from PyPI where it can")


def test_the_kvikio_engine_keeps_the_contract(kvikio: None, tmp_path: Path, summary: list[str]) -> None:
    out = run_cases("cases_kvikio.py", tmp_path, KVIKIO_COMPAT_MODE="ON")
    summary.append(f"KvikIO engine over hostdriver: {out.strip().splitlines()[-1]}")


def test_a_block_manager_over_kvikio_keeps_its_promises(kvikio: None, tmp_path: Path, summary: list[str]) -> None:
    out = run_cases("cases_kvikio_store.py", tmp_path, KVIKIO_COMPAT_MODE="ON")
    summary.append(f"BlockManager over KvikIO over hostdriver: {out.strip().splitlines()[-1]}")
