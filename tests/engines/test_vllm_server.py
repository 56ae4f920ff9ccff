"""vLLM's own HTTP server with gdskv: many clients, retention by request, our series on its metrics page, SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Wanted, environment, wait_for
from test_vllm import FULL, PROMPTS, document, settings


class Server:
    """``vllm serve`` with a model that has no tokenizer: prompts and answers are token ids."""

    def __init__(self, model: Path, gdskv: dict[str, Any], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        transfer = {
            "kv_connector": "GdskvConnector",
            "kv_connector_module_path": "gdskv.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": gdskv,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--port", str(self.port), "--dtype", "float32", "--block-size", "32", "--max-model-len", "2048"]
        command += ["--enforce-eager", "--skip-tokenizer-init", "--num-gpu-blocks-override", "256"]
        command += ["--kv-transfer-config", json.dumps(transfer), "--served-model-name", "m"]
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment(**variables), start_new_session=True
            )
        try:
            wait_for(self.healthy, 240, f"the server answers\n{log.read_text(errors='replace')[-2000:]}")
        except BaseException:
            self.kill()
            raise

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
        try:
            return bool(self.get("/health") is not None)
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body |= {"detokenize": False, "return_token_ids": True} | more
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            value: dict[str, Any] = json.loads(answer.read())
        return value

    def series(self) -> dict[str, float]:
        """Our series, by name."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith("gdskv_")]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Server]]:
    """Start a server."""
    servers: list[Server] = []

    def new(gdskv: dict[str, Any]) -> Server:
        servers.append(Server(model, gdskv, tmp_path / "server.log"))
        return servers[-1]

    yield new
    for server in servers:
        server.kill()


def test_clients_retention_metrics_and_a_restart_after_sigkill(
    serve: Callable[[dict[str, Any]], Server], kv: Path, wanted: Wanted
) -> None:
    server = serve(settings(kv))
    prompts = [document(n % 3, 320) + document(200 + n, 60 + 10 * n) for n in range(12)]
    for _ in range(2):
        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(server.complete, prompts))
        assert [a["choices"][0]["token_ids"] for a in answers] == wanted(prompts)
    keep = {"kv_transfer_params": {"gdskv": {"ttl": 3600, "priority": 80, "tenant": "a"}}}
    kept = server.complete(PROMPTS[0], **keep)
    assert kept["choices"][0]["token_ids"] == wanted(PROMPTS[:1])[0]
    wait_for(lambda: server.series().get("gdskv_retained") == 15, 30, "the blocks are retained")
    series = server.series()
    assert series["gdskv_committed_total"] > 15 and series["gdskv_host_used"] > 15 and series["gdskv_open"] == 1
    # an idle server writes what memory alone holds
    wait_for(lambda: server.series()["gdskv_disk_used"] == server.series()["gdskv_host_used"], 60, "all is on disk")
    server.kill()

    server = serve(settings(kv))
    again = server.complete(PROMPTS[0])
    assert again["choices"][0]["token_ids"] == wanted(PROMPTS[:1])[0]
    wait_for(lambda: server.series().get("gdskv_loaded_tokens_disk_total") == FULL, 30, "it came from disk")
    assert server.series()["gdskv_retained"] == 15, "for the rest of the hour"
