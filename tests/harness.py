"""A stand-in for an engine: it runs requests through a BlockManager with KV bytes that follow from the block's key, so
every byte that comes back can be checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gdskv
from gdskv.table.learned import TRUST
from gdskv.table.state import LEARNS

BLOCK = 4096
TOKENS = 16
LAYOUT = gdskv.KVLayout.raw(BLOCK, TOKENS)
NAMESPACE = gdskv.Namespace(model="test")
_WORDS = np.arange(BLOCK // 8, dtype=np.uint64)


def config(tmp_path: Path, device: int = 8, host: int = 8, disk: int = 32, **more: Any) -> gdskv.CacheConfig:
    """Settings for tiers of that many blocks."""
    return gdskv.CacheConfig(
        device_bytes=device * BLOCK,
        host_bytes=host * BLOCK,
        disk_bytes=disk * BLOCK,
        directories=[tmp_path] if disk else [],
        min_free=0,
        **more,
    )


def trust(store: gdskv.KVStore) -> None:
    """Let a table that learns decide by value at once, where a test is too short for its warm-up."""
    store.table.arrays.lm[TRUST] = store.table.arrays.m[LEARNS]


def payload(key: np.ndarray) -> np.ndarray:
    """The bytes that the block of a key must hold."""
    return (_WORDS * key[0] + key[1]).view(np.uint8)


def tokens(doc: int, n: int) -> np.ndarray:
    """The first `n` tokens of a document."""
    return np.arange(n) + doc * 1_000_000


class WrongBytes(AssertionError):
    """The one thing that must never happen."""


class Engine:
    """Runs requests one call at a time; `now` is its own clock."""

    def __init__(self, kv: gdskv.BlockManager, check: bool = True) -> None:
        self.kv, self.now, self.check = kv, 0.0, check
        self.verified = 0
        self.recomputed = 0

    def begin(self, doc: int, n: int, **more: Any) -> gdskv.Request | gdskv.Rejected:
        return self.kv.begin(tokens(doc, n), now=self.now, **more)

    def wait(self, request: gdskv.Request, polls: int = 20_000) -> None:
        """Poll until the request is ready; a request that never is fails the test."""
        for i in range(polls):
            if self.kv.is_ready(request):
                return
            self.kv.poll(now=self.now)
            if i > 50:
                time.sleep(0.0005)
        raise AssertionError(f"request {request.id} is stuck: {self.kv.stats()}")

    def verify(self, request: gdskv.Request) -> None:
        """Every block that is said to have come must hold its bytes."""
        lost = set(request.failed.tolist())
        for i in range(len(request.tiers)):
            if i not in lost:
                have = self.kv.device_pool.view(int(request.blocks[i]))[:BLOCK]
                if not np.array_equal(have, payload(request.keys[i])):
                    raise WrongBytes(f"block {i} of request {request.id}, found in tier {request.tiers[i]}")
                self.verified += 1

    def compute(self, request: gdskv.Request) -> None:
        """Fill what was not found, or did not arrive."""
        for i in [*range(len(request.tiers), len(request.keys)), *request.failed.tolist()]:
            self.kv.device_pool.view(int(request.blocks[i]))[:BLOCK] = payload(request.keys[i])
            self.recomputed += 1

    def finish(self, request: gdskv.Request) -> None:
        self.wait(request)
        self.verify(request)
        self.compute(request)
        self.kv.commit(request, now=self.now)
        self.kv.release(request, now=self.now)
        if self.check:
            self.kv.check()

    def run(self, doc: int, n: int, **more: Any) -> gdskv.Request:
        """One request from begin to release."""
        self.now += 1.0
        request = self.begin(doc, n, **more)
        assert isinstance(request, gdskv.Request), request
        self.finish(request)
        return request

    def drain(self, until: Callable[[], bool] | None = None) -> None:
        """Poll until nothing is in flight."""
        for _ in range(20_000):
            if self.kv.store.idle and (until is None or until()):
                return
            self.kv.poll(now=self.now)
            time.sleep(0.0002)
        raise AssertionError(f"transfers are stuck: {self.kv.stats()}")
