"""One vLLM engine in a process of its own, driven by commands in JSON lines: it is killed and started over by tests.

python vllm_child.py IN OUT     two file descriptors; the first line holds the settings
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
)

TIERS = ("loaded_tokens_host", "loaded_tokens_disk")


class Engine:
    """What the commands do; each answers with something that JSON can hold."""

    def __init__(self, model: str, gdskv: dict[str, Any] | None, **more: Any) -> None:
        from vllm import LLM

        self.tiering = more.pop("tiering", None)
        if self.tiering is not None:  # vLLM's own connector, with these tiers below its CPU tier
            extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_offload"} | self.tiering
            more["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        if gdskv is not None:
            more["kv_transfer_config"] = {
                "kv_connector": "GdskvConnector",
                "kv_connector_module_path": "gdskv.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": gdskv,
            }
        if "events" in more:  # where to publish them
            from vllm.config import KVEventsConfig

            more["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=more.pop("events")
            )
        settings = {
            "disable_log_stats": False,
            "max_model_len": 2048,
            "num_gpu_blocks_override": 256,
            "block_size": 32,
        } | more
        self.llm = LLM(model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **settings)
        self.core = self.llm.llm_engine.engine_core
        self.connector = self.core.engine_core.scheduler.connector if hasattr(self.core, "engine_core") else None

    def _parameters(self, tokens: int, params: dict[str, Any] | None) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra)

    def generate(self, prompts: list[Any], tokens: int = 8, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Answer prompts, all at once: tokens of each, and where the blocks of the prompts were found."""
        before = self.stats()
        asked = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        outputs = self.llm.generate(asked, self._parameters(tokens, params), use_tqdm=False)
        after = self.stats()
        cached = sum(o.num_cached_tokens for o in outputs)
        host, disk = (after.get(tier, 0) - before.get(tier, 0) for tier in TIERS)
        failed = after.get("failed_load_blocks", 0) - before.get("failed_load_blocks", 0)
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "cached": [o.num_cached_tokens for o in outputs],
            "found": {"gpu": cached - host - disk, "host": host, "disk": disk},
            "failed": failed,
        }

    def abort_in_flight(self, prompts: list[list[int]], steps: int) -> int:
        """Begin requests and end them after a few steps; how many there were."""
        engine = self.llm.llm_engine
        for number, prompt in enumerate(prompts):
            engine.add_request(f"abort{number}", {"prompt_token_ids": prompt}, self._parameters(64, None))
        for _ in range(steps):
            engine.step()
        engine.abort_request([f"abort{number}" for number in range(len(prompts))])
        while engine.has_unfinished_requests():
            engine.step()
        return len(prompts)

    def settle(self) -> dict[str, int]:
        """Step as an idle engine does, until all is written."""
        core = self.core.engine_core
        for _ in range(20_000):
            if not core.scheduler.has_requests():
                return self.stats()
            core.step()
        raise AssertionError(f"it does not settle: {self.stats()}")

    def reset(self, connector: bool = False) -> bool:
        """Empty vLLM's own pool, once nobody holds its blocks, and gdskv's tiers if told so."""
        self.settle()
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def preemptions(self) -> int:
        """How often a request had to give its blocks up."""
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")

    def stats(self) -> dict[str, int]:
        """gdskv's counters."""
        if self.connector is None:
            return {}
        if self.tiering is not None:
            (tier,) = self.connector.connector_scheduler.manager.secondary_tiers
            return dict(tier.stats()) if hasattr(tier, "stats") else {}
        return {name: int(value) for name, value in self.connector.leader.stats().items()}

    def check(self) -> dict[str, int]:
        """The table does not contradict itself, and nothing is held."""
        store = self.connector.leader.leader.store
        store.table.check(closed=False, exclusive=False)
        stats = self.stats()
        assert stats["host_leased"] == stats["disk_leased"] == 0, stats
        assert not self.connector.leader._requests, "requests that have ended are forgotten"
        return stats

    def stop(self) -> None:
        """End as an engine does that is told to."""
        self.core.shutdown()


def main() -> None:
    """Take commands until told to stop."""
    inward, outward = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:3], "rw", strict=True))

    def answer(value: Any) -> None:
        outward.write(json.dumps(value) + "\n")
        outward.flush()

    try:
        engine = Engine(**json.loads(inward.readline()))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer({"value": None})
    for line in inward:
        name, arguments, named = json.loads(line)
        try:
            answer({"value": getattr(engine, name)(*arguments, **named)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
        if name == "stop":
            return


if __name__ == "__main__":
    main()
