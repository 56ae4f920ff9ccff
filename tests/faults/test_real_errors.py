"""Errors that a real kernel reports: full, aborted, removed, shrunk. No call raises, and no byte is wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from faults import NOTES, audit, book, open_engine, open_store, settings, work
from harness import Engine
from mounts import MIB, mounted, run

import gdskv


def serve(engine: Engine, seed: int, kind: str, requests: int = 60) -> None:
    """Requests go on, each block that comes is right, and the table stays sound."""
    before = engine.verified
    work(engine, np.random.default_rng(seed), requests=requests)
    engine.drain()
    engine.kv.check()
    book(kind, injected=1, served_right=engine.verified - before, wrong=0)  # the harness raises at a wrong byte


def fill_up(place: Path) -> None:
    """Somebody else's data takes all that is left."""
    with open(place / "foreign", "wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while True:
                    file.write(b"\xaa" * size)
            except OSError:
                continue


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_a_file_system_that_others_fill_up_does_not_matter(tmp_path: Path, kind: str) -> None:
    """D1 and D7 of the cases, from the other side: the space was taken at open."""
    with mounted(kind, tmp_path) as place:
        engine = open_engine(settings(place))
        with engine.kv:
            fill_up(place)
            assert os.statvfs(place).f_bavail * os.statvfs(place).f_frsize < MIB
            serve(engine, 1, f"real, full {kind}")
            stats = engine.kv.stats()
            assert stats["write_errors"] == stats["failed_writes"] == 0
            assert stats["spills"] > 0
        with contextlib.suppress(gdskv.DirectoryError):  # there may be no place for a lock file or a superblock
            open_store(settings(place)).close()
        (place / "foreign").unlink()
        with open_store(settings(place)) as store:
            found = audit(store)
            assert found.wrong == 0
            assert len(found.right) == store.ledger.recovered.blocks > 0


def test_a_full_file_system_is_refused_at_open_with_both_numbers(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path, size=4 * MIB) as place:
        fill_up(place)
        with pytest.raises(gdskv.DirectoryError, match=r"does not fit .* free"):
            open_engine(settings(place))
        assert [path.name for path in place.iterdir()] == ["foreign"]


def test_a_file_system_that_turns_read_only_is_served_from(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as place:
        engine = open_engine(settings(place))
        serve(engine, 1, "real, read-only ext4")
        run("mount", "-o", "remount,abort", place)
        serve(engine, 2, "real, read-only ext4")
        stats = engine.kv.stats()
        NOTES.append(
            f"ext4 aborted while open: {stats['write_errors']} write errors, "
            f"{stats['directories_read_only']} directory read-only"
        )
        assert stats["rejected"] == 0
        engine.kv.close()


def test_a_device_that_shrinks_under_its_file_system_gives_real_read_errors(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as place:
        engine = open_engine(settings(place))
        serve(engine, 1, "real, device gone")
        subprocess.run(["sync"], check=True)
        os.truncate(tmp_path / "ext4.image", MIB)
        serve(engine, 2, "real, device gone")
        stats = engine.kv.stats()
        NOTES.append(
            f"loop device cut off under ext4: {stats['failed_reads']} reads and {stats['failed_writes']} writes failed"
        )
        assert stats["failed_reads"] + stats["failed_writes"] > 0
        engine.kv.close()


@pytest.mark.parametrize("what", ["removed", "truncated"])
@pytest.mark.parametrize("name", ["blocks.slab", "slots.dir", "state.dir", "superblock"])
def test_a_file_that_goes_away_while_open_costs_its_blocks(tmp_path: Path, name: str, what: str) -> None:
    engine = open_engine(settings(tmp_path))
    serve(engine, 1, f"real, file {what}")
    path = next(tmp_path.glob(f"*/{name}"))
    if what == "removed":
        path.unlink()
    else:
        os.truncate(path, 0)
    serve(engine, 2, f"real, file {what}")
    engine.kv.close()
    with open_store(settings(tmp_path)) as store:
        found = audit(store)
        book(f"real, file {what}", served_right=len(found.right), refused=found.refused, wrong=found.wrong)
        assert found.wrong == 0


def test_errors_of_a_device_mapper_target(tmp_path: Path) -> None:
    """The error target where the kernel has device-mapper; the wrapping engine of tests/test_failing.py runs always."""
    targets = (
        subprocess.run(["dmsetup", "targets"], capture_output=True, text=True) if shutil.which("dmsetup") else None
    )
    if targets is None or targets.returncode:
        NOTES.append(
            "device-mapper: not in this kernel; errors came from the wrapping engine and a cut-off loop device"
        )
        pytest.skip("no device-mapper in this kernel")
    NOTES.append(f"device-mapper: {' '.join(targets.stdout.split())}; not used yet")
    pytest.skip("device-mapper is there and not used yet")


def test_a_directory_removed_while_open_is_not_missed(tmp_path: Path) -> None:
    place = tmp_path / "kv"
    place.mkdir()
    engine = open_engine(settings(place))
    serve(engine, 1, "real, directory removed")
    shutil.rmtree(place)
    before = engine.verified
    serve(engine, 2, "real, directory removed")
    assert engine.verified > before, "blocks are served on, from files that have no name any more"
    engine.kv.close()
    assert not place.exists()
    place.mkdir()
    with open_engine(settings(place)).kv as again:
        assert again.store.ledger.recovered.blocks == 0


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_directory_without_permission_is_refused_in_words(tmp_path: Path, mode: int) -> None:
    """Asked by a user to whom modes apply, in a forked child."""
    place = tmp_path / "kv"
    place.mkdir()
    place.chmod(mode)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == os.geteuid() and str(parent) != "/tmp":
            parent.chmod(0o755)
    ask, answer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            open_engine(settings(place))
            os.write(answer, b"opened")
        except gdskv.DirectoryError as error:
            os.write(answer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(answer)
    said = os.read(ask, 4096).decode()
    place.chmod(0o755)
    assert "writ" in said or "looked at" in said
    assert "another directory" in said
