"""Ranks of SGLang, each in a process of its own, with the process groups that its controllers agree over."""

from __future__ import annotations

import errno
import multiprocessing
import random
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from real import PAGE, Sglang  # first: it puts doubles in the place of what needs a GPU

import torch  # isort: skip

__all__ = ["Ranks"]


def _faulty(engine: Any) -> Any:
    """Reads that now and then fail, come short or bring a flipped bit."""
    from doubles import Fail, FaultEngine, Flip, Short

    from gdskv.io.base import READ

    dice = random.Random(11)

    def rule(transfer: Any) -> Any:
        if transfer["op"] != READ or dice.random() > 0.1:
            return None
        return dice.choice([Fail(errno.EIO), Short(4096), Flip(dice.randrange(4096))])

    return FaultEngine(engine, rule)


class _Rank(Sglang):
    """What a test asks of a rank from outside."""

    def digests(self) -> list[bytes]:
        """Of the bytes of each page."""
        return [blake2b(page.view(torch.uint8).numpy().tobytes()).digest() for page in self.pages()]

    def noise(self, seed: int) -> list[bytes]:
        self.fill(seed)
        return self.digests()

    def get(self, document: int, n: int) -> int:
        """Leading pages that the backend brings, without asking the other ranks."""
        got = self.backend.batch_get_v1(self.hashes(document, n), torch.arange(n * PAGE))
        return int(sum(got))

    def stats(self) -> dict[str, int]:
        return dict(self.backend.stats())


def _run(pipe: Connection, meeting: str, rank: int, ranks: int, faulty: bool, arguments: Any, settings: Any) -> None:
    from gdskv.engines.sglang import GdskvStorage

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    GdskvStorage.io = _faulty if faulty and rank == 0 else None
    try:
        sglang = _Rank(*arguments, group=torch.distributed.group.WORLD, **settings)
        pipe.send("here")
        while ask := pipe.recv():
            pipe.send(getattr(sglang, ask[0])(*ask[1:]))
    except Exception as error:
        pipe.send(error)
        raise


class Ranks:
    """Two processes; `all` has each do the same at once, `one` has one."""

    def __init__(self, scratch: Path, *arguments: Any, faulty: bool = False, ranks: int = 2, **settings: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["real"])  # SGLang's imports, once for all ranks
        meeting = scratch / f"meeting{len(list(scratch.iterdir()))}"
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            mine, other = context.Pipe()
            told = (other, str(meeting), rank, ranks, faulty, arguments, settings)
            process = context.Process(target=_run, args=told, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        for rank in range(ranks):
            self._answer(rank)

    def all(self, *ask: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(ask)
        return [self._answer(rank) for rank in range(len(self.pipes))]

    def one(self, rank: int, *ask: Any) -> Any:
        self.pipes[rank].send(ask)
        return self._answer(rank)

    def close(self) -> None:
        self.all("close")
        self.end()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(120), f"rank {rank} does not answer"
        answer = self.pipes[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer
