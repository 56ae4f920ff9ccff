"""tools/gpu-check over doubles: the CUDA driver double, kernels compiled for the CPU, pools in host memory.

What cannot be shown so is CUDA itself: CuPy's compilation, torch's streams, the demo. Run by test_gpu_check.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch
from hostdriver import TESTS, Driver
from hostkernels import HostKernels

from gdskv.io import kernels


@pytest.fixture(scope="module")
def script() -> Any:
    loader = SourceFileLoader("gpu_check", str(TESTS.parent / "tools" / "gpu-check"))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def setting(
    script: Any, tmp_path: Path, driver: Driver, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    handles = HostKernels(tmp_path_factory.mktemp("hostkernels")).handles
    monkeypatch.setattr(kernels, "load", lambda number: handles)  # for stores, which compile their own
    kept: list[torch.Tensor] = []

    def known(tensor: torch.Tensor) -> None:
        kept.append(tensor)
        driver.adopt(tensor.data_ptr(), tensor.nbytes)

    yield script.Setting("cpu", 0, tmp_path, lambda number: handles, known, True)
    for tensor in kept:
        driver.disown(tensor.data_ptr())


@pytest.mark.parametrize("section", ["environment", "kernels", "speed", "files", "store", "manager"])
def test_a_section_finds_all_well(script: Any, setting: Any, section: str) -> None:
    rows = script.check(setting, [getattr(script, section)])
    assert rows and [row for row in rows if not row.ok] == []


def test_wrong_bytes_of_a_kernel_are_found(script: Any, setting: Any, driver: Driver) -> None:
    handles = setting.load(0)
    crooked = {**handles, "gather_16": handles["scatter_16"]}
    rows = script.check(setting._replace(load=lambda number: crooked), [script.kernels])
    assert any(not row.ok for row in rows)


def test_a_section_that_breaks_is_a_row_and_the_others_go_on(script: Any, setting: Any) -> None:
    def broken(s: Any) -> Any:
        raise RuntimeError("no such thing")

    rows = script.check(setting, [broken, script.environment])
    assert not rows[0].ok and "no such thing" in rows[0].result
    assert len(rows) > 5
