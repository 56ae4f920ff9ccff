"""The SGLang backend, over doubles of SGLang's base class and host pool; `tools/test sglang` has the real ones."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import Fail, FaultEngine, StuckEngine
from standin_sglang import StandInConfig, StandInExtraInfo, StandInHostPool, install

import gdskv
from gdskv.engines import sglang_settings
from gdskv.io.base import READ

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that makes a backend with its pool; `io` wraps its I/O engine, other names are settings."""
    install(monkeypatch)
    module = import_module("gdskv.engines.sglang")
    made: list[Any] = []

    def build(pool: StandInHostPool | None = None, io: Any = None, config: Any = None, **extra: Any) -> Any:
        monkeypatch.setattr(module.GdskvStorage, "io", io and staticmethod(io))
        settings = {"interface_v1": 1, "host_bytes": "1MiB", "disk_bytes": "4MiB", "directories": [str(tmp_path)]}
        config = config or StandInConfig()
        config.extra_config = {"backend_name": "gdskv", "min_free": 0} | settings | extra
        made.append(module.GdskvStorage(config, {}))
        made[-1].register_mem_pool_host(pool or StandInHostPool(64))
        return made[-1]

    yield build
    for backend in made:
        backend.close()


def hashes(document: int, n: int) -> list[str]:
    return [f"{document:032x}{page:032x}" for page in range(n)]


def indices(backend: Any, n: int) -> torch.Tensor:
    return torch.arange(n * backend.mem_pool_host.page_size)


