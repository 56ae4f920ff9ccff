"""Doubles of TensorRT-LLM: the connector's base classes with their published signatures, MPI between threads, and an
executor that calls a connector in the order in which TensorRT-LLM does.

TensorRT-LLM itself cannot be imported without its runtime, so nothing here has run inside it.
"""

from __future__ import annotations

import pickle
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

TOKENS = 8
LAYERS, WIDTH = 2, 512
POOL = 40  # blocks


class StandInWorker:
    """As `KvCacheConnectorWorker`."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args, self._metadata = llm_args, None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata


class StandInScheduler:
    """As `KvCacheConnectorScheduler`."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


@dataclass
class RequestData:
    """As TensorRT-LLM's."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    cache_salt: str | None = None


@dataclass
class SchedulerOutput:
    """As TensorRT-LLM's."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class Mpi:
    """Ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._said: list[Any] = [None] * ranks
        self.local = threading.local()

    def rank(self) -> int:
        return int(self.local.rank)

    def allgather(self, value: Any) -> list[Any]:
        self._said[self.rank()] = pickle.dumps(value)
        self._barrier.wait(60)
        heard = [pickle.loads(said) for said in self._said]
        self._barrier.wait(60)
        return heard

    def broadcast(self, value: Any) -> Any:
        return self.allgather(value)[0]


def install(monkeypatch: Any, mpi: Mpi) -> None:
    """Let ``import tensorrt_llm`` find these doubles."""
    path = ["tensorrt_llm", "_torch", "pyexecutor", "connectors", "kv_cache_connector"]
    for i in range(len(path)):
        monkeypatch.setitem(sys.modules, ".".join(path[: i + 1]), types.ModuleType(path[i]))
    module: Any = sys.modules[".".join(path)]
    module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker = StandInScheduler, StandInWorker
    utils: Any = types.ModuleType("_utils")
    utils.mpi_rank, utils.mpi_allgather = mpi.rank, mpi.allgather
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", utils)
    monkeypatch.delitem(sys.modules, "gdskv.engines.tensorrt_llm", raising=False)


def arguments(ranks: int = 1, **more: Any) -> SimpleNamespace:
    """As `TorchLlmArgs`."""
    cache = SimpleNamespace(tokens_per_block=TOKENS, dtype="auto", max_attention_window=None)
    named = {"model": "tiny", "dtype": "float16", "tensor_parallel_size": ranks, "kv_cache_config": cache}
    return SimpleNamespace(**(named | more))


class Request:
    """As `LlmRequest`, as far as it is asked."""

    def __init__(self, request_id: int, tokens: list[int], **more: Any) -> None:
        self.request_id, self.tokens = request_id, list(tokens)
        self.cache_salt = self.lora_task_id = self.kv_cache_retention_config = None
        self.__dict__.update(more)
        self.blocks: list[int] = []
        self.told = [0, 0]  # tokens and blocks that the scheduler's output has named
        self.position = self.loaded = 0
        self.state = "waiting"

    def get_tokens(self, beam: int) -> list[int]:
        return self.tokens


def payload(tokens: list[int], rank: int, salt: Any = None) -> torch.Tensor:
    """What a rank computes for the last block of some tokens."""
    seed = sha256(f"{rank} {salt} {tokens}".encode()).digest()
    noise = np.random.default_rng(np.frombuffer(seed, np.uint32)).integers(0, 256, LAYERS * 2 * WIDTH, np.uint8)
    return torch.from_numpy(noise).view(LAYERS, 2, WIDTH)


class Executor:
    """One rank. All ranks make the same calls in the same order."""

    def __init__(
        self, args: Any, mpi: Mpi, connector: Any, chunk: int = 20, register: Callable[..., None] | None = None
    ):
        self.rank, self.mpi, self.chunk = mpi.rank(), mpi, chunk
        self.pool = torch.zeros(POOL, LAYERS, 2, WIDTH, dtype=torch.uint8)
        self.scheduler = connector.GdskvScheduler(args) if self.rank == 0 else None
        self.worker = connector.GdskvWorker(args)
        (register or (lambda worker, pool: worker.register_kv_caches(pool)))(self.worker, self.pool)
        self.free = list(range(POOL))
        self.active: list[Request] = []
        self.loading: dict[int, Request] = {}
        self.saving: dict[int, Request] = {}
        self._new: tuple[list[int], list[int]] = ([], [])  # to be saved, to be loaded
        self._gone: set[int] = set()

    def lead(self, call: Callable[[Any], Any]) -> Any:
        return self.mpi.broadcast(call(self.scheduler) if self.scheduler is not None else None)

    def admit(self, request: Request) -> int:
        """Give a request blocks; the tokens that the connector promises."""
        n, parked = self.lead(lambda s: s.get_num_new_matched_tokens(request, 0))
        need = -(-len(request.tokens) // TOKENS)
        request.blocks, self.free = self.free[:need], self.free[need:]
        self.lead(lambda s: s.update_state_after_alloc(request, request.blocks))
        request.position = request.loaded = n
        request.told, request.state = [0, 0], "loading" if parked else "running"
        if parked:
            self.loading[request.request_id] = request
            self._new[1].append(request.request_id)
        self.active.append(request)
        return int(n)

    def turn(self) -> None:
        """One iteration."""
        running = [r for r in self.active if r.state == "running"]
        output = SchedulerOutput()
        for r in running:
            part = min(self.chunk, len(r.tokens) - r.position)
            data = RequestData(r.request_id, r.tokens[r.told[0] :], r.blocks[r.told[1] :], r.position, part)
            (output.cached_requests if r.told[1] else output.new_requests).append(data)
            r.told = [len(r.tokens), len(r.blocks)]
        self.worker.bind_connector_meta(self.lead(lambda s: s.build_connector_meta(output)))
        self.worker.start_load_kv(None)
        for layer in range(LAYERS):  # the waits stand before and after each layer of a forward pass
            self.worker.wait_for_layer_load(layer, None)
            for r in running:
                self._compute(r, layer)
            self.worker.save_kv_layer(layer, None)
        for r in running:
            r.position = min(r.position + self.chunk, len(r.tokens))
        self.worker.wait_for_save(None)
        for r in running:
            if r.position == len(r.tokens):
                self.finish(r)
        self.poll()

    def poll(self) -> None:
        """What TensorRT-LLM asks at the end of each iteration, and while it waits."""
        mine = self.worker.get_finished(*self._new)
        self._new = ([], [])
        for request_id in mine[0]:
            self._gone.add(-1 - request_id)
        self._gone |= set(mine[1])
        everywhere = set.intersection(*map(set, self.mpi.allgather(sorted(self._gone))))
        self._gone -= everywhere
        for number in everywhere:
            if number < 0:
                self._release(self.saving.pop(-1 - number))
            else:
                request = self.loading.pop(number)
                if request.state == "cancelled":
                    self._release(request)
                else:
                    request.state = "running"

    def _compute(self, r: Request, layer: int) -> None:
        for i in range(r.loaded // TOKENS):  # what was promised must be there once the layer was waited for
            want = payload(r.tokens[: (i + 1) * TOKENS], self.rank, r.cache_salt)[layer]
            assert torch.equal(self.pool[r.blocks[i], layer], want), (
                f"wrong bytes in layer {layer} of block {i} of request {r.request_id}"
            )
        end = min(r.position + self.chunk, len(r.tokens))
        for i in range(r.loaded // TOKENS, end // TOKENS):
            self.pool[r.blocks[i], layer] = payload(r.tokens[: (i + 1) * TOKENS], self.rank, r.cache_salt)[layer]

    def finish(self, r: Request) -> None:
        self.active.remove(r)
        if self.lead(lambda s: s.request_finished(r, r.blocks)):
            self.saving[r.request_id] = r
            self._new[0].append(r.request_id)
        elif r.request_id in self.loading:
            r.state = "cancelled"
        else:
            self._release(r)

    def _release(self, r: Request) -> None:
        for block in r.blocks:
            self.pool[block] = 0xEE  # another request's
        self.free += r.blocks

    def run(self, requests: list[Request]) -> list[int]:
        """All of them at once, to their end; the tokens that each was promised."""
        promised = [self.admit(r) for r in requests]
        for _ in range(20_000):
            if not (self.active or self.saving or self.loading):
                return promised
            self.turn()
        raise AssertionError(f"requests {[r.request_id for r in self.active]} are stuck")
