"""I/O engines that wrap another: they delay, fail, record or hold transfers, and honour the contract all the same.

For tests only. Give one to a store or a manager: ``io=lambda engine: DelayEngine(engine, 0.1)``.
"""

from __future__ import annotations

import ctypes
import errno
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gdskv.io.base import READ, RESULT, TRANSFER, IOEngine, Results, Tags, Transfers
from gdskv.io.crc import crc32c_at

__all__ = ["DelayEngine", "Fail", "FaultEngine", "Flip", "RecorderEngine", "Short", "StuckEngine"]


class _Wrapper:
    """Passes everything on. `_held` are results that this engine has and the caller has not polled yet."""

    def __init__(self, inner: IOEngine) -> None:
        self.inner = inner
        self._held: deque[np.void] = deque()

    def submit(self, transfers: Transfers) -> int:
        return self.inner.submit(transfers)

    def poll(self, out: Results) -> int:
        n = min(len(out), len(self._held))
        for i in range(n):
            out[i] = self._held.popleft()
        return n

    def cancel(self, tags: Tags) -> int:
        return self.inner.cancel(tags)

    @property
    def in_flight(self) -> int:
        return self.inner.in_flight + len(self._held)

    def counters(self) -> dict[str, int]:
        return self.inner.counters()

    def path(self, slab: int) -> str:
        return self.inner.path(slab)

    def close(self, timeout: float) -> bool:
        return self.inner.close(timeout)

    def _results(self) -> Results:
        """Everything that the inner engine has ready."""
        out = np.zeros(max(1, self.inner.in_flight), RESULT)
        return out[: self.inner.poll(out)].copy()


class RecorderEngine(_Wrapper):
    """Keeps what was submitted and what came back, in order."""

    def __init__(self, inner: IOEngine) -> None:
        super().__init__(inner)
        self.batches: list[Transfers] = []
        self.results: list[np.void] = []

    @property
    def transfers(self) -> Transfers:
        """All transfers accepted so far, one array of dtype TRANSFER."""
        return np.concatenate([np.zeros(0, TRANSFER), *self.batches])

    def submit(self, transfers: Transfers) -> int:
        accepted = self.inner.submit(transfers)
        if accepted:
            self.batches.append(np.array(transfers[:accepted]))
        return accepted

    def poll(self, out: Results) -> int:
        n = self.inner.poll(out)
        self.results.extend(out[:n].copy())
        return n


class DelayEngine(_Wrapper):
    """Holds each result back for `seconds` of real time after the transfer was done."""

    def __init__(self, inner: IOEngine, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self._clock = clock
        self._ready_at: deque[float] = deque()

    def poll(self, out: Results) -> int:
        now = self._clock()
        if self.inner.in_flight:
            results = self._results()
            self._held.extend(results)
            self._ready_at.extend([now + self.seconds] * len(results))
        n = 0
        while n < len(out) and self._ready_at and self._ready_at[0] <= now:
            self._ready_at.popleft()
            out[n] = self._held.popleft()
            n += 1
        return n


class Fail(NamedTuple):
    """The transfer does not happen; its result is ``-errno``."""

    errno: int = errno.EIO


class Short(NamedTuple):
    """The transfer happens, and its result is that only so many bytes moved."""

    moved: int


class Flip(NamedTuple):
    """A read lands with one bit of this byte flipped, as from a disk that lies; the checksum is that of what landed."""

    byte: int = 0


class FaultEngine(_Wrapper):
    """Lets transfers fail as `rule` says, which gets each (a record of dtype TRANSFER) and names a fault, or None.

    Tags of transfers in flight must differ. A transfer that was not accepted is shown to the rule again.
    """

    def __init__(self, inner: IOEngine, rule: Callable[[np.void], Fail | Short | Flip | None]) -> None:
        super().__init__(inner)
        self.rule = rule
        self.faults = 0
        self._faulty: dict[int, tuple[np.void, Short | Flip]] = {}

    def submit(self, transfers: Transfers) -> int:
        start = 0  # transfers from here on are good and not handed on yet, so that neighbours stay together
        spoilt: list[tuple[int, Short | Flip]] = []
        accepted = len(transfers)
        for i, transfer in enumerate(transfers):
            fault = self.rule(transfer)
            if isinstance(fault, Fail):
                accepted = start + self.inner.submit(transfers[start:i])
                if accepted < i:
                    break
                self._held.append(np.array((transfer["tag"], -fault.errno, 0, 1), RESULT)[()])
                start = accepted = i + 1
                self.faults += 1
            elif fault is not None:
                spoilt.append((i, fault))
        else:
            accepted = start + self.inner.submit(transfers[start:])
        for i, fault in spoilt:
            if i < accepted:
                self._faulty[int(transfers["tag"][i])] = (transfers[i].copy(), fault)
                self.faults += 1
        return accepted

    def poll(self, out: Results) -> int:
        if self.inner.in_flight:
            for result in self._results():
                transfer, fault = self._faulty.pop(int(result["tag"]), (None, None))
                if transfer is not None and result["moved"] == transfer["length"]:
                    self._spoil(result, transfer, fault)
                self._held.append(result)
        return super().poll(out)

    def _spoil(self, result: np.void, transfer: np.void, fault: Short | Flip | None) -> None:
        if isinstance(fault, Short):
            result["moved"] = fault.moved
            result["crc"] = 0
        elif isinstance(fault, Flip):
            assert transfer["op"] == READ, "only what is read can be flipped here; flip the file itself otherwise"
            address, length = int(transfer["address"]), int(transfer["length"])
            ctypes.c_ubyte.from_address(address + fault.byte).value ^= 1
            if result["crc"]:
                result["crc"] = crc32c_at(address, length)


class StuckEngine(_Wrapper):
    """A device that took transfers and says nothing more: none ends, none can be cancelled, until `release`."""

    def __init__(self, inner: IOEngine, *, stuck: bool = True, queue_depth: int = 4096) -> None:
        super().__init__(inner)
        self.stuck = stuck
        self._depth = queue_depth
        self._kept: list[Transfers] = []

    def release(self) -> None:
        """Let everything go on."""
        self.stuck = False

    def submit(self, transfers: Transfers) -> int:
        if not self.stuck and not self._kept:
            return self.inner.submit(transfers)
        accepted = min(len(transfers), self._depth - sum(len(kept) for kept in self._kept))
        if accepted:
            self._kept.append(np.array(transfers[:accepted]))
        return accepted

    def poll(self, out: Results) -> int:
        while not self.stuck and self._kept:
            accepted = self.inner.submit(self._kept[0])
            if accepted < len(self._kept[0]):
                self._kept[0] = self._kept[0][accepted:]
                break
            self._kept.pop(0)
        return self.inner.poll(out)

    @property
    def in_flight(self) -> int:
        return self.inner.in_flight + sum(len(kept) for kept in self._kept)

    def close(self, timeout: float) -> bool:
        return self.inner.close(timeout) and not self._kept