def fill(backend: Any, seed: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    pool = backend.mem_pool_host.kv_buffer
    pool.copy_(torch.randint(0, 256, pool.shape, generator=noise, dtype=torch.uint8))
    return pool.clone()


def test_pages_come_back_from_host_and_after_a_restart_from_disk(make: Make) -> None:
    backend = make()
    want = fill(backend, 1)
    assert backend.batch_exists(hashes(1, 6)) == 0
    assert backend.batch_set_v1(hashes(1, 6), indices(backend, 6)) == [True] * 6
    assert backend.batch_exists(hashes(1, 9)) == 6 and backend.exists(hashes(1, 6)[5])
    for again in range(2):
        backend.mem_pool_host.kv_buffer.zero_()
        assert backend.batch_get_v1(hashes(1, 8), indices(backend, 8)) == [True] * 6 + [False] * 2
        assert torch.equal(backend.mem_pool_host.kv_buffer[:, :6], want[:, :6])
        if not again:
            backend.close()
            backend = make()
    assert backend.stats()["recovered"] == 12
    # a batch may begin anywhere in a prompt
    assert backend.batch_get_v1(hashes(1, 6)[4:], indices(backend, 2)) == [True] * 2


def test_the_generic_interface_copies_a_page_into_one_tensor(make: Make) -> None:
    backend = make(interface_v1=0)
    pages = [torch.full((8192,), i, dtype=torch.uint8) for i in range(5)]
    assert backend.batch_set(hashes(2, 5), pages)
    assert backend.set(hashes(2, 6)[5], pages[0])
    targets = [torch.zeros(8192, dtype=torch.uint8) for _ in range(7)]
    got = backend.batch_get(hashes(2, 7), targets)
    assert got[6] is None and all(torch.equal(have, want) for have, want in zip(got[:5], pages, strict=False))
    assert torch.equal(backend.get(hashes(2, 1)[0]), pages[0]) and backend.get(hashes(3, 1)[0]) is None
    assert not backend.set(hashes(4, 1)[0], torch.zeros(10, dtype=torch.uint8))
    assert backend.stats()["errors"] == 1
    with pytest.raises(gdskv.ConfigError, match="interface_v1"):
        backend.batch_get_v1(hashes(2, 1), indices(backend, 1))


def test_without_host_memory_pages_move_between_disk_and_the_pool_itself(make: Make) -> None:
    backend = make(host_bytes=0)
    want = fill(backend, 2)
    assert all(backend.batch_set_v1(hashes(1, 32), indices(backend, 32)))
    backend.mem_pool_host.kv_buffer.zero_()
    assert all(backend.batch_get_v1(hashes(1, 32), indices(backend, 32)))
    stats = backend.stats()
    assert torch.equal(backend.mem_pool_host.kv_buffer[:, :32], want[:, :32])
    assert (stats["staged"], stats["matched_disk"]) == (0, 64)


def test_a_page_of_which_one_piece_is_lost_is_a_miss_and_so_is_what_follows(make: Make) -> None:
    read: list[int] = []

    def rule(transfer: Any) -> Fail | None:
        if transfer["op"] != READ:
            return None
        read.append(int(transfer["offset"]))
        return Fail(errno.EIO) if transfer["offset"] == read[min(5, len(read) - 1)] and len(read) > 5 else None

    backend = make(host_bytes=0, io=lambda engine: FaultEngine(engine, rule), max_extent=4096)
    want = fill(backend, 3)
    assert all(backend.batch_set_v1(hashes(1, 8), indices(backend, 8)))
    backend.mem_pool_host.kv_buffer.zero_()
    got = backend.batch_get_v1(hashes(1, 8), indices(backend, 8))
    n = sum(got)
    assert 0 < n < 8 and got == [True] * n + [False] * (8 - n)
    assert torch.equal(backend.mem_pool_host.kv_buffer[:, :n], want[:, :n])
    assert backend.stats()["pages_missed"] == 8 - n


@pytest.mark.parametrize("told", ["by prefix", "by the same empty list", "not at all"])
def test_what_sglang_tells_of_the_page_before_decides_what_leaves_first(make: Make, told: str) -> None:
    backend = make(disk_bytes=0, directories=[], host_bytes=40 * 4096)
    empty: list[str] = []
    pages = hashes(1, 16)
    for first in (0, 8):
        prefix = {"by prefix": pages[:first], "by the same empty list": empty, "not at all": None}[told]
        assert all(backend.batch_set_v1(pages[first : first + 8], indices(backend, 8), StandInExtraInfo(prefix)))
    assert all(backend.batch_set_v1(hashes(2, 8), indices(backend, 8), StandInExtraInfo([])))
    # four pages had to leave: those at the end of the prompt, if they are known to be its end
    assert backend.batch_exists(pages) == (4 if told == "not at all" else 12)
    assert backend.batch_exists(pages[8:]) == (8 if told == "not at all" else 4)


@pytest.mark.parametrize("batch", [60, 6])
def test_more_pages_than_host_memory_holds_pass_through_it_in_parts(make: Make, batch: int) -> None:
    backend = make(host_bytes=16 * 4096)
    want, pages = fill(backend, 4), hashes(1, 60)
    for first in range(0, 60, batch):
        part = indices(backend, 60)[first * 4 : (first + batch) * 4]
        told = StandInExtraInfo(pages[:first])
        assert all(backend.batch_set_v1(pages[first : first + batch], part, told)), first
    backend.mem_pool_host.kv_buffer.zero_()
    assert all(backend.batch_get_v1(pages, indices(backend, 60)))
    assert torch.equal(backend.mem_pool_host.kv_buffer[:, :60], want[:, :60])


def test_a_thread_that_waits_for_a_disk_holds_up_no_other(make: Make) -> None:
    stuck: list[StuckEngine] = []

    def wrap(engine: Any) -> StuckEngine:
        stuck.append(StuckEngine(engine, stuck=False))
        return stuck[-1]

    backend = make(io=wrap, host_bytes=0)
    assert all(backend.batch_set_v1(hashes(1, 4), indices(backend, 4)))
    stuck[0].stuck = True
    answer: list[list[bool]] = []
    waiting = threading.Thread(
        target=lambda: answer.append(backend.batch_get_v1(hashes(1, 4), indices(backend, 4))), daemon=True
    )
    waiting.start()
    for _ in range(50):
        assert backend.batch_exists(hashes(1, 6)) == 4
    assert not answer
    stuck[0].release()
    waiting.join(30)
    assert answer == [[True] * 4]


def test_clear_forgets_on_disk_too_and_close_turns_all_into_misses(make: Make) -> None:
    backend = make()
    assert all(backend.batch_set_v1(hashes(1, 4), indices(backend, 4)))
    backend.clear()
    assert backend.batch_exists(hashes(1, 4)) == 0
    assert all(backend.batch_set_v1(hashes(2, 4), indices(backend, 4)))
    backend.close()
    assert not any(backend.batch_get_v1(hashes(2, 4), indices(backend, 4)))
    assert not any(backend.batch_set_v1(hashes(2, 4), indices(backend, 4)))
    backend = make()
    assert (backend.batch_exists(hashes(1, 4)), backend.batch_exists(hashes(2, 4))) == (0, 4)


def test_retention_is_the_same_for_all_pages(make: Make) -> None:
    backend = make(retention={"ttl": 3600, "priority": 80}, retained_fraction=1)
    assert all(backend.batch_set_v1(hashes(1, 4), indices(backend, 4)))
    assert backend.stats()["retained"] == 8
    with pytest.raises(gdskv.RetentionError, match="priority=200"):
        make(retention={"priority": 200})


# ---- pages that are the same on every rank


def rank(n: int, **names: Any) -> StandInConfig:
    return StandInConfig(is_mla_model=True, tp_size=3, tp_rank=n, **names)


def test_rank_0_keeps_the_pages_of_all_and_the_others_read_them(make: Make, tmp_path: Path) -> None:
    second = make(config=rank(1))
    assert second.batch_exists(hashes(1, 6)) == 0  # rank 0 is not there yet
    first, third = make(config=rank(0)), make(config=rank(2))
    want = fill(first, 5)
    assert all(first.batch_set_v1(hashes(1, 6), indices(first, 6)))
    for reader in (second, third):
        assert reader.batch_exists(hashes(1, 9)) == 6
        assert reader.batch_get_v1(hashes(1, 8), indices(reader, 8)) == [True] * 6 + [False] * 2
        assert torch.equal(reader.mem_pool_host.kv_buffer[:, :6], want[:, :6])
        assert reader.batch_set_v1(hashes(2, 1), indices(reader, 1)) == [False]
        reader.clear()
    assert (second.stats()["rank0_unanswered"], third.stats()["rank0_unanswered"]) == (1, 0)
    assert [folder.name for folder in tmp_path.iterdir()] == ["rank0"]
    assert sum(slab.stat().st_blocks for slab in tmp_path.rglob("*.slab")) * 512 > 3 << 20  # all of disk_bytes
    first.clear()
    assert second.batch_exists(hashes(1, 6)) == 0
    first.close()
    assert not any(second.batch_get_v1(hashes(1, 6), indices(second, 6)))
    again = make(config=rank(0))
    assert all(again.batch_set_v1(hashes(3, 6), indices(again, 6)))
    assert sum(second.batch_get_v1(hashes(3, 6), indices(second, 6))) == 6


@pytest.mark.parametrize("host_bytes", ["1MiB", 0])
def test_more_pages_than_a_reader_maps_come_in_parts(
    make: Make, monkeypatch: pytest.MonkeyPatch, host_bytes: Any
) -> None:
    monkeypatch.setattr("gdskv.engines.sglang_shared.WINDOW", 5 * 8192)
    first, second = (make(config=rank(n), host_bytes=host_bytes) for n in (0, 1))
    want = fill(first, 6)
    assert all(first.batch_set_v1(hashes(1, 60), indices(first, 60)))
    got: list[list[bool]] = []
    # three threads of SGLang at once, to three parts of the pool
    places = [indices(second, 60)[part * 80 : part * 80 + 80] for part in range(3)]

    def read(part: int) -> None:
        got.append(second.batch_get_v1(hashes(1, 60)[part * 20 : part * 20 + 20], places[part]))

    threads = [threading.Thread(target=read, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [[True] * 20] * 3 and torch.equal(second.mem_pool_host.kv_buffer[:, :60], want[:, :60])


def test_a_rank_with_other_pages_finds_nothing(make: Make) -> None:
    first, second = make(config=rank(0)), make(config=rank(1, model_name="other"))
    fill(first, 7)
    assert all(first.batch_set_v1(hashes(1, 4), indices(first, 4)))
    assert not any(second.batch_get_v1(hashes(1, 4), indices(second, 4)))
    assert second.stats()["rank0_unanswered"] == 1


def test_a_reader_gives_up_on_a_rank_0_whose_disk_hangs_and_takes_no_late_bytes(make: Make) -> None:
    stuck: list[StuckEngine] = []

    def wrap(engine: Any) -> StuckEngine:
        stuck.append(StuckEngine(engine, stuck=False))
        return stuck[-1]

    first = make(config=rank(0), io=wrap, host_bytes=0, io_timeout=30)
    second = make(config=rank(1), io_timeout=0.1)
    assert all(first.batch_set_v1(hashes(1, 4), indices(first, 4)))
    stuck[0].stuck = True
    second.mem_pool_host.kv_buffer.fill_(7)
    assert not any(second.batch_get_v1(hashes(1, 4), indices(second, 4)))
    stuck[0].release()
    stuck[0].stuck = False
    assert (second.mem_pool_host.kv_buffer == 7).all()
    assert all(second.batch_get_v1(hashes(1, 4), indices(second, 4)))
    assert second.stats()["rank0_unanswered"] == 1


def test_a_second_rank_0_in_one_place_is_refused(make: Make) -> None:
    make(config=rank(0), disk_bytes=0, directories=[])
    with pytest.raises(gdskv.ConfigError, match="one server"):
        make(config=rank(0), disk_bytes=0, directories=[])


# ---- what is refused


def test_refusals_say_what_to_set(make: Make, tmp_path: Path) -> None:
    def more(**names: int) -> StandInConfig:
        """As of 0.5.23."""
        config = StandInConfig()
        config.__dict__.update(names)
        return config

    mixed = StandInHostPool(4)
    mixed.sizes = [4096, 2048]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("SGLang 0.5.23", {"config": StandInConfig(is_mla_model=True, tp_size=2), "replicas": 2}),
        ("tp_lcm_size", {"config": StandInConfig(should_split_heads=True, tp_lcm_size=4)}),
        ("--dcp-size", {"config": more(dcp_size=2)}),
        ("replicas=1", {"config": more(dp_rank=1)}),
        ("pieces of one size", {"pool": mixed}),
        ("interface_v1", {"pool": SimpleNamespace(page_size=4, layout="x", size_per_token=64, dtype="uint8")}),
        ("Set host_bytes", {"pool": StandInHostPool(4, piece=1000), "host_bytes": 0}),
        ("Set host_bytes to", {"host_bytes": 4096}),
        ("SGLang's own pool", {"device_bytes": "1MiB"}),
        ("mkdir -p", {"directories": [str(tmp_path / "none")]}),
        ("host_byte", {"host_byte": 1}),
        ("replicas=0", {"replicas": 0}),
    ]
    for words, arguments in cases:
        with pytest.raises(gdskv.ConfigError, match=words):
            make(**arguments)
    with pytest.raises(gdskv.ConfigError, match="full attention"):
        make().register_mem_host_pool_v2(None, "mamba")


def test_adapters_are_refused_where_page_hashes_do_not_know_them() -> None:
    with pytest.raises(gdskv.ConfigError, match="LoRA"):
        sglang_settings.refuse(StandInConfig(), SimpleNamespace(enable_lora=True))


def test_ranks_on_several_nodes_are_refused_where_they_share_pages() -> None:
    def refused(nodes: int, total: int, tp: int, stages: int = 1) -> bool:
        args = SimpleNamespace(nnodes=nodes, tp_size=total, pp_size=stages)
        try:
            sglang_settings.refuse(StandInConfig(is_mla_model=True, tp_size=tp), args)
        except gdskv.ConfigError as error:
            assert "--dp-size" in str(error)
            return True
        return False

    assert refused(2, 16, 16) and refused(4, 8, 8, stages=2)
    assert not refused(1, 8, 8) and not refused(2, 16, 8) and not refused(2, 8, 8, stages=2)


def test_replicas_take_the_next_free_folder_and_one_more_is_refused(make: Make, tmp_path: Path) -> None:
    for _ in range(2):
        make(replicas=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["rank0", "replica1-rank0"]
    with pytest.raises(gdskv.DirectoryBusy):
        make(replicas=2)
    third = StandInConfig()
    third.dp_rank = 2  # type: ignore[attr-defined]  # as of 0.5.23
    make(config=third, replicas=3)
    assert (tmp_path / "replica2-rank0").is_dir()


def test_the_namespace_tells_apart_all_that_bytes_depend_on() -> None:
    def digest(args: dict[str, Any] | None = None, pool: Any = None, zero_copy: bool = True, **config: Any) -> bytes:
        shape = sglang_settings.geometry(pool or StandInHostPool(4), zero_copy)
        made = StandInConfig(**config)
        return sglang_settings.namespace(made, shape, SimpleNamespace(**(args or {}))).digest(shape.layout)

    other = StandInHostPool(4)
    other.layout = "page_first_direct"
    kinds = [
        digest(),
        digest(zero_copy=False),
        digest(pool=other),
        digest(pool=StandInHostPool(4, page_size=8)),
        digest(pool=StandInHostPool(4, pieces=1, piece=8192)),
        digest(tp_size=2),
        digest(tp_size=2, tp_rank=1),
        digest(pp_size=2),
        digest(attn_cp_size=2, attn_cp_rank=1),
        digest(is_mla_model=True),
        digest(model_name="other"),
        digest(extra_config={"revision": "b"}),
        digest({"kv_cache_dtype": "fp8_e5m2"}),
        digest({"model_path": "llama", "revision": "c"}),
        digest({"dtype": "float16"}),
        digest({"load_format": "dummy", "random_seed": 1}),
        digest({"load_format": "dummy", "random_seed": 2}),
    ]
    assert len(set(kinds)) == len(kinds) and digest() == kinds[0]
