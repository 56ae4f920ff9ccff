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


SUITES = """cases_kvikio_store.py cases_gpu.py test_manager.py test_store.py test_restart.py test_failing.py
test_retention_behaviour.py test_cases_wrong_bytes.py test_cases_races.py test_cases_time.py
test_model.py test_store_model.py"""


def test_managers_and_stores_over_kvikio_keep_their_promises(kvikio: None, tmp_path: Path, summary: list[str]) -> None:
    out = run_cases(SUITES, tmp_path, "-p", "ongpu", KVIKIO_COMPAT_MODE="ON", GDSKV_IO="kvikio")
    for line in out.strip().splitlines():
        if "wrong bytes" in line or " passed" in line:
            summary.append(f"over KvikIO over hostdriver: {line}")


def test_they_keep_them_where_nothing_is_checked(kvikio: None, tmp_path: Path, summary: list[str]) -> None:
    # That KvikIO itself copies to and from device memory then is shown by cases_kvikio.py and cases_gpu.py
    variables = {"KVIKIO_COMPAT_MODE": "ON", "GDSKV_IO": "kvikio", "GDSKV_CHECKSUMS": "false"}
    out = run_cases("test_manager.py test_restart.py", tmp_path, "-p", "ongpu", **variables)
    summary.append(f"over KvikIO without checksums over hostdriver: {out.strip().splitlines()[-1]}")
