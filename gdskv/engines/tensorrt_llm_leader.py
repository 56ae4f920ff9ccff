"""The scheduler's half of the TensorRT-LLM connector: which blocks are loaded and stored, and when blocks may be given
away. Runs on rank 0.

TensorRT-LLM cannot be told that a promised block did not arrive. So only what has landed in host memory on every rank,
checked, is promised, and held until it is copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdskv.engines import tensorrt_llm_settings as settings
from gdskv.errors import RetentionError
from gdskv.keys import Keys, block_keys, extend_keys
from gdskv.layout import KVLayout
from gdskv.ranks import Held, Leader, Orders, Report
from gdskv.retention import Retention
from gdskv.store import Ticket

__all__ = ["LeaderSide", "Step"]

log = logging.getLogger(__name__)

WAIT = 0.5  # seconds that the only rank waits for blocks from disk, at most; those that come later are computed


@dataclass
class Step:
    """Leader to every worker."""

    orders: Orders
    loads: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    """Per ticket: request, and the engine's blocks that are on their way."""
    saves: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Per ticket: request, and copies out of the engine's blocks."""
    cancelled: dict[int, int] = field(default_factory=dict)
    """Loads that no longer matter: ticket and request."""


@dataclass
class _Request:
    retention: Retention | None
    prompt: int
    """Tokens of the prompt."""
    keys: Keys
    salt: bytes
    adapter: bytes
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    """Leading blocks that were offered to the store."""
    held: Held | None = None
    """What was promised, until it has blocks to go to."""
    promised: tuple[int, int] = (0, 0)
    """Blocks: from, up to."""
    load: int | None = None
    """Number of the ticket of its load."""
    saves: set[int] = field(default_factory=set)
    """Tickets of copies under way."""


