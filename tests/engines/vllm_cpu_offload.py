"""A double for the copies between GPU and CPU of vLLM's offloading, which refuses the CPU platform: memory to memory.

All else is vLLM's own: the connector, the CPU tier, the tiers below it. Named in `spec_name` by tests and the bench.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorkerDouble(OffloadingWorker):
    """Copies at once, in the calling thread; one block a chunk."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = []
        for cache in kv_caches.tensors:
            theirs = cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            self._pairs.append((theirs, region.create_next_worker_view(cache.page_size_bytes)))
        self._done: list[TransferResult] = []

    def _copy(self, job: int, to: int, blocks: Any, chunks: Any) -> bool:
        start = time.perf_counter()
        moved = 0
        for pair in self._pairs:
            ends = (torch.from_numpy(blocks.astype("int64")), torch.from_numpy(chunks.astype("int64")))
            pair[to][ends[to]] = pair[1 - to][ends[1 - to]]
            moved += pair[0].shape[1] * len(blocks)
        self._done.append(TransferResult(job, True, moved, time.perf_counter() - start))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, 1, src_spec.block_ids, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, 0, dst_spec.block_ids, src_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pairs = []
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering on the CPU platform."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorkerDouble(kv_caches, region)
        return self._worker
