"""The embedded engine: any Hugging Face causal model, with its KV kept in a ``BlockManager`` and reused.

Knows the manager's public calls only; transformers and torch are imported when the first request runs.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gdskv.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

    from gdskv.manager import BlockManager, Request
    from gdskv.retention import Retention

__all__ = ["Engine", "Generation"]

_NAP_S = 2e-4  # between two polls when every request waits for its blocks


@dataclass(eq=False)
class Generation:
    """One prompt and what becomes of it. Read it; only the engine writes it."""

    prompt: list[int]
    max_new_tokens: int
    retention: Retention | None = None
    salt: bytes = b""
    tokens: list[int] = field(default_factory=list)
    """The generated tokens so far."""
    state: Literal["waiting", "parked", "running", "finished", "cancelled"] = "waiting"
    """``waiting`` for slots of the device pool, ``parked`` until its blocks have landed, ``running``, or at its end."""
    reused: tuple[int, int, int] = (0, 0, 0)
    """Prompt tokens taken from device, host and disk instead of being computed."""
    ttft: float = 0.0
    """Seconds from ``submit`` to the first token."""

    submitted: float = 0.0
    request: Request | None = None
    """Its blocks; None before it starts, and where it runs without the cache because it got no slot."""
    cache: Any = None
    position: int = 0  # tokens whose KV is in `cache`
    saved: int = 0  # leading blocks of `position` tokens whose KV is in the device pool
    saving: bool = False  # turns false for good when there is no slot for a further block

    @property
    def recomputed(self) -> int:
        """Prompt tokens that were computed."""
        return len(self.prompt) - sum(self.reused)

    def ended(self, ends: frozenset[int]) -> bool:
        """Whether no further token is wanted; ``ends`` are the tokens that end an answer."""
        return len(self.tokens) == self.max_new_tokens or (bool(self.tokens) and self.tokens[-1] in ends)


class Engine:
    """Greedy generation for several requests at a time, with the prefixes they share computed once.

    Prompts are computed in chunks that always end at multiples of ``chunk_tokens``. A restored prefix is cut back to
    such a place, so what follows it is computed in the same steps as without a cache, and to the same bit.

    Parameters
    ----------
    model
        A causal model of transformers whose layers all have full attention.
    kv
        The cache, with the layout of ``models.layout_of(model, ...)``; None computes everything.
    chunk_tokens
        Prompt tokens per forward pass, a multiple of the layout's ``tokens_per_block``.
    clock
        Gives ``now``, in seconds.
    before_release
        Called with each generation at its end, while its blocks are still leased.

    Raises
    ------
    ConfigError
        ``chunk_tokens`` is not a multiple of the tokens per block.
    """

    def __init__(
        self,
        model: Any,
        kv: BlockManager | None,
        *,
        chunk_tokens: int = 256,
        clock: Callable[[], float] = time.monotonic,
        before_release: Callable[[Generation], None] | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._block = kv.layout.tokens_per_block if kv is not None else 1
        if chunk_tokens < 1 or chunk_tokens % self._block:
            raise ConfigError(
                f"chunk_tokens={chunk_tokens} is not a multiple of tokens_per_block={self._block}: choose one that is."
            )
        self._chunk = chunk_tokens
        self._clock = clock
        self._before_release = before_release
        self._waiting: deque[Generation] = deque()
        self._active: list[Generation] = []
        parameters = inspect.signature(model.forward).parameters
        # transformers 5 renames past_key_values
        self._cache_keyword = "past_key_values" if "past_key_values" in parameters else "cache"
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        ends = getattr(model.generation_config, "eos_token_id", None)
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def generate(
        self, prompts: Iterable[Sequence[int]], max_new_tokens: int = 16, *, retention: Retention | None = None
    ) -> list[Generation]:
        """Run ``prompts``, lists of token ids, all in flight at once; return when all have finished, in their order."""
        generations = [self.submit(prompt, max_new_tokens, retention=retention) for prompt in prompts]
        try:
            while any(g.state not in ("finished", "cancelled") for g in generations):
                if not self.step():
                    time.sleep(_NAP_S)
        except BaseException:
            for generation in generations:
                self.cancel(generation)
            raise
        return generations

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int = 16, *, retention: Retention | None = None, salt: bytes = b""
    ) -> Generation:
        """Queue a prompt of at least one token id; it moves on with each ``step``."""
        if not len(prompt) or max_new_tokens < 1:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens with max_new_tokens={max_new_tokens}: both must be at least 1."
            )
        generation = Generation([int(t) for t in prompt], max_new_tokens, retention, salt)
        generation.submitted = time.perf_counter()
        self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """Stop a generation; its slots return when nothing moves in them any more. Does nothing at its end."""
        if generation.state in ("finished", "cancelled"):
            return
        if generation.state == "waiting":
            self._waiting.remove(generation)
        else:
            self._active.remove(generation)
        if generation.request is not None and self._kv is not None:
            self._kv.cancel(generation.request, now=self._clock())
        generation.state, generation.cache = "cancelled", None

    def step(self) -> bool:
        """Give every request one turn: start, look whether its blocks have landed, one chunk, or one token.

        Returns
        -------
        bool
            Whether anything moved on; if not, all that are left wait for transfers.
        """
        if self._kv is not None:
            self._kv.poll(now=self._clock())
        moved = self._start()
        for generation in list(self._active):
            if generation.state == "parked" and not self._unpark(generation):
                continue
            if not self._save(generation):
                continue
            moved = True
            if generation.ended(self._ends):
                self._finish(generation)
            else:
                self._compute(generation)
        return moved

    def _start(self) -> bool:
        """Begin those that wait, in order, until one finds no slots."""
        from gdskv.manager import Rejected

        moved = False
        while self._waiting:
            generation = self._waiting[0]
            if self._kv is not None:
                answer = self._kv.begin(
                    generation.prompt, salt=generation.salt, retention=generation.retention, now=self._clock()
                )
                if not isinstance(answer, Rejected):
                    generation.request = answer
                    generation.saving = True
                elif any(g.request is not None for g in self._active):
                    break  # slots come back when one of those ends
                # else: nobody here will give slots back, so it runs without the cache
            generation.cache = self._new_cache()
            generation.state = "parked"
            self._active.append(self._waiting.popleft())
            moved = True
        return moved

    def _unpark(self, generation: Generation) -> bool:
        request = generation.request
        if request is None or self._kv is None:
            generation.state = "running"
            return True
        if not self._kv.is_ready(request):
            return False
        generation.state = "running"
        # the last token is always computed: its logits name the first new one
        usable = min(request.cached_blocks * self._block, len(generation.prompt) - 1)
        blocks = usable // self._chunk * self._chunk // self._block
        if blocks:
            self._restore(generation, blocks)
            tiers = request.tiers[:blocks].tolist()
            device, host, disk = (tiers.count(tier) * self._block for tier in range(3))
            generation.reused = (device, host, disk)
            generation.position = blocks * self._block
            generation.saved = blocks
        return True

    def _compute(self, generation: Generation) -> None:
        """Run the next chunk of the prompt, or the last token, and take a new token where the prompt is through."""
        known = generation.prompt + generation.tokens
        start = generation.position
        end = min(start - start % self._chunk + self._chunk, len(known))
        logits = self._forward(known[start:end], generation.cache)
        generation.position = end
        if end == len(known):
            generation.tokens.append(int(logits.argmax()))
            if len(generation.tokens) == 1:
                generation.ttft = time.perf_counter() - generation.submitted

    def _forward(self, tokens: list[int], cache: Any) -> torch.Tensor:
        """Feed ``tokens`` behind what ``cache`` holds; return the logits of the last one, float[vocabulary]."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self._model.device)
            output = self._model(ids, use_cache=True, **{self._cache_keyword: cache}, **self._last_logits)
            logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _restore(self, generation: Generation, blocks: int) -> None:
        """Copy the leading ``blocks`` from the device pool into the model's cache."""
        import torch

        kv, request = self._kv, generation.request
        assert kv is not None and request is not None
        held = [kv.device_pool[slot] for slot in request.blocks[:blocks].tolist()]
        with torch.inference_mode():
            for layer in range(kv.layout.layers):
                keys = torch.cat([block[layer, 0] for block in held], dim=1)
                values = torch.cat([block[layer, 1] for block in held], dim=1)
                device = self._model.device
                generation.cache.update(keys[None].to(device), values[None].to(device), layer)

    def _save(self, generation: Generation) -> bool:
        """Copy the blocks that are full by now to the device pool and make them findable.

        False: the slot of one still holds bytes that are on their way elsewhere. To be called again.
        """
        kv, request = self._kv, generation.request
        if kv is None or request is None or not generation.saving:
            return True
        before = generation.saved
        for index in range(before, generation.position // self._block):
            if index >= len(request.blocks) and kv.allocate(request, 1, now=self._clock()) is not None:
                generation.saving = False
                break
            if not kv.is_ready(request):
                return False
            if index >= len(request.tiers) or index in request.failed:  # else found in the cache, for others too
                self._copy_out(generation.cache, index, kv.device_pool[int(request.blocks[index])])
            generation.saved = index + 1
        if generation.saved > before:
            self._commit(generation)
        return True

    def _copy_out(self, cache: Any, index: int, block: torch.Tensor) -> None:
        place = slice(index * self._block, (index + 1) * self._block)
        for layer, states in enumerate(cache.layers):
            keys, values = states.keys[0, :, place], states.values[0, :, place]
            if keys.shape != block.shape[2:] or values.shape != block.shape[2:]:
                raise ModelError(
                    f"layer {layer} has keys {tuple(keys.shape)} and values {tuple(values.shape)} where the layout "
                    f"has {tuple(block.shape[2:])}: open the manager with the layout of this model."
                )
            block[layer, 0].copy_(keys)
            block[layer, 1].copy_(values)

    def _commit(self, generation: Generation) -> None:
        if self._kv is not None and generation.request is not None:
            if self._model.device.type == "cuda":  # the manager copies on a stream of its own
                import torch

                torch.cuda.current_stream(self._model.device).synchronize()
            known = generation.prompt + generation.tokens
            self._kv.commit(generation.request, known[: generation.saved * self._block], now=self._clock())

    def _finish(self, generation: Generation) -> None:
        self._commit(generation)  # also where all was found: a ttl is refreshed
        if self._before_release is not None:
            self._before_release(generation)
        if self._kv is not None and generation.request is not None:
            self._kv.release(generation.request, now=self._clock())
        generation.state, generation.cache = "finished", None
        self._active.remove(generation)
