"""Pipeline parallelism: the real connector with a worker per stage, each with layers of its own.

vLLM 0.32 for CPUs cannot run two stages, with gdskv or without (its second stage is given no tensors), so what calls
the connector here is a double of its scheduler and workers; messages between them are pickled, as vLLM does.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Has
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gdskv.engines.vllm import GdskvConnector
from gdskv.errors import ConfigError

TOKENS = 32
BLOCKS = 16  # of a stage's pool
LAYER_BYTES = 2 * TOKENS * 64 * 4
NAMES = [bytes([i]) * 32 for i in range(1, 4)]  # of a prompt's blocks, as vLLM hashes them


class Stages:
    """One scheduler's connector and one for each stage; `layers` of each."""

    def __init__(self, kv: Path, layers: tuple[int, ...]) -> None:
        extra = {"host_bytes": 64 * LAYER_BYTES, "disk_bytes": 128 * LAYER_BYTES, "directories": [str(kv)]}
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
        self.layers = [{f"stage{s}.layer{i}": _empty() for i in range(n)} for s, n in enumerate(layers)]

        def made(role: KVConnectorRole, rank: int, names: list[str]) -> GdskvConnector:
            config = Has(
                model_config=Has(model="m", dtype="float32", seed=0, quantization=None, revision="r", hf_config=None),
                cache_config=Has(block_size=TOKENS, cache_dtype="auto", prefix_caching_hash_algo="sha256"),
                parallel_config=Has(
                    world_size=len(layers), tensor_parallel_size=1, pipeline_parallel_size=len(layers), rank=rank
                ),
                load_config=Has(load_format="auto"),
                device_config=Has(device_type="cpu"),
                kv_transfer_config=Has(engine_id=f"{kv} {id(self)}", kv_connector_extra_config=extra | {"min_free": 0}),
            )
            group = Has(kv_cache_spec=spec, layer_names=names)
            return GdskvConnector(config, role, Has(kv_cache_groups=[group], num_blocks=BLOCKS))

        self.scheduler = made(KVConnectorRole.SCHEDULER, 0, [])
        self.workers = [made(KVConnectorRole.WORKER, rank, list(own)) for rank, own in enumerate(self.layers)]
        for worker, own in zip(self.workers, self.layers, strict=True):
            worker.register_kv_caches(own)
        hello = {(rank, 0): w.get_handshake_metadata() for rank, w in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(hello)))
        self.received: list[set[str]] = [set() for _ in layers]
        self.errors: set[int] = set()

    def step(self, new: tuple[str, list[int]] | None = None) -> None:
        """One of vLLM's steps; `new`: a request that is computed in these blocks."""
        nobody = Has(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        tokens = {new[0]: TOKENS * len(new[1])} if new else {}
        requests = [Has(req_id=new[0], num_computed_tokens=0, block_ids=(new[1],))] if new else []
        meta = self.scheduler.build_connector_meta(
            Has(
                scheduled_new_reqs=requests,
                scheduled_cached_reqs=nobody,
                num_scheduled_tokens=tokens,
                total_num_scheduled_tokens=sum(tokens.values()),
                preempted_req_ids=None,
            )
        )
        reports: Any = None
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
            worker.start_load_kv(None)
            if new:
                self.compute(rank, new[1])
            worker.wait_for_save()
            self.received[rank] |= worker.get_finished(set())[1] or set()
            self.errors |= worker.get_block_ids_with_load_errors()
            report = worker.build_connector_worker_meta()
            reports = reports.aggregate(report) if reports else report
        self.scheduler.update_connector_output(Has(kv_connector_worker_meta=pickle.loads(pickle.dumps(reports))))

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not true():
            assert time.monotonic() < end, self.scheduler._leader.stats()
            self.step()

    def compute(self, rank: int, blocks: list[int]) -> None:
        for number, tensor in enumerate(self.layers[rank].values()):
            for i, block in enumerate(blocks):
                tensor[block] = 1000 * rank + 100 * number + i + 1

    def holds(self, rank: int, blocks: list[int]) -> list[bool]:
        return [
            all(
                bool((t[block] == 1000 * rank + 100 * n + i + 1).all())
                for n, t in enumerate(self.layers[rank].values())
            )
            for i, block in enumerate(blocks)
        ]

    def ask(self, name: str) -> tuple[Any, int]:
        """A request with the same prompt, and how many of its tokens can be loaded."""
        tokens = TOKENS * len(NAMES)
        request = Has(
            request_id=name, block_hashes=NAMES, num_tokens=tokens + 1, num_prompt_tokens=tokens, prompt_embeds=None,
            kv_transfer_params=None,
        )  # fmt: skip
        return request, self.scheduler.get_num_new_matched_tokens(request, 0)[0] or 0

    def load(self, name: str, blocks: list[int]) -> None:
        """Have a request's blocks loaded on every stage."""
        request, found = self.ask(name)
        assert found == TOKENS * len(blocks)
        self.scheduler.update_state_after_alloc(request, Has(get_block_ids=lambda: [blocks]), found)
        self.until(lambda: all(name in received for received in self.received))

    def end(self) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()


def _empty() -> torch.Tensor:
    return torch.zeros(BLOCKS, 2, TOKENS, 64)


def test_every_stage_keeps_and_gets_back_its_own_layers(kv: Path) -> None:
    stages = Stages(kv, (2, 2))
    _, found = stages.ask("cold")
    assert found == 0
    stages.step(("cold", [3, 4, 5]))
    stages.until(lambda: not stages.scheduler.has_pending_push_work())
    stages.load("warm", [9, 8, 7])
    assert [stages.holds(rank, [9, 8, 7]) for rank in (0, 1)] == [[True] * 3] * 2 and not stages.errors
    stages.end()

    with next((kv / "rank1").rglob("blocks.slab")).open("r+b") as file:  # one block, of the second stage alone
        file.seek(4096 + 2 * LAYER_BYTES)
        file.write(b"\x55" * LAYER_BYTES)
    stages = Stages(kv, (2, 2))
    stages.load("again", [1, 2, 3])
    right = stages.holds(1, [1, 2, 3])
    assert stages.holds(0, [1, 2, 3]) == [True] * 3 and right.count(False) == 1
    assert stages.errors == {[1, 2, 3][right.index(False)]}, "what one stage lost is named, and the others count"
    stages.end()


def test_stages_that_hold_unequal_numbers_of_layers_are_refused(kv: Path) -> None:
    with pytest.raises(ConfigError, match="Give every rank sizes that hold as many blocks"):
        Stages(kv, (2, 1))
