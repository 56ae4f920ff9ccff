"""The CUDA driver as the I/O engine needs it: what an address is, copies on a stream of its own, pinning. No toolkit.

Knows ``libcuda.so.1`` only; must not know transfers. Nothing here waits for the GPU but `CopyStream.wait` and `close`.
"""

from __future__ import annotations

import ctypes
import errno
from functools import cache
from typing import Any, NamedTuple

__all__ = ["CopyStream", "Cuda", "Gpu", "load"]

_SUCCESS, _NOT_READY, _NO_MEMORY = 0, 600, 2
_MEMORY_TYPE, _DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
_pointer, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [_uint],
    "cuDriverGetVersion": [_pointer],
    "cuDeviceGetCount": [_pointer],
    "cuDeviceGetName": [_pointer, _int, _int],
    "cuDeviceGetPCIBusId": [_pointer, _int, _int],
    "cuDeviceTotalMem_v2": [_pointer, _int],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuDevicePrimaryCtxRelease_v2": [_int],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuPointerGetAttributes": [_uint, _pointer, _pointer, _pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemFree_v2": [_pointer],
    "cuMemHostAlloc": [_pointer, _size, _uint],
    "cuMemFreeHost": [_pointer],
    "cuMemHostRegister_v2": [_pointer, _size, _uint],
    "cuMemHostUnregister": [_pointer],
    "cuMemcpyAsync": [_pointer, _pointer, _size, _pointer],
    "cuStreamCreate": [_pointer, _uint],
    "cuStreamSynchronize": [_pointer],
    "cuStreamDestroy_v2": [_pointer],
    "cuStreamWaitEvent": [_pointer, _pointer, _uint],
    "cuLaunchKernel": [_pointer, *[_uint] * 7, _pointer, _pointer, _pointer],
    "cuEventCreate": [_pointer, _uint],
    "cuEventDestroy_v2": [_pointer],
    "cuEventRecord": [_pointer, _pointer],
    "cuEventQuery": [_pointer],
    "cuGetErrorName": [_int, _pointer],
}


class Gpu(NamedTuple):
    """One device, as the driver names it."""

    name: str
    bytes: int
    bus: str
    """PCI address such as ``0000:3b:00.0``; empty where the driver does not say."""


class Cuda:
    """The driver of this process. Make it with `load`."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            getattr(lib, name).argtypes = arguments
        self.lib = lib
        self.double = hasattr(lib, "hostdriver_count")
        """Whether it is the double over host memory that tests load: no GPU, no GPUDirect."""
        version = _int()
        self.check(lib.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"
        """The newest CUDA that the driver runs, such as ``"12.8"``."""

    def gpus(self) -> list[Gpu]:
        """The devices that this process may use."""
        count = _int()
        self.check(self.lib.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        found = []
        for device in range(count.value):
            name, bus, size = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32), _size()
            self.lib.cuDeviceGetName(name, len(name), device)
            self.lib.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            self.lib.cuDeviceGetPCIBusId(bus, len(bus), device)
            found.append(Gpu(name.value.decode(), size.value, bus.value.decode().lower()))
        return found

    def is_device(self, address: int) -> bool:
        """Whether an address is memory of a GPU."""
        kind, what = _uint(), _int(_MEMORY_TYPE)
        out = (ctypes.c_void_p * 1)(ctypes.addressof(kind))
        return self.lib.cuPointerGetAttributes(1, ctypes.byref(what), out, address) == 0 and kind.value == _DEVICE

    def allocate(self, size: int) -> int:
        """Address of device memory, in the context that is current: that of a `CopyStream` within ``with``."""
        base = ctypes.c_uint64()
        self.check(self.lib.cuMemAlloc_v2(ctypes.byref(base), size), "cuMemAlloc")
        return base.value

    def free(self, base: int) -> None:
        """Give back what `allocate` gave."""
        self.check(self.lib.cuMemFree_v2(base), "cuMemFree")

    def allocate_host(self, size: int) -> int:
        """Address of pinned host memory, in the context that is current."""
        base = ctypes.c_void_p()
        self.check(self.lib.cuMemHostAlloc(ctypes.byref(base), size, 0), "cuMemHostAlloc")
        return base.value or 0

    def free_host(self, base: int) -> None:
        """Give back what `allocate_host` gave."""
        self.check(self.lib.cuMemFreeHost(base), "cuMemFreeHost")

    def pin(self, base: int, size: int) -> bool:
        """Lock host memory for the GPU; False where the driver refuses: then copies are slower, and no less right."""
        return bool(self.lib.cuMemHostRegister_v2(base, size, 0) == _SUCCESS)

    def unpin(self, base: int) -> None:
        """Undo `pin`."""
        self.lib.cuMemHostUnregister(base)

    def check(self, code: int, what: str) -> None:
        """Raise OSError for a code that is not success: ENOMEM when memory ran out, else EIO, with CUDA's name."""
        if code == _SUCCESS:
            return
        name = ctypes.c_char_p()
        self.lib.cuGetErrorName(code, ctypes.byref(name))
        meaning = name.value.decode() if name.value else "unknown"
        raise OSError(errno.ENOMEM if code == _NO_MEMORY else errno.EIO, f"{what}: {meaning} ({code})")


