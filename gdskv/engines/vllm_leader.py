"""The scheduler's half of the vLLM connector: which blocks are loaded and stored, and when vLLM may give blocks away.

Runs in vLLM's scheduler. No bytes pass through here, and no call waits for a device.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdskv.engines.vllm_events import Events
from gdskv.engines.vllm_messages import LoadNote, Reports, SaveNote, Step
from gdskv.engines.vllm_settings import cache_config, files_digest, namespace, refuse, retention_of
from gdskv.errors import RetentionError
from gdskv.keys import Keys, keys_from_hashes
from gdskv.layout import KVLayout
from gdskv.ranks import Leader, Report
from gdskv.retention import Retention
from gdskv.store import Done

__all__ = ["LeaderSide"]

log = logging.getLogger(__name__)


@dataclass
class _Request:
    """What is known of a request of vLLM's."""

    request: Any
    space: bytes
    retention: Retention | None
    keys: Keys
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    """Tokens that vLLM's own pool had when it asked last."""
    stored: int = 0
    """Leading blocks that were offered to the store."""
    saves: set[int] = field(default_factory=set)
    """Tickets of copies under way."""
    failed: bool = False
    """A load went wrong: it computes, and asks no more."""
    sources: tuple[int, int] = (0, 0)
    """Tokens of its last load, from host and from disk."""


