"""The worker's half of the vLLM connector: one rank's `Worker`, and what vLLM is told of loads and saves.

Runs in each of vLLM's worker processes. Must not decide anything.
"""

from __future__ import annotations

import time
from typing import Any

from gdskv.engines.tickets import Forward, Tickets
from gdskv.engines.vllm_messages import Greeting, Reports, Step
from gdskv.engines.vllm_settings import cache_config, namespace
from gdskv.errors import GdskvError
from gdskv.layout import KVLayout
from gdskv.ranks import EngineMemory, Landed, Worker

__all__ = ["WorkerSide"]

PAUSE = 0.0002  # seconds; vLLM steps without pause while it waits for loads


class WorkerSide:
    """One rank.

    Parameters
    ----------
    vllm_config, kv_cache_config
        vLLM's.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm, self._kv = vllm_config, kv_cache_config
        self.rank = int(vllm_config.parallel_config.rank)
        self.worker: Worker | None = None
        self._forward = Forward()
        self._tickets: Tickets[str] = Tickets()
        self._held: set[str] = set()
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._errors: set[int] = set()
        self._empty = False

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Open memory, files and threads: here, in the process that uses them."""
        group = self._kv.kv_cache_groups[0]
        names = [name for name in group.layer_names if name in kv_caches]
        other = sorted(set(kv_caches) - set(names))
        if other:
            raise GdskvError(
                f"layers {other[:3]} have KV caches outside of the group that gdskv keeps. Run it without gdskv."
            )
        tensors = [kv_caches[name] for name in names]
        memory = EngineMemory(tensors, self._kv.num_blocks)
        layout = KVLayout.raw(memory.block_bytes)
        space = namespace(self._vllm, rank=self.rank, shapes=memory.shapes)
        config = cache_config(self._vllm, rank=self.rank)
        if tensors[0].device.type == "cuda":
            import torch

            self._forward = Forward(torch.cuda)
            config = config.model_copy(update={"device": str(tensors[0].device)})
        self.worker = Worker(config, layout, space, memory, rank=self.rank)

    @property
    def _open(self) -> Worker:
        if self.worker is None:
            raise GdskvError("vLLM has not registered its KV caches yet. Call register_kv_caches first.")
        return self.worker

    def greeting(self) -> Greeting:
        """What this rank holds."""
        return Greeting(self._open.report())

    def preempt(self, step: Step) -> None:
        """Let nothing move any more in the blocks of preempted requests: others compute in them next."""
        tickets = self._tickets.saves_of(set(step.preempted))
        if tickets:
            self._take(self._open.stop_tickets(tickets))

    def start(self, step: Step) -> None:
        """Take a step's orders in and start what may start."""
        worker = self._open
        accepted = worker.receive(step.orders)
        for load in step.loads:
            self._errors |= set(load.failed)
            if accepted and load.ticket >= 0 and load.blocks:
                self._tickets.load(load.ticket, load.request, load.blocks)
            else:
                self._errors |= set(load.blocks)
                self._received.add(load.request)
        if accepted:
            for save in step.saves:
                self._tickets.save(save.ticket, save.request, save.count)
        self._held |= set(step.held)
        self._empty = step.empty
        self._advance()

    def computed(self) -> None:
        """The forward pass has been started; blocks may be copied out once it is through."""
        self._forward.started(self._open)
        self._advance()

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose last copy has left their blocks, of those that vLLM holds; and those whose loads are done."""
        self._advance()
        if self._empty and not self._received:
            time.sleep(PAUSE)
            self._advance()
        done = {request for request in self._held if not self._tickets.saving(request)}
        self._held -= done
        received, self._received = self._received, set()
        return done, received

    def errors(self) -> set[int]:
        """vLLM's blocks that did not arrive."""
        errors, self._errors = self._errors, set()
        return errors

    def report(self) -> Reports:
        """For the leader."""
        return Reports([self._open.report()])

    def close(self, timeout: float = 5.0) -> None:
        """Carry out what was ordered, and close the files."""
        if self.worker is not None:
            self.worker.close(timeout)

    def _advance(self) -> None:
        self._forward.look(self._open)
        self._take(self._open.advance())

    def _take(self, landed: list[Landed]) -> None:
        for came in self._tickets.take(landed):
            if not came.ok:
                self._errors.add(came.block)
            if came.last:
                self._received.add(came.request)
