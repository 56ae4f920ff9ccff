"""I/O threads let a caller that is in a call go first, and not for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gdskv
from gdskv.io.base import COPY, TRANSFER
from gdskv.io.courtesy import IN_CALL, in_call
from gdskv.io.posix import PosixEngine, drain


def test_the_mark_stands_as_long_as_the_outermost_call() -> None:
    seen = []

    @in_call
    def inner() -> None:
        seen.append(int(IN_CALL[0]))

    @in_call
    def outer() -> None:
        inner()
        seen.append(int(IN_CALL[0]))

    outer()
    assert seen == [1, 1] and IN_CALL[0] == 0


def test_the_mark_is_taken_back_when_a_call_raises() -> None:
    @in_call
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert IN_CALL[0] == 0


def test_every_call_of_a_request_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gdskv.CacheConfig(device_bytes=64 << 10, host_bytes=64 << 10)
    with gdskv.BlockManager(config, gdskv.KVLayout.raw(4096), gdskv.Namespace(model="m")) as kv:
        seen = []
        table = kv.store.table
        for name in ("begin", "commit", "release", "match"):
            real = getattr(table, name)

            def spy(*arguments: object, _real: object = real, **named: object) -> object:
                seen.append(int(IN_CALL[0]))
                return _real(*arguments, **named)  # type: ignore[operator]

            monkeypatch.setattr(table, name, spy)
        keys = np.arange(8, dtype=np.uint64).reshape(4, 2)
        kv.match(keys=keys, now=0.0)
        request = kv.begin(keys=keys, now=0.0)
        assert not isinstance(request, gdskv.Rejected)
        kv.commit(request, now=0.0)
        kv.release(request, now=0.0)
    assert len(seen) >= 4 and all(seen) and IN_CALL[0] == 0


def _switches(engine: PosixEngine) -> int:
    """How often the engine's threads gave their processor away by themselves."""
    count = 0
    for thread in engine._threads:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        count += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return count


def test_a_thread_that_copies_steps_back_for_a_call_but_not_for_ever() -> None:
    source, target = np.arange(6 << 20, dtype=np.uint8), np.zeros(6 << 20, np.uint8)
    engine = PosixEngine([], checksums=True)
    batch = np.zeros(3, TRANSFER)
    for i in range(3):
        part = slice(i * (2 << 20), (i + 1) * (2 << 20))
        batch[i] = (i, COPY, -1, 0, source[part].ctypes.data, target[part].ctypes.data, 2 << 20)
    steps = []
    try:
        for mark in (0, 1):
            IN_CALL[0] = mark
            before = _switches(engine)
            assert engine.submit(batch) == 3
            assert (drain(engine, 30.0)["moved"] == 2 << 20).all()
            steps.append(_switches(engine) - before)
    finally:
        IN_CALL[0] = 0
        assert engine.close(5.0)
    assert np.array_equal(source, target)
    assert steps[1] > steps[0] + 3 * 10  # a call lasts 20 moments at most each time, and there are three strides
