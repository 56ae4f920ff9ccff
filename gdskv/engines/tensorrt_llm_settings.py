"""What gdskv takes from TensorRT-LLM's arguments and requests: namespace, retention, and what is refused and why.

Reads attributes of TensorRT-LLM's objects only, so it can be imported and tested without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from gdskv.config import CacheConfig
from gdskv.engines.common import digest, files_digest
from gdskv.errors import ConfigError
from gdskv.layout import Namespace
from gdskv.retention import DEFAULT_PRIORITY, Retention, TokenRange

__all__ = ["cache_config", "namespace", "ranks", "refuse", "retention_of", "tokens_per_block"]


def tokens_per_block(args: Any) -> int:
    """Tokens of one block of the engine."""
    return int(getattr(args.kv_cache_config, "tokens_per_block", None) or getattr(args, "tokens_per_block", None) or 32)


def ranks(args: Any) -> int:
    """Processes that hold a part of each block, or of its layers."""
    return int(getattr(args, "tensor_parallel_size", 1)) * int(getattr(args, "pipeline_parallel_size", 1))


def refuse(args: Any) -> None:
    """Raise for what would give wrong answers.

    Raises
    ------
    ConfigError
        One line: what is set, why it cannot be, what to set instead.
    """
    if getattr(args, "enable_attention_dp", False):
        raise ConfigError(
            "enable_attention_dp=True: each rank has requests of its own, and gdskv decides for all ranks at once. "
            "Set enable_attention_dp=False."
        )
    for name in ("context_parallel_size", "max_beam_width"):
        if (getattr(args, name, None) or 1) > 1:
            raise ConfigError(f"{name}={getattr(args, name)} is not supported by gdskv. Set {name}=1.")
    if getattr(args, "speculative_config", None) is not None:
        raise ConfigError(
            "speculative_config is set: connectors are not told which draft tokens were accepted. Leave it out."
        )
    if getattr(args.kv_cache_config, "max_attention_window", None):
        raise ConfigError(
            "max_attention_window is set: blocks that a sliding window has passed do not stay as they are. "
            "gdskv keeps full attention. Leave it out, or run this model without gdskv."
        )


def cache_config(args: Any, *, rank: int | None = None) -> CacheConfig:
    """Settings from ``GDSKV_*`` variables, and the TOML file that GDSKV_CONFIG names; the connector's own configuration
    has no place for them.

    Sizes are those of the whole engine. With `rank`, the settings of that rank: its share, in a folder of its own in
    each directory.

    Raises
    ------
    ConfigError
        As `CacheConfig`; or `device_bytes` is set, or a directory does not exist.
    """
    toml = os.environ.get("GDSKV_CONFIG")
    whole = CacheConfig.from_toml(toml) if toml else CacheConfig()
    if whole.device_bytes:
        raise ConfigError(f"device_bytes={whole.device_bytes} is TensorRT-LLM's own pool. Leave it out.")
    if rank is None:
        return whole
    folders = []
    for directory in whole.places(rank):
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory. Create it (mkdir -p {directory}), or name another.")
        folders.append(directory / f"rank{rank}")
        folders[-1].mkdir(exist_ok=True)
    parts = ranks(args)
    update = {
        "host_bytes": whole.host_bytes // parts,
        "disk_bytes": whole.disk_bytes // parts,
        "directories": tuple(folders),
    }
    return whole.model_copy(update=update)


def namespace(args: Any, *, rank: int = 0, shapes: Iterable[str] = ()) -> Namespace:
    """All of TensorRT-LLM's arguments that KV bytes depend on.

    Parameters
    ----------
    rank
        Tensor- and pipeline-parallel rank.
    shapes
        Geometry of the KV memory in words, where it is known: on a worker.
    """
    cache = args.kv_cache_config
    extra = {
        "kv_dtype": str(getattr(cache, "dtype", None)),
        "tokens_per_block": str(tokens_per_block(args)),
        "quant": str(getattr(args, "quant_config", None)),
        "lora": str(getattr(args, "lora_config", None)),
        "model_kwargs": str(getattr(args, "model_kwargs", None)),
        "load_format": str(getattr(args, "load_format", None)),
        "shapes": digest("\n".join(shapes)),
    }
    stated = str(getattr(args, "revision", None) or "")
    return Namespace(
        model=str(args.model),
        revision=f"{stated} {files_digest(str(args.model))}".strip(),
        dtype=str(getattr(args, "dtype", "")).replace("auto", ""),
        tp=int(getattr(args, "tensor_parallel_size", 1)),
        pp=int(getattr(args, "pipeline_parallel_size", 1)),
        rank=rank,
        extra=tuple(extra.items()),
    )


def retention_of(wish: Any) -> Retention | None:
    """A request's retention, from its ``KvCacheRetentionConfig``: the words mean the same.

    Raises
    ------
    RetentionError
        A range is wrong.
    """
    if wish is None:
        return None
    parts = tuple(
        TokenRange(int(part.token_start), part.token_end, int(part.priority), _seconds(part.duration_ms))
        for part in wish.token_range_retention_configs
    )
    priority = getattr(wish, "decode_retention_priority", None)
    return Retention(
        ranges=parts,
        decode_priority=DEFAULT_PRIORITY if priority is None else int(priority),
        decode_ttl=_seconds(getattr(wish, "decode_duration_ms", None)),
    )


def _seconds(duration: Any) -> float | None:
    """Milliseconds or a timedelta, as seconds."""
    if duration is None:
        return None
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration) / 1000
