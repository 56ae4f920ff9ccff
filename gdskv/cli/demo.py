"""``gdskv demo``: long documents asked in turn, a crash, and the same documents again from what the disk remembers.

Reads options, runs the rounds and shows them; the engine and the cache do the rest.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gdskv.cli import console
from gdskv.errors import GdskvError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from gdskv.engines.transformers import Engine, Generation
    from gdskv.layout import KVLayout
    from gdskv.manager import BlockManager

__all__ = ["demo"]

_DOCUMENTS = 6
_DOCUMENT_TOKENS = 2048
_QUESTION_TOKENS = 24
_ANSWER_TOKENS = 8
_SEED = 0
_TTL_S = 3600.0


@dataclass(frozen=True)
class _Setup:
    """What both processes of a demo run on."""

    model: Path | None
    dtype: str | None
    tokens_per_block: int
    document_tokens: int
    directory: Path
    device: str

    def network(self) -> Any:
        """The model, loaded."""
        from gdskv.engines import models

        network = models.random_llama(_SEED) if self.model is None else models.load_model(self.model)
        network = models.with_dtype(network, self.dtype) if self.dtype is not None else network
        return models.on_device(network, self.device)


@dataclass
class _Row:
    """One request, with the cache and without."""

    round: int
    document: int
    device: int
    """Prompt tokens reused from the device tier."""
    host: int
    disk: int
    recomputed: int
    ttft_ms: float
    ttft_without_ms: float
    equal: bool
    """The same answer as without the cache."""


def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the disk tier; a temporary one.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model of transformers; a built-in random Llama.")
    ] = None,
    tokens_per_block: Annotated[int, typer.Option(help="Tokens in one block.")] = 64,
    device: Annotated[str, typer.Option(help="Where the model and the device tier are: cpu, cuda:0.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the model's own.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask long documents in turn, kill the process, ask them again, and compare with having no cache.

    The documents are to stay for an hour, so the first round writes them to disk; the second finds them there. Exit
    code 1 if an answer differs from the one without
    a cache, a block came back wrong, or none came back from disk.
    """
    # Read when torch loads: idle threads of its pool then sleep instead of spinning; the I/O threads need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ExitStack() as stack:
        place = directory or Path(stack.enter_context(TemporaryDirectory(prefix="gdskv-demo-")))
        result = _run(_Setup(model, dtype, tokens_per_block, _DOCUMENT_TOKENS, place, device))
    if json:
        console.print_json(result)
    else:
        _show(result)
    if not (result["tokens_equal"] and result["blocks_from_disk"]) or result["wrong_blocks"]:
        raise typer.Exit(1)


class _Audit:
    """Remembers a checksum of every block when it is made, and compares it whenever the block is used again."""

    def __init__(self, kv: BlockManager, seen: dict[bytes, int]) -> None:
        self._kv = kv
        self.seen = seen
        self.wrong = 0

    def __call__(self, generation: Generation) -> None:
        import zlib

        import torch

        request = generation.request
        if request is None:
            return
        for key, slot in zip(request.keys[: generation.saved], request.blocks.tolist(), strict=False):
            block = self._kv.device_pool[slot].reshape(-1).view(torch.uint8).cpu()
            checksum = zlib.crc32(block.numpy().tobytes())
            self.wrong += self.seen.setdefault(key.tobytes(), checksum) != checksum


