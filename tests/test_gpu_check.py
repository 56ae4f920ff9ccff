"""tools/gpu-check: what it says where there is no GPU, and all its sections over doubles of one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostdriver import TESTS, missing, run_cases


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_2(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS.parent / "tools" / "gpu-check"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "torch finds no CUDA device. Run it on a machine with a GPU." in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_its_sections_over_doubles(tmp_path: Path, summary: list[str]) -> None:
    if importlib.util.find_spec("kvikio") is None:
        if sys.version_info < (3, 11):
            pytest.skip("KvikIO has no build for Python 3.10")
        missing("KvikIO is not installed: tools/setup installs it from PyPI where it can")
    out = run_cases("cases_gpu_check.py", tmp_path, "-p", "ongpu", KVIKIO_COMPAT_MODE="ON")
    summary.append(f"tools/gpu-check over hostdriver and kernels on the CPU: {out.strip().splitlines()[-1]}")
