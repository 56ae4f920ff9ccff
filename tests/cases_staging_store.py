"""KVStore over an engine's pages "on the GPU": the real KvikIO over the CUDA driver double, kernels on its streams.

Run by test_staging.py in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from doubles import Fail, FaultEngine
from hostdriver import Driver
from hostkernels import HostKernels

import gdskv
from gdskv.io import kernels
from gdskv.io.staging import StagedEngine

TOKENS = 16  # of a block, in two pages
LAYOUT = gdskv.KVLayout(layers=2, kv_heads=3, head_dim=20, dtype="bfloat16", tokens_per_block=TOKENS)  # 7,680 bytes
NAMESPACE = gdskv.Namespace(model="paged")
PAGES = 96


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return HostKernels(tmp_path_factory.mktemp("hostkernels")).handles


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, functions: dict[str, int]) -> Iterator[Driver]:
    """Late copies and kernels, these compiled for the CPU."""
    driver = Driver()
    monkeypatch.setattr(kernels, "load", lambda device: functions)
    driver.set("delay_us", 100)
    yield driver
    for name in ("fail_copy", "fail_late", "delay_us"):
        driver.set(name, 0)


class Paged:
    """An engine with pages of its own, per layer or fused, and a store under them."""

    def __init__(self, folder: Path, driver: Driver, host: int, disk: int, *, fused: bool, io: Any = None, **more: Any):
        self.driver, self.fused, self.now = driver, fused, 1.0
        each = (PAGES, 2, TOKENS // 2, LAYOUT.kv_heads, LAYOUT.head_dim)
        if fused:
            self.tensors = [torch.zeros((PAGES, LAYOUT.layers, *each[1:]), dtype=torch.bfloat16)]
        else:
            self.tensors = [torch.zeros(each, dtype=torch.bfloat16) for _ in range(LAYOUT.layers)]
        for tensor in self.tensors:
            driver.adopt(tensor.data_ptr(), tensor.nbytes)
        axes = "page layer kv token head dim" if fused else "page kv token head dim"
        self.pages = gdskv.DevicePages(LAYOUT, self.tensors, axes)
        slot = LAYOUT.slot_bytes
        sizes = {"host_bytes": host * slot, "disk_bytes": disk * slot, "staging_bytes": 8 * slot}
        config = gdskv.CacheConfig(**sizes, directories=[folder] if disk else [], min_free=0, io="kvikio", **more)
        self.kv = gdskv.KVStore(config, LAYOUT, NAMESPACE, device_pages=self.pages, io=io)

    def close(self) -> None:
        for name in ("fail_copy", "fail_late", "delay_us"):
            self.driver.set(name, 0)
        assert self.kv.close(20)
        for tensor in self.tensors:
            self.driver.disown(tensor.data_ptr())

    def layers(self, rows: np.ndarray) -> torch.Tensor:
        """The pages of a block: (2 pages, layers, 2, tokens of a page, kv_heads, head_dim)."""
        where = torch.from_numpy(rows.astype(np.int64))
        return self.tensors[0][where] if self.fused else torch.stack([t[where] for t in self.tensors], 1)

    def compute(self, keys: np.ndarray, rows: np.ndarray) -> None:
        for key, row in zip(keys, rows, strict=True):
            for i, page in enumerate(row):
                value = content(key)[i]
                for layer in range(LAYOUT.layers):
                    (self.tensors[0][page, layer] if self.fused else self.tensors[layer][page]).copy_(value[layer])

    def right(self, key: np.ndarray, row: np.ndarray) -> bool:
        return torch.equal(self.layers(row).view(torch.int16), content(key).view(torch.int16))

    def finished(self, ticket: Any) -> gdskv.Done:
        assert isinstance(ticket, gdskv.Ticket)
        for _ in range(20_000):
            for done in self.kv.poll(now=self.now):
                if done.ticket == ticket:
                    return done
            time.sleep(0.0002)
        raise AssertionError(f"ticket {ticket} is stuck: {self.kv.stats()}")

    def put(self, keys: np.ndarray, rows: np.ndarray) -> gdskv.Done:
        self.compute(keys, rows)
        return self.finished(self.kv.store(keys, source=rows, now=self.now))

    def get(self, keys: np.ndarray, rows: np.ndarray) -> tuple[gdskv.Found, gdskv.Done]:
        found = self.kv.match(keys, now=self.now)
        return found, self.finished(self.kv.load(found, into=rows[: found.length], now=self.now))


def content(key: np.ndarray) -> torch.Tensor:
    """What the two pages of a key's block must hold."""
    rng = np.random.default_rng(key.tolist())
    shape = (2, LAYOUT.layers, 2, TOKENS // 2, LAYOUT.kv_heads, LAYOUT.head_dim)
    return torch.from_numpy(rng.integers(-32768, 32767, shape, dtype=np.int16)).view(torch.bfloat16)


def chain(doc: int, n: int) -> np.ndarray:
    return gdskv.block_keys(harness.tokens(doc, n * TOKENS), TOKENS)


def some(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(PAGES)[: 2 * n].reshape(n, 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("host", "disk"), [(16, 0), (0, 32), (4, 32)])
def test_pages_are_stored_and_loaded_into_other_pages(tmp_path, driver, fused, host, disk):
    p = Paged(tmp_path, driver, host, disk, fused=fused)
    assert isinstance(p.kv.io, StagedEngine)
    for doc in range(3):
        assert p.put(chain(doc, 4), some(doc, 4)).failed.tolist() == []
    for tensor in p.tensors:
        tensor.zero_()
    loaded = 0
    for doc in range(3):
        rows = some(10 + doc, 4).astype(np.int32)
        found, done = p.get(chain(doc, 4), rows)
        assert done.failed.tolist() == []
        assert all(p.right(key, row) for key, row in zip(chain(doc, 4)[: found.length], rows, strict=False))
        loaded += found.length
    assert loaded >= 8
    stats = p.kv.stats()
    assert stats["io_gather_transfers"] >= 8 and stats["io_scatter_bytes"] > 0 and stats["staged"] == 0
    assert p.pages._n_free == len(p.pages._free), "every name has ended"
    p.close()


def test_a_block_that_went_through_the_gpu_is_read_by_the_host_and_the_other_way(tmp_path, driver):
    first = Paged(tmp_path, driver, 0, 32, fused=False)
    first.put(chain(0, 4), some(0, 4))
    first.close()
    second = Paged(tmp_path, driver, 4, 32, fused=True)  # another way to hold the same pages: the same bytes on disk
    assert second.kv.prefetch(chain(0, 1), now=1.0) == 1  # verified by the host's checksum
    memory = np.zeros((4, LAYOUT.block_bytes), np.uint8)
    found = second.kv.match(chain(0, 4), now=1.0)
    assert found.length == 4
    assert second.finished(second.kv.load(found, into=memory, now=1.0)).failed.tolist() == []
    canonical = [content(key).permute(1, 2, 4, 0, 3, 5).contiguous().view(torch.uint8).flatten() for key in chain(0, 4)]
    assert all(np.array_equal(have, want.numpy()) for have, want in zip(memory, canonical, strict=True))
    _, done = second.get(chain(0, 4), some(5, 4))
    assert done.failed.tolist() == [] and all(second.right(k, r) for k, r in zip(chain(0, 4), some(5, 4), strict=True))
    second.close()


def test_damage_on_disk_is_found_by_the_kernels_checksum(tmp_path, driver):
    p = Paged(tmp_path, driver, 0, 32, fused=False)
    p.put(chain(0, 3), some(0, 3))
    p.close()
    slab = max((f for f in tmp_path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(slab.read_bytes())
    needle = (
        content(chain(0, 3)[1]).permute(1, 2, 4, 0, 3, 5).contiguous().view(torch.uint8).flatten().numpy().tobytes()
    )
    data[data.index(needle) + 5000] ^= 1
    slab.write_bytes(data)
    p = Paged(tmp_path, driver, 0, 32, fused=False)
    found, done = p.get(chain(0, 3), some(1, 3))
    assert found.length == 3 and 1 in done.failed.tolist() and p.right(chain(0, 3)[0], some(1, 3)[0])
    p.close()


def test_wrong_pages_are_refused_and_nothing_stays_behind(tmp_path, driver):
    p = Paged(tmp_path, driver, 4, 0, fused=False)
    for bad in (np.array([[0, PAGES]]), np.array([0]), np.zeros((0, 2), np.int64)):
        with pytest.raises(gdskv.LayoutError):
            p.kv.store(chain(0, 1), source=bad, now=p.now)
    assert p.pages._n_free == len(p.pages._free)
    other = gdskv.KVLayout.raw(4096)
    with pytest.raises(gdskv.ConfigError, match="Use one layout"):
        gdskv.KVStore(p.kv.config, other, NAMESPACE, device_pages=p.pages)
    p.close()


def test_pages_in_host_memory_are_refused(tmp_path, driver):
    pages = gdskv.DevicePages(gdskv.KVLayout.raw(4096), torch.zeros(4, 1, 4096, dtype=torch.uint8), "page token dim")
    config = gdskv.CacheConfig(host_bytes="1MiB", io="kvikio")
    with pytest.raises(gdskv.ConfigError, match="has a tensor on cpu"):
        gdskv.KVStore(config, pages.layout, NAMESPACE, device_pages=pages)
    with pytest.raises(gdskv.ConfigError, match="device_pages cannot be had: io="):
        gdskv.KVStore(gdskv.CacheConfig(host_bytes="1MiB", io="posix"), pages.layout, NAMESPACE, device_pages=pages)


@pytest.mark.parametrize("seed", range(6))
def test_random_stores_and_loads_under_faults_give_no_wrong_bytes(tmp_path, driver, seed):
    rng = np.random.default_rng(seed)
    rule = lambda transfer: Fail() if rng.random() < 0.03 else None  # noqa: E731
    host, disk = [(12, 0), (0, 16), (4, 16)][seed % 3]
    p = Paged(tmp_path, driver, host, disk, fused=bool(seed % 2), io=lambda engine: FaultEngine(engine, rule))
    verified = 0
    for step in range(200):
        p.now += 1.0  # a directory that failed is tried again later
        if rng.random() < 0.2:
            driver.set(str(rng.choice(["fail_copy", "fail_late"])), int(rng.integers(1, 4)))
        keys, rows = chain(int(rng.integers(0, 6)), n := int(rng.integers(1, 5))), some(1000 * seed + step, n)
        if rng.random() < 0.5:
            p.put(keys, rows)
            continue
        found = p.kv.match(keys, now=p.now)
        answer = p.kv.load(found, into=rows[: found.length], now=p.now)
        if rng.random() < 0.1:
            p.kv.cancel(answer)
        done = p.finished(answer)
        for i in set(range(found.length)) - set(done.failed.tolist()):
            assert p.right(keys[i], rows[i]), f"wrong bytes in block {i} of step {step}"
            verified += 1
        p.kv.check()
    assert verified > 40 and p.pages._n_free == len(p.pages._free)
    p.close()
