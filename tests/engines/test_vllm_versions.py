"""The adapters fit the interfaces of the vLLM that the other tests run, and of newer ones, which are imported only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHECKOUT, environment

RUN = "0.32.0"


@pytest.mark.parametrize("version", [RUN, "0.33.0", "0.34.0"])
def test_the_adapters_fit_the_interfaces_of_vllm(version: str) -> None:
    variables = environment(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
    if version != RUN:
        variables["PYTHONPATH"] = f"{CHECKOUT / '.venv-engines' / f'vllm-{version}'}:{variables['PYTHONPATH']}"
    child = Path(__file__).with_name("vllm_interfaces.py")
    done = subprocess.run([sys.executable, str(child)], capture_output=True, text=True, env=variables, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["version"] == version and answer["wrong"] == []
    for name in ("get_num_new_matched_tokens", "get_finished", "start_load_kv", "take_events", "request_finished"):
        assert f"GdskvConnector.{name}" in answer["compared"], "vLLM has no such method any more"
    assert {"GdskvTier.submit_load", "GdskvTier.get_finished_jobs", "GdskvTier.lookup"} <= set(answer["compared"])


def test_a_method_that_does_not_take_what_vllm_gives_is_found() -> None:
    from vllm_interfaces import takes

    class Theirs:
        def load(self, job: int, *, soon: bool = False) -> None: ...

    class Without:
        def load(self, job: int) -> None: ...

    class Renamed:
        def load(self, task: int, *, soon: bool = False) -> None: ...

    class More:
        def load(self, job: int, soon: bool = False, **more: int) -> None: ...

    assert "soon" in takes(Without.load, Theirs.load) and "job" in takes(Renamed.load, Theirs.load)
    assert takes(More.load, Theirs.load) == "" == takes(Theirs.load, Theirs.load)
