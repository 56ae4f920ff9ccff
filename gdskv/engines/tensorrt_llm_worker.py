"""The worker's half of the TensorRT-LLM connector: one rank's `Worker`, and what is told of loads and saves.

Runs in each process. Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gdskv.engines import tensorrt_llm_settings as settings
from gdskv.engines.tensorrt_llm_leader import Step
from gdskv.engines.tickets import Forward, Tickets
from gdskv.errors import ConfigError, GdskvError
from gdskv.layout import KVLayout
from gdskv.ranks import EngineMemory, Landed, Report, Worker
from gdskv.store import Wrap

__all__ = ["WorkerSide", "memory_of_layout"]


def memory_of_layout(layout: Any) -> EngineMemory:
    """Where blocks lie, from a ``KvCacheLayout``.

    Raises
    ------
    ConfigError
        There are several groups of layers, a sliding window, or bytes that are shared between ranks.
    """
    if len(layout.groups) != 1:
        raise ConfigError(
            f"the KV cache has {len(layout.groups)} groups of layers (several attention windows or a state-space "
            "model); gdskv keeps one. Run this model without gdskv."
        )
    group = layout.groups[0]
    if group.window_size is not None or group.replicated_regions:
        raise ConfigError(
            f"the KV cache has an attention window of {group.window_size} tokens and {len(group.replicated_regions)} "
            "regions that all ranks share; gdskv keeps full attention. Run this model without gdskv."
        )
    slots = {region.num_slots for region in group.regions}
    if len(slots) != 1:
        raise ConfigError(f"regions of the KV cache have {sorted(slots)} slots. gdskv keeps caches with one number.")
    return EngineMemory.of_regions([(r.base, r.stride, r.size) for r in group.regions], slots.pop())


class WorkerSide:
    """One rank.

    Parameters
    ----------
    args
        TensorRT-LLM's.
    rank : int
    wrap : callable, optional
        Wraps the I/O engine, as tests do.
    """

    def __init__(self, args: Any, rank: int, wrap: Wrap | None = None) -> None:
        self._args, self.rank, self._wrap = args, rank, wrap
        self._worker: Worker | None = None
        self._forward = Forward()
        self._tickets: Tickets[int] = Tickets()
        self._held: set[int] = set()
        self._parked: set[int] = set()
        self._received: set[int] = set()
        self._broken: set[int] = set()
        self._unwanted: set[int] = set()  # tickets whose request was cancelled: their end is waited for, and no more

    def register(self, memory: EngineMemory, device: str) -> None:
        """Open memory, files and threads: here, in the process that uses them."""
        space = settings.namespace(self._args, rank=self.rank, shapes=memory.shapes)
        config = settings.cache_config(self._args, rank=self.rank).model_copy(update={"device": device})
        if device.startswith("cuda"):
            import torch

            self._forward = Forward(torch.cuda)
        layout = KVLayout.raw(memory.block_bytes)
        self._worker = Worker(config, layout, space, memory, rank=self.rank, wrap=self._wrap)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise GdskvError("TensorRT-LLM has not registered its KV cache yet. Call register_kv_caches first.")
        return self._worker

    def start(self, step: Step) -> None:
        """Take a step's orders in and start what may start."""
        accepted = self.worker.receive(step.orders)
        for ticket, request in step.cancelled.items():
            self._broken.discard(request)
            if self._tickets.loading(ticket) or ticket in step.loads:
                self._unwanted.add(ticket)
        for ticket, (request, blocks) in step.loads.items():
            self._received.discard(request)  # of an earlier load of it, that nobody asked for
            if accepted and ticket >= 0:
                self._tickets.load(ticket, request, list(blocks))
            else:
                self._received.add(request)
                if ticket in self._unwanted:
                    self._unwanted.discard(ticket)
                else:
                    self._broken.add(request)
        if accepted:
            for ticket, (request, count) in step.saves.items():
                self._tickets.save(ticket, request, count)
        self.advance()

    def computed(self, stream: Any) -> None:
        """The forward pass has been started; blocks may be copied out once it is through."""
        self._forward.started(self.worker, stream)
        self.advance()

    def finished(self, saving: Iterable[int], loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """Requests whose last copy has left their blocks, and those whose blocks have come, of those asked for so far.

        Raises
        ------
        GdskvError
            Blocks of a request that waits did not come: it would compute on wrong bytes.
        """
        self._held |= set(saving)
        self._parked |= set(loading)
        self.advance()
        saved = {request for request in self._held if not self._tickets.saving(request)}
        loaded = self._parked & self._received
        if loaded & self._broken:
            raise GdskvError(
                f"blocks of requests {sorted(loaded & self._broken)} could not be copied from host memory, and "
                "TensorRT-LLM cannot compute them again. It must stop here, or answers would be wrong."
            )
        self._held -= saved
        self._parked -= loaded
        self._received -= loaded
        return sorted(saved), sorted(loaded)

    def report(self) -> Report:
        """For the leader."""
        return self.worker.report()

    def close(self, timeout: float = 5.0) -> None:
        """Carry out what was ordered, and close the files."""
        if self._worker is not None:
            self._worker.close(timeout)

    def advance(self) -> None:
        """Move on what may move."""
        self._forward.look(self.worker)
        self._take(self.worker.advance())

    def _take(self, landed: list[Landed]) -> None:
        for came in self._tickets.take(landed):
            if not came.ok and came.ticket not in self._unwanted:
                self._broken.add(came.request)
            if came.last:
                self._unwanted.discard(came.ticket)
                if not self._tickets.loads_of(came.request):
                    self._received.add(came.request)
