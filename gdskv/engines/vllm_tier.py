"""vLLM's own CPU offloading with gdskv's disk tier below it: a secondary tier that vLLM loads by name.

::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184, "secondary_tiers": [{"type": "GdskvTier",
      "module_path": "gdskv.engines.vllm_tier", "disk_bytes": "500GiB", "directories": ["/nvme0/kv"]}]}}'

Bounded, checked and kept over restarts, where vLLM's file tier is none of these. Bytes move between vLLM's CPU tier and
the slabs without a copy. Needs vLLM.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from gdskv.config import CacheConfig
from gdskv.engines.vllm_settings import files_digest, retention_of
from gdskv.errors import ConfigError, RetentionError
from gdskv.keys import Keys, keys_from_hashes
from gdskv.layout import KVLayout, Namespace
from gdskv.retention import Retention
from gdskv.store import Done, KVStore, Ticket

__all__ = ["GdskvTier"]


@dataclass
class _Job:
    """A job of vLLM's: as many tickets as blocks."""

    id: int
    left: int
    moved: int = 0
    failed: set[bytes] = field(default_factory=set)
    keys: tuple[bytes, ...] = ()
    started: float = field(default_factory=time.monotonic)


class GdskvTier(SecondaryTierManager):
    """The disk tier of a `KVStore` under vLLM's CPU tier.

    vLLM names chunks one by one, by a hash that covers what comes before; each is a chain of its own here.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        vLLM's.
    **settings
        Of `CacheConfig`: `disk_bytes` and `directories` at least.

    Raises
    ------
    ConfigError, DirectoryError, DirectoryBusy
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = CacheConfig(**settings)
        if config.host_bytes or config.device_bytes or not config.disk_bytes:
            raise ConfigError(
                f"host_bytes={config.host_bytes}, disk_bytes={config.disk_bytes}: memory is vLLM's own tier here. "
                "Set disk_bytes and directories, and neither host_bytes nor device_bytes."
            )
        rows = np.frombuffer(primary_kv_view, np.uint8)
        self._view = rows  # keeps the memory
        self._base, self._stride = rows.ctypes.data, int(self._block_size_bytes)
        layout = KVLayout.raw(self._stride)
        self._store = KVStore(config, layout, _namespace(offloading_spec.config), now=time.monotonic())
        self._digest = self._store.digest
        self._tickets: dict[int, tuple[_Job, bytes]] = {}
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        self._retention: dict[str, Retention | None] = {}

    # ---- requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        try:
            self._retention[req_context.req_id] = retention_of(req_context.kv_transfer_params)
        except (RetentionError, TypeError, ValueError):
            self._retention[req_context.req_id] = None  # vLLM has no way to refuse it here
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._retention.pop(req_context.req_id, None)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        there = self._store.peek(self._key(key), now=time.monotonic())
        return LookupResult.HIT if len(there) else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        for key in keys:
            self._store.release(self._store.match(self._key(key), now=time.monotonic()))

    # ---- jobs

    def submit_store(self, job_metadata: Any) -> None:
        retention = self._retention.get(job_metadata.req_context.req_id)
        job = self._begin(job_metadata)
        for key, chunk in zip(job.keys, job_metadata.chunk_ids.tolist(), strict=True):
            ticket = self._store.store(
                self._key(key), source=self._address(chunk), retention=retention, now=time.monotonic()
            )
            self._await(job, key, ticket if ticket.blocks else None)

    def submit_load(self, job_metadata: Any, expedited: bool = False, **more: Any) -> None:
        job = self._begin(job_metadata)
        for key, chunk in zip(job.keys, job_metadata.chunk_ids.tolist(), strict=True):
            now = time.monotonic()
            found = self._store.match(self._key(key), now=now)
            ticket = self._store.load(found, into=self._address(chunk), now=now) if found.length else None
            self._await(job, key, ticket if isinstance(ticket, Ticket) else None)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for done in self._store.poll(now=time.monotonic()):
            self._done(done)
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        while self._jobs:
            for done in self._store.poll(now=time.monotonic()):
                self._done(done)
            time.sleep(0.0005)

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or not self._store.idle

    def stats(self) -> dict[str, int]:
        """The store's counters and gauges."""
        return self._store.stats()

    def shutdown(self) -> None:
        self._store.close()

    def _begin(self, metadata: Any) -> _Job:
        keys = tuple(metadata.keys)
        job = _Job(metadata.job_id, len(keys), keys=keys)
        if keys:
            self._jobs[job.id] = job
        else:
            self._results.append(JobResult(job.id, True))
        return job

    def _await(self, job: _Job, key: bytes, ticket: Ticket | None) -> None:
        if ticket is None:
            self._land(job, key, False)
        else:
            self._tickets[ticket.id] = (job, key)

    def _done(self, done: Done) -> None:
        job, key = self._tickets.pop(done.ticket.id, (None, b""))
        if job is not None:
            self._land(job, key, len(done.failed) == 0)

    def _land(self, job: _Job, key: bytes, ok: bool) -> None:
        job.left -= 1
        if ok:
            job.moved += self._stride
        else:
            job.failed.add(key)
        if job.left == 0:
            del self._jobs[job.id]
            good = tuple(key for key in job.keys if key not in job.failed)
            seconds = time.monotonic() - job.started
            self._results.append(
                JobResult(job.id, not job.failed, good if job.failed and good else None, seconds, job.moved)
            )

    def _key(self, key: bytes) -> Keys:
        return keys_from_hashes([bytes(key)], namespace=self._digest)

    def _address(self, chunk: int) -> Any:
        return np.array([self._base + chunk * self._stride], np.uint64)


def _namespace(config: Any) -> Namespace:
    """What vLLM tells a tier of itself, and the state of a local model's files."""
    extra = {
        "layers": " ".join(name for group in config.groups for name in group.layer_names),
        "tokens": f"{[group.tokens_per_block for group in config.groups]} {config.cache.tokens_per_hash}",
        "chunk": str(config.cache.blocks_per_chunk),
        "layout": f"{config.kv_cache_layout} {config.replicated_layout} {config.canonical_layout}",
        "hash": f"seed {os.environ.get('PYTHONHASHSEED', '')}",
    }
    return Namespace(
        model=str(config.model.name),
        revision=files_digest(config.model.name),
        dtype=str(config.model.dtype),
        tp=config.parallel.tp_size,
        pp=config.parallel.pp_size,
        cp=config.parallel.pcp_size * config.parallel.dcp_size,
        extra=tuple(extra.items()),
    )
