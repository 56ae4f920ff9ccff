"""gdskv below SGLang's own controller, its threads and its host pools, on CPU tensors: bit-exact, or a counted miss."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real import PAGE, Sglang, until  # first: it puts doubles in the place of what needs a GPU

import torch  # isort: skip
from doubles import Fail, FaultEngine, Flip, Short

from gdskv.engines.sglang import GdskvStorage
from gdskv.io.base import COPY, READ

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
KINDS = [(layout, zero_copy, False) for layout in LAYOUTS for zero_copy in (False, True)]
KINDS += [(layout, zero_copy, True) for layout in LAYOUTS[:3] for zero_copy in (False, True)]
N = 12


def name(kind: tuple[str, bool, bool]) -> str:
    return f"{'mla' if kind[2] else 'mha'}-{kind[0]}-{'v1' if kind[1] else 'generic'}"


@pytest.fixture(params=KINDS, ids=name)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def no_injector() -> Iterator[None]:
    yield
    GdskvStorage.io = None


def same(have: list[torch.Tensor], want: list[torch.Tensor], n: int) -> bool:
    return all(torch.equal(have[i].view(torch.uint8), want[i].view(torch.uint8)) for i in range(n))


def test_pages_come_back_bit_exact_from_host_and_after_a_restart_from_disk(kind: Any, tmp_path: Path) -> None:
    sglang = Sglang(tmp_path, *kind)
    want = sglang.fill(1)
    assert sglang.prefetch(1, N) == 0
    assert sglang.backup(1, N) == N * PAGE
    sglang.wipe()
    assert sglang.prefetch(1, N + 3) == N
    assert same(sglang.pages(), want, N)
    sglang.close()
    sglang = Sglang(tmp_path, *kind)
    assert sglang.prefetch(1, N) == N
    assert same(sglang.pages(), want, N)
    stats = sglang.backend.stats()
    assert stats["recovered"] > 0 and stats["pages_loaded"] == N and stats["errors"] == 0
    assert sglang.prefetch(2, N) == 0
    sglang.close()


def test_a_page_is_itself_or_a_counted_miss_when_reads_and_writes_fail(kind: Any, tmp_path: Path) -> None:
    dice = random.Random(7)
    faulty: list[FaultEngine] = []

    def rule(transfer: Any) -> Fail | Short | Flip | None:
        if dice.random() > 0.06:
            return None
        if transfer["op"] == READ:
            return dice.choice([Fail(errno.EIO), Short(4096), Flip(dice.randrange(4096))])
        return Fail(errno.EIO) if transfer["op"] == COPY else Fail(errno.ENOSPC)

    def wrap(engine: Any) -> FaultEngine:
        faulty.append(FaultEngine(engine, rule))
        return faulty[-1]

    GdskvStorage.io = wrap
    want: dict[int, list[torch.Tensor]] = {}
    counted = stored = 0
    for opening in range(3):
        # so small that pages leave for disk and come back
        sglang = Sglang(tmp_path, *kind, host_bytes="2MiB", disk_bytes="8MiB")
        for round in range(8):
            document = dice.randrange(6)
            want[document] = sglang.fill(document)
            stored += sglang.backup(document, N) // PAGE
            sglang.wipe()
            document = dice.choice(list(want))
            before = sglang.backend.stats()
            n = sglang.prefetch(document, N)
            assert same(sglang.pages(), want[document], n), (opening, round)
            after = sglang.backend.stats()
            asked = after["pages_asked"] - before["pages_asked"]
            assert after["pages_loaded"] - before["pages_loaded"] == n
            assert after["pages_missed"] - before["pages_missed"] == asked - n
            counted += n
        sglang.close()
    assert sum(engine.faults for engine in faulty) > 5 and counted > N and stored > N


def test_three_threads_at_once_get_their_own_bytes(tmp_path: Path) -> None:
    sglang = Sglang(tmp_path, "page_first", True, host_bytes="1MiB")
    want = sglang.fill(3)
    backend = sglang.backend
    wrong: list[str] = []

    def work(me: int) -> None:
        mine = torch.arange(me * 8 * PAGE, (me + 1) * 8 * PAGE)
        for round in range(12):
            hashes = sglang.hashes(10 + me + 4 * round, 8)
            if not all(backend.batch_set_v1(hashes, mine)):
                wrong.append(f"thread {me} could not store in round {round}")
            there = backend.batch_exists(hashes)
            got = backend.batch_get_v1(hashes, mine)
            if sum(got) != there or not all(got[:there]):
                wrong.append(f"thread {me} found {there} pages and got {got} in round {round}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and same(sglang.pages(), want, 32)
    assert backend.stats()["pages_loaded"] == 4 * 12 * 8
    sglang.close()


def test_a_chain_goes_on_behind_the_pages_that_sglang_names(tmp_path: Path) -> None:
    sglang = Sglang(tmp_path, "page_first", True)
    want = sglang.fill(4)
    sglang.backup(1, N, prefix=[])
    sglang.backup(1, N, first=N, prefix=sglang.hashes(1, N))
    sglang.wipe()
    assert sglang.prefetch(1, 2 * N) == 2 * N
    assert same(sglang.pages(), want, N) and same(sglang.pages()[N:], want, N)
    sglang.close()


def test_what_is_cleared_is_gone_also_after_a_restart(tmp_path: Path) -> None:
    sglang = Sglang(tmp_path, "page_first", True)
    sglang.fill(5)
    sglang.backup(1, N)
    until(lambda: sglang.backend.stats()["in_flight"] == 0)
    sglang.backend.clear()
    assert sglang.prefetch(1, N) == 0
    assert sglang.backup(2, N) == N * PAGE
    sglang.close()
    sglang = Sglang(tmp_path, "page_first", True)
    assert (sglang.prefetch(1, N), sglang.prefetch(2, N)) == (0, N)
    sglang.close()


def test_no_two_layouts_or_interfaces_share_pages(tmp_path: Path) -> None:
    spaces = []
    for kind in KINDS:
        (tmp_path / name(kind)).mkdir()
        Sglang(tmp_path / name(kind), *kind, disk_bytes="1MiB").close()
        spaces += [folder.name for folder in (tmp_path / name(kind) / "rank0").iterdir() if folder.is_dir()]
    assert len(set(spaces)) == len(spaces) == len(KINDS)
