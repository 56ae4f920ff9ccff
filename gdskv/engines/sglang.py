"""SGLang: gdskv's host and disk tiers below SGLang's host pool, as a storage backend that SGLang loads by name.

::

    --enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "gdskv", "module_path": "gdskv.engines.sglang",
      "class_name": "GdskvStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
      "host_bytes": "4GiB", "disk_bytes": "500GiB", "directories": ["/nvme0/kv"]}'

This module only maps SGLang's calls to those of a `PageStore`. Needs SGLang.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from gdskv.engines import sglang_settings
from gdskv.engines.sglang_pages import Addresses, PageStore
from gdskv.engines.sglang_shared import PageReader, PageServer
from gdskv.errors import ConfigError, GdskvError
from gdskv.store import Wrap

__all__ = ["GdskvStorage"]

log = logging.getLogger(__name__)


class GdskvStorage(HiCacheStorage):
    """The backend of one rank. SGLang's threads call it at once. Of an MLA model rank 0 has the tiers, and the other
    ranks of its node read from it.

    A page is served with all its bytes, those that were stored under its hash, or it is a miss; so is everything
    before a host pool is registered and after `close`.

    Parameters
    ----------
    storage_config
        SGLang's `HiCacheStorageConfig`; gdskv's settings are in its `extra_config`.
    kwargs
        What SGLang's factory hands to every backend; nothing of it is needed.

    Raises
    ------
    ConfigError
        What would give wrong answers or never a hit is refused; see `gdskv.engines.sglang_settings.refuse`.
    """

    io: Wrap | None = None
    """Wraps the I/O engine, as tests do."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._server_args = _server_args()
        sglang_settings.refuse(storage_config, self._server_args)
        self._retention = sglang_settings.retention(storage_config)
        extra = getattr(storage_config, "extra_config", None) or {}
        self._zero_copy = bool(extra.get("interface_v1", 0))
        self._pages: PageStore | PageReader | None = None
        self._server: PageServer | None = None
        self._chains = threading.local()
        self.errors = 0
        """Calls that ended with an error, and were a miss."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store: only now it is known how pages lie in memory.

        Raises
        ------
        ConfigError, DirectoryError, DirectoryBusy
        """
        super().register_mem_pool_host(mem_pool_host)
        if self._pages is not None:
            raise ConfigError("a host pool is registered already. Detach the backend before you attach it again.")
        self._shape = shape = sglang_settings.geometry(mem_pool_host, self._zero_copy)
        if not sglang_settings.keeps_pages(self._config):
            self._pages = sglang_settings.open_reader(self._config, shape, self._server_args)
            return
        pages = PageStore(
            lambda: sglang_settings.open_store(
                self._config, shape, self._server_args, type(self).io, now=time.monotonic()
            ),
            shape.pieces,
            self._retention,
        )
        if sglang_settings.shared(self._config):
            try:
                self._server = sglang_settings.open_server(self._config, shape, self._server_args, pages)
            except ConfigError:
                pages.close(0.0)
                raise
        self._pages = pages

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse: models with several kinds of KV.

        Raises
        ------
        ConfigError
        """
        raise ConfigError(
            f"the model keeps KV of kind {host_pool_name} beside full attention (sliding window, state space, indexer "
            "or draft). gdskv keeps full attention and MLA. Run this model without --hicache-storage-backend."
        )

    # ---- is it there

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return int(self._answer(0, lambda pages: pages.found(keys)))

    # ---- zero copy: to and from SGLang's host pool

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        self._expect(zero_copy=True)
        n = self._answer(0, lambda pages: pages.load(keys, self._places(keys, host_indices)))
        return [i < n for i in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        self._expect(zero_copy=True)
        after = self._before(keys, extra_info)
        n = self._answer(0, lambda pages: pages.store(keys, self._places(keys, host_indices), after))
        return [i < n for i in range(len(keys))]

    # ---- generic: to and from a tensor a page

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """A leading run of tensors, then None: `target_locations` filled, or new ones of the pool's dtype."""
        self._expect(zero_copy=False)
        pages = target_locations if target_locations is not None else [self._page() for _ in keys]
        n = self._answer(0, lambda store: store.load(keys, self._addresses(keys, pages)))
        return [page if i < n else None for i, page in enumerate(pages)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """True if all pages are kept now."""
        self._expect(zero_copy=False)
        if values is None:
            raise GdskvError("values is None. Give a tensor for each key; pages by address go through batch_set_v1.")
        held = [value.contiguous() for value in values]
        n = self._answer(0, lambda pages: pages.store(keys, self._addresses(keys, held)))
        return bool(n == len(keys))

    # ---- the whole

    def clear(self) -> None:
        if not self._answer(True, lambda pages: pages.clear()):
            log.error("a transfer did not end, so the cache stays closed after clear: everything is a miss")

    def close(self) -> None:
        if self._pages is not None and not self._pages.close():
            log.warning("a device held on to transfers when the cache was closed: what they carried is not kept")
        if self._server is not None:
            self._server.close()

    def get_stats(self) -> Any:
        """What SGLang shows of a backend: nothing but its own counts. gdskv's own are in `stats`."""
        return None

    def stats(self) -> dict[str, int]:
        """All counters and gauges of gdskv."""
        pages: dict[str, int] = self._answer({}, lambda pages: pages.stats())
        return pages | {"errors": self.errors}

    # ----

    def _expect(self, *, zero_copy: bool) -> None:
        if zero_copy != self._zero_copy:
            raise ConfigError(
                f'this backend was opened with "interface_v1": {int(self._zero_copy)}, and is called by the other '
                f'interface, in which pages are other bytes. Set "interface_v1": {int(zero_copy)}.'
            )

    def _answer(self, otherwise: Any, ask: Callable[[PageStore | PageReader], Any]) -> Any:
        """SGLang's threads end for good when a call raises: what goes wrong here is a miss, counted and told."""
        if self._pages is None:
            return otherwise
        try:
            return ask(self._pages)
        except (GdskvError, OSError) as error:
            self.errors += 1
            log.warning("%s", error)
            return otherwise

    def _before(self, keys: list[str], extra_info: Any) -> list[str]:
        """Hashes of the pages before the first, as far as SGLang says so.

        It hands over what precedes an operation's first batch, and appends each batch for the next; but a list that
        was empty stays empty. As every operation has a list of its own, the same list says that it goes on."""
        prefix = getattr(extra_info, "prefix_keys", None)
        earlier, before = getattr(self._chains, "last", (None, []))
        if prefix is None or prefix is not earlier:
            before = []
        self._chains.last = (prefix, [*before, *keys])
        return list(prefix or before)

    def _places(self, keys: Sequence[str], host_indices: Any) -> Addresses:
        pool = self.mem_pool_host
        if len(host_indices) != len(keys) * pool.page_size:
            raise GdskvError(
                f"{len(host_indices)} host indices for {len(keys)} pages of {pool.page_size} tokens. Give one a token."
            )
        addresses, sizes = sglang_settings.pieces_of(pool, host_indices)
        wrong = sizes[sizes * self._shape.pieces != self._shape.page_bytes]
        if len(wrong) or len(addresses) != len(keys) * self._shape.pieces:
            raise GdskvError(f"the pool's pages are not what they were when it was registered: {self._shape.words}.")
        return addresses

    def _page(self) -> torch.Tensor:
        dtype = self.mem_pool_host.dtype
        return torch.empty(self._shape.page_bytes // dtype.itemsize, dtype=dtype)

    def _addresses(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> Addresses:
        for page in pages:
            size = page.numel() * page.element_size()
            if size != self._shape.page_bytes or not page.is_contiguous() or page.device.type != "cpu":
                raise GdskvError(
                    f"a page is a tensor of {size} bytes on {page.device}; contiguous memory of the host with "
                    f"{self._shape.page_bytes} bytes is needed."
                )
        if len(pages) != len(keys):
            raise GdskvError(f"{len(pages)} tensors for {len(keys)} keys. Give one a key.")
        return np.array([page.data_ptr() for page in pages], np.uint64)


def _server_args() -> Any:
    """What SGLang was started with; None where that cannot be asked."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        return None
    try:
        return get_server_args()
    except Exception:  # not published, in a process that only uses the interfaces
        return None
