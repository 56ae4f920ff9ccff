"""What gdskv takes from vLLM's configuration: sizes and directories, the namespace, and what is refused and why.

Reads attributes of vLLM's objects only, so it can be imported and tested without vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from gdskv.config import CacheConfig
from gdskv.engines.common import digest, files_digest, retention_of
from gdskv.errors import ConfigError
from gdskv.layout import Namespace

__all__ = ["cache_config", "files_digest", "namespace", "refuse", "retention_of"]


def refuse(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise for what would give wrong answers, or a cache that is lost with every restart.

    Raises
    ------
    ConfigError
        One line: what is set, why it cannot be, what to set instead.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    algorithm = str(getattr(cache, "prefix_caching_hash_algo", "sha256"))
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r} is seeded at random in every process, and two prompts can be made "
            "to share a hash. Set --prefix-caching-hash-algo sha256."
        )
    if not getattr(cache, "enable_prefix_caching", True):
        raise ConfigError("prefix caching is off, so vLLM makes no block hashes. Set --enable-prefix-caching.")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"the model has {len(groups)} groups of KV cache (sliding window, state space or the like beside full "
            "attention); gdskv keeps one. Set --disable-hybrid-kv-cache-manager, which vLLM takes where all layers are "
            "attention; other models run without gdskv."
        )
    spec = groups[0].kv_cache_spec
    kinds = [type(s).__name__ for s in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values()]
    strange = sorted({kind for kind in kinds if kind not in ("FullAttentionSpec", "MLAAttentionSpec")})
    if strange:
        raise ConfigError(
            f"the KV cache is of kind {', '.join(strange)}: its blocks do not stay as they are until a request ends. "
            "gdskv keeps full attention and MLA; for sliding windows set --disable-hybrid-kv-cache-manager."
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales=True takes the scales of the KV cache from the first prompt after each start, so a "
            "restart cannot read what was kept. Use a checkpoint that has the scales, or an unquantised KV cache."
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)} is not supported by gdskv. Set it to 1.")


def cache_config(vllm_config: Any, *, rank: int | None = None) -> CacheConfig:
    """Settings from ``kv_connector_extra_config``, ``GDSKV_*`` variables, or the TOML file under ``config`` in it.

    Sizes are those of the whole engine. With `rank`, the settings of that rank: its share, in a folder of its own in
    each directory.

    Raises
    ------
    ConfigError
        As `CacheConfig`; or `device_bytes` is set, or a directory does not exist.
    """
    given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    toml = given.pop("config", None)
    whole = CacheConfig.from_toml(toml, **given) if toml is not None else CacheConfig(**given)
    if whole.device_bytes:
        raise ConfigError(
            f"device_bytes={whole.device_bytes} is vLLM's own pool. Leave it out, and set --gpu-memory-utilization."
        )
    if rank is None:
        return whole
    ranks = vllm_config.parallel_config.world_size
    folders = []
    for directory in whole.places(rank):
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory. Create it (mkdir -p {directory}), or name another.")
        folders.append(directory / _folder(vllm_config, rank))
        folders[-1].mkdir(exist_ok=True)
    update = {
        "host_bytes": whole.host_bytes // ranks,
        "disk_bytes": whole.disk_bytes // ranks,
        "directories": tuple(folders),
        "device": _device(vllm_config, rank),
    }
    return whole.model_copy(update=update)


def _folder(vllm_config: Any, rank: int) -> str:
    replica = getattr(vllm_config.parallel_config, "data_parallel_rank", 0) or 0
    return f"rank{rank}" if not replica else f"replica{replica}-rank{rank}"


def _device(vllm_config: Any, rank: int) -> str:
    kind = str(getattr(vllm_config.device_config, "device_type", "cpu"))
    return kind if kind != "cuda" else "cuda:0" if rank == 0 else f"cuda:{rank}"


def namespace(vllm_config: Any, *, rank: int = 0, shapes: Iterable[str] = ()) -> Namespace:
    """All of vLLM's configuration that KV bytes depend on.

    Parameters
    ----------
    rank
        Tensor- and pipeline-parallel rank.
    shapes
        Geometry of the KV tensors in words, where it is known: on a worker.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    hf = getattr(model, "hf_config", None)
    described = dict(hf.to_dict()) if hf is not None else {}
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        described.pop(name, None)
    load = vllm_config.load_config
    extra = {
        "hf_config": digest(json.dumps(described, sort_keys=True, default=str)),
        "block_size": str(cache.block_size),
        "hash": f"{cache.prefix_caching_hash_algo} seed {os.environ.get('PYTHONHASHSEED', '')}",
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "max_lora_rank": str(getattr(getattr(vllm_config, "lora_config", None), "max_lora_rank", None)),
        "speculation": _speculation(getattr(vllm_config, "speculative_config", None)),
        "load_format": str(load.load_format),
        "seed": str(model.seed) if str(load.load_format) == "dummy" else "",
        "shapes": digest("\n".join(shapes)),
    }
    commit = getattr(hf, "_commit_hash", None) or getattr(model, "revision", None) or ""
    return Namespace(
        model=str(model.model),
        revision=files_digest(model.model) or str(commit),
        dtype=str(model.dtype),
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        rank=rank,
        extra=tuple(extra.items()),
    )


def _speculation(config: Any) -> str:
    """Draft layers hold KV of their own in the same blocks."""
    if config is None:
        return ""
    return f"{getattr(config, 'method', '')} {getattr(config, 'model', '')}"
