"""The ring of staging buffers with the real KvikIO over the CUDA driver double; kernels run on the double's streams.

Run by test_staging.py in a process of its own.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import crc32c
import numpy as np
import pytest
import torch
from hostdriver import Driver
from hostkernels import HostKernels

from gdskv import KVLayout
from gdskv.io import cuda
from gdskv.io.base import COPY, NO_SLAB, READ, RESULT, TRANSFER, WRITE, Slab
from gdskv.io.buffers import LAUNCHES, Staging, bar1_bytes
from gdskv.io.kernels import Mover
from gdskv.io.kvikio import KvikioEngine
from gdskv.io.posix import drain
from gdskv.io.staging import BLOCKS, StagedEngine
from gdskv.pools.memory import Memory
from gdskv.pools.pages import DevicePages

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=40, dtype="bfloat16", tokens_per_block=16)  # 15,360 bytes
SLOT = LAYOUT.slot_bytes
PAGES, BUFFERS = 64, 16
FENCES = ("_after_caller", "_may_write", "_may_reuse", "_may_return")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return HostKernels(tmp_path_factory.mktemp("hostkernels")).handles


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    for name in ("fail_alloc", "fail_copy", "fail_late", "delay_us"):
        driver.set(name, 0)


class Rig:
    """A file, pages on "the GPU", host memory, and a ring between them; and what must be where."""

    def __init__(self, folder: Path, driver: Driver, kernels: dict[str, int], without: str = "", **more: int) -> None:
        self.driver = driver
        self.stream = cuda.CopyStream(cuda.load(), 0, 16)
        shape = (2, PAGES, LAYOUT.tokens_per_block, LAYOUT.kv_heads, LAYOUT.head_dim)
        self.tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYOUT.layers)]
        for tensor in self.tensors:
            driver.adopt(tensor.data_ptr(), tensor.nbytes)
        self.pages = DevicePages(LAYOUT, self.tensors, "kv page token head dim", stream=self.stream._stream.value)
        self.host = Memory(PAGES, SLOT, "host")
        self.fd = os.open(folder / "slab", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.ftruncate(self.fd, PAGES * SLOT)
        self.path = folder / "slab"
        self.engine = self._engine(kernels, without, **more)
        self.fill(0)

    def _engine(
        self, kernels: dict[str, int], without: str, buffers: int = BUFFERS, checksums: int = 1, depth: int = 4096
    ) -> StagedEngine:
        staging = Staging(cuda.load(), 0, SLOT, buffers * SLOT)
        inner = KvikioEngine(
            [Slab(self.fd, 0, True, PAGES * SLOT)],
            device_memory=[(staging.base, staging.bytes)],
            unchecked=(staging.base, staging.bytes),
            checksums=bool(checksums),
        )
        mover = Mover(
            cuda.load(),
            staging.stream,
            kernels,
            self.pages,
            SLOT,
            checksums=bool(checksums),
            launches=LAUNCHES,
            blocks=BLOCKS,
        )
        unfenced = {without: (lambda self: None) if without == "_after_caller" else (lambda self, batch: True)}
        ring = type("Unfenced", (StagedEngine,), unfenced) if without else StagedEngine
        return ring(inner, staging, self.pages, mover, queue_depth=depth)

    def fill(self, seed: int) -> np.ndarray:
        """Random bytes in all pages; what each is as an extent, (PAGES, SLOT)."""
        for i, tensor in enumerate(self.tensors):
            generator = torch.Generator().manual_seed(100 * seed + i)
            raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
            tensor.view(torch.uint8).view(-1).copy_(raw)
        return self.extents()

    def extents(self) -> np.ndarray:
        blocks = torch.stack(self.tensors).permute(2, 0, 1, 4, 3, 5).contiguous()  # page, layer, kv, head, token, dim
        out = np.zeros((PAGES, SLOT), np.uint8)
        out[:, : LAYOUT.block_bytes] = blocks.view(torch.uint8).view(PAGES, -1).numpy()
        return out

    def on_disk(self) -> np.ndarray:
        return np.fromfile(self.path, np.uint8).reshape(PAGES, SLOT)

    def transfers(self, op: int, pages: list[int], slots: list[int], *, out: bool = False, tag: int = 0) -> np.ndarray:
        """Between pages and slots: of the file, or for a COPY of host memory (`out`: to it)."""
        names = self.pages.name(np.array(pages), len(pages))
        batch = np.zeros(len(pages), TRANSFER)
        batch["tag"], batch["op"] = tag + np.arange(len(pages)), op
        batch["length"] = LAYOUT.block_bytes if op == COPY else SLOT
        host = self.host.base + np.array(slots, np.uint64) * np.uint64(self.host.stride)
        if op == COPY:
            batch["slab"] = NO_SLAB
            batch["address"], batch["target"] = (names, host) if out else (host, names)
        else:
            batch["offset"], batch["address"] = np.array(slots) * SLOT, names
        return batch

    def close(self) -> None:
        self.driver.set("delay_us", 0)
        for name in ("fail_copy", "fail_late"):
            self.driver.set(name, 0)
        assert self.engine.close(20)
        self.stream.close()
        for tensor in self.tensors:
            self.driver.disown(tensor.data_ptr())
        os.close(self.fd)
        self.host.close()


@pytest.fixture
def rig(tmp_path: Path, driver: Driver, kernels: dict[str, int]) -> Iterator[Callable[..., Rig]]:
    made = []

    def make(without: str = "", **more: int) -> Rig:
        made.append(Rig(tmp_path, driver, kernels, without, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def moved(results: np.ndarray) -> dict[int, int]:
    return dict(zip(results["tag"].tolist(), results["moved"].tolist(), strict=True))


def test_blocks_go_to_disk_and_back_with_the_librarys_checksums(rig, driver):
    r = rig()
    driver.set("delay_us", 200)
    before = r.extents()
    order = np.random.default_rng(0).permutation(PAGES).tolist()
    assert r.engine.submit(r.transfers(WRITE, order, list(range(PAGES)))) == PAGES
    crc = {int(x["tag"]): int(x["crc"]) for x in drain(r.engine)}
    assert np.array_equal(r.on_disk(), before[order])
    assert crc == {i: crc32c.crc32c(before[page].tobytes()) for i, page in enumerate(order)}
    r.fill(1)
    r.engine.submit(r.transfers(READ, list(range(PAGES)), list(range(PAGES))))
    results = drain(r.engine)
    assert {int(x["tag"]): int(x["crc"]) for x in results} == crc and set(results["moved"].tolist()) == {SLOT}
    assert np.array_equal(r.extents(), before[order])
    counters = r.engine.counters()
    assert counters["gather_bytes"] == counters["scatter_bytes"] == PAGES * SLOT
    assert counters["write_bytes_kvikio_compat"] == PAGES * SLOT


def test_neighbours_on_disk_move_as_one_call_however_their_pages_lie(rig):
    r = rig(buffers=2 * PAGES)
    pages = np.random.default_rng(1).permutation(PAGES).tolist()
    r.engine.submit(r.transfers(WRITE, pages, list(range(PAGES))))
    drain(r.engine)
    r.engine.submit(r.transfers(READ, pages, list(range(PAGES))))
    drain(r.engine)
    counters = r.engine.counters()
    assert counters["write_calls_kvikio_compat"] == counters["read_calls_kvikio_compat"] == 1
    assert counters["gather_launches"] == counters["scatter_launches"] == 1


def test_blocks_go_to_host_memory_and_back(rig, driver):
    r = rig()
    driver.set("delay_us", 200)
    before = r.extents()
    some = list(range(0, PAGES, 2))
    r.engine.submit(r.transfers(COPY, some, some, out=True))
    assert moved(drain(r.engine)) == dict.fromkeys(range(len(some)), LAYOUT.block_bytes)
    host = r.host.array.reshape(PAGES, -1)[:, : LAYOUT.block_bytes]
    assert np.array_equal(host[some], before[some][:, : LAYOUT.block_bytes])
    r.fill(2)
    r.engine.submit(r.transfers(COPY, some, some))
    drain(r.engine)
    assert np.array_equal(r.extents()[some], before[some])


# ---- fences: the ring is right, and without any one of them it is not


def produced_late(r: Rig) -> bool:
    """The engine's own stream is still writing pages when they are stored."""
    new = r.fill(3)
    tensors = [tensor.clone() for tensor in r.tensors]
    r.fill(4)
    r.driver.set("delay_us", 10_000)
    for source, target in zip(tensors * 4, r.tensors * 4, strict=True):
        r.stream.copy(target.data_ptr(), source.data_ptr(), source.nbytes)
    r.engine.submit(r.transfers(WRITE, list(range(8)), list(range(8))))
    drain(r.engine)
    r.stream.wait()
    return np.array_equal(r.on_disk()[:8], new[:8])


