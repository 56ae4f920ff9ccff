"""The CUDA driver double does what the driver does. Run by test_hostdriver.py in a process that loads it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hostdriver import Driver

SIZE = 1 << 20
INVALID, NO_MEMORY, NOT_READY, UNKNOWN = 1, 2, 600, 999
TYPE, ORDINAL, HOST_POINTER = 2, 9, 4
HOST, DEVICE = 1, 2


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    for name in ("fail_alloc", "fail_copy", "fail_late", "delay_us"):
        driver.set(name, 0)


@pytest.fixture
def device(driver: Driver) -> Iterator[np.ndarray]:
    """Device memory, which this process can look into."""
    pointer = ctypes.c_uint64()
    assert driver.lib.cuMemAlloc_v2(ctypes.byref(pointer), SIZE) == 0
    yield np.ctypeslib.as_array((ctypes.c_uint8 * SIZE).from_address(pointer.value))
    assert driver.lib.cuMemFree_v2(pointer.value) == 0


@pytest.fixture
def stream(driver: Driver) -> Iterator[ctypes.c_void_p]:
    stream = ctypes.c_void_p()
    assert driver.lib.cuStreamCreate(ctypes.byref(stream), 0) == 0
    yield stream
    driver.lib.cuStreamSynchronize(stream)  # nothing may run on when its memory is gone
    assert driver.lib.cuStreamDestroy_v2(stream) == 0


@pytest.fixture
def source() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


def kind(driver: Driver, pointer: int) -> int:
    out, what = ctypes.c_uint(99), ctypes.c_int(TYPE)
    data = (ctypes.c_void_p * 1)(ctypes.addressof(out))
    assert driver.lib.cuPointerGetAttributes(1, ctypes.byref(what), data, pointer) == 0
    return out.value


def test_memory_answers_as_what_it_is(driver, device, source):
    inside = device.ctypes.data + 5000
    assert kind(driver, inside) == DEVICE
    assert kind(driver, source.ctypes.data) == 0, "memory that the driver does not know"
    assert driver.lib.cuMemHostRegister_v2(source.ctypes.data, SIZE, 0) == 0
    assert kind(driver, source.ctypes.data) == HOST
    assert driver.lib.cuMemHostUnregister(source.ctypes.data) == 0
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    assert driver.lib.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), inside) == 0
    assert (base.value, size.value) == (device.ctypes.data, SIZE)
    assert driver.lib.cuPointerGetAttribute(ctypes.byref(base), HOST_POINTER, inside) == INVALID
    driver.adopt(source.ctypes.data, SIZE)
    assert kind(driver, source.ctypes.data + SIZE - 1) == DEVICE and kind(driver, source.ctypes.data + SIZE) == 0
    driver.disown(source.ctypes.data)


def test_a_copy_that_nobody_waited_for_has_not_happened(driver, device, stream, source):
    driver.set("delay_us", 50_000)
    assert driver.lib.cuMemcpyAsync(device.ctypes.data, source.ctypes.data, SIZE, stream) == 0
    assert not device.any()
    source[0] ^= 255  # and it reads its source when it runs
    assert driver.lib.cuStreamSynchronize(stream) == 0
    assert np.array_equal(device, source)


def test_an_event_is_reached_when_what_was_before_it_is_done(driver, device, stream, source):
    event = ctypes.c_void_p()
    assert driver.lib.cuEventCreate(ctypes.byref(event), 0) == 0
    assert driver.lib.cuEventQuery(event) == 0, "an event that was never recorded"
    driver.set("delay_us", 50_000)
    driver.lib.cuMemcpyAsync(device.ctypes.data, source.ctypes.data, SIZE, stream)
    assert driver.lib.cuEventRecord(event, stream) == 0
    assert driver.lib.cuEventQuery(event) == NOT_READY
    driver.lib.cuMemcpyAsync(device.ctypes.data, source.ctypes.data, SIZE, stream)
    before = time.monotonic()
    assert driver.lib.cuEventSynchronize(event) == 0
    assert np.array_equal(device, source) and time.monotonic() - before < 10
    assert driver.lib.cuEventQuery(event) == 0


def test_a_stream_waits_for_another_ones_event(driver, device, stream, source):
    other, event = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.lib.cuStreamCreate(ctypes.byref(other), 0) == 0
    assert driver.lib.cuEventCreate(ctypes.byref(event), 0) == 0
    assert driver.lib.cuStreamWaitEvent(stream, event, 0) == 0, "an event that was never recorded is not waited for"
    driver.set("delay_us", 50_000)
    half = SIZE // 2
    driver.lib.cuMemcpyAsync(device.ctypes.data, source.ctypes.data, half, other)
    driver.lib.cuEventRecord(event, other)
    assert driver.lib.cuStreamWaitEvent(stream, event, 0) == 0
    driver.set("delay_us", 0)
    driver.lib.cuMemcpyAsync(device.ctypes.data + half, device.ctypes.data, half, stream)
    assert driver.lib.cuStreamSynchronize(stream) == 0
    assert np.array_equal(device[half:], source[:half])
    assert driver.lib.cuStreamDestroy_v2(other) == 0


def test_a_kernel_runs_late_with_the_parameter_of_its_launch(driver, device, stream):
    seen = []
    run = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_long), ctypes.c_uint, ctypes.c_uint)
    call = run(lambda parameter, x, y: seen.append((parameter[0], x, y)))

    class Kernel(ctypes.Structure):
        _fields_ = (("run", run), ("bytes", ctypes.c_size_t))

    kernel, parameter = Kernel(call, 8), ctypes.c_long(7)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
    launch = [ctypes.addressof(kernel), 3, 2, 1, 256, 1, 1, 0, stream, parameters, None]
    driver.set("delay_us", 50_000)
    assert driver.lib.cuLaunchKernel(*launch) == 0
    parameter.value = 8
    assert seen == []
    assert driver.lib.cuStreamSynchronize(stream) == 0
    assert seen == [(7, 3, 2)] and driver.count("kernels") == 1
    driver.set("fail_copy", 1)
    assert driver.lib.cuLaunchKernel(*launch) == UNKNOWN
    driver.set("fail_late", 1)
    assert driver.lib.cuLaunchKernel(*launch) == 0
    assert driver.lib.cuStreamSynchronize(stream) == UNKNOWN and len(seen) == 1


@pytest.mark.parametrize("default", [True, False])
def test_a_stream_keeps_its_order(driver, device, stream, source, default):
    on = None if default else stream
    half = SIZE // 2
    for i in range(200):
        driver.lib.cuMemcpyAsync(device.ctypes.data, source.ctypes.data + i, half, on)
        driver.lib.cuMemcpyAsync(device.ctypes.data + half, device.ctypes.data, half, on)
    assert driver.lib.cuStreamSynchronize(on) == 0
    assert np.array_equal(device[half:], source[199 : 199 + half])


def test_a_batch_of_copies_needs_a_stream_of_its_own(driver, device, stream, source):
    n = 4
    to = (ctypes.c_uint64 * n)(*[device.ctypes.data + 4096 * (n - 1 - i) for i in range(n)])
    start = (ctypes.c_uint64 * n)(*[source.ctypes.data + 4096 * i for i in range(n)])
    sizes = (ctypes.c_size_t * n)(*[4096] * n)
    batch = driver.lib.cuMemcpyBatchAsync
    assert batch(to, start, sizes, n, None, None, 0, None, None) == INVALID
    assert batch(to, start, sizes, n, None, None, 0, None, stream) == 0
    driver.lib.cuStreamSynchronize(stream)
    for i in range(n):
        assert np.array_equal(device[4096 * (n - 1 - i) :][:4096], source[4096 * i :][:4096])
    assert driver.count("batch_copies") == n


def test_faults_come_as_often_as_asked(driver, device, stream, source):
    pointer = ctypes.c_uint64()
    driver.set("fail_alloc", 1)
    assert driver.lib.cuMemAlloc_v2(ctypes.byref(pointer), SIZE) == NO_MEMORY
    driver.set("fail_alloc", 1)
    assert driver.lib.cuMemHostRegister_v2(source.ctypes.data, SIZE, 0) == NO_MEMORY
    driver.set("fail_copy", 2)
    copy = [device.ctypes.data, source.ctypes.data, SIZE, stream]
    assert [driver.lib.cuMemcpyAsync(*copy) for _ in range(3)] == [UNKNOWN, UNKNOWN, 0]
    driver.lib.cuStreamSynchronize(stream)
    device[:] = 0
    driver.set("fail_late", 1)
    assert driver.lib.cuMemcpyAsync(*copy) == 0
    assert driver.lib.cuStreamSynchronize(stream) == UNKNOWN and not device.any()
    assert driver.lib.cuMemcpyAsync(*copy) == 0
    assert driver.lib.cuStreamSynchronize(stream) == 0 and np.array_equal(device, source)