class LeaderSide:
    """Decides for one engine.

    Parameters
    ----------
    vllm_config, kv_cache_config
        vLLM's.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        refuse(vllm_config, kv_cache_config)
        self._block = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        hashed = getattr(kv_cache_config, "hash_block_size", None) or self._block
        self._hashes = self._block // int(hashed)  # of vLLM's hashes, in a block
        space = namespace(vllm_config)
        layout = KVLayout.raw(4096 * self._block, self._block)
        config = cache_config(vllm_config)
        listened = getattr(getattr(vllm_config, "kv_events_config", None), "enable_kv_cache_events", False)
        config = config.model_copy(update={"events": bool(listened)})
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._events = Events(spec, self._block) if listened else None
        self._told_of: Any = None  # the leader's store that events were told of
        self._ranks = int(vllm_config.parallel_config.world_size)
        self.leader = Leader(config, layout, space, ranks=self._ranks, now=time.monotonic())
        self._digest = space.digest(layout)
        self._requests: dict[str, _Request] = {}
        self._loads: dict[int, str] = {}
        self._saves: dict[int, str] = {}
        self._new_loads: list[LoadNote] = []
        self._held: list[str] = []
        self._adapters: dict[str, str] = {}
        self.counters = {
            "loads": 0,
            "loaded_tokens_host": 0,
            "loaded_tokens_disk": 0,
            "failed_load_blocks": 0,
            "saves": 0,
            "failed_save_blocks": 0,
            "wrong_retention": 0,
            "not_cached": 0,
        }

    # ---- workers

    def greet(self, reports: list[Report]) -> None:
        """Take up what the workers hold, before the first request."""
        now = time.monotonic()
        for report in reports:
            self.leader.receive(report, now=now)

    def take_in(self, reports: Reports | None) -> None:
        """Take in what the workers have done in a step."""
        now = time.monotonic()
        for report in reports.reports if reports is not None else ():
            self.leader.receive(report, now=now)
        self._poll(now)

    def _poll(self, now: float) -> None:
        for done in self.leader.poll(now=now):
            self._done(done)

    def _done(self, done: Done) -> None:
        ticket = done.ticket.id
        if ticket in self._loads:
            state = self._requests.get(self._loads.pop(ticket))
            self.counters["failed_load_blocks"] += len(done.failed)
            if state is not None and len(done.failed):
                state.failed = True
        elif ticket in self._saves:
            self.counters["failed_save_blocks"] += len(done.failed)
            state = self._requests.get(self._saves.pop(ticket))
            if state is not None:
                state.saves.discard(ticket)

    # ---- requests

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens beyond `computed` that can be loaded. Changes nothing that matters."""
        state = self._state(request)
        if state is None:
            return 0, False
        state.local = computed
        if state.failed:
            return 0, False
        usable = (request.num_tokens - 1) // self._block  # the last token is computed: its logits are wanted
        there = len(self.leader.match(self._keys(state)[:usable], now=time.monotonic())) * self._block
        return (there - computed, True) if there > computed else (0, False)

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """vLLM has blocks for what `matched` promised: load them."""
        state = self._requests.get(request.request_id)
        if state is None or external == 0:
            return
        start, end = state.local // self._block, (state.local + external) // self._block
        if self._events is not None:
            self._events.expect(state.request, state.keys[:end], 0, self._hashes)
        load = self.leader.load(state.keys[:end], start=start, into=blocks[start:end], now=time.monotonic())
        failed = [blocks[start + i] for i in load.failed.tolist()]
        coming = [block for block in blocks[start:end] if block not in set(failed)]
        ticket = load.ticket.id if load.ticket is not None and coming else -1
        if ticket >= 0:
            self._loads[ticket] = request.request_id
        self._new_loads.append(LoadNote(request.request_id, ticket, coming, failed))
        host, disk = (int((load.tiers == tier).sum()) * self._block for tier in (1, 2))
        state.sources = (host, disk)
        state.failed = bool(failed)
        self.counters["loads"] += 1
        self.counters["loaded_tokens_host"] += host
        self.counters["loaded_tokens_disk"] += disk

    def sources(self, request: Any) -> tuple[int, int]:
        """Tokens of a request's load that came from host and from disk."""
        state = self._requests.get(request.request_id)
        return state.sources if state is not None else (0, 0)

    def step(self, scheduled: Any) -> Step:
        """What the workers are to do beside vLLM's step."""
        now = time.monotonic()
        self._poll(now)
        preempted = list(scheduled.preempted_req_ids or ())
        for name in preempted:
            if name in self._requests:
                self._requests[name].blocks = []
        self._follow(scheduled)
        saves = []
        for name, tokens in scheduled.num_scheduled_tokens.items():
            note = self._save(name, tokens, now)
            if note is not None:
                saves.append(note)
        empty = scheduled.total_num_scheduled_tokens == 0
        if empty:
            self.leader.flush()
            self._poll(now)
        loads, self._new_loads = self._new_loads, []
        held, self._held = self._held, []
        return Step(self.leader.orders(now=now), loads, saves, held, preempted, empty)

    def _follow(self, scheduled: Any) -> None:
        """Keep up with which blocks belong to whom and how far they are computed."""
        self._computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            if new.req_id in self._requests:
                self._requests[new.req_id].blocks = list(new.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._computed[name] = computed
            state = self._requests.get(name)
            if state is None:
                continue
            if name in cached.resumed_req_ids:
                state.blocks, state.stored = [], 0
            if blocks is not None:
                state.blocks = state.blocks + list(blocks[0])

    def _save(self, name: str, tokens: int, now: float) -> SaveNote | None:
        """Store the blocks of a request that are full after this step, those that are not cached yet."""
        state = self._requests.get(name)
        if state is None:
            return None
        full = (self._computed[name] + tokens) // self._block
        if full <= state.stored:
            return None
        keys = self._keys(state)[:full]
        n = min(len(keys), len(state.blocks))
        if n <= state.stored:
            return None
        prompt = state.request.num_prompt_tokens
        if self._events is not None:
            self._events.expect(state.request, keys[:n], state.stored, self._hashes)
        taken = self.leader.take(
            keys[:n], source=state.blocks[:n], retention=state.retention, prompt_tokens=prompt, now=now
        )
        if taken is None:
            return None
        ticket, count = taken
        state.stored = n
        if not count:
            return None
        self.counters["saves"] += 1
        self._saves[ticket.id] = name
        state.saves.add(ticket.id)
        return SaveNote(name, ticket.id, count)

    def finished(self, request: Any) -> bool:
        """A request has ended. True: vLLM keeps its blocks until the workers say that the copies have left them."""
        state = self._requests.pop(request.request_id, None)
        if state is None or not state.saves:
            return False
        self._held.append(request.request_id)
        return True

    # ---- the engine

    @property
    def busy(self) -> bool:
        """Is there work that needs further steps, requests or not?"""
        return not self.leader.idle or bool(self._held or self._new_loads)

    def reset(self) -> None:
        """Forget everything: the weights may have changed."""
        self.leader.forget()
        self._poll(time.monotonic())

    def take_events(self) -> list[Any]:
        """vLLM's events of what gdskv's tiers have come to serve, and serve no more, since the last call."""
        if self._events is None:
            return []
        store, gone = self.leader.store, []
        if store is not self._told_of:  # its table went, and what memory alone held
            gone, self._told_of = self._events.all_gone(), store
        return gone + (self._events.translate(store.events()) if store is not None else [])

    def stats(self) -> dict[str, int]:
        """All counters and gauges."""
        more = {"unnamed_events": self._events.unnamed} if self._events is not None else {}
        return self.leader.stats() | self.counters | more

    # ---- keys

    def _state(self, request: Any) -> _Request | None:
        """What is known of a request; None if it is not cached."""
        name = request.request_id
        if name not in self._requests:
            if request.prompt_embeds is not None or getattr(request, "pooling_params", None) is not None:
                self.counters["not_cached"] += 1
                return None
            empty = np.empty((0, 2), np.uint64)
            self._requests[name] = _Request(request, self._space(request), self._retention(request), empty)
        return self._requests[name]

    def _space(self, request: Any) -> bytes:
        """What the keys of a request depend on beside vLLM's hashes, which know an adapter by name and path only."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return self._digest
        if adapter.lora_path not in self._adapters:
            self._adapters[adapter.lora_path] = files_digest(adapter.lora_path)
        return self._digest + self._adapters[adapter.lora_path].encode()

    def _retention(self, request: Any) -> Retention | None:
        try:
            return retention_of(request.kv_transfer_params)
        except (RetentionError, TypeError, ValueError) as error:
            self.counters["wrong_retention"] += 1
            log.warning("request %s: its retention is ignored: %s", request.request_id, error)
            return None

    def _keys(self, state: _Request) -> Keys:
        """Keys of all blocks that vLLM has hashed."""
        hashes = state.request.block_hashes
        have, there = len(state.keys), len(hashes) // self._hashes
        if there > have:
            step = self._hashes
            new = [bytes(hashes[(i + 1) * step - 1]) for i in range(have, there)]
            state.keys = np.concatenate([state.keys, keys_from_hashes(new, namespace=state.space)])
        return state.keys