def written_soon(r: Rig) -> bool:
    """A buffer goes to the drive as soon as it may."""
    r.driver.set("delay_us", 10_000)
    r.engine.submit(r.transfers(WRITE, list(range(8)), list(range(8))))
    drain(r.engine)
    return np.array_equal(r.on_disk()[:8], r.extents()[:8])


def reused_soon(r: Rig) -> bool:
    """Many blocks are read through few buffers."""
    want = r.extents()
    r.engine.submit(r.transfers(WRITE, list(range(PAGES)), list(range(PAGES))))
    drain(r.engine)
    r.fill(5)
    r.driver.set("delay_us", 2_000)
    r.engine.submit(r.transfers(READ, list(range(PAGES)), list(range(PAGES))))
    drain(r.engine)
    r.engine._stream.wait()
    return np.array_equal(r.extents(), want)


def returned_soon(r: Rig) -> bool:
    """The engine writes to a page as soon as it is his again."""
    before = r.extents()
    r.driver.set("delay_us", 5_000)
    r.engine.submit(r.transfers(COPY, list(range(8)), list(range(8)), out=True))
    out = np.zeros(8, RESULT)
    left = 8
    while left:
        for row in out[: r.engine.poll(out)]:
            for tensor in r.tensors:
                tensor[:, int(row["tag"])] = 0
            left -= 1
    r.engine._stream.wait()
    return np.array_equal(r.host.array.reshape(PAGES, -1)[:8, : LAYOUT.block_bytes], before[:8, : LAYOUT.block_bytes])