class CopyStream:
    """Copies between any two memories and kernels, in order, none of them waited for.

    Parameters
    ----------
    device
        The GPU whose context it works in, whatever thread calls.
    events
        Copies, or other points in its work, that can be told apart at a time.
    """

    def __init__(self, cuda: Cuda, device: int, events: int) -> None:
        self._cuda, self._device = cuda, device
        self._context, self._stream = _pointer(), _pointer()
        lib = cuda.lib
        cuda.check(lib.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device), "cuDevicePrimaryCtxRetain")
        self._free: list[ctypes.c_void_p] = []
        self._before: ctypes.c_void_p | None = None  # made when it is first needed
        with self:
            cuda.check(lib.cuStreamCreate(ctypes.byref(self._stream), 1), "cuStreamCreate")  # 1: waits for no other
            for _ in range(events):
                event = _pointer()
                cuda.check(lib.cuEventCreate(ctypes.byref(event), 2), "cuEventCreate")  # 2: without times
                self._free.append(event)

    def __enter__(self) -> CopyStream:
        self._cuda.check(self._cuda.lib.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        return self

    def __exit__(self, *_: object) -> None:
        self._cuda.lib.cuCtxPopCurrent_v2(None)

    @property
    def room(self) -> int:
        """Copies that can start now."""
        return len(self._free)

    def start(self, target: int, source: int, length: int) -> ctypes.c_void_p:
        """Start a copy and return the event that `done` asks for. OSError when CUDA refuses."""
        self.copy(target, source, length)
        return self.mark()

    def copy(self, target: int, source: int, length: int) -> None:
        """Start a copy. OSError when CUDA refuses."""
        with self:
            self._cuda.check(self._cuda.lib.cuMemcpyAsync(target, source, length, self._stream), "cuMemcpyAsync")

    def launch(self, kernel: int, grid: tuple[int, int], threads: int, parameter: ctypes.Structure) -> None:
        """Start a kernel that takes one parameter, by its function handle. OSError when CUDA refuses."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))  # it is copied by the call
        sizes = (*grid, 1, threads, 1, 1, 0)
        with self:
            code = self._cuda.lib.cuLaunchKernel(kernel, *sizes, self._stream, parameters, None)
            self._cuda.check(code, "cuLaunchKernel")

    def mark(self) -> ctypes.c_void_p:
        """The event that `done` asks for: all that was started so far has ended."""
        lib = self._cuda.lib
        with self:
            event = self._free.pop()
            code = lib.cuEventRecord(event, self._stream)
            if code != _SUCCESS:  # what was started runs: the event must not be taken for it
                self._cuda.check(lib.cuStreamSynchronize(self._stream), "cuStreamSynchronize")
                self._free.append(event)
                self._cuda.check(code, "cuEventRecord")
        return event

    def after(self, stream: int) -> None:
        """Let what is started here from now on begin after all that was started on another stream so far."""
        lib = self._cuda.lib
        with self:
            if self._before is None:
                self._before = _pointer()
                self._cuda.check(lib.cuEventCreate(ctypes.byref(self._before), 2), "cuEventCreate")
            self._cuda.check(lib.cuEventRecord(self._before, stream), "cuEventRecord")
            self._cuda.check(lib.cuStreamWaitEvent(self._stream, self._before, 0), "cuStreamWaitEvent")

    def wait(self) -> None:
        """Wait for all that was started. OSError when some of it failed."""
        with self:
            self._cuda.check(self._cuda.lib.cuStreamSynchronize(self._stream), "cuStreamSynchronize")

    def done(self, event: ctypes.c_void_p) -> bool:
        """Whether a copy has ended; its event is then free again. OSError when it failed."""
        with self:
            code = self._cuda.lib.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        self._free.append(event)
        self._cuda.check(code, "copy")
        return True

    def close(self) -> None:
        """Wait for what runs, and give everything back."""
        lib = self._cuda.lib
        with self:
            lib.cuStreamSynchronize(self._stream)
            for event in [*self._free, *filter(None, [self._before])]:
                lib.cuEventDestroy_v2(event)
            lib.cuStreamDestroy_v2(self._stream)
        lib.cuDevicePrimaryCtxRelease_v2(self._device)


@cache
def load() -> Cuda | None:
    """The CUDA driver, or None where there is none or it finds no device."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
        count = _int()
        if lib.cuInit(0) != _SUCCESS or lib.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS or count.value == 0:
            return None
        return Cuda(lib)
    except (OSError, AttributeError):
        return None
