"""Kinds G5 to G7, R6 and W7 with the real KvikIO over the CUDA driver double. Run by test_io_kvikio.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import kvikio
import pytest
from cases_kvikio_store import config
from harness import LAYOUT, NAMESPACE, TOKENS, Engine
from hostdriver import Driver
from test_io_posix import PAGE, memory, slab, transfers  # noqa: F401

import gdskv
from gdskv.io.base import READ, WRITE
from gdskv.io.kvikio import KvikioEngine
from gdskv.io.posix import drain


class Watched:
    """``kvikio.CuFile``, which counts handles, and operations that nobody has ended yet."""

    opened = closed = flying = most = 0
    lock = threading.Lock()

    def __init__(self, *arguments: object, **more: object) -> None:
        self._file = kvikio_file(*arguments, **more)
        Watched.opened += 1

    def close(self) -> None:
        Watched.closed += 1
        self._file.close()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> object:
        call = getattr(self._file, name)
        return self._counted(call) if name in ("pread", "pwrite") else call

    @staticmethod
    def _counted(call: object) -> object:
        def begin(*arguments: object, **more: object) -> object:
            with Watched.lock:
                Watched.flying += 1
                Watched.most = max(Watched.most, Watched.flying)
            return Future(call(*arguments, **more))  # type: ignore[operator]

        return begin


class Future:
    """An operation's future, whose end is counted once."""

    def __init__(self, inner: object) -> None:
        self._inner, self._over = inner, False

    def done(self) -> bool:
        return bool(self._inner.done())  # type: ignore[attr-defined]

    def get(self) -> int:
        try:
            return int(self._inner.get())  # type: ignore[attr-defined]
        finally:
            if not self._over:
                self._over = True
                with Watched.lock:
                    Watched.flying -= 1


kvikio_file = kvikio.CuFile


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Watched]]:
    Watched.opened = Watched.closed = Watched.flying = Watched.most = 0
    monkeypatch.setattr(kvikio, "CuFile", Watched)
    yield Watched


def test_g5_one_handle_per_slab_for_life(tmp_path: Path, watched: type[Watched]) -> None:
    with gdskv.BlockManager(config(tmp_path), LAYOUT, NAMESPACE) as kv:
        after_the_probe = watched.opened
        engine = Engine(kv)
        for doc in range(40):
            engine.run(doc % 8, 4 * TOKENS)
        assert kv.stats()["onboards_disk"] > 0
        assert watched.opened == after_the_probe, "no operation opens a file"
        assert watched.opened - watched.closed == 1
    assert watched.opened == watched.closed


def test_g6_kvikio_never_has_more_than_its_threads_can_take(watched, slab, memory) -> None:  # noqa: F811
    engine = KvikioEngine([slab()], read_threads=2, write_threads=3, max_extent=PAGE)
    for op in (WRITE, READ):
        assert engine.submit(transfers(op, memory, list(range(200)))) == 200
        assert (drain(engine)["moved"] == PAGE).all()
    assert 1 <= watched.most <= 5
    assert watched.flying == 0
    assert engine.close(5)


def test_r6_w7_a_slot_is_used_again_only_when_what_moves_in_it_has_landed(tmp_path: Path, driver: Driver) -> None:
    """Slow copies and reads; requests that are cancelled at once; slots that the next request fills immediately."""
    with gdskv.BlockManager(config(tmp_path, device=8, host=8, disk=64), LAYOUT, NAMESPACE) as kv:
        engine = Engine(kv)
        for doc in range(6):
            engine.run(doc, 4 * TOKENS)
        driver.set("delay_us", 3000)
        for doc in (0, 1, 2, 3, 4, 5, 0, 2, 4, 1):
            gone = engine.begin(doc, 4 * TOKENS)
            assert isinstance(gone, gdskv.Request)
            kv.cancel(gone, now=engine.now)  # its reads and copies are on their way
            other = engine.begin(100 + doc, 4 * TOKENS)
            if isinstance(other, gdskv.Rejected):
                engine.drain()
                continue
            engine.finish(other)  # computes into its slots as soon as they are ready, and commits
        driver.set("delay_us", 0)
        engine.drain()
        for doc in range(6):
            engine.run(doc, 4 * TOKENS)
        assert engine.verified > 0
        kv.check()


@pytest.mark.parametrize("checksums", [True, False])
def test_a_manager_s_blocks_pass_between_device_and_disk_in_kvikio_s_own_copies_where_nothing_is_checked(
    tmp_path: Path, driver: Driver, checksums: bool
) -> None:
    with gdskv.BlockManager(config(tmp_path, host=0, disk=64, checksums=checksums), LAYOUT, NAMESPACE) as kv:
        engine, before = Engine(kv), driver.count("batch_copies")
        for doc in range(6):
            engine.run(doc, 4 * TOKENS)
        engine.drain()
        written = driver.count("batch_copies")
        for doc in range(6):
            engine.run(doc, 4 * TOKENS)
        engine.drain()
        read = driver.count("batch_copies")
        stats = kv.stats()
        assert stats["io_write_bytes_kvikio_compat"] > 0 and stats["io_read_bytes_kvikio_compat"] > 0
        assert stats["onboards_disk"] > 0 and engine.verified == stats["onboards_disk"]
        assert (written > before, read > written) == (not checksums, not checksums)
