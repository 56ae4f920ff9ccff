"""What gdskv takes from SGLang's configuration: sizes and directories, the namespace, and what is refused and why.

Reads attributes of SGLang's objects only, so it can be imported and tested without SGLang.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.config import CacheConfig
from gdskv.engines.common import digest, files_digest, retention_of
from gdskv.engines.sglang_pages import PageStore
from gdskv.engines.sglang_shared import PageReader, PageServer
from gdskv.errors import ConfigError, DirectoryBusy
from gdskv.layout import ALIGNMENT, KVLayout, Namespace
from gdskv.retention import Retention
from gdskv.store import KVStore, Wrap

__all__ = [
    "Geometry",
    "geometry",
    "keeps_pages",
    "namespace",
    "open_reader",
    "open_server",
    "open_store",
    "refuse",
    "retention",
    "settings",
    "shared",
]

log = logging.getLogger(__name__)

_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")
_OURS = ("config", "retention", "revision", "replicas")


class Geometry(NamedTuple):
    """How a page lies in SGLang's host pool."""

    page_bytes: int
    pieces: int
    """Of equal size; 1 with the generic interface, which copies a page into one tensor."""
    aligned: bool
    """Every piece begins at a multiple of 4 KiB, and is one long."""
    words: str
    """All of it, for the namespace."""

    @property
    def layout(self) -> KVLayout:
        return KVLayout.raw(self.page_bytes // self.pieces)


def settings(config: Any) -> dict[str, Any]:
    """gdskv's part of ``--hicache-storage-backend-extra-config``."""
    extra = dict(getattr(config, "extra_config", None) or {})
    return {name: value for name, value in extra.items() if name not in _SGLANGS}


def refuse(config: Any, server_args: Any) -> None:
    """Raise for what would give wrong answers or a cache that never hits.

    Raises
    ------
    ConfigError
        One line: what is set, why it cannot be, what to set instead.
    """
    if shared(config):
        _refuse_shared(config, server_args)
    if int(getattr(config, "dcp_size", 1) or 1) > 1:
        raise ConfigError(
            f"dcp_size={config.dcp_size} cuts pages between ranks of which one writes; a directory of gdskv belongs to "
            "one process. Set --dcp-size 1."
        )
    if getattr(config, "should_split_heads", False):
        raise ConfigError(
            f"tp_lcm_size={getattr(config, 'tp_lcm_size', None)} splits pages for servers of several tp sizes to "
            "share; a directory of gdskv belongs to one server. Leave tp_lcm_size out."
        )
    if getattr(server_args, "enable_lora", False) and not _salted():
        raise ConfigError(
            "LoRA adapters are on, and this SGLang leaves the adapter out of its page hashes, so pages of two adapters "
            "would be mixed up. Use SGLang 0.5.20 or later."
        )


def shared(config: Any) -> bool:
    """Are pages the same on several ranks, of which rank 0 writes (MLA)?"""
    return bool(getattr(config, "is_mla_model", False)) and int(getattr(config, "tp_size", 1) or 1) > 1


def keeps_pages(config: Any) -> bool:
    """Does this rank have tiers of its own? Else it reads those of its rank 0."""
    return not shared(config) or int(getattr(config, "tp_rank", 0) or 0) == 0


def _refuse_shared(config: Any, server_args: Any) -> None:
    tp = int(config.tp_size)
    nodes, total, stages = (int(getattr(server_args, n, 1) or 1) for n in ("nnodes", "tp_size", "pp_size"))
    if nodes > 1 and (here := total * stages // nodes) % tp:
        raise ConfigError(
            f"the model has latent attention (MLA), and {tp} ranks with the same pages are on nodes of {here} ranks. "
            "Rank 0 writes them and serves the ranks of its own node: the others would find nothing, and so would all. "
            f"Use --enable-dp-attention with a --dp-size that leaves {here} ranks or fewer to each replica."
        )
    if int(settings(config).get("replicas", 1)) > 1 and getattr(config, "dp_rank", None) is None:
        raise ConfigError(
            f"the model has latent attention (MLA), tp_size={tp}, and there are several replicas, which this SGLang "
            "does not tell apart, so a rank cannot find its rank 0. Use SGLang 0.5.23 or later."
        )


def _salted() -> bool:
    """Do page hashes depend on adapter and cache_salt?"""
    try:
        from sglang.srt.mem_cache import utils
    except ImportError:
        return False
    return hasattr(utils, "storage_namespace_seed")


def geometry(pool: Any, zero_copy: bool) -> Geometry:
    """Of a host pool.

    Raises
    ------
    ConfigError
        Pages lie in pieces of different sizes, or the pool does not say where they lie.
    """
    page, layout = int(pool.page_size), str(pool.layout)
    kind = type(pool).__name__
    size = int(pool.size_per_token) * page
    names = ("head_num", "head_dim", "v_head_dim", "layer_num", "kv_cache_dim", "start_layer", "end_layer")
    parts = [f"{name}={getattr(pool, name)}" for name in names if isinstance(getattr(pool, name, None), int)]
    words = f"{kind} {layout} {pool.dtype} page_size={page} bytes={size} {' '.join(parts)}"
    if not zero_copy:
        return Geometry(size, 1, False, f"generic {words}")
    remedy = 'Leave "interface_v1" out: pages are then copied into one tensor each.'
    try:
        first, second = (pieces_of(pool, np.arange(page) + at * page) for at in (0, 1))
    except (AttributeError, NotImplementedError, ValueError, KeyError) as error:
        raise ConfigError(f"{kind} with layout {layout} does not say where its pages lie ({error}). {remedy}") from None
    sizes = set(first[1].tolist())
    if len(sizes) != 1 or int(first[1].sum()) != size:
        raise ConfigError(
            f"{kind} with layout {layout} has pages in pieces of {sorted(sizes)} bytes, {size} in all; gdskv takes "
            f"pieces of one size that make up the page. {remedy}"
        )
    places = np.concatenate([first[0], second[0], np.array([sizes.pop()], np.uint64)])
    aligned = not (places % np.uint64(ALIGNMENT)).any()
    return Geometry(size, len(first[0]), aligned, f"v1 {words} pieces={len(first[0])}")


def pieces_of(pool: Any, indices: Any) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Address and bytes of each piece of some pages of a host pool, page by page; `indices` are of their tokens."""
    if isinstance(indices, np.ndarray):
        import torch

        indices = torch.from_numpy(indices)
    addresses, sizes = pool.get_page_buffer_meta(indices)
    return np.array(addresses, np.uint64), np.array(sizes, np.int64)


def rank_of(config: Any) -> tuple[int, tuple[int, int, int]]:
    """The process among all that keeps this one's pages, and the sizes of tensor, pipeline and context parallelism."""
    tp, pp, cp = (max(1, int(getattr(config, f"{name}_size", 1) or 1)) for name in ("tp", "pp", "attn_cp"))
    at = [int(getattr(config, f"{name}_rank", 0) or 0) for name in ("tp", "pp", "attn_cp")]
    if shared(config):
        at[0] = 0
    return (at[1] * tp + at[0]) * cp + at[2], (tp, pp, cp)


def namespace(config: Any, shape: Geometry, server_args: Any) -> Namespace:
    """All of SGLang's configuration that the bytes of a page depend on."""
    rank, (tp, pp, cp) = rank_of(config)
    path = str(getattr(server_args, "model_path", "") or "")
    name = path or str(getattr(config, "model_name", "") or "")
    stated = settings(config).get("revision") or getattr(server_args, "revision", None)
    known = (
        "kv_cache_dtype",
        "quantization",
        "quantization_param_path",
        "json_model_override_args",
        "load_format",
        "speculative_algorithm",
        "speculative_draft_model_path",
    )
    extra = {f"sglang.{n}": str(getattr(server_args, n, None)) for n in known}
    if str(getattr(server_args, "load_format", "")) == "dummy":
        extra["sglang.random_seed"] = str(getattr(server_args, "random_seed", None))
    revision = f"{stated or ''} {files_digest(name)}".strip()
    if not revision:
        log.warning(
            'nothing tells two states of the weights of %s apart: if they change, set another "revision" beside the '
            "directories of gdskv",
            name or "this model",
        )
    return Namespace(
        model=name or "unnamed",
        revision=revision,
        dtype="" if str(getattr(server_args, "dtype", "auto")) == "auto" else str(server_args.dtype),
        tp=tp,
        pp=pp,
        cp=cp,
        rank=rank,
        extra=(("page", shape.words), ("mla", str(bool(getattr(config, "is_mla_model", False)))), *extra.items()),
    )


def retention(config: Any) -> Retention | None:
    """What every page is kept by: SGLang passes nothing of a request on to its storage.

    Raises
    ------
    RetentionError, TypeError
        A value is wrong, or a name is not known.
    """
    return retention_of({"gdskv": settings(config).get("retention")})


def _whole(config: Any) -> tuple[CacheConfig, int]:
    """Settings for the server, and its replicas."""
    given = settings(config)
    toml, replicas = given.get("config"), int(given.get("replicas", 1))
    given = {name: value for name, value in given.items() if name not in _OURS}
    return CacheConfig.from_toml(toml, **given) if toml is not None else CacheConfig(**given), replicas


def open_server(config: Any, shape: Geometry, server_args: Any, pages: PageStore) -> PageServer:
    """Rank 0's side of `open_reader`.

    Raises
    ------
    ConfigError
    """
    return PageServer(pages, *_meeting(config, shape, server_args))


def open_reader(config: Any, shape: Geometry, server_args: Any) -> PageReader:
    """What a rank that keeps no pages reads those of its rank 0 through.

    Raises
    ------
    ConfigError
        As `CacheConfig`.
    """
    timeout = 2 * _whole(config)[0].io_timeout  # rank 0 waits for a device as long as that and gives up
    meeting = _meeting(config, shape, server_args)
    return PageReader(*meeting, shape.pieces, shape.layout.block_bytes, timeout)


def _meeting(config: Any, shape: Geometry, server_args: Any) -> tuple[str, bytes, int]:
    """Name of the socket in Linux's abstract namespace, the pages' namespace, and the bytes between their pieces."""
    rank = rank_of(config)[0]
    places = [str(path.absolute()) for path in _whole(config)[0].places(rank)]
    names = [os.getuid(), places, rank, getattr(config, "dp_rank", None), getattr(server_args, "port", None)]
    digest_ = namespace(config, shape, server_args).digest(shape.layout)
    return f"\0gdskv-{digest(str(names))}", digest_, shape.layout.slot_bytes


def open_store(config: Any, shape: Geometry, server_args: Any, io: Wrap | None = None, *, now: float = 0.0) -> KVStore:
    """This rank's share of the tiers, in a folder of its own in each directory.

    Raises
    ------
    ConfigError
        As `CacheConfig`; or pages need host memory to pass through, and there is none.
    DirectoryError, DirectoryBusy
    """
    whole, replicas = _whole(config)
    if whole.device_bytes:
        raise ConfigError(f"device_bytes={whole.device_bytes} is SGLang's own pool. Leave it out.")
    if not whole.host_bytes and not shape.aligned:
        raise ConfigError(
            "host_bytes=0, and SGLang's pages do not all begin at multiples of 4 KiB, so they pass through host memory "
            "of gdskv. Set host_bytes, 1GiB for a start."
        )
    rank, (tp, pp, cp) = rank_of(config)
    parts = (1 if shared(config) else tp) * pp * cp * replicas
    for directory in whole.places(rank):
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory. Create it (mkdir -p {directory}), or name another.")
    mine = getattr(config, "dp_rank", None)  # from 0.5.23 on; before, each takes the first folder that is free
    if mine is not None and not 0 <= mine < replicas:
        raise ConfigError(f"replicas={replicas}, and this is replica {mine}. Set replicas to the number of --dp-size.")
    for replica in range(replicas) if mine is None else [mine]:
        folders = [d / (f"rank{rank}" if not replica else f"replica{replica}-rank{rank}") for d in whole.places(rank)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        update = {
            "host_bytes": whole.host_bytes // parts,
            "disk_bytes": whole.disk_bytes // parts,
            "directories": tuple(folders),
        }
        share = whole.model_copy(update=update)
        try:
            return KVStore(share, shape.layout, namespace(config, shape, server_args), now=now, io=io)
        except DirectoryBusy:
            if replica in (mine, replicas - 1):
                raise
    raise ConfigError(f"replicas={replicas} is not 1 or more. Give the number of --dp-size.")