class _Rounds:
    """A manager, the engine on it and one without a cache, ready to be asked."""

    def __init__(self, setup: _Setup, seen: dict[bytes, int]) -> None:
        from gdskv.config import CacheConfig
        from gdskv.engines import models
        from gdskv.engines.transformers import Engine
        from gdskv.manager import BlockManager

        self.network = setup.network()
        size = setup.tokens_per_block
        self.layout = models.layout_of(self.network, size)
        per_request = -(-(setup.document_tokens + _QUESTION_TOKENS + _ANSWER_TOKENS) // size)
        config = CacheConfig(
            device_bytes=(per_request + per_request // 4 + 1) * self.layout.slot_bytes,  # one document and a bit
            host_bytes=2 * per_request * self.layout.slot_bytes,
            disk_bytes=2 * _DOCUMENTS * per_request * self.layout.slot_bytes,
            directories=(setup.directory,),
            device=setup.device,
        )
        chunk = -(-256 // size) * size
        clock = time.monotonic
        self.asked = _questions(self.network.config.get_text_config().vocab_size, setup.document_tokens)
        self.plain = Engine(self.network, None, chunk_tokens=chunk)
        self.kv = BlockManager(config, self.layout, models.namespace_of(self.network), now=clock())
        self.audit = _Audit(self.kv, seen)
        self.engine = Engine(self.network, self.kv, chunk_tokens=chunk, clock=clock, before_release=self.audit)
        self.plain.generate([self.asked[0][2][:chunk]], 2)  # the first pass of a process pays for everybody

    def ask(self, first: bool) -> Iterator[_Row]:
        """Ask the questions of the first round, or of those behind the crash."""
        for round_, document, prompt in self.asked:
            if (round_ == 1) == first:
                yield _ask(self.engine, self.plain, round_, document, prompt)
        self.kv.check()

    def drain(self) -> None:
        """Wait until everything is on disk that was promised to be."""
        while not self.kv.store.idle:
            self.kv.poll(now=time.monotonic())
            time.sleep(0.001)


def _first_round(setup: _Setup, pipe: Connection) -> None:
    """What the process does that is going to be killed."""
    try:
        rounds = _Rounds(setup, {})
        for row in rounds.ask(True):
            pipe.send(row)
        rounds.drain()
        pipe.send((rounds.audit.wrong, rounds.audit.seen))
    except GdskvError as error:
        pipe.send(error)
    pipe.recv()  # nobody answers: here it is killed


def _killed_round(setup: _Setup, step: Callable[[int], None]) -> tuple[list[_Row], int, dict[bytes, int]]:
    """Run the first round in a process of its own and kill it: rows, wrong blocks, checksums of all blocks made."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=_first_round, args=(setup, other), daemon=True)
    child.start()
    other.close()
    rows: list[_Row] = []
    try:
        while isinstance(message := pipe.recv(), _Row):
            rows.append(message)
            step(1)
    except EOFError:
        raise GdskvError("the demo's first process ended by itself. Look at what it printed above.") from None
    finally:
        child.kill()
        child.join()
    if isinstance(message, GdskvError):
        raise message
    wrong, seen = message
    return rows, wrong, seen


def _run(setup: _Setup) -> dict[str, Any]:
    from gdskv.engines import models

    models.layout_of(setup.network(), setup.tokens_per_block)  # what cannot work is said before a process is started
    questions = 2 * _DOCUMENTS + len(_AGAIN)
    with console.progress("questions", questions) as step:
        rows, wrong, seen = _killed_round(setup, step)
        rounds = _Rounds(setup, seen)
        with rounds.kv:
            for row in rounds.ask(False):
                rows.append(row)
                step(1)
            counters = rounds.kv.stats()
            ledger, pool = rounds.kv.store.ledger, rounds.kv.store.disk_pool
            assert ledger is not None and pool is not None
            opened = {
                "blocks_recovered": ledger.recovered.blocks,
                "sizing": str(rounds.kv.sizing),
                "directories": console.places(pool.directories),
            }
    name = "random Llama" if setup.model is None else str(setup.model)
    result = _result(name, rounds.network, rounds.layout, rows, wrong + rounds.audit.wrong, setup.document_tokens)
    return result | opened | {"counters": counters}


_AGAIN = (1, 2)  # documents asked a third time: by then they are in device and host memory


def _questions(vocabulary: int, document_tokens: int) -> list[tuple[int, int, list[int]]]:
    """Return (round, document, prompt) of each request: the latest document is the first to be asked again."""
    from random import Random

    random = Random(_SEED)

    def text(tokens: int) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(tokens)]

    documents = [text(document_tokens) for _ in range(_DOCUMENTS)]
    first = [(1, n, document + text(_QUESTION_TOKENS)) for n, document in enumerate(documents, 1)]
    again = [(2, n, document + text(_QUESTION_TOKENS)) for n, document in enumerate(documents, 1)]
    return first + again[::-1] + [(3, n, documents[n - 1] + text(_QUESTION_TOKENS)) for n in _AGAIN]


def _ask(engine: Engine, plain: Engine, round_: int, document: int, prompt: list[int]) -> _Row:
    from gdskv.retention import Retention

    (cached,) = engine.generate([prompt], _ANSWER_TOKENS, retention=Retention(ttl=_TTL_S))
    (reference,) = plain.generate([prompt], _ANSWER_TOKENS)
    return _Row(
        round_,
        document,
        *cached.reused,
        recomputed=cached.recomputed,
        ttft_ms=round(cached.ttft * 1e3, 3),
        ttft_without_ms=round(reference.ttft * 1e3, 3),
        equal=cached.tokens == reference.tokens,
    )


def _result(
    name: str, network: Any, layout: KVLayout, rows: list[_Row], wrong: int, document_tokens: int
) -> dict[str, Any]:
    cold = median(row.ttft_ms for row in rows if row.round == 1)
    warm = median(row.ttft_ms for row in rows if row.round == 2)
    reused = {tier: sum(getattr(row, tier) for row in rows) for tier in ("device", "host", "disk")}
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "dtype": layout.dtype,
        "tokens_per_block": layout.tokens_per_block,
        "block_bytes": layout.block_bytes,
        "document_tokens": document_tokens,
        "requests": len(rows),
        "tokens_equal": all(row.equal for row in rows),
        "wrong_blocks": wrong,
        "ttft_cold_ms": round(cold, 3),
        "ttft_warm_ms": round(warm, 3),
        "ttft_without_ms": round(median(row.ttft_without_ms for row in rows), 3),
        **{f"blocks_from_{tier}": tokens // layout.tokens_per_block for tier, tokens in reused.items()},
        "rows": [asdict(row) for row in rows],
    }


def _show(result: dict[str, Any]) -> None:
    from gdskv.units import format_size

    console.out.print(
        f"{result['model']}: {result['parameters'] / 1e6:.0f} M parameters, {result['dtype']}; "
        f"{_DOCUMENTS} documents of {result['document_tokens']:,} tokens; "
        f"blocks of {result['tokens_per_block']} tokens, {format_size(result['block_bytes'])}"
    )
    console.out.print(result["sizing"], markup=False)
    console.print_places(result["directories"])
    title = "prompt tokens reused and computed; time to first token"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))  # 80 columns are enough
    for name in ("round", "doc", "device", "host", "disk", "computed", "first ms", "no cache ms", "answer"):
        table.add_column(name, justify="left" if name == "answer" else "right")
    for row in result["rows"]:
        table.add_row(
            *(f"{row[n]:,}" for n in ("round", "document", "device", "host", "disk", "recomputed")),
            *(f"{row[n]:,.0f}" for n in ("ttft_ms", "ttft_without_ms")),
            "equal" if row["equal"] else "[bold red]different[/]",
            end_section=(row["round"], row["document"]) in ((1, _DOCUMENTS), (2, 1)),
        )
    console.out.print(table)
    console.out.print(
        f"After the first round the process was killed; the next one found {result['blocks_recovered']} blocks in the "
        "directory."
    )
    cold, warm = result["ttft_cold_ms"], result["ttft_warm_ms"]
    console.out.print(
        f"Asked again, a document answers after {warm:.0f} ms instead of {cold:.0f} ms ({cold / warm:.0f}x sooner): "
        f"{result['blocks_from_disk']} blocks came from disk, {result['blocks_from_host']} from host memory, "
        f"{result['wrong_blocks']} wrong; "
        + ("every answer is the same as without a cache." if result["tokens_equal"] else "answers differ.")
    )
