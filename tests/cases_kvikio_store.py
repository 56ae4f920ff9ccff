"""BlockManager and the choice of engine, with the real KvikIO over the CUDA driver double, device pools on "the GPU".

Run by test_io_kvikio.py in a process of its own, with the plugin ongpu.py.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import harness
import numpy as np
import pytest
from doubles import Fail, FaultEngine
from hostdriver import Driver

import gdskv
from gdskv.io import modes
from gdskv.io.kvikio import KvikioEngine

config = partial(harness.config, io="kvikio")


@pytest.mark.parametrize("checksums", [True, False])
def test_the_store_says_how_bytes_move(tmp_path: Path, checksums: bool) -> None:
    with gdskv.BlockManager(config(tmp_path, checksums=checksums), harness.LAYOUT, harness.NAMESPACE) as kv:
        assert isinstance(kv.store.io, KvikioEngine)
        (mode,) = kv.store.modes
        assert mode.name == "compat" and "hostdriver" in mode.why
        engine = harness.Engine(kv)
        for doc in range(6):
            engine.run(doc, 8 * harness.TOKENS)
        counters = kv.store.io.counters()
        assert counters["write_bytes_kvikio_compat"] > 0 and counters["write_bytes_kvikio_direct"] == 0
        assert counters["copy_bytes_device"] > 0


def test_each_open_logs_the_mode_of_each_directory_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    caplog.set_level(logging.INFO, "gdskv")
    settings = config(tmp_path, disk=64).model_copy(update={"directories": folders})
    for _ in range(2):
        caplog.clear()
        with gdskv.BlockManager(settings, harness.LAYOUT, harness.NAMESPACE) as kv:
            harness.Engine(kv).run(1, 4 * harness.TOKENS)
            why = [mode.why for mode in kv.store.modes]
        lines = [r.getMessage() for r in caplog.records if "compat" in r.getMessage()]
        assert lines == [f"{folder}: compat, {reason}" for folder, reason in zip(folders, why, strict=True)]
        assert all("hostdriver" in reason for reason in why)


def test_g4_a_compat_success_is_not_direct(tmp_path: Path) -> None:
    with pytest.raises(gdskv.ConfigError, match=r"require_gds=true, but .* is compat: hostdriver"):
        gdskv.BlockManager(config(tmp_path, require_gds=True), harness.LAYOUT, harness.NAMESPACE)
    assert list(tmp_path.glob(".gdskv-probe*")) == []


def test_auto_does_not_take_a_double_for_a_gpu(tmp_path: Path) -> None:
    with gdskv.BlockManager(config(tmp_path, io="auto"), harness.LAYOUT, harness.NAMESPACE) as kv:
        assert kv.store.modes[0].name == "posix"


def test_g1_a_file_that_cufile_refuses_is_compat_with_the_reason(tmp_path, monkeypatch, driver) -> None:
    def refuse(cuda: object, device: int, path: str, compat: str) -> str:
        raise RuntimeError("cuFile error at: /a/b.cpp:88: error 5030 registering the file")

    monkeypatch.setattr(modes.cuda.load(), "double", False)
    monkeypatch.setattr(modes, "_round", refuse)
    mode = modes.probe(tmp_path)
    assert mode.name == "compat"
    assert "5030" in mode.why and "cannot register files of this file system" in mode.why


@pytest.mark.parametrize(
    ("counted", "name"), [(0, "compat"), (1 << 20, "compat"), (2 << 20, "direct"), (None, "compat")]
)
def test_g4_direct_is_what_nvidia_fs_has_counted(tmp_path, monkeypatch, counted, name) -> None:
    counts = iter([None, None] if counted is None else [5 << 20, (5 << 20) + counted])
    monkeypatch.setattr(modes.cuda.load(), "double", False)
    monkeypatch.setattr(modes, "_round", lambda *_: "verified 1 MiB")
    monkeypatch.setattr(modes, "nvidia_fs_bytes", lambda: next(counts))
    assert modes.probe(tmp_path).name == name


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_under_cuda_faults_and_failing_disks(tmp_path: Path, driver: Driver, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rule = lambda transfer: Fail() if rng.random() < 0.02 else None  # noqa: E731
    with gdskv.BlockManager(
        config(tmp_path), harness.LAYOUT, harness.NAMESPACE, io=lambda engine: FaultEngine(engine, rule)
    ) as kv:
        engine = harness.Engine(kv)
        for _ in range(120):
            if rng.random() < 0.2:
                driver.set(str(rng.choice(["fail_copy", "fail_late"])), int(rng.integers(1, 4)))
            engine.run(int(rng.integers(0, 8)), int(rng.integers(1, 8)) * harness.TOKENS)
        assert engine.verified > 0
