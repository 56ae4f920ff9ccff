"""Kinds G2, G3 and G8: what goes wrong around GPUs and drives and can be seen on a machine without a GPU.

G1 and G4 (cases_kvikio_store.py), G5 to G7 (cases_gpu.py) need KvikIO, over which test_io_kvikio.py runs them. G9 is in
test_pace.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from doubles import Fail
from faulty import Bench, aligned
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, payload, tokens

import gdskv
from gdskv.io.base import TRANSFER, WRITE
from gdskv.io.posix import PosixEngine, drain
from gdskv.pools import host
from gdskv.pools.disk import DiskPool


@pytest.fixture
def keys() -> np.ndarray:
    return gdskv.block_keys(tokens(0, 4 * TOKENS), TOKENS)


def test_g2_a_misaligned_transfer_is_refused_before_the_device_sees_it(tmp_path: Path) -> None:
    pool = DiskPool([tmp_path], 8 * BLOCK, BLOCK, bytes(16), 0)
    if not pool.slabs[0].direct:
        pytest.skip("no O_DIRECT on the file system of the temporary folder")
    engine = PosixEngine(pool.slabs)
    memory = aligned(2)
    try:
        for base, offset, length in ((8, 4096, BLOCK), (0, 4096 + 8, BLOCK), (0, 4096, BLOCK - 8)):
            transfer = np.zeros(1, TRANSFER)
            transfer["op"], transfer["length"], transfer["offset"] = WRITE, length, offset
            transfer["address"] = memory.ctypes.data + base
            assert engine.submit(transfer) == 1
            (result,) = drain(engine)
            assert (result["moved"], result["started"]) == (-errno.EINVAL, 0)
        assert engine.counters()["refused"] == 3
    finally:
        engine.close(5)
        pool.close()


def test_g2_misaligned_memory_is_staged_and_counted_or_refused_in_words(tmp_path: Path, keys: np.ndarray) -> None:
    raw = np.zeros(4 * BLOCK + 4096 + 8, np.uint8)
    start = -raw.ctypes.data % 4096 + 8
    crooked = raw[start : start + 4 * BLOCK].reshape(4, BLOCK)
    with Bench(tmp_path, store=True, host=8, disk=32) as b:
        for i in range(4):
            crooked[i] = payload(keys[i])
        b.kv.store(keys, source=crooked, now=0)
        b.finished()
        for doc in range(1, 8):
            more = gdskv.block_keys(tokens(doc, 4 * TOKENS), TOKENS)
            b.kv.store(more, source=aligned(4), now=0)
            b.finished()
        crooked[:] = 0
        found = b.kv.match(keys, now=0)
        assert list(found.tier) == [2] * 4
        b.kv.load(found, into=crooked, now=0)
        b.finished()
        assert all(np.array_equal(crooked[i], payload(keys[i])) for i in range(4))
        assert b.stats["staged"] == 4
    place = tmp_path / "without"
    place.mkdir()
    with (
        gdskv.KVStore(config(place, device=0, host=0, disk=8), LAYOUT, NAMESPACE) as store,
        pytest.raises(gdskv.GdskvError, match=r"not aligned to 4096.*set host_bytes"),
    ):
        store.store(keys, source=crooked, now=0)


def test_g2_health_shows_that_stores_fail(tmp_path: Path) -> None:
    with Bench(tmp_path, host=4, disk=32) as b:
        b.fail(WRITE, Fail(errno.EINVAL), times=1000)
        for doc in range(8):
            b.engine.run(doc, 4 * TOKENS)
        b.polls()
        assert b.stats["write_errors"] >= 3 and b.stats["read_only_periods"] >= 1
        assert b.stats["failed_writes"] >= 3


@pytest.fixture(params=["direct", "buffered"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory whose file system takes O_DIRECT, or says no to it."""
    if request.param == "buffered":
        real = os.open

        def refuse(path: object, flags: int, *more: int, **named: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, *more, **named)

        monkeypatch.setattr(os, "open", refuse)
    yield request.param


def test_g3_the_mode_in_use_is_shown_and_counted_per_directory(tmp_path: Path, place: str) -> None:
    with gdskv.BlockManager(config(tmp_path, 8, 8, 64), LAYOUT, NAMESPACE) as kv:
        (info,) = kv.store.disk_pool.directories
        if place == "direct" and info.mode == "buffered":
            pytest.skip(f"no O_DIRECT here: {info.why}")
        assert info.mode == place and kv.store.io.path(0) == place
        assert info.why == "verified by writing and reading a page" or "O_DIRECT" in info.why
        engine = Engine(kv)
        for doc in range(8):
            engine.run(doc, 4 * TOKENS)
        engine.drain()
        stats = kv.stats()
        other = {"direct": "buffered", "buffered": "direct"}[place]
        assert stats[f"io_write_bytes_posix_{place}"] >= BLOCK
        if place == "buffered":
            assert stats[f"io_write_bytes_posix_{other}"] == 0


def test_g8_host_memory_is_pinned_in_chunks_and_let_go_on_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    assert host._CHUNK <= 64 << 30
    monkeypatch.setattr(host, "_CHUNK", 1 << 20)
    pinned: dict[int, int] = {}
    limit = [100]

    def register(base: int, size: int, flags: int) -> int:
        if len(pinned) == limit[0]:
            return 2
        pinned[base] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda base: pinned.pop(base))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = host.HostPool(40, 65536, pin=True)  # a double of CUDA's runtime counts
    assert pool.pinned and sum(pinned.values()) == pool.bytes and max(pinned.values()) == 1 << 20
    assert sorted(pinned) == list(range(pool.base, pool.base + pool.bytes, 1 << 20))
    pool.close()
    assert pinned == {}
    limit[0] = 2
    with pytest.raises(
        gdskv.ConfigError, match=r"host_bytes=2\.50MiB cannot be pinned: CUDA error 2 at 2MiB.*ulimit -l"
    ):
        host.HostPool(40, 65536, pin=True)
    assert pinned == {}
