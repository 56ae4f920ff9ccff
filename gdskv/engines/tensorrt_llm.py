"""TensorRT-LLM: gdskv's host and disk tiers below its own pool, as a KV cache connector that it loads by name.

::

    KvCacheConnectorConfig(connector_module="gdskv.engines.tensorrt_llm",
                           connector_scheduler_class="GdskvScheduler", connector_worker_class="GdskvWorker")

with sizes and directories in ``GDSKV_*`` variables. One object on rank 0 decides; one in each process moves bytes. This
module only maps TensorRT-LLM's calls to theirs. Needs TensorRT-LLM.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

from gdskv.engines import tensorrt_llm_settings as settings
from gdskv.engines.tensorrt_llm_leader import LeaderSide, Step
from gdskv.engines.tensorrt_llm_worker import WorkerSide, memory_of_layout
from gdskv.errors import GdskvError
from gdskv.ranks import EngineMemory, Report
from gdskv.store import Wrap

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ImportError:  # where earlier releases have it
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )

__all__ = ["GdskvScheduler", "GdskvWorker"]

NAP = 0.0001  # seconds between two looks at what moves


class _Pair:
    """The halves of an engine that live in one process. `args` are kept so that their id stays theirs."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.leader: LeaderSide | None = None
        self.worker: WorkerSide | None = None
        self.registered = False

    def meet(self) -> None:
        """Once both are there: what came back from disk is known before the first request."""
        if self.leader is not None and self.worker is not None and self.registered and self.leader.ranks == 1:
            self.leader.drive = self.drive
            self.leader.take_in([self.worker.report()])

    def drive(self, done: Callable[[], bool], seconds: float) -> None:
        """Let the only rank work until `done`, for at most some seconds."""
        assert self.leader is not None and self.worker is not None
        end = time.monotonic() + seconds
        while True:
            self.worker.start(self.leader.take_step())
            self.leader.take_in([self.worker.report()])
            if done() or time.monotonic() >= end:
                return
            time.sleep(NAP)

    def close(self) -> None:
        """Write what memory alone holds, as far as some seconds allow: nobody says when the engine ends."""
        if self.leader is not None and self.worker is not None and self.registered and self.leader.ranks == 1:
            leader = self.leader.leader
            self.worker.worker.sources_ready()
            self.drive(lambda: not leader.flush() and leader.idle, 10.0)
            self.worker.start(self.leader.take_step())  # that says that nothing is left
        if self.worker is not None:
            self.worker.close()
        _HERE.pop(id(self.args), None)


_HERE: dict[int, _Pair] = {}


def _pair(args: Any) -> _Pair:
    if id(args) not in _HERE:
        _HERE[id(args)] = _Pair(args)
        atexit.register(_HERE[id(args)].close)
    return _HERE[id(args)]


class GdskvScheduler(KvCacheConnectorScheduler):
    """Decides, on rank 0.

    Raises
    ------
    ConfigError
        What would give wrong answers is refused; see `gdskv.engines.tensorrt_llm_settings.refuse`.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.leader = LeaderSide(llm_args)
        pair = _pair(llm_args)
        pair.leader = self.leader
        pair.meet()

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self.leader.step(scheduler_output)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self.leader.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.leader.allocated(request, list(block_ids))

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.leader.finished(request)

    def request_reset(self, request: Any) -> None:
        self.leader.reset(getattr(request, "request_id", request))

    def cancel_load(self, request: Any) -> None:
        self.leader.cancel(getattr(request, "request_id", request))

    def stats(self) -> dict[str, int]:
        """All counters and gauges of gdskv."""
        return self.leader.stats()


class GdskvWorker(KvCacheConnectorWorker):
    """Moves, in each process."""

    wrap: Wrap | None = None
    """Wraps the I/O engine, as tests do."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._ranks = settings.ranks(llm_args)
        self.worker = WorkerSide(llm_args, self._rank(), type(self).wrap)
        self._last: Step | None = None
        self._here = _pair(llm_args)
        self._here.worker = self.worker

    def _rank(self) -> int:
        if self._ranks == 1:
            return 0
        from tensorrt_llm._utils import mpi_rank

        return int(mpi_rank())

    def _gather(self, report: Report) -> list[Report]:
        """The reports of all ranks: every rank comes here once in each turn of the executor."""
        if self._ranks == 1:
            return [report]
        from tensorrt_llm._utils import mpi_allgather

        return list(mpi_allgather(report))

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self._open(EngineMemory([kv_cache_tensor], kv_cache_tensor.shape[0]), str(kv_cache_tensor.device))

    def register_kv_cache_layout(self, layout: Any) -> None:
        import torch

        cuda = torch.cuda.is_available()
        self._open(memory_of_layout(layout), f"cuda:{torch.cuda.current_device()}" if cuda else "cpu")

    def _open(self, memory: EngineMemory, device: str) -> None:
        if self._here.registered:
            raise GdskvError("a KV cache is registered already. gdskv keeps one for an engine.")
        self.worker.register(memory, device)
        self._here.registered = True
        self._here.meet()

    def start_load_kv(self, stream: Any) -> None:
        step = self.get_connector_meta()
        if isinstance(step, Step) and step is not self._last:  # without news the last one stays bound
            self._last = step
            self.worker.start(step)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        pass  # a request runs once all its blocks are there

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        pass  # blocks are taken whole, after the step

    def wait_for_save(self, stream: Any) -> None:
        self.worker.computed(stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        answer = self.worker.finished(finished_gen_req_ids, started_loading_req_ids)
        reports = self._gather(self.worker.report())
        if self._here.leader is not None:
            self._here.leader.take_in(reports)
        return answer
