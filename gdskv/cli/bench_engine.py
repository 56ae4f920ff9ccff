"""``gdskv bench engine``: time to the first token in the real vLLM, by where the prompt's KV was found.

Each engine runs in a process of its own: this module again, with its settings as the argument. Needs vLLM.
"""

from __future__ import annotations

import json as json_
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from gdskv.cli import benchlib, console
from gdskv.errors import ConfigError, GdskvError

__all__ = ["engine"]

BLOCK = 32  # tokens
LAYERS, HEADS, HEAD_DIM = 8, 8, 64
BLOCK_BYTES = LAYERS * HEADS * BLOCK * 2 * HEAD_DIM * 4
PLACES = ("cold", "gpu pool", "host", "disk")
DOUBLE = Path(__file__).resolve().parent.parent.parent / "tests" / "engines" / "vllm_cpu_offload.py"


def engine(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for the disk tiers; a temporary one.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=2 * BLOCK, help="Tokens of a prompt.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts measured, after one that warms up.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time vLLM's first token: nothing cached, and the KV of the prompt in vLLM's own pool, in host memory, on disk.

    Beside gdskv runs vLLM's own CPU tier with its file tier, over the same bytes. On the CPU platform, which vLLM's
    tiers refuse, a double from tests/ copies between the pool and the CPU tier; without a checkout gdskv runs alone.
    """
    if find_spec("vllm") is None:
        raise ConfigError("gdskv bench engine needs vLLM, which is not here. In a checkout: tools/setup-engines.")
    sides = ["gdskv", "vllm"] if DOUBLE.is_file() else ["gdskv"]
    with (
        TemporaryDirectory(prefix="gdskv-bench-", dir=directory) as folder,
        console.progress("bench engine", 3) as step,
    ):
        model = Path(folder) / "model"
        _make_model(model)
        step(1)
        times = {}
        for side in sides:
            times[side] = _run(side, model, Path(folder), tokens, rounds)
            step(1)
    results = []
    for place in PLACES:
        value = times["gdskv"][place]
        if place in ("host", "disk") and "vllm" in times:
            name = "vLLM's CPU tier (copies: a double)" if place == "host" else "vLLM's file tier (copies: a double)"
            results.append(benchlib.Result.of(f"first token {place}", value, "ms", times["vllm"][place], name))
        else:
            results.append(benchlib.Result.of(f"first token {place}", value, "ms"))
    for place in ("host", "disk"):
        cold = times["gdskv"]["cold"]
        results.append(
            benchlib.Result.of(f"first token {place} beside cold", times["gdskv"][place], "ms", cold, "computed anew")
        )
    facts = {"tokens": tokens, "bytes": tokens // BLOCK * BLOCK_BYTES, "layers": LAYERS, "rounds": rounds}
    benchlib.show("engine", results, json=json, **facts)


def _make_model(folder: Path) -> None:
    """A Llama of random weights, wide enough that a prompt costs something: 29 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _run(side: str, model: Path, folder: Path, tokens: int, rounds: int) -> dict[str, float]:
    """Median ms by place, of an engine in a process of its own."""
    place = folder / side
    place.mkdir()
    settings = {"side": side, "model": str(model), "directory": str(place), "tokens": tokens, "rounds": rounds}
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(DOUBLE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "gdskv.cli.bench_engine", json_.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode or not last:
        raise GdskvError(f"the engine with {side} has failed: {done.stderr.strip()[-400:]}")
    times: dict[str, float] = json_.loads(last[0])
    return times


def _measure(side: str, model: str, directory: str, tokens: int, rounds: int) -> dict[str, float]:
    """In the engine's process. A prompt is asked cold, again, after vLLM's pool was emptied, and after another prompt
    has driven it out of host memory, too."""
    from vllm import LLM, SamplingParams

    blocks = tokens // BLOCK
    host, disk = (blocks + blocks // 4) * BLOCK_BYTES, 4 * (rounds + 1) * blocks * BLOCK_BYTES
    tiers: dict[str, Any] = {"disk_bytes": disk, "directories": [directory], "host_bytes": host, "min_free": 0}
    transfer: dict[str, Any] = {
        "kv_connector": "GdskvConnector",
        "kv_connector_module_path": "gdskv.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": tiers,
    }
    if side == "vllm":
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "vllm_cpu_offload",
            "cpu_bytes_to_use": host,
            "secondary_tiers": [{"type": "fs", "root_dir": directory}],
        }
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=tokens + BLOCK,
        num_gpu_blocks_override=4 * blocks,
        kv_transfer_config=transfer,
    )
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    core = llm.llm_engine.engine_core.engine_core

    def ask(document: int) -> tuple[float, int]:
        prompt = [(i * 7 + document * 131 + (i * i) % 97) % 4000 + 1 for i in range(tokens)]
        start = time.perf_counter()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3, answer.num_cached_tokens

    def settle() -> None:
        while core.scheduler.has_requests():
            core.step()

    def emptied() -> None:
        settle()
        if not llm.reset_prefix_cache():
            raise GdskvError("vLLM's pool could not be emptied: blocks are in use.")

    found: dict[str, list[float]] = {place: [] for place in PLACES}
    for number in range(rounds + 1):
        for place in PLACES:
            if place == "host":
                emptied()
            elif place == "disk":
                emptied()
                ask(1000 + number)
                emptied()
            ms, cached = ask(number)
            if (cached == 0) != (place == "cold"):
                raise GdskvError(f"a prompt that should come from {place} had {cached} tokens cached.")
            if number:
                found[place].append(ms)
    llm.llm_engine.engine_core.shutdown()
    return {place: median(times) for place, times in found.items()}


if __name__ == "__main__":
    print(json_.dumps(_measure(**json_.loads(sys.argv[1]))))