def loaded_soon(r: Rig) -> bool:
    """The engine reads a page as soon as it is told that it is there."""
    want = r.extents()
    r.engine.submit(r.transfers(WRITE, list(range(8)), list(range(8))))
    drain(r.engine)
    r.fill(6)
    r.driver.set("delay_us", 5_000)
    r.engine.submit(r.transfers(READ, list(range(8)), list(range(8))))
    drain(r.engine)
    return np.array_equal(r.extents()[:8], want[:8])


SITUATIONS = [
    (produced_late, "_after_caller"),
    (written_soon, "_may_write"),
    (reused_soon, "_may_reuse"),
    (returned_soon, "_may_return"),
    (loaded_soon, "_may_return"),
]


@pytest.mark.parametrize("situation", [s for s, _ in SITUATIONS])
def test_the_fenced_ring_gives_right_bytes(rig, situation):
    assert situation(rig(buffers=4))


@pytest.mark.parametrize(("situation", "fence"), SITUATIONS)
def test_the_ring_without_one_fence_gives_wrong_bytes(rig, situation, fence):
    assert not situation(rig(without=fence, buffers=4))


# ---- faults and limits


@pytest.mark.parametrize("fault", ["fail_copy", "fail_late"])
@pytest.mark.parametrize("op", [READ, WRITE, COPY])
def test_a_cuda_fault_is_an_error_and_never_wrong_bytes(rig, driver, fault, op):
    r = rig()
    before = r.extents()
    r.engine.submit(r.transfers(WRITE, list(range(PAGES)), list(range(PAGES))))
    drain(r.engine)
    failed = 0
    for n in range(1, 6):
        driver.set(fault, n)
        pages = list(range(10))
        r.engine.submit(r.transfers(op, pages, pages, out=True))
        results = drain(r.engine)
        driver.set(fault, 0)
        assert len(results) == 10
        good = [int(x["tag"]) for x in results if x["moved"] > 0]
        failed += 10 - len(good)
        assert all(x["moved"] > 0 or x["moved"] in (-errno.EIO, -errno.ENOMEM) for x in results)
        if op == COPY:
            host = r.host.array.reshape(PAGES, -1)[:, : LAYOUT.block_bytes]
            assert np.array_equal(host[good], before[good][:, : LAYOUT.block_bytes])
        for x in results:
            if x["moved"] > 0 and op != COPY:
                assert x["crc"] == crc32c.crc32c(before[int(x["tag"])].tobytes())
    assert failed
    r.engine.submit(r.transfers(WRITE, list(range(PAGES)), list(range(PAGES))))
    assert set(drain(r.engine)["moved"].tolist()) == {SLOT}
    assert np.array_equal(r.on_disk(), before) and not any(r.engine._busy)


