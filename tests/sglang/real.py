"""SGLang's own objects on CPU tensors: device pool, host pool, controller with its threads, and gdskv as its backend.

Import this before anything of SGLang.
"""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import no_gpu_modules  # noqa: F401  # first, in the place of what SGLang needs a GPU for
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel

__all__ = ["PAGE", "Sglang", "tokens", "until"]

PAGE = 16
PAGES = 48
LAYERS = 3


class _Allocator:
    """As much of SGLang's allocator as the controller asks for: the device pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool


def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for SGLang's threads."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "SGLang's threads did not come that far"
        time.sleep(0.001)


def _places(rank: int, ranks: int) -> dict[str, int]:
    """A rank, in the names that this SGLang knows."""
    for groups in (("tp", "pp", "attn_dcp"), ("tp", "pp")):
        names = {f"{group}_{what}": int(what == "size") for group in groups for what in ("rank", "size")}
        names |= {"tp_rank": rank, "tp_size": ranks}
        try:
            with get_parallel().override(**names):
                return names
        except ValueError:  # a name that 0.5.20 does not know
            continue
    raise AssertionError("SGLang names its ranks otherwise")


def tokens(document: int, n: int) -> list[int]:
    """The tokens of `n` pages of a prompt."""
    return [document * 100_000 + i for i in range(n * PAGE)]


class Sglang:
    """A rank: pools, the controller and gdskv below it. Of several, `group` is their process group."""

    def __init__(
        self, directory: Path, layout: str, zero_copy: bool, mla: bool = False, group: Any = None, **settings: Any
    ) -> None:
        size = PAGES * PAGE
        if mla:
            device: Any = MLATokenToKVPool(size, PAGE, torch.float32, 64, 16, LAYERS, "cpu", False)
        else:
            device = MHATokenToKVPool(size, PAGE, torch.float32, 2, 32, LAYERS, "cpu", False)
        kind: Any = MLATokenToKVPoolHost if mla else MHATokenToKVPoolHost
        more = {
            "device_capacity_tokens": size,
            "start_layer": device.start_layer,
            "end_layer": device.end_layer,
            "target_layer_num": LAYERS,
        }
        known = inspect.signature(kind).parameters
        more = {name: value for name, value in more.items() if name in known}
        pool = device
        if "buffer_info" in known:  # from 0.5.23 on
            pool = device._mla_buffer_info() if mla else device._mha_buffer_info()
        self.pool = kind(pool, 2.0, 0, PAGE, layout, pin_memory=False, **more)
        extra = {
            "backend_name": "gdskv",
            "module_path": "gdskv.engines.sglang",
            "class_name": "GdskvStorage",
            "interface_v1": int(zero_copy),
            "host_bytes": "8MiB",
            "disk_bytes": "64MiB",
            "directories": [str(directory)],
            "min_free": 0,
            **settings,
        }
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        with get_parallel().override(**_places(rank, ranks)):
            self.controller = HiCacheController(
                _Allocator(device),
                self.pool,
                PAGE,
                group,
                load_cache_event=None,
                io_backend="direct",
                storage_backend="dynamic",
                prefetch_threshold=PAGE,
                model_name="tiny",
                storage_backend_extra_config=extra,
            )

    def fill(self, seed: int) -> list[torch.Tensor]:
        """Noise in the whole pool; the bytes of each page."""
        noise = torch.Generator().manual_seed(seed)
        self.pool.kv_buffer.copy_(torch.randn(self.pool.kv_buffer.shape, generator=noise))
        return self.pages()

    def wipe(self) -> None:
        """Nothing in the pool."""
        self.pool.kv_buffer.zero_()

    def pages(self) -> list[torch.Tensor]:
        """The bytes of each page, as SGLang flattens it."""
        return [self.pool.get_data_page(i * PAGE).clone() for i in range(self.pool.page_num)]

    def hashes(self, document: int, n: int) -> list[str]:
        """SGLang's page hashes of a prompt."""
        return list(get_hash_str(tokens(document, n), None, PAGE))

    def backup(self, document: int, n: int, first: int = 0, prefix: list[str] | None = None) -> int:
        """Have SGLang's thread write the first `n` pages of the pool as the pages from `first` on of a prompt; tokens
        that it counts as written."""
        hashes = self.hashes(document, first + n)[first:]
        self.controller.write_storage(torch.arange(n * PAGE), [], hashes, prefix)
        return int(self.controller.ack_backup_queue.get(timeout=60).completed_tokens)

    def prefetch(self, document: int, n: int) -> int:
        """Have SGLang's threads look for a prompt and read it to the beginning of the pool; pages that it counts."""
        self.controller.prefetch(f"request {document}", tokens(document, n))
        operation = self.controller.prefetch_hit_queue.get(timeout=60)
        operation.host_indices = torch.arange(len(operation.hash_value) * PAGE)
        self.controller.prefetch_buffer.put(operation)
        pages = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            if ack.completed_req:
                return pages
            pages = ack.completed_tokens // PAGE

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def close(self) -> None:
        self.controller.detach_storage_backend()
