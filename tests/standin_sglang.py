"""Doubles of what SGLang's storage backends meet: the base class with its published signatures, and a host pool.

For the tests that run without SGLang; tests/sglang has the real ones.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import torch


class StandInHiCacheStorage:
    """The base class: what is not abstract there does what it does there."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        raise NotImplementedError

    def clear(self) -> None:
        pass

    def get_stats(self) -> Any:
        return None


@dataclass
class StandInConfig:
    """As `HiCacheStorageConfig`."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "tiny"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    extra_config: dict[str, Any] | None = None


@dataclass
class StandInExtraInfo:
    """As `HiCacheStorageExtraInfo`."""

    prefix_keys: list[str] | None = None


class StandInHostPool:
    """A host pool of pages in pieces of `piece` bytes; ``sizes`` are what it says of them."""

    layout = "page_first"
    dtype = torch.uint8

    def __init__(self, pages: int, page_size: int = 4, pieces: int = 2, piece: int = 4096) -> None:
        self.page_size, self.pieces, self.piece = page_size, pieces, piece
        self.size_per_token = pieces * piece // page_size
        memory = torch.zeros((pieces * pages + 1) * piece + 4096, dtype=torch.uint8)
        start = -memory.data_ptr() % 4096
        self.kv_buffer = memory[start : start + pieces * pages * piece].view(pieces, pages, piece)
        self.sizes = [piece] * pieces

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [i // self.page_size for i in indices.tolist()[:: self.page_size]]
        places = [self.kv_buffer[part].data_ptr() + page * self.piece for page in pages for part in range(self.pieces)]
        return places, self.sizes * len(pages)


def install(monkeypatch: Any) -> None:
    """Let ``import sglang`` find these doubles."""
    parts = ["sglang", "srt", "mem_cache", "hicache_storage"]
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), types.ModuleType(parts[i]))
    sys.modules[".".join(parts)].HiCacheStorage = StandInHiCacheStorage  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "gdskv.engines.sglang", raising=False)