class LeaderSide:
    """Decides for one engine.

    Parameters
    ----------
    args
        TensorRT-LLM's.
    """

    def __init__(self, args: Any) -> None:
        settings.refuse(args)
        self._block = settings.tokens_per_block(args)
        space = settings.namespace(args)
        layout = KVLayout.raw(4096 * self._block, self._block)
        self.ranks = settings.ranks(args)
        config = settings.cache_config(args)
        self.leader = Leader(config, layout, space, ranks=self.ranks, now=time.monotonic())
        self._digest = space.digest(layout)
        self._requests: dict[int, _Request] = {}
        self._loads: dict[int, tuple[Ticket | None, int]] = {}  # by number: ticket, request
        self._saves: dict[int, int] = {}
        self._step = Step(Orders(0, []))
        self.drive: Callable[[Callable[[], bool], float], None] | None = None
        """Lets the worker of the only rank work until a condition holds, or for some seconds."""
        self.counters = {
            "loads": 0,
            "loaded_tokens": 0,
            "tokens_left_on_disk": 0,
            "saves": 0,
            "failed_save_blocks": 0,
            "wrong_retention": 0,
            "not_cached": 0,
        }

    def take_in(self, reports: list[Report]) -> None:
        """Take in what the workers have done. Only now silence would count: with no request no worker is asked."""
        now = time.monotonic()
        for report in reports:
            self.leader.receive(report, now=now)
        for done in self.leader.poll(now=now):
            ticket = done.ticket.id
            if ticket in self._saves:
                self.counters["failed_save_blocks"] += len(done.failed)
                state = self._requests.get(self._saves.pop(ticket))
                if state is not None:
                    state.saves.discard(ticket)
            elif ticket in self._loads:
                state = self._requests.get(self._loads.pop(ticket)[1])
                if state is not None and state.load == ticket:
                    state.load = None

    # ---- requests

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens beyond `computed` that are promised, loaded while others run."""
        self.reset(request.request_id)
        state = self._begin(request)
        if state is None or computed % self._block:
            return 0, False
        start = computed // self._block
        keys = state.keys[: (state.prompt - 1) // self._block]  # the last token is computed: its logits are wanted
        held = self._hold(keys)
        if held is None or held.found.length <= start:
            if held is not None:
                self.leader.let_go(held)
            return 0, False
        state.held, state.promised = held, (start, held.found.length)
        return (held.found.length - start) * self._block, True

    def _hold(self, keys: Keys) -> Held | None:
        """Hold what is in host memory, after the rest was asked for."""
        there = len(self.leader.match(keys, now=time.monotonic()))
        best, end = -1, time.monotonic() + WAIT
        while True:
            held = self.leader.hold(keys[:there], now=time.monotonic())
            ready = held.found.length if held is not None else 0
            if ready in (there, best) or time.monotonic() >= end:
                break
            self.leader.prefetch(keys[:there], now=time.monotonic())
            if self.drive is None:  # other ranks take no orders before this call is over: they are there the next time
                break
            if held is not None:
                self.leader.let_go(held)  # nothing else is planned before the next look, so it stays
            best = ready
            self.drive(lambda: not self.leader.coming(keys[:there]), end - time.monotonic())
        self.counters["tokens_left_on_disk"] += (there - ready) * self._block
        return held

    def allocated(self, request: Any, blocks: list[int]) -> None:
        """The engine has blocks for what was promised: copy to them."""
        state = self._requests.get(request.request_id)
        if state is None or state.held is None:
            return
        held, (start, end) = state.held, state.promised
        state.held = None
        into = blocks[start:end]
        if not into or min(into) < 0:
            self.leader.let_go(held)
            return
        ticket = self.leader.load_held(held, start=start, into=into, now=time.monotonic())
        coming = set(into) if ticket is not None else set()
        number = ticket.id if ticket is not None else -1 - request.request_id
        self._step.loads[number] = (request.request_id, coming)
        self._loads[number] = ticket, request.request_id
        state.load = number
        self.counters["loads"] += 1
        self.counters["loaded_tokens"] += len(into) * self._block

    def step(self, scheduled: Any) -> Step:
        """What the workers are to do beside the engine's step."""
        now = time.monotonic()
        for data, new in [(d, True) for d in scheduled.new_requests] + [(d, False) for d in scheduled.cached_requests]:
            state = self._requests.get(data.request_id)
            if state is None:
                continue
            if new:
                state.tokens, state.blocks = [], []
            state.tokens += data.new_tokens
            state.blocks += data.new_block_ids
            self._save(data, state, now)
        self.leader.flush()  # nobody says when the engine ends, so nothing stays in memory alone for long
        return self.take_step()

    def take_step(self) -> Step:
        """What was decided since the last one."""
        self._step.orders = self.leader.orders(now=time.monotonic())
        step, self._step = self._step, Step(Orders(0, []))
        return step

    def _save(self, data: Any, state: _Request, now: float) -> None:
        """Store the blocks of a request that are full after this step, those that are not cached yet."""
        full = (data.computed_position + data.num_scheduled_tokens) // self._block
        full = min(full, len(state.tokens) // self._block, len(state.blocks))
        if full <= state.stored or min(state.blocks[:full]) < 0:
            return
        keys = self._keys(state, full)
        taken = self.leader.take(
            keys, source=state.blocks[:full], retention=state.retention, prompt_tokens=state.prompt, now=now
        )
        if taken is None:
            return
        state.stored = full
        ticket, count = taken
        if count:
            self._step.saves[ticket.id] = (data.request_id, count)
            self._saves[ticket.id] = data.request_id
            state.saves.add(ticket.id)
            self.counters["saves"] += 1

    def finished(self, request: Any) -> bool:
        """A request has ended. True: its blocks are kept until the workers say that the copies have left them."""
        state = self._requests.get(request.request_id)
        saving = state is not None and bool(state.saves)
        self.reset(request.request_id)
        return saving

    def cancel(self, request_id: int) -> None:
        """A load is not wanted any more: what of it has not started does not start."""
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.held is not None:
            self.leader.let_go(state.held)
            state.held = None
        if state.load is not None:
            ticket = self._loads[state.load][0]
            if ticket is not None:
                self.leader.cancel(ticket)
            self._step.cancelled[state.load] = request_id
            state.load = None

    def reset(self, request_id: int) -> None:
        """The blocks of a request are gone: what is known of it holds no more."""
        self.cancel(request_id)
        self._requests.pop(request_id, None)

    # ---- keys

    def _begin(self, request: Any) -> _Request | None:
        """What is known of a request; None if it is not cached."""
        if any(getattr(request, name, None) for name in ("multimodal_hashes", "prompt_embedding_table")):
            self.counters["not_cached"] += 1
            return None
        tokens = list(request.get_tokens(0))
        salt, adapter = getattr(request, "cache_salt", None), getattr(request, "lora_task_id", None)
        state = _Request(
            self._retention(request),
            len(tokens),
            np.empty((0, 2), np.uint64),
            b"" if salt is None else b"salt " + str(salt).encode(),
            b"" if adapter is None else b"task " + str(adapter).encode(),
            tokens,
        )
        self._keys(state, len(tokens) // self._block)
        self._requests[request.request_id] = state
        return state

    def _retention(self, request: Any) -> Retention | None:
        try:
            return settings.retention_of(getattr(request, "kv_cache_retention_config", None))
        except (RetentionError, TypeError, ValueError, AttributeError) as error:
            self.counters["wrong_retention"] += 1
            log.warning("request %s: its retention is ignored: %s", request.request_id, error)
            return None

    def _keys(self, state: _Request, full: int) -> Keys:
        have = len(state.keys)
        if full > have:
            first, last = have * self._block, full * self._block
            if have:
                new = extend_keys(state.keys[-1], state.tokens[first:last], self._block, first_token=first)
            else:
                new = block_keys(
                    state.tokens[:last], self._block, namespace=self._digest, salt=state.salt, adapter=state.adapter
                )
            state.keys = np.concatenate([state.keys, new])
        return state.keys[:full]

    def stats(self) -> dict[str, int]:
        """All counters and gauges."""
        return self.leader.stats() | self.counters
