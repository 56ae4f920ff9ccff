"""Do gdskv's adapters fit the vLLM that is imported here? Prints its version and what was compared; a child of a test.

Started with the Python files of another vLLM before the installed one: nothing of it is compiled, so nothing runs but
imports and plain objects.
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import numpy as np


def overridden(ours: type, theirs: type) -> dict[str, tuple[Any, Any]]:
    """What a class takes over from vLLM's, by name: ours and theirs."""
    names = [n for n in vars(ours) if not n.startswith("_") or n == "__init__"]
    return {n: (vars(ours)[n], inspect.getattr_static(theirs, n)) for n in names if hasattr(theirs, n)}


def takes(ours: Any, theirs: Any) -> str:
    """Why a call that theirs takes would fail with ours, by place or by name; empty if it would not."""
    if isinstance(theirs, property) or not callable(getattr(theirs, "__func__", theirs)):
        return ""
    ours, theirs = (inspect.signature(getattr(f, "__func__", f)) for f in (ours, theirs))
    kinds = inspect.Parameter
    named = [p for p in theirs.parameters.values() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    placed = [p.name for p in named if p.kind is not kinds.KEYWORD_ONLY]
    try:
        ours.bind(*placed, **{p.name: 0 for p in named if p.kind is kinds.KEYWORD_ONLY})
        ours.bind("self", **{p.name: 0 for p in named[1:] if p.kind is not kinds.POSITIONAL_ONLY})
        ours.bind(*[p.name for p in named if p.default is kinds.empty and p.kind is not kinds.KEYWORD_ONLY])
    except TypeError as error:
        return f"{theirs} called on {ours}: {error}"
    return ""


def main() -> None:
    """Compare, and say what was."""
    from vllm import version
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    from gdskv.engines import vllm, vllm_events, vllm_messages, vllm_metrics, vllm_tier

    pairs = (
        (vllm.GdskvConnector, base.KVConnectorBase_V1),
        (vllm.GdskvConnector, base.SupportsHMA),
        (vllm_tier.GdskvTier, SecondaryTierManager),
        (vllm_metrics.GdskvStats, metrics.KVConnectorStats),
        (vllm_metrics.GdskvPrometheus, metrics.KVConnectorPromMetrics),
        (vllm_messages.Reports, base.KVConnectorWorkerMetadata),
    )
    compared, wrong = [], []
    for ours, theirs in pairs:
        wrong += [f"{ours.__name__} lacks {name}" for name in getattr(ours, "__abstractmethods__", ())]
        for name, (here, there) in overridden(ours, theirs).items():
            compared.append(f"{ours.__name__}.{name}")
            if name != "__init__":  # vLLM makes these by keywords of its own; see the engine tests
                wrong += [f"{compared[-1]}: {why}" for why in [takes(here, there)] if why]
    # what the adapters make of vLLM's
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=None)
    events = vllm_events.Events(spec, 32)
    request = SimpleNamespace(block_hashes=[b"1" * 32, b"2" * 32], all_token_ids=list(range(64)))
    events.expect(request, np.ones((2, 2), np.uint64), 1, 1)
    told = np.array([(1, 1, 2, 1)], [("k0", "<u8"), ("k1", "<u8"), ("tier", "u1"), ("stored", "u1")])
    (event,) = events.translate(told)
    assert (event.medium, event.block_size, event.token_ids) == ("STORAGE", 32, list(range(32, 64)))
    result = JobResult(7, False, (b"k",), 0.5, 4096)
    assert (result.job_id, result.success, result.successful_keys, result.transfer_bytes) == (7, False, (b"k",), 4096)
    print(json.dumps({"version": version.__version__, "compared": compared, "wrong": wrong}))


if __name__ == "__main__":
    main()
