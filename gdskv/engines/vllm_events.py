"""KV events of gdskv's tiers, in vLLM's schema: for routers that send a request where its prefix is. Needs vLLM.

The table tells of keys, subscribers know blocks by vLLM's hashes. What a block is called is noted when a request stores
or loads it, and kept as long as a tier serves it. Made only where vLLM's ``kv_events_config`` is on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from gdskv.keys import Keys

__all__ = ["Events"]

MEDIA = {1: MEDIUM_CPU, 2: MEDIUM_STORAGE}  # by tier
EXPECTED = 1 << 16  # blocks on their way into a tier whose names are kept


class _Block(NamedTuple):
    """What vLLM calls a block, and what a subscriber wants to know of it."""

    hash: bytes
    parent: bytes | None
    tokens: NDArray[np.int32]
    lora: Any


class Events:
    """Translates for one scheduler.

    Parameters
    ----------
    spec
        vLLM's ``kv_cache_spec`` of the group that gdskv keeps.
    tokens_per_block : int
    """

    def __init__(self, spec: Any, tokens_per_block: int) -> None:
        self._kind = get_kv_cache_spec_kind(spec).value
        self._size = tokens_per_block
        self._expected: dict[bytes, _Block] = {}  # the oldest first
        self._told: dict[bytes, tuple[_Block, set[int]]] = {}  # and the tiers that serve it
        self.unnamed = 0
        """Blocks that were not told of, as so many others came between their request and their arrival."""

    def expect(self, request: Any, keys: Keys, first: int, hashes_per_block: int) -> None:
        """Note what blocks `first` up to ``len(keys)`` of a request are called."""
        hashes, step = request.block_hashes, hashes_per_block
        for i in range(first, len(keys)):
            name = keys[i].tobytes()
            if name in self._told:
                continue
            tokens = np.array(request.all_token_ids[i * self._size : (i + 1) * self._size], np.int32)
            parent = bytes(hashes[i * step - 1]) if i else None
            block = _Block(bytes(hashes[(i + 1) * step - 1]), parent, tokens, getattr(request, "lora_request", None))
            self._expected[name] = block
        while len(self._expected) > EXPECTED:
            del self._expected[next(iter(self._expected))]

    def translate(self, events: NDArray[Any]) -> list[Any]:
        """vLLM's events for a table's."""
        names = np.stack([events["k0"], events["k1"]], axis=1)
        out = []
        for name, tier, stored in zip(names, events["tier"].tolist(), events["stored"].tolist(), strict=True):
            event = (self._stored if stored else self._removed)(name.tobytes(), tier)
            if event is not None:
                out.append(event)
        return out

    def all_gone(self) -> list[Any]:
        """Events that say so of all that was told."""
        there = [(name, tier) for name, (_, tiers) in self._told.items() for tier in sorted(tiers)]
        return [self._removed(name, tier) for name, tier in there]

    def _stored(self, name: bytes, tier: int) -> Any:
        block, tiers = self._told.get(name, (None, set()))
        block = self._expected.pop(name, None) or block
        if block is None:
            self.unnamed += 1
            return None
        self._told[name] = (block, tiers | {tier})
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block.hash)],
            parent_block_hash=None if block.parent is None else maybe_convert_block_hash(block.parent),
            token_ids=block.tokens.tolist(),
            block_size=self._size,
            lora_id=None if block.lora is None else block.lora.adapter_id,
            medium=MEDIA[tier],
            lora_name=None if block.lora is None else block.lora.name,
            group_idx=0,
            kv_cache_spec_kind=self._kind,
        )

    def _removed(self, name: bytes, tier: int) -> Any:
        block, tiers = self._told.get(name, (None, set()))
        if block is None or tier not in tiers:
            return None  # was not told of
        tiers.discard(tier)
        if not tiers:
            del self._told[name]
        return BlockRemoved(block_hashes=[maybe_convert_block_hash(block.hash)], medium=MEDIA[tier], group_idx=0)