def test_what_has_not_started_can_be_cancelled(rig, driver):
    r = rig()
    driver.set("delay_us", 20_000)
    assert r.engine.submit(r.transfers(READ, list(range(PAGES)), list(range(PAGES)))) == PAGES
    cancelled = r.engine.cancel(np.arange(PAGES))
    assert PAGES - BUFFERS <= cancelled < PAGES and r.engine.cancel(np.arange(PAGES)) == 0
    results = drain(r.engine)
    assert sorted(set(results["moved"].tolist())) == [-errno.ECANCELED, SLOT]
    assert int((results["moved"] == -errno.ECANCELED).sum()) == cancelled == r.engine.counters()["cancelled"]
    assert set(results["started"][results["moved"] < 0].tolist()) == {0} and not any(r.engine._busy)


def test_depth_is_bounded_and_a_leading_run_is_accepted(rig):
    r = rig(depth=20)
    batch = r.transfers(WRITE, list(range(30)), list(range(30)))
    batch = np.concatenate([batch[:10], r.transfers(READ, [40], [40], tag=100), batch[10:]])
    assert r.engine.submit(batch) == 21
    assert r.engine.in_flight == 21
    assert len(drain(r.engine)) == 21 and r.engine.submit(batch[21:]) == 10
    assert len(drain(r.engine)) == 10


def test_writes_leave_buffers_to_reads(rig, driver):
    r = rig(buffers=4)
    driver.set("delay_us", 2_000)
    r.engine.submit(r.transfers(WRITE, list(range(40)), list(range(40))))
    r.engine.submit(r.transfers(READ, [50], [50], tag=1000))
    order: list[int] = []
    out = np.zeros(8, RESULT)
    while r.engine.in_flight:
        order += out["tag"][: r.engine.poll(out)].tolist()
    assert order.index(1000) < 10


def test_what_cannot_be_is_refused_and_its_neighbours_move(rig):
    r = rig()
    batch = r.transfers(WRITE, [0, 1, 2], [0, 1, 2])
    batch["length"][0] -= 4096
    batch["offset"][1] = PAGES * SLOT
    both = r.transfers(COPY, [3], [3], out=True, tag=3)
    both["target"] = both["address"]
    r.engine.submit(np.concatenate([batch, both]))
    assert moved(drain(r.engine)) == {0: -errno.EINVAL, 1: -errno.EINVAL, 2: SLOT, 3: -errno.EINVAL}


def test_other_transfers_pass_by(rig):
    r = rig()
    batch = r.transfers(WRITE, [0, 1, 2, 3], [0, 1, 2, 3])
    batch["address"][1::2] = r.host.base + np.arange(2) * r.host.stride
    r.host.array[: 2 * SLOT] = np.random.default_rng(0).integers(0, 256, 2 * SLOT, dtype=np.uint8)
    r.engine.submit(batch)
    results = drain(r.engine)
    assert moved(results) == dict.fromkeys(range(4), SLOT)
    disk = r.on_disk()
    assert np.array_equal(disk[1:4:2].ravel(), r.host.array[: 2 * SLOT]) and np.array_equal(disk[2], r.extents()[2])
    assert {int(x["tag"]): int(x["crc"]) for x in results} == {i: crc32c.crc32c(disk[i].tobytes()) for i in range(4)}


def test_without_checksums_there_are_none(rig):
    r = rig(checksums=0)
    r.engine.submit(r.transfers(WRITE, [0, 1], [0, 1]))
    assert set(drain(r.engine)["crc"].tolist()) == {0}
    assert np.array_equal(r.on_disk()[:2], r.extents()[:2])


def test_close_lets_what_is_queued_finish(rig, driver):
    r = rig(buffers=4)
    driver.set("delay_us", 200)
    r.engine.submit(r.transfers(WRITE, list(range(40)), list(range(40))))
    assert r.engine.close(20)
    assert set(drain(r.engine)["moved"].tolist()) == {SLOT} and np.array_equal(r.on_disk()[:40], r.extents()[:40])
    assert r.engine.submit(r.transfers(WRITE, [0], [0])) == 0


