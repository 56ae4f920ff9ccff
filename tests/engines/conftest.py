"""Real engines for the tests of this folder: `tools/test engines` runs them, in an environment of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent.parent
CHILD = Path(__file__).with_name("vllm_child.py")
sys.path.append(str(CHECKOUT / "tests" / "faults"))

from mounts import MIB, mounted, run  # noqa: E402


def environment(**more: str) -> dict[str, str]:
    """Variables for a child, without the GDSKV_* ones of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith("GDSKV_")}
    return kept | {"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests' / 'engines'}"} | more


class Vllm:
    """An engine in another process. Methods of `vllm_child.Engine` are called by name."""

    def __init__(self, log: Path, settings: dict[str, Any], **variables: str) -> None:
        theirs, self._out = os.pipe()
        self._in, back = os.pipe()
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(CHILD), str(theirs), str(back)],
                pass_fds=(theirs, back),
                stdout=file,
                stderr=file,
                env=environment(**variables),
                start_new_session=True,
            )
        os.close(theirs)
        os.close(back)
        self._to, self._from = os.fdopen(self._out, "w"), os.fdopen(self._in)
        self.error = ""
        self._say(settings)
        self._hear()

    def _say(self, value: Any) -> None:
        self._to.write(json.dumps(value) + "\n")
        self._to.flush()

    def _hear(self) -> Any:
        line = self._from.readline()
        answer = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            self.kill()
            tail = self.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{answer['error']}\n{tail}")
        return answer["value"]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._say([name, arguments, named])
            return self._hear()

        return call

    def stop(self) -> None:
        """End in good order."""
        self._say(["stop", [], {}])
        self._hear()
        self.process.wait(60)

    def kill(self) -> None:
        """End at once, with all processes of the engine."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Vllm]]:
    """Start an engine over a model: with gdskv's settings, or without."""
    engines: list[Vllm] = []

    def new(gdskv: dict[str, Any] | None, variables: dict[str, str] | None = None, **settings: Any) -> Vllm:
        everything = {"model": str(model), "gdskv": gdskv} | settings
        engines.append(Vllm(tmp_path / "engine.log", everything, **(variables or {})))
        return engines[-1]

    yield new
    for engine in engines:
        engine.kill()


class Wanted:
    """What an engine without gdskv answers. One such engine is asked for all tests."""

    def __init__(self, engine: Vllm) -> None:
        self._engine = engine
        self._known: dict[str, list[list[int]]] = {}

    def __call__(self, prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
        name = json.dumps([prompts, tokens])
        if name not in self._known:
            self._known[name] = [self._engine.generate([prompt], tokens)["tokens"][0] for prompt in prompts]
        return self._known[name]


@pytest.fixture(scope="session")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wanted]:
    """Return a function from prompts to the tokens that must come."""
    settings = {"model": str(model), "gdskv": None, "enable_prefix_caching": False}
    engine = Vllm(tmp_path_factory.mktemp("reference") / "engine.log", settings)
    yield Wanted(engine)
    engine.stop()


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    """A directory for the disk tier."""
    folder = tmp_path / "kv"
    folder.mkdir()
    return folder


def wait_for(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until something holds; else the test fails."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"{what} within {seconds:g} s")
        time.sleep(0.2)


class FullDisk:
    """A small file system of its own that can be filled up under an open slab."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, slab: Path) -> None:
        """Take back the slab's space, which was preallocated, and leave none."""
        run("fallocate", "--punch-hole", "--offset", 4096, "--length", slab.stat().st_size - 4096, slab)
        with contextlib.suppress(OSError), (self.path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[FullDisk]:
    """Return a disk tier's directory on a file system of its own; needs root."""
    with mounted("ext4", tmp_path, size=48 * MIB) as place:
        (place / "kv").mkdir()
        yield FullDisk(place / "kv")
