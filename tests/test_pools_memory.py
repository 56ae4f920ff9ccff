"""Host and device pools: alignment, views, tensors, forks, and what is not to be had."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from gdskv import ConfigError, KVLayout
from gdskv.pools.device import DevicePool
from gdskv.pools.host import HostPool

PAGE = 4096


@pytest.mark.parametrize(("slot_bytes", "stride"), [(4096, 4096), (5000, 8192), (1, 4096), (65536, 65536)])
def test_slots_stand_at_multiples_of_a_page(slot_bytes, stride):
    pool = HostPool(7, slot_bytes)
    assert (pool.blocks, pool.stride, pool.bytes) == (7, stride, 7 * stride)
    assert pool.base % PAGE == 0
    assert [pool.address(i) - pool.base for i in range(7)] == [i * stride for i in range(7)]
    for i in range(7):
        pool.view(i)[:] = i
    for i in range(7):
        assert pool.view(i).shape == (slot_bytes,) and (pool.view(i) == i).all()
        assert pool.view(i).ctypes.data == pool.address(i)
    assert not pool.pinned
    pool.close()


@pytest.mark.parametrize("slot", [-1, 7])
def test_a_slot_that_does_not_exist_is_refused(slot):
    pool = HostPool(7, PAGE)
    with pytest.raises(IndexError, match=f"slot {slot} "):
        pool.address(slot)
    with pytest.raises(IndexError, match=f"slot {slot} "):
        pool.view(slot)
    pool.close()


def test_huge_pages_are_tried_and_reported():
    small, large = HostPool(4, PAGE), HostPool(64, 1 << 20)
    assert small.huge is False
    assert large.huge in (True, False)
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as setting:
        if "[never]" in setting.read():
            assert large.huge is False
    small.close()
    large.close()


def test_memory_is_not_taken_before_it_is_used():
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * PAGE

    before = resident()
    pool = HostPool(256, 1 << 20)
    assert resident() - before < 64 << 20
    pool.view(200)[:] = 1
    pool.close()


def test_a_forked_child_does_not_share_the_memory():
    pool = HostPool(4, PAGE)
    pool.view(0)[:] = 7
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps", encoding="ascii") as maps:
            ranges = [[int(x, 16) for x in line.split()[0].split("-")] for line in maps]
        os._exit(any(low <= pool.base < high for low, high in ranges))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (pool.view(0) == 7).all()
    pool.close()


def test_a_view_outlives_the_pool():
    pool = HostPool(4, PAGE)
    view = pool.view(1)
    view[:] = 9
    pool.close()
    assert (view == 9).all()


@pytest.mark.parametrize("make", [lambda n: HostPool(n, PAGE), lambda n: DevicePool(n, KVLayout.raw(PAGE))])
def test_more_memory_than_there_is_is_refused(make):
    with pytest.raises(ConfigError, match=r"_bytes=4PiB does not fit: .* is free. Lower .*_bytes."):
        make(1 << 40)


def test_pinning_without_a_gpu_is_refused():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pool = HostPool(16, 1 << 20, pin=True)
        assert pool.pinned
        pool.close()
    else:
        with pytest.raises(ConfigError, match="CUDA"):
            HostPool(16, PAGE, pin=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_a_device_slot_is_a_tensor_of_the_layouts_shape(dtype):
    import torch

    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype=dtype, tokens_per_block=5)
    pool = DevicePool(6, layout, "cpu")
    assert len(pool) == 6
    tensor = pool[4]
    assert tensor.shape == layout.shape and tensor.dtype == layout.torch_dtype
    assert tensor.data_ptr() == pool.address(4) == pool.base + 4 * pool.stride
    tensor.view(torch.uint8).fill_(5)
    assert (pool.view(4)[: layout.block_bytes] == 5).all() and (pool.view(4)[layout.block_bytes :] == 0).all()
    assert not pool.view(3).any() and not pool.view(5).any()
    with pytest.raises(IndexError):
        pool[6]
    del tensor
    pool.close()


def test_the_addresses_of_a_device_pool_on_the_cpu_need_no_torch():
    code = (
        "import sys; from gdskv.layout import KVLayout; from gdskv.pools.device import DevicePool;"
        "p = DevicePool(4, KVLayout.raw(4096), 'cpu'); p.view(1)[:] = 1;"
        "print(p.address(1) % 4096, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "nonsense device"])
def test_a_device_that_does_not_exist_is_refused(device):
    with pytest.raises(ConfigError, match=f"device='{device}' cannot be used: .*Use device='cpu'"):
        DevicePool(4, KVLayout.raw(4096), device)


def test_direct_reads_land_in_a_pool(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 64)
    pool = HostPool(4, PAGE)
    fd = os.open(file, os.O_RDONLY)
    assert os.preadv(fd, [pool.view(2)], PAGE) == PAGE
    os.close(fd)
    assert pool.view(2).tobytes() == bytes(range(256)) * 16
    assert np.array_equal(pool.view(1), np.zeros(PAGE, np.uint8))
    pool.close()
