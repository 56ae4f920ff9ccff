"""vLLM: gdskv's host and disk tiers below vLLM's own pool, as a KV connector that vLLM loads by name.

::

    --kv-transfer-config '{"kv_connector": "GdskvConnector", "kv_connector_module_path": "gdskv.engines.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config":
      {"host_bytes": "16GiB", "disk_bytes": "500GiB", "directories": ["/nvme0/kv"]}}'

One object lives in vLLM's scheduler and decides; one lives in each worker and moves bytes. This module only maps vLLM's
calls to theirs. Needs vLLM.

What needs Numba is imported when a connector is made: on the CPU platform vLLM 0.32 looks through all modules when a
worker starts, and an object of llvmlite's breaks it there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from gdskv.engines.vllm_metrics import GdskvPrometheus, GdskvStats, Meter
from gdskv.errors import ConfigError

if TYPE_CHECKING:
    from gdskv.engines.vllm_leader import LeaderSide
    from gdskv.engines.vllm_messages import Greeting, Reports, Step
    from gdskv.engines.vllm_worker import WorkerSide

__all__ = ["GdskvConnector"]

_HERE: dict[str, dict[str, Any]] = {}
"""Both halves of an engine, where they live in one process: then closing can write what memory alone holds."""


class GdskvConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector.

    Blocks that a step fills are copied to host memory while the next steps run, and leave for disk from there. A
    request whose prefix is cached waits for its blocks while others run. A block that does not arrive, or whose bytes
    are not those that were written, is named to vLLM, which computes it again; it is stored again then.

    Raises
    ------
    ConfigError
        What would give wrong answers or cold restarts is refused; see `gdskv.engines.vllm_settings.refuse`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute") != "recompute":
            raise ConfigError(
                "kv_load_failure_policy='fail' ends a request for every block that cannot be read. "
                "Set kv_load_failure_policy='recompute'."
            )
        self.leader: LeaderSide | None = None
        self.worker: WorkerSide | None = None
        name = str(vllm_config.kv_transfer_config.engine_id)
        self._here = _HERE.setdefault(f"{name}-{getattr(vllm_config.parallel_config, 'data_parallel_rank', 0)}", {})
        if role == KVConnectorRole.SCHEDULER:
            from gdskv.engines.vllm_leader import LeaderSide

            self.leader = self._here["leader"] = LeaderSide(vllm_config, kv_cache_config)
            self._meter = Meter()
        else:
            from gdskv.engines.vllm_worker import WorkerSide

            self.worker = WorkerSide(vllm_config, kv_cache_config)
            self._here.setdefault("workers", []).append(self.worker)

    # ---- in a worker

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None, "vLLM calls this in workers only"
        return self.worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> Greeting:
        return self._worker.greeting()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if kv_connector_metadata.preempted:
            self._worker.preempt(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # a request runs once all its blocks are there

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # blocks are taken whole, after the step

    def wait_for_save(self) -> None:
        self._worker.computed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._worker.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.errors()

    def build_connector_worker_meta(self) -> Reports:
        return self._worker.report()

    # ---- in the scheduler

    @property
    def _leader(self) -> LeaderSide:
        assert self.leader is not None, "vLLM calls this in the scheduler only"
        return self.leader

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a copy that is dropped is a miss later

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._leader.greet([greeting.report for greeting in metadata.values()])

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._leader.greet([greeting.report for greeting in metadata.values()])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._leader.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._leader.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        host, disk = self._leader.sources(request)
        if host + disk != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        return {s: n for s, n in ((CacheHitSource.HOST, host), (CacheHitSource.DISK, disk)) if n}

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._leader.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._leader.take_in(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._leader.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._leader.finished(request), None

    def take_events(self) -> list[Any]:
        return self._leader.take_events()

    def has_pending_push_work(self) -> bool:
        return self._leader.busy

    def reset_cache(self) -> bool:
        self._leader.reset()
        return True

    # ---- metrics

    def get_kv_connector_stats(self) -> GdskvStats | None:
        return self._meter(self._leader.stats()) if self.leader is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> GdskvStats:
        return GdskvStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> GdskvPrometheus:
        return GdskvPrometheus(*arguments, **named)

    # ---- the end

    def shutdown(self) -> None:
        workers = self._here.get("workers", [])
        if "leader" in self._here and len(workers) == 1:
            _write_back(self._here["leader"], workers[0])
        self._here.clear()
        if self.worker is not None:
            self.worker.close()


def _write_back(leader: LeaderSide, worker: WorkerSide, timeout: float = 10.0) -> None:
    """Write what memory alone holds to disk, as far as time allows."""
    end = time.monotonic() + timeout
    if worker.worker is None:
        return
    while leader.leader.open and time.monotonic() < end:
        now = time.monotonic()
        leader.leader.flush()
        leader.leader.poll(now=now)
        worker.worker.receive(leader.leader.orders(now=now))
        worker.computed()
        leader.leader.receive(worker.worker.report(), now=now)
        if leader.leader.idle and worker.worker.idle:
            break
        time.sleep(0.0005)
    worker.worker.receive(leader.leader.orders(now=time.monotonic()))
