"""``gdskv bench engine``: time to the first token in the real vLLM, by where the prompt's KV was found.

Each engine runs in a process of its own: this module again, with its settings as the argument. Both are up all the
time, and take rounds in turn: one waits while the other is timed. Needs vLLM.
"""

from __future__ import annotations

import json as json_
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer

from gdskv.cli import benchlib, console
from gdskv.errors import ConfigError, GdskvError

__all__ = ["engine"]

BLOCK = 32  # tokens
LAYERS, HEADS, HEAD_DIM = 8, 8, 64
BLOCK_BYTES = LAYERS * HEADS * BLOCK * 2 * HEAD_DIM * 4
MARK = "gdskv bench: "  # before what an engine answers
PLACES = ("cold", "gpu pool", "host", "disk")
DOUBLE = Path(__file__).resolve().parent.parent.parent / "tests" / "engines" / "vllm_cpu_offload.py"


def engine(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for the disk tiers; a temporary one.", show_default=False)
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=2 * BLOCK, help="Tokens of a prompt: whole blocks of 32, and a half.")
    ] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts measured, after one that warms up.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time vLLM's first token: nothing cached, and the KV of the prompt in vLLM's own pool, in host memory, on disk.

    Beside gdskv runs vLLM's own CPU tier with its file tier, over the same bytes, round by round in turn. On the CPU
    platform, which vLLM's tiers refuse, a double from tests/ copies between the pool and the CPU tier; without a
    checkout gdskv runs alone.
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
        with ExitStack() as running:
            engines = {s: running.enter_context(_Engine(s, model, Path(folder), tokens, rounds)) for s in sides}
            for one in engines.values():
                one.ready()
            step(1)
            rows = {side: _Rounds({place: [] for place in PLACES}, {}) for side in sides}
            for number in range(rounds + 1):
                for side in sides if number % 2 else reversed(sides):
                    rows[side].add(engines[side].round(number), count=number > 0)
            step(1)
    if len(sides) == 2 and rows["gdskv"].cached != rows["vllm"].cached:
        raise GdskvError(f"the engines found other tokens cached, so nothing compares: {rows}")
    times = {side: {place: median(ms) for place, ms in rows[side].ms.items()} for side in sides}
    names = dict.fromkeys(PLACES, "vLLM with its own tiers")
    names |= {"host": "vLLM's CPU tier (copies: a double)", "disk": "vLLM's file tier (copies: a double)"}
    results = []
    for place in PLACES:
        beside = (times["vllm"][place], names[place]) if "vllm" in times else ()
        results.append(benchlib.Result.of(f"first token {place}", times["gdskv"][place], "ms", *beside))
    cold = times["gdskv"]["cold"]
    for place in PLACES[1:]:
        value = times["gdskv"][place]
        results.append(benchlib.Result.of(f"first token {place} beside cold", value, "ms", cold, "computed anew"))
    facts = {"tokens": _length(tokens), "bytes": tokens // BLOCK * BLOCK_BYTES, "layers": LAYERS, "rounds": rounds}
    facts["cached_tokens"] = rows["gdskv"].cached["disk"]
    benchlib.show("engine", results, json=json, **facts)


def _length(tokens: int) -> int:
    """Tokens of a prompt: it ends within a block, as of whole blocks either side counts the last one otherwise."""
    return tokens // BLOCK * BLOCK + BLOCK // 2


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


class _Rounds(NamedTuple):
    ms: dict[str, list[float]]
    cached: dict[str, int]
    """Tokens that were found cached, by place."""

    def add(self, found: dict[str, tuple[float, int]], *, count: bool) -> None:
        for place, (ms, cached) in found.items():
            self.cached[place] = cached
            if count:
                self.ms[place].append(ms)


class _Engine:
    """An engine in a process of its own, which measures a round when it is told to."""

    def __init__(self, side: str, model: Path, folder: Path, tokens: int, rounds: int) -> None:
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
        self._side, self._words = side, folder / f"{side}.log"
        with self._words.open("w") as words:
            self._process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=words, text=True, env=os.environ | variables
            )

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        if error[0] is not None:
            self._process.kill()
        with suppress(OSError):
            self._process.stdin.close()  # the end of what it is told
        self._process.wait()

    def ready(self) -> None:
        self._answer()

    def round(self, number: int) -> dict[str, tuple[float, int]]:
        """Milliseconds and cached tokens by place."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        return {place: (ms, cached) for place, (ms, cached) in self._answer().items()}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # vLLM and its libraries print there, too
            if line.startswith(MARK):
                answer: dict[str, Any] = json_.loads(line[len(MARK) :])
                return answer
        raise GdskvError(f"the engine with {self._side} has failed: {self._words.read_text().strip()[-400:]}")


def _measure(side: str, model: str, directory: str, tokens: int, rounds: int) -> None:
    """In the engine's process: a round for each number on standard input.

    A prompt is asked cold, again, after vLLM's pool was emptied, and after another prompt has driven it out of host
    memory, too.
    """
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
        prompt = [(i * 7 + document * 131 + (i * i) % 97) % 4000 + 1 for i in range(_length(tokens))]
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

    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        number, found = int(line), {}
        for place in PLACES:
            if place == "host":
                emptied()
            elif place == "disk":
                emptied()
                ask(1000 + number)
                emptied()
            found[place] = ask(number)
            if (found[place][1] == 0) != (place == "cold"):
                raise GdskvError(f"a prompt that should come from {place} had {found[place][1]} tokens cached.")
        settle()  # so that nothing moves while the other engine is timed
        print(MARK + json_.dumps(found), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    _measure(**json_.loads(sys.argv[1]))