def test_close_answers_in_time_when_the_device_hangs(rig, driver):
    r = rig(buffers=4)
    driver.set("delay_us", 500_000)
    r.engine.submit(r.transfers(WRITE, list(range(40)), list(range(40))))
    before = time.monotonic()
    assert r.engine.close(0.1) is False
    assert time.monotonic() - before < 2
    driver.set("delay_us", 0)
    assert r.engine.close(20)
    results = drain(r.engine)
    assert len(results) == 40 and set(results["moved"].tolist()) <= {SLOT, -errno.ECANCELED}


@pytest.mark.parametrize("seed", range(3))
def test_random_transfers_under_faults_never_give_wrong_bytes(rig, driver, seed):
    r = rig(buffers=6)
    rng = np.random.default_rng(seed)
    driver.set("delay_us", 50)
    disk: dict[int, bytes] = {}
    for _ in range(60):
        here = r.fill(int(rng.integers(0, 1000)))
        if rng.random() < 0.3:
            driver.set(str(rng.choice(["fail_copy", "fail_late"])), int(rng.integers(1, 4)))
        n = int(rng.integers(1, 20))
        pages, slots = rng.permutation(PAGES)[:n].tolist(), rng.permutation(PAGES)[:n].tolist()
        op = int(rng.integers(0, 2))
        r.engine.submit(r.transfers(op, pages, slots))
        results = drain(r.engine)
        assert len(results) == n
        now = r.extents()
        for x in results:
            page, slot = pages[int(x["tag"])], slots[int(x["tag"])]
            if op == WRITE:
                disk.pop(slot, None)
                if x["moved"] == SLOT:
                    disk[slot] = here[page].tobytes()
                    assert x["crc"] == crc32c.crc32c(disk[slot])
            elif x["moved"] == SLOT and slot in disk:
                assert now[page].tobytes() == disk[slot] and x["crc"] == crc32c.crc32c(disk[slot])
    assert disk and not any(r.engine._busy)


def test_buffers_that_cannot_be_had_are_refused(driver):
    from gdskv import ConfigError

    with pytest.raises(ConfigError, match="less than two blocks of"):
        Staging(cuda.load(), 0, SLOT, SLOT)
    driver.set("fail_alloc", 1)
    with pytest.raises(ConfigError, match=r"cannot be had on the GPU: .*OUT_OF_MEMORY.*Lower staging_bytes"):
        Staging(cuda.load(), 0, SLOT, 4 * SLOT)


def test_buffers_take_half_of_bar1_at_most(tmp_path, monkeypatch):
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    lines = ["0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200", f"0x0 {8 * SLOT - 1:#x} 0x14220c"]
    (folder / "resource").write_text("\n".join(lines))
    assert bar1_bytes("0000:3b:00.0", str(tmp_path)) == 8 * SLOT
    assert bar1_bytes("0000:ff:00.0", str(tmp_path)) is None and bar1_bytes("", str(tmp_path)) is None
    monkeypatch.setattr("gdskv.io.buffers.bar1_bytes", lambda bus: 8 * SLOT)
    staging = Staging(cuda.load(), 0, SLOT, 100 * SLOT)
    assert staging.buffers == 4
    staging.close()


def test_buffers_are_registered_once_and_a_refusal_is_said(rig, monkeypatch, caplog):
    import kvikio.buffer

    calls = []
    monkeypatch.setattr(kvikio.buffer, "memory_register", lambda array: calls.append(array.__cuda_array_interface__))
    r = rig()
    for seed in range(3):
        r.fill(seed)
        r.engine.submit(r.transfers(WRITE, list(range(PAGES)), list(range(PAGES))))
        drain(r.engine)
    (only,) = calls
    assert only["shape"][0] >= BUFFERS * SLOT and only["data"][0] <= r.engine._staging.base

    def refuse(array: object) -> None:
        raise RuntimeError("cuFile error: 5008")

    monkeypatch.setattr(kvikio.buffer, "memory_register", refuse)
    Staging(cuda.load(), 0, SLOT, 4 * SLOT).close()
    assert "memory_register of the staging buffers: cuFile error: 5008" in caplog.text
