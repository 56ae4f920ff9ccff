"""Two ranks of an MLA model in two processes: rank 0 writes and keeps the pages, both read the same bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from real import PAGE

N = 12
Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Ranks] = []
    (tmp_path / "kv").mkdir()

    def build(layout: str, zero_copy: bool, **settings: Any) -> Ranks:
        started.append(Ranks(tmp_path, tmp_path / "kv", layout, zero_copy, True, **settings))
        return started[-1]

    yield build
    for ranks in started:
        ranks.end()


@pytest.mark.parametrize(("layout", "zero_copy"), [("page_first", True), ("layer_first", True), ("page_first", False)])
def test_both_ranks_read_what_rank_0_wrote_also_after_a_restart(
    start: Start, tmp_path: Path, layout: str, zero_copy: bool
) -> None:
    ranks = start(layout, zero_copy)
    want = ranks.all("noise", 1)[0]
    assert ranks.all("prefetch", 1, N) == [0, 0]
    assert ranks.all("backup", 1, N) == [N * PAGE, 0]  # SGLang has rank 0 alone write
    for again in range(2):
        ranks.all("wipe")
        assert ranks.all("prefetch", 1, N + 3) == [N, N]
        assert [have[:N] for have in ranks.all("digests")] == [want[:N]] * 2
        first, second = ranks.all("stats")
        assert (first["errors"], second["errors"], second["rank0_unanswered"]) == (0, 0, 0)
        assert second["pages_loaded"] == N and bool(first["recovered"]) == bool(again)
        if not again:
            ranks.close()
            ranks = start(layout, zero_copy)
    assert [folder.name for folder in (tmp_path / "kv").iterdir()] == ["rank0"]


def test_a_page_is_itself_or_a_miss_on_both_ranks_when_reads_fail(start: Start) -> None:
    ranks = start("page_first", True, faulty=True, host_bytes="1MiB", disk_bytes="16MiB")
    want: dict[int, list[bytes]] = {}
    pages = short = 0
    for document in [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]:
        ranks.all("wipe")
        counts = ranks.all("prefetch", document, N)
        assert counts[0] == counts[1]  # they agree
        if document in want:
            n = counts[0]
            assert [have[:n] for have in ranks.all("digests")] == [want[document][:n]] * 2
            pages, short = pages + n, short + (n < N)
        want[document] = ranks.all("noise", document)[0]
        ranks.all("backup", document, N)
    assert pages > N and short > 0


def test_without_rank_0_everything_is_a_miss_and_nothing_waits_for_good(start: Start) -> None:
    ranks = start("page_first", True, io_timeout=0.5)
    ranks.all("noise", 1)
    ranks.all("backup", 1, N)
    assert ranks.one(1, "get", 1, N) == N
    for way, counted in ((signal.SIGSTOP, 1), (signal.SIGKILL, 2)):
        process = ranks.processes[0].pid
        assert process is not None
        os.kill(process, way)
        if way == signal.SIGKILL:
            ranks.processes[0].join()
        assert ranks.one(1, "get", 1, N) == 0
        assert ranks.one(1, "stats")["rank0_unanswered"] == counted
