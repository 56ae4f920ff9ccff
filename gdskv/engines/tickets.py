"""What a worker's adapter keeps of loads and saves under way: which request each ticket is of, and what is left of it.

Shared by the engines whose workers are `gdskv.ranks.Worker`s. Knows tickets and names of requests, and no engine.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

from gdskv.ranks import Landed, Worker

__all__ = ["Came", "Forward", "Tickets"]

R = TypeVar("R", str, int)  # what an engine calls a request


class Came(NamedTuple, Generic[R]):
    """A block of a load that has come to its end."""

    ticket: int
    request: R
    block: int
    ok: bool
    last: bool
    """Of its ticket."""


class Tickets(Generic[R]):
    """Loads and saves of one rank."""

    def __init__(self) -> None:
        self._loads: dict[int, tuple[R, set[int]]] = {}  # request, blocks on their way
        self._saves: dict[int, tuple[R, int]] = {}  # request, copies under way
        self._saving: dict[R, int] = {}  # copies under way of a request

    def load(self, ticket: int, request: R, blocks: list[int]) -> None:
        """Blocks are on their way to the engine's memory."""
        self._loads[ticket] = (request, set(blocks))

    def save(self, ticket: int, request: R, count: int) -> None:
        """So many blocks are copied out of the engine's memory."""
        if count:
            self._saves[ticket] = (request, count)
            self._saving[request] = self._saving.get(request, 0) + count

    def loading(self, ticket: int) -> bool:
        """Is a load of this ticket under way?"""
        return ticket in self._loads

    def loads_of(self, request: R) -> bool:
        """Is a load of this request under way?"""
        return any(other == request for other, _ in self._loads.values())

    def saves_of(self, requests: set[R]) -> set[int]:
        """Tickets of saves of these requests."""
        return {ticket for ticket, (request, _) in self._saves.items() if request in requests}

    def saving(self, request: R) -> bool:
        """Is a copy of this request's blocks under way?"""
        return request in self._saving

    def take(self, landed: list[Landed]) -> list[Came[R]]:
        """Take in what has come to an end; what of it was loads."""
        came = []
        for ticket, block, ok in landed:
            if ticket in self._loads:
                request, blocks = self._loads[ticket]
                blocks.discard(block)
                if not blocks:
                    del self._loads[ticket]
                came.append(Came(ticket, request, block, ok, not blocks))
            elif ticket in self._saves:
                request, left = self._saves.pop(ticket)
                if left > 1:
                    self._saves[ticket] = (request, left - 1)
                self._saving[request] -= 1
                if not self._saving[request]:
                    del self._saving[request]
        return came


class Forward:
    """Tells a worker when forward passes are through and blocks may be copied out: at once, or with CUDA by events.

    Parameters
    ----------
    cuda : module, optional
        ``torch.cuda`` where the engine computes there.
    """

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._events: deque[tuple[Any, int]] = deque()  # end of a pass; orders taken in by then

    def started(self, worker: Worker, stream: Any = None) -> None:
        """A pass has been started, on this stream or the current one."""
        if self._cuda is None:
            worker.sources_ready()
        else:
            event = self._cuda.Event()
            event.record(stream) if stream is not None else event.record()
            self._events.append((event, worker.serial))

    def look(self, worker: Worker) -> None:
        """Have the worker know which passes are through."""
        while self._events and self._events[0][0].query():
            worker.sources_ready_up_to(self._events.popleft()[1])
