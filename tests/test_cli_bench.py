"""``gdskv bench``: with tiny sizes, so that what is shown here is how results look and that nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import Command

from gdskv.cli import bench_busy, bench_engine, bench_io, bench_kvikio, bench_records, reference

FIELDS = {"name", "value", "unit", "reference", "reference_name", "ratio"}


@pytest.fixture
def gdskv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, with short rounds and no fio."""
    for module in (bench_io, bench_busy):
        monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(bench_io, "LONG_S", 0.005)
    monkeypatch.setattr(bench_io, "SHORT_S", 0.005)
    monkeypatch.setattr(bench_io, "SINGLES", 20)
    monkeypatch.setattr(bench_io, "DEPTHS", (1,))
    monkeypatch.setattr(bench_records, "MOVED", 64 << 20)
    monkeypatch.setattr(reference.shutil, "which", lambda name: None)
    return Command(monkeypatch, capsys)


def test_io_shows_each_figure_beside_its_reference(gdskv: Command, tmp_path: Path) -> None:
    places = tmp_path / "disk"
    places.mkdir()
    picture = tmp_path / "io.png"
    answer = gdskv("bench", "io", "--dir", places, "--size-gib", 0.1, "--sizes", "64KiB", "--plot", picture, "--json")
    assert answer.code == 0
    results = {result["name"]: result for result in answer.json["results"]}
    assert all(set(result) == FIELDS for result in results.values())
    for name in ("read 2MiB qd16", "write 64KiB qd16", "read 64KiB p99 idle"):
        assert results[name]["reference_name"].startswith("threads with pread and pwrite")
        assert results[name]["value"] > 0 and results[name]["ratio"] > 0
    assert results["cpu of read checksums off"]["unit"] == "ms/GB", "of so short a run it may be 0"
    assert {"read 128KiB consecutive", "read 64KiB p99 beside writes", "write beside reads"} <= set(results)
    assert {"first write 2MiB qd16", "spill 128KiB with records", "mixed 2MiB qd16"} <= set(results)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(places.iterdir())


def test_stall_counts_only_if_all_was_admitted_and_kept(gdskv: Command, tmp_path: Path) -> None:
    answer = gdskv("bench", "stall", "--dir", tmp_path, "--requests", 5, "--blocks", 20, "--json")
    assert answer.code == 0
    counts = answer.json["counts"]
    assert (counts["admitted"], counts["rejected"], counts["shed"], counts["failed"]) == (15, 0, 0, 0)
    names = [result["name"] for result in answer.json["results"]]
    assert names[:5] == [f"{call} p99.9" for call in ("match", "allocate", "commit", "release", "poll")]
    assert not list(tmp_path.iterdir())


def test_policy_shows_each_call_beside_the_other_order(gdskv: Command, tmp_path: Path) -> None:
    sizes = ("--device-blocks", 300, "--host-blocks", 200, "--disk-blocks", 900, "--block-bytes", "4KiB")
    answer = gdskv("bench", "policy", "--dir", tmp_path, "--limit", 150, "--rounds", 1, *sizes, "--json")
    assert answer.code == 0 and answer.json["wrong_blocks"] == 0
    results = {result["name"]: result for result in answer.json["results"]}
    for call in ("match", "allocate", "commit", "release"):
        assert results[f"{call} p99.9"]["reference"] > 0 and results[f"{call} p99.9"]["value"] > 0
    assert sum(name.startswith("record") for name in results) == 2
    assert not list(tmp_path.iterdir())


def test_busy_compares_times_of_both_directions(gdskv: Command, tmp_path: Path) -> None:
    answer = gdskv("bench", "busy", "--dir", tmp_path, "--size-gib", 0.1, "--json")
    assert answer.code == 0
    assert [result["name"] for result in answer.json["results"]] == ["read 1MiB busy", "write 1MiB busy"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--sizes", "1000"), "multiple of 4096"), (("--io", "tape"), "Use posix")],
)
def test_io_refuses_what_it_cannot_measure(gdskv: Command, arguments: tuple[str, str], says: str) -> None:
    answer = gdskv("bench", "io", *arguments)
    assert answer.code != 0 and answer.out == ""
    assert says in " ".join(answer.err.split())


@pytest.mark.parametrize("bench", ["io", "stall", "busy", "recovery", "policy"])
def test_a_directory_that_is_not_there_is_named(gdskv: Command, tmp_path: Path, bench: str) -> None:
    answer = gdskv("bench", bench, "--dir", tmp_path / "none")
    assert answer.code != 0 and answer.out == ""
    assert f"--dir={tmp_path / 'none'}: no folder can be made in it: No such file" in answer.err


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not here")
def test_fio_reads_and_writes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    chosen = reference.choose(file, 1 << 20, direct=False)
    assert chosen.name in ("fio io_uring buffered", "threads with pread and pwrite, buffered")
    for op in ("read", "write", "rw"):
        assert chosen.run(op, 4096, 4, 0.05, 0).gb_s > 0


GDSIO = """#!/bin/sh
echo "$@" >{log}
echo "IoType: READ XferType: GPUD Threads: 4 DataSetSize: 1/1(KiB) IOSize: 1024(KiB) {throughput} total_time 1 secs"
"""


def test_gdsio_is_asked_for_gpu_memory_and_understood(tmp_path: Path) -> None:
    program, log = tmp_path / "gdsio", tmp_path / "log"  # a double of NVIDIA's program
    program.write_text(GDSIO.format(log=log, throughput="Throughput: 6.500000 GiB/sec, Avg_Latency: 589.4 usecs"))
    program.chmod(0o755)
    gdsio = bench_kvikio.Gdsio(str(program), tmp_path / "file", 1 << 30)
    assert gdsio.run("write", 1 << 20, 4).gb_s == pytest.approx(6.5 * 1.073741824)
    asked = f"-f {tmp_path}/file -d 0 -x 0 -I 1 -w 4 -s {1 << 30} -i {1 << 20} -T 1"
    assert log.read_text().split() == asked.split()
    program.write_text(GDSIO.format(log=log, throughput="Error: no nvidia-fs"))
    with pytest.raises(OSError, match=r"gdsio measured nothing: .*no nvidia-fs"):
        gdsio.run("read", 1 << 20, 4)


def test_kvikio_is_refused_in_words_where_it_cannot_be(gdskv: Command, tmp_path: Path) -> None:
    from gdskv.io.modes import missing

    if missing() is None:
        pytest.skip("KvikIO works here")
    answer = gdskv("bench", "io", "--io", "kvikio", "--dir", tmp_path, "--size-gib", 0.1, "--sizes", "64KiB")
    assert answer.code != 0 and "--io=kvikio cannot be measured here" in answer.err
    assert not list(tmp_path.iterdir())


def test_engine_without_vllm_says_what_is_missing(gdskv: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "find_spec", lambda name: None)
    answer = gdskv("bench", "engine", "--json")
    assert answer.code == 2 and answer.out == ""
    assert "needs vLLM, which is not here" in answer.err
