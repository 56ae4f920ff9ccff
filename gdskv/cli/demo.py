"""``gdskv demo``: long documents asked in turn, then asked again, with a model's real KV moving through all tiers.

Reads options, runs the rounds and shows them; the engine and the cache do the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gdskv.cli import console

if TYPE_CHECKING:
    from gdskv.engines.transformers import Engine, Generation
    from gdskv.layout import KVLayout
    from gdskv.manager import BlockManager

__all__ = ["demo"]

_DOCUMENTS = 6
_DOCUMENT_TOKENS = 2048
_QUESTION_TOKENS = 24
_ANSWER_TOKENS = 8
_SEED = 0


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
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the model's own.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask long documents in turn, then ask them again, and compare with having no cache.

    The pools are so small that the first round spills to disk. Exit code 1 if an answer differs from the one without
    a cache, a block came back wrong, or none came back from disk.
    """
    # Read when torch loads: idle threads of its pool then sleep instead of spinning; the I/O threads need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gdskv.engines import models

    name = "random Llama" if model is None else str(model)
    network = models.random_llama(_SEED) if model is None else models.load_model(model)
    if dtype is not None:
        network = models.with_dtype(network, dtype)
    if directory is not None:
        result = _run(network, name, directory, tokens_per_block)
    else:
        with TemporaryDirectory(prefix="gdskv-demo-") as temporary:
            result = _run(network, name, Path(temporary), tokens_per_block)
    if json:
        console.print_json(result)
    else:
        _show(result)
    if not (result["tokens_equal"] and result["blocks_from_disk"]) or result["wrong_blocks"]:
        raise typer.Exit(1)


class _Audit:
    """Remembers a checksum of every block when it is made, and compares it whenever the block is used again."""

    def __init__(self, kv: BlockManager) -> None:
        self._kv = kv
        self._seen: dict[bytes, int] = {}
        self.wrong = 0

    def __call__(self, generation: Generation) -> None:
        import zlib

        request = generation.request
        if request is None:
            return
        for key, slot in zip(request.keys[: generation.saved], request.blocks.tolist(), strict=False):
            checksum = zlib.crc32(self._kv.device_pool.view(slot)[: self._kv.layout.block_bytes].tobytes())
            self.wrong += self._seen.setdefault(key.tobytes(), checksum) != checksum


def _run(network: Any, name: str, directory: Path, tokens_per_block: int) -> dict[str, Any]:
    from gdskv.config import CacheConfig
    from gdskv.engines import models
    from gdskv.engines.transformers import Engine
    from gdskv.manager import BlockManager

    layout = models.layout_of(network, tokens_per_block)
    per_request = -(-(_DOCUMENT_TOKENS + _QUESTION_TOKENS + _ANSWER_TOKENS) // tokens_per_block)
    config = CacheConfig(
        device_bytes=(per_request + per_request // 4 + 1) * layout.slot_bytes,  # one document and a bit
        host_bytes=2 * per_request * layout.slot_bytes,
        disk_bytes=2 * _DOCUMENTS * per_request * layout.slot_bytes,
        directories=(directory,),
    )
    chunk = -(-256 // tokens_per_block) * tokens_per_block
    clock = time.monotonic
    plain = Engine(network, None, chunk_tokens=chunk)
    with BlockManager(config, layout, models.namespace_of(network), now=clock()) as kv:
        audit = _Audit(kv)
        engine = Engine(network, kv, chunk_tokens=chunk, clock=clock, before_release=audit)
        asked = _questions(network.config.get_text_config().vocab_size)
        plain.generate([asked[0][2][:chunk]], 2)  # the first pass of a process pays for everybody
        with console.progress("questions", len(asked)) as step:
            rows = [_ask(engine, plain, *question, step) for question in asked]
        kv.check()
        counters = kv.stats()
        assert kv.store.disk_pool is not None
        opened = {"sizing": str(kv.sizing), "directories": console.places(kv.store.disk_pool.directories)}
    return _result(name, network, layout, rows, audit.wrong) | opened | {"counters": counters}


def _questions(vocabulary: int) -> list[tuple[int, int, list[int]]]:
    """Return (round, document, prompt) of each request: the latest document is the first to be asked again."""
    from random import Random

    random = Random(_SEED)

    def text(tokens: int) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(tokens)]

    documents = [text(_DOCUMENT_TOKENS) for _ in range(_DOCUMENTS)]
    first = [(1, n, document + text(_QUESTION_TOKENS)) for n, document in enumerate(documents, 1)]
    again = [(2, n, document + text(_QUESTION_TOKENS)) for n, document in enumerate(documents, 1)]
    return first + again[::-1]


def _ask(
    engine: Engine, plain: Engine, round_: int, document: int, prompt: list[int], step: Callable[[int], None]
) -> _Row:
    (cached,) = engine.generate([prompt], _ANSWER_TOKENS)
    (reference,) = plain.generate([prompt], _ANSWER_TOKENS)
    step(1)
    return _Row(
        round_,
        document,
        *cached.reused,
        recomputed=cached.recomputed,
        ttft_ms=round(cached.ttft * 1e3, 3),
        ttft_without_ms=round(reference.ttft * 1e3, 3),
        equal=cached.tokens == reference.tokens,
    )


def _result(name: str, network: Any, layout: KVLayout, rows: list[_Row], wrong: int) -> dict[str, Any]:
    cold = median(row.ttft_ms for row in rows if row.round == 1)
    warm = median(row.ttft_ms for row in rows if row.round == 2)
    reused = {tier: sum(getattr(row, tier) for row in rows) for tier in ("device", "host", "disk")}
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "dtype": layout.dtype,
        "tokens_per_block": layout.tokens_per_block,
        "block_bytes": layout.block_bytes,
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
        f"{_DOCUMENTS} documents of {_DOCUMENT_TOKENS:,} tokens; "
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
            end_section=row["round"] == 1 and row["document"] == _DOCUMENTS,
        )
    console.out.print(table)
    cold, warm = result["ttft_cold_ms"], result["ttft_warm_ms"]
    console.out.print(
        f"Asked again, a document answers after {warm:.0f} ms instead of {cold:.0f} ms ({cold / warm:.0f}x sooner): "
        f"{result['blocks_from_disk']} blocks came from disk, {result['blocks_from_host']} from host memory, "
        f"{result['wrong_blocks']} wrong; "
        + ("every answer is the same as without a cache." if result["tokens_equal"] else "answers differ.")
    )
