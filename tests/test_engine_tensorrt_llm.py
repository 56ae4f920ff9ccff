"""The TensorRT-LLM connector, over doubles of its base classes and of its executor: never inside TensorRT-LLM."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import Fail, FaultEngine
from standin_tensorrt_llm import POOL, TOKENS, Executor, Mpi, Request, arguments, install

import gdskv
from gdskv.engines import tensorrt_llm_settings as settings
from gdskv.engines.tensorrt_llm_worker import memory_of_layout
from gdskv.io.base import COPY

N = 6  # blocks of a prompt


class Engine:
    """A TensorRT-LLM of one rank, as far as the connector sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrap: Any = None, **more: Any) -> None:
        mpi = Mpi(1)
        mpi.local.rank = 0
        install(monkeypatch, mpi)
        self.module = import_module("gdskv.engines.tensorrt_llm")
        monkeypatch.setattr(self.module.GdskvWorker, "wrap", wrap and staticmethod(wrap))
        self.args = arguments()
        self.executor = Executor(self.args, mpi, self.module, **more)
        self._next = 0

    @property
    def stats(self) -> dict[str, int]:
        return self.executor.scheduler.stats()

    def request(self, doc: int, blocks: float = N, **more: Any) -> Request:
        self._next += 1
        return Request(self._next, tokens(doc, blocks), **more)

    def run(self, *docs: int, blocks: float = N, **more: Any) -> list[int]:
        """Prompts at once; promised blocks of each."""
        return [n // TOKENS for n in self.executor.run([self.request(doc, blocks, **more) for doc in docs])]

    def close(self) -> None:
        self.module._HERE[id(self.args)].close()


def tokens(doc: int, blocks: float) -> list[int]:
    return [doc * 1000 + i for i in range(int(blocks * TOKENS))]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Return a function that starts an engine on the same directory."""
    for name, value in {"HOST_BYTES": "256KiB", "DISK_BYTES": "4MiB", "DIRECTORIES": tmp_path, "MIN_FREE": 0}.items():
        monkeypatch.setenv(f"GDSKV_{name}", str(value))
    made: list[Engine] = []

    def make(**more: Any) -> Engine:
        made.append(Engine(monkeypatch, **more))
        return made[-1]

    yield make
    for engine in made:
        with contextlib.suppress(KeyError):
            engine.close()


def test_a_prompt_comes_back_from_host_memory_and_from_disk_after_a_restart(start: Callable[..., Engine]) -> None:
    engine = start()
    assert engine.run(1, 2) == [0, 0]
    assert engine.run(1, 2, 3) == [N - 1, N - 1, 0]  # the last token is computed, and so is its block
    assert engine.run(1, blocks=N + 2.5) == [N]
    assert engine.run(1, blocks=N + 2.5) == [N + 2]
    engine.close()
    engine = start()
    assert engine.run(1, blocks=N + 2.5) == [N + 2]
    assert engine.run(3, 2) == [N - 1, N - 1]
    assert engine.stats["matched_host"] > 0 and engine.stats["failed_reads"] == 0


@pytest.mark.parametrize("chunk", [3, TOKENS, 20, 1000])
def test_a_prefill_in_chunks_of_any_size_stores_each_block_once(start: Callable[..., Engine], chunk: int) -> None:
    engine = start(chunk=chunk)
    assert engine.run(1, blocks=5.5) == [0]
    assert engine.stats["committed"] == 5
    assert engine.run(1, blocks=5.5) == [5] and engine.stats["committed"] == 5


def test_more_prompts_than_host_memory_holds_come_back_from_disk(start: Callable[..., Engine]) -> None:
    engine = start()  # 64 blocks in host memory, 120 in all prompts
    for doc in range(20):
        assert engine.run(doc) == [0]
    assert [engine.run(doc) for doc in range(20)] == [[N - 1]] * 20
    assert engine.stats["matched_disk"] + engine.stats["prefetches"] > 0


def test_salt_adapter_and_what_cannot_be_told_apart(start: Callable[..., Engine]) -> None:
    engine = start()
    for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_task_id": 7}, {"lora_task_id": 0}):
        assert engine.run(1, **more) == [0], more
        assert engine.run(1, **more) == [N - 1], more
    assert engine.run(1, multimodal_hashes=[[1]]) == [0] and engine.stats["not_cached"] == 1


def test_a_load_is_cancelled_and_its_blocks_return_when_nothing_moves(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.run(1)
    executor = engine.executor
    for how in ("cancel_load", "finished"):
        request = engine.request(1)
        assert executor.admit(request) == (N - 1) * TOKENS and request.state == "loading"
        if how == "cancel_load":
            executor.turn()  # its copies have begun, and may be done
            executor.scheduler.cancel_load(request)
        if request.request_id in executor.loading:
            executor.finish(request)
        for _ in range(1000):
            if not executor.loading:
                break
            executor.turn()
        if request in executor.active:
            executor.finish(request)
        assert sorted(executor.free) == list(range(POOL))
    assert engine.run(1) == [N - 1]
    assert engine.stats["host_leased"] == 0


def test_a_request_that_is_reset_starts_again_with_other_blocks(start: Callable[..., Engine]) -> None:
    engine = start(chunk=TOKENS)
    engine.run(1)
    executor = engine.executor
    request = engine.request(1, N + 3)
    executor.admit(request)
    while request.state != "running" or request.position < (N + 1) * TOKENS:
        executor.turn()
    executor.active.remove(request)
    executor.free += request.blocks[::-1]
    executor.scheduler.request_reset(request)
    assert executor.run([request])[0] >= N * TOKENS
    assert engine.run(1, blocks=N + 3) == [N + 2]


def test_bytes_that_are_spoilt_on_disk_are_not_promised(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    engine.run(1)
    engine.close()
    (slab,) = (path for path in tmp_path.glob("rank0/*/*") if path.stat().st_size > 1 << 20)
    data = bytearray(slab.read_bytes())
    data[1 << 16 :] = bytes(b ^ 0x55 for b in data[1 << 16 :])
    data[4096 : 1 << 16] = bytes(b ^ 0x55 for b in data[4096 : 1 << 16])
    slab.write_bytes(data)
    engine = start()
    assert engine.run(1) == [0]
    assert engine.stats["bad_payloads"] > 0 and engine.stats["tokens_left_on_disk"] > 0
    assert engine.run(1) == [N - 1]


def test_it_stops_rather_than_compute_on_a_block_that_did_not_arrive(start: Callable[..., Engine]) -> None:
    broken = []

    def rule(transfer: Any) -> Fail | None:
        return Fail(errno.EIO) if broken and transfer["op"] == COPY else None

    engine = start(wrap=lambda inner: FaultEngine(inner, rule))
    engine.run(1)
    broken.append(True)
    with pytest.raises(gdskv.GdskvError, match="could not be copied"):
        engine.run(1)


def test_two_ranks_load_what_all_have_in_host_memory(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_of_two(work: Callable[[Executor], Any]) -> list[Any]:
        mpi = Mpi(2)
        install(monkeypatch, mpi)
        connector = import_module("gdskv.engines.tensorrt_llm")
        answers: list[Any] = [None, None]

        def rank(me: int) -> None:
            mpi.local.rank = me
            args = arguments(ranks=2)
            executor = Executor(args, mpi, connector)
            try:
                executor.poll()  # where the ranks meet
                answers[me] = work(executor)
            except BaseException as error:
                answers[me] = error
                mpi._barrier.abort()
            connector._HERE[id(args)].close()

        threads = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return answers

    def cold_and_warm(executor: Executor) -> list[int]:
        promised = executor.run([Request(1, tokens(1, N))]) + executor.run([Request(2, tokens(1, N))])
        for _ in range(200):  # blocks that memory alone holds are written beside the next steps
            executor.turn()
        return promised

    def after_restart(executor: Executor) -> list[int]:
        first = executor.run([Request(1, tokens(1, N))])
        for _ in range(200):
            executor.turn()
        return first + executor.run([Request(2, tokens(1, N))])

    monkeypatch.setenv("GDSKV_HOST_BYTES", "512KiB")
    assert engine_of_two(cold_and_warm) == [[0, (N - 1) * TOKENS]] * 2
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["rank0", "rank1"]
    # from disk: not promised to the one that asks, there for the next
    assert engine_of_two(after_restart) == [[0, (N - 1) * TOKENS]] * 2


# ---- settings


def test_its_words_for_retention_mean_the_same() -> None:
    def part(start: int, end: int | None, priority: int, ms: Any) -> SimpleNamespace:
        return SimpleNamespace(token_start=start, token_end=end, priority=priority, duration_ms=ms)

    wish = SimpleNamespace(
        token_range_retention_configs=[part(0, 16, 90, timedelta(hours=1)), part(16, None, 20, None)],
        decode_retention_priority=70,
        decode_duration_ms=1500,
    )
    assert settings.retention_of(wish) == gdskv.Retention(
        ranges=(gdskv.TokenRange(0, 16, 90, 3600.0), gdskv.TokenRange(16, None, 20)), decode_priority=70, decode_ttl=1.5
    )
    assert settings.retention_of(None) is None


def test_retention_reaches_the_store_and_a_wrong_one_is_counted(start: Callable[..., Engine]) -> None:
    def wish(end: int) -> SimpleNamespace:
        hour = SimpleNamespace(token_start=0, token_end=end, priority=80, duration_ms=3_600_000)
        return SimpleNamespace(token_range_retention_configs=[hour])

    engine = start()
    engine.run(1, kv_cache_retention_config=wish(3 * TOKENS))
    assert engine.stats["retained"] == 3
    engine.run(2, kv_cache_retention_config=wish(0))
    assert engine.stats["wrong_retention"] == 1 and engine.stats["retained"] == 3


def test_refusals_say_what_to_set(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("enable_attention_dp", True),
        ("max_beam_width", 4),
        ("context_parallel_size", 2),
        ("speculative_config", object()),
    ):
        with pytest.raises(gdskv.ConfigError, match=name):
            settings.refuse(arguments(**{name: value}))
    args = arguments()
    args.kv_cache_config.max_attention_window = [512]
    with pytest.raises(gdskv.ConfigError, match="max_attention_window"):
        settings.refuse(args)
    monkeypatch.setenv("GDSKV_DEVICE_BYTES", "1MiB")
    with pytest.raises(gdskv.ConfigError, match="own pool"):
        settings.cache_config(arguments())


def region(pool: torch.Tensor, layer: int) -> SimpleNamespace:
    stride = pool.stride(0)
    return SimpleNamespace(base=pool[0, layer].data_ptr(), stride=stride, size=pool[0, 0].numel(), num_slots=len(pool))


def layout(pool: torch.Tensor, **more: Any) -> SimpleNamespace:
    regions = tuple(region(pool, layer) for layer in range(pool.shape[1]))
    group = {"regions": regions, "replicated_regions": (), "window_size": None, "layer_group_id": 0}
    return SimpleNamespace(tokens_per_block=TOKENS, groups=(SimpleNamespace(**(group | more)),))


def test_memory_that_is_described_by_regions(start: Callable[..., Engine]) -> None:
    engine = start(register=lambda worker, pool: worker.register_kv_cache_layout(layout(pool)))
    assert (engine.run(1), engine.run(1)) == ([0], [N - 1])
    pool = torch.zeros(4, 2, 2, 8, dtype=torch.uint8)
    for more in ({"window_size": 128}, {"replicated_regions": (region(pool, 0),)}):
        with pytest.raises(gdskv.ConfigError, match="full attention"):
            memory_of_layout(layout(pool, **more))
    several = layout(pool)
    several.groups *= 2
    with pytest.raises(gdskv.ConfigError, match="2 groups"):
        memory_of_layout(several)
