"""The shape and size of one block's bytes (`KVLayout`), and what makes two caches interchangeable (`Namespace`).

Knows numbers and names only and must not know where a block lies, nor who computes it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from gdskv.errors import LayoutError
from gdskv.units import format_size

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "FORMAT_VERSION", "KVLayout", "Namespace"]

ALIGNMENT = 4096  # bytes; what O_DIRECT and cuFile ask of a base, a length and an offset
FORMAT_VERSION = 1  # of everything that outlives a process: keys, slot order, a block's bytes
MAX_BLOCK_BYTES = 1 << 30  # one read(2) moves less than 2 GiB

_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class KVLayout:
    """The KV of ``tokens_per_block`` consecutive tokens, over all layers of one rank.

    Parameters
    ----------
    layers, kv_heads, head_dim
        Counts of this rank. Grouped-query attention is ``"mha"`` with fewer KV heads.
    dtype
        ``float32``, ``float16``, ``bfloat16``, ``float8_e4m3fn``, ``float8_e5m2``, ``int8`` or ``uint8``, or the
        `torch.dtype` of that name.
    tokens_per_block
        Tokens in one block.
    kind
        ``"mha"``: keys and values per head. ``"mla"``: one latent vector of `head_dim` per token and layer; `kv_heads`
        is then 1.
    fused
        Whether the engine holds all layers in one tensor. The bytes of a block are the same; the namespace is not.

    Raises
    ------
    LayoutError
        A count is below 1, the dtype or the kind is not known, or a block is larger than 1 GiB.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    tokens_per_block: int
    kind: Literal["mha", "mla"] = "mha"
    fused: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "tokens_per_block"):
            object.__setattr__(self, name, _count(name, getattr(self, name), least=1))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in _ITEM_BYTES:
            raise LayoutError(f"dtype={self.dtype!r} is not known. Choose one of {', '.join(_ITEM_BYTES)}.")
        if self.kind not in ("mha", "mla"):
            raise LayoutError(f"kind={self.kind!r} is not known. Choose mha (also for grouped queries) or mla.")
        if self.kind == "mla" and self.kv_heads != 1:
            raise LayoutError(f"kv_heads={self.kv_heads} does not fit kind='mla': one latent vector. Set kv_heads=1.")
        if not isinstance(self.fused, bool):
            raise LayoutError(f"fused={self.fused!r} is not a truth value. Set fused to True or False.")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise LayoutError(
                f"tokens_per_block={self.tokens_per_block} makes a block of {format_size(self.block_bytes)}; the limit "
                f"is {format_size(MAX_BLOCK_BYTES)}. Use fewer tokens per block."
            )

    @classmethod
    def raw(cls, block_bytes: int, tokens_per_block: int = 1) -> KVLayout:
        """Return a layout for blocks of bytes without structure, such as those that a trace's replay moves.

        Raises
        ------
        LayoutError
            `block_bytes` is no multiple of `tokens_per_block`.
        """
        block_bytes = _count("block_bytes", block_bytes, least=1)
        tokens_per_block = _count("tokens_per_block", tokens_per_block, least=1)
        if block_bytes % tokens_per_block:
            raise LayoutError(
                f"block_bytes={block_bytes} is no multiple of tokens_per_block={tokens_per_block}. "
                f"Use {block_bytes // tokens_per_block * tokens_per_block or tokens_per_block}."
            )
        return cls(1, 1, block_bytes // tokens_per_block, "uint8", tokens_per_block, kind="mla")

    @property
    def shape(self) -> tuple[int, ...]:
        """``(layers, 2, kv_heads, tokens_per_block, head_dim)``; for MLA ``(layers, tokens_per_block, head_dim)``."""
        if self.kind == "mla":
            return (self.layers, self.tokens_per_block, self.head_dim)
        return (self.layers, 2, self.kv_heads, self.tokens_per_block, self.head_dim)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return _ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        vectors = 1 if self.kind == "mla" else 2 * self.kv_heads
        return self.layers * vectors * self.tokens_per_block * self.head_dim * self.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: a block, rounded up to 4096."""
        return -(-self.block_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def torch_dtype(self) -> torch.dtype:
        """The `torch.dtype` of that name; imports torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Namespace:
    """All that makes KV bytes interchangeable, beside the layout: blocks of two namespaces never meet.

    Parameters
    ----------
    model
        The model's name; not empty.
    revision
        What tells two states of the weights apart: a commit, or a digest of the files.
    dtype
        The dtype that the model computes in, resolved (never ``"auto"``). Empty: that of the layout.
    tp, pp, cp
        Sizes of tensor, pipeline and context parallelism.
    rank
        This rank, below ``tp * pp * cp``.
    rope
        The settings of the rotary embedding: text, or a mapping that JSON can hold.
    adapter
        An adapter that is merged into the weights. One that is chosen per request goes into the block keys instead.
    kv_scales
        What tells two sets of KV quantisation scales apart.
    extra
        Further ``(name, value)`` pairs, in any order.

    Raises
    ------
    LayoutError
        The model's name is empty, a size is below 1, the rank does not exist, `rope` is not what JSON can hold, or a
        name stands in `extra` twice.
    """

    model: str
    revision: str = ""
    dtype: str = ""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    rank: int = 0
    rope: str | Mapping[str, Any] = ""
    adapter: str = ""
    kv_scales: str = ""
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        object.__setattr__(self, "rope", _canonical(self.rope))
        for name in ("model", "revision", "adapter", "kv_scales"):
            if not isinstance(getattr(self, name), str):
                raise LayoutError(f"{name}={getattr(self, name)!r} is not text. Give {name} as a str.")
        if not self.model.strip():
            raise LayoutError(f"model={self.model!r} is empty. Name the model, such as 'llama-3.1-8b'.")
        if self.dtype == "auto":
            raise LayoutError("dtype='auto' is not resolved. Give the dtype that the model computes in, or none.")
        for name in ("tp", "pp", "cp"):
            object.__setattr__(self, name, _count(name, getattr(self, name), least=1))
        object.__setattr__(self, "rank", _count("rank", self.rank, least=0))
        ranks = self.tp * self.pp * self.cp
        if self.rank >= ranks:
            raise LayoutError(f"rank={self.rank} does not exist among {ranks} (tp * pp * cp). Use 0 to {ranks - 1}.")
        object.__setattr__(self, "extra", _pairs(self.extra))

    def fields(self, layout: KVLayout) -> dict[str, str]:
        """Return everything that `digest` covers, readable."""
        named = {"format": str(FORMAT_VERSION)}
        named |= {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name != "extra"}
        named["dtype"] = self.dtype or layout.dtype
        named |= {f"layout.{f.name}": str(getattr(layout, f.name)) for f in fields(layout)}
        named |= {f"extra.{name}": value for name, value in self.extra}
        return named

    def digest(self, layout: KVLayout) -> bytes:
        """Return 16 bytes, the same on every machine, that differ when any of `fields` does."""
        state = blake2b(digest_size=16, person=b"gdskv-namespace")
        for name, value in self.fields(layout).items():
            for text in (name, value):
                data = text.encode("utf-8", "surrogatepass")
                state.update(len(data).to_bytes(4, "little") + data)
        return state.digest()


def _count(name: str, value: object, least: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(f"{name}={value!r} is not a whole number. Give {least} or more.") from None
    if number < least:
        raise LayoutError(f"{name}={number} is below {least}. Give {least} or more.")
    return number


def _canonical(rope: object) -> str:
    if isinstance(rope, str):
        return rope
    if not isinstance(rope, Mapping):
        raise LayoutError(f"rope={rope!r} is neither text nor a mapping. Give the RoPE settings as one of them.")
    try:
        return json.dumps(dict(rope), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"rope={rope!r} is not what JSON can hold ({error}). Use text, numbers and lists.") from None


def _pairs(extra: object) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for pair in extra if isinstance(extra, (tuple, list)) else [extra]:
        if not isinstance(pair, (tuple, list)) or [type(text) for text in pair] != [str, str]:
            raise LayoutError(f"extra={extra!r} is not pairs of text. Write (('name', 'value'),).")
        name, value = pair
        if any(name == earlier for earlier, _ in pairs):
            raise LayoutError(f"extra names {name!r} twice. Give each name once.")
        pairs.append((name, value))
    return tuple(sorted(pairs))
