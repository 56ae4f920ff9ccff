"""The disk pool on real directories: what it takes, what it refuses, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdskv import DirectoryBusy, DirectoryError, GdskvError
from gdskv.pools.disk import SLAB_HEADER, SLAB_NAME, DiskPool

MIB = 1 << 20
DIGEST = bytes(range(16))
TESTS = Path(__file__).resolve().parent


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[object]:
    """Return a function that mounts a file system under tmp_path; skips the test where that is not allowed."""
    with contextlib.ExitStack() as undo:

        def mount(name: str, *options: str) -> Path:
            point = tmp_path / name
            point.mkdir()
            done = subprocess.run(["mount", *options, str(point)], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"cannot mount here: {done.stderr.strip()}")
            undo.callback(subprocess.run, ["umount", str(point)], check=True)
            return point

        yield mount


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def open_elsewhere(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a pool in `folder` until its standard input ends."""
    code = (
        "import sys; from gdskv.pools.disk import DiskPool;"
        f"p = DiskPool([{str(folder)!r}], {MIB}, 4096, {DIGEST!r}, 0); print('open', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS.parent
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def test_space_is_taken_at_open(tmp_path):
    pool = DiskPool([tmp_path], 10 * MIB + 5000, 65536, DIGEST, 0)
    assert (pool.blocks, pool.bytes_asked, pool.bytes_used) == (160, 10 * MIB + 5000, 10 * MIB)
    (slab,) = pool.slabs
    (info,) = pool.directories
    status = os.fstat(slab.fd)
    assert status.st_size == slab.size == info.bytes == SLAB_HEADER + 10 * MIB
    assert status.st_blocks * 512 >= 10 * MIB, "preallocated, not sparse"
    assert status.st_mode & 0o077 == 0, "nobody else reads other people's prompts"
    assert info.mode == ("direct" if slab.direct else "buffered") and info.why and info.file_system
    assert names(tmp_path) == {"gdskv.lock", DIGEST.hex(), f"{DIGEST.hex()}/{SLAB_NAME}"}
    pool.close()
    pool.close()
    assert names(tmp_path) == {DIGEST.hex(), f"{DIGEST.hex()}/{SLAB_NAME}"}, "the slab stays for the next owner"


def test_slots_go_evenly_over_the_directories(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    pool = DiskPool(folders, 100 * 4096, 4096, DIGEST, 0)
    assert [info.blocks for info in pool.directories] == [34, 33, 33]
    assert pool.first_slot == [0, 34, 67]
    assert [slab.lane for slab in pool.slabs] == [0, 1, 2]
    assert [pool.locate(slot) for slot in (0, 33, 34, 66, 67, 99)] == [
        (0, SLAB_HEADER),
        (0, SLAB_HEADER + 33 * 4096),
        (1, SLAB_HEADER),
        (1, SLAB_HEADER + 32 * 4096),
        (2, SLAB_HEADER),
        (2, SLAB_HEADER + 32 * 4096),
    ]
    for slot in (-1, 100):
        with pytest.raises(IndexError):
            pool.locate(slot)
    pool.close()


@pytest.mark.parametrize("later", [5 * MIB, 10 * MIB, 20 * MIB])
def test_a_slab_of_an_earlier_owner_is_used_again(tmp_path, later):
    with contextlib.closing(DiskPool([tmp_path], 10 * MIB, 4096, DIGEST, 0)) as pool:
        inode = os.fstat(pool.slabs[0].fd).st_ino
    with contextlib.closing(DiskPool([tmp_path], later, 4096, DIGEST, 0)) as pool:
        status = os.fstat(pool.slabs[0].fd)
        assert status.st_ino == inode
        assert status.st_size == SLAB_HEADER + max(later, 10 * MIB), "what is beyond the end may have to be moved first"
        pool.trim()
        status = os.fstat(pool.slabs[0].fd)
        assert status.st_size == SLAB_HEADER + later and status.st_blocks * 512 >= later
    assert names(tmp_path) == {DIGEST.hex(), f"{DIGEST.hex()}/{SLAB_NAME}"}


def test_what_an_earlier_owner_holds_counts_as_free(tmp_path, monkeypatch):
    DiskPool([tmp_path], 10 * MIB, 4096, DIGEST, 0).close()
    free_now(monkeypatch, 2 * MIB)
    DiskPool([tmp_path], 12 * MIB, 4096, DIGEST, 0).close()
    with pytest.raises(DirectoryError, match=r"does not fit .*14.00MiB free"):
        DiskPool([tmp_path], 16 * MIB, 4096, DIGEST, 0)


def test_what_other_namespaces_hold_counts_as_used(tmp_path):
    DiskPool([tmp_path], 10 * MIB, 4096, DIGEST, 0).close()
    before = names(tmp_path)
    with pytest.raises(
        DirectoryError, match=r"disk_bytes=12MiB .* 12MiB beside the 10MiB .* gdskv inspect .* --reclaim"
    ):
        DiskPool([tmp_path], 12 * MIB, 4096, bytes(16), 0)
    assert names(tmp_path) == before


def free_now(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let every file system have 100 GiB, and `size` of it free."""
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        values = list(real(path))
        values[1], values[2], values[4] = 4096, (100 << 30) // 4096, size // 4096
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)


def refused(folders: list[Path], disk_bytes: int = MIB, min_free: float = 0, slot: int = 4096) -> str:
    """The message with which a pool is refused; nothing may be left behind or held."""
    before = [names(folder) if folder.is_dir() else set() for folder in folders]
    with pytest.raises(DirectoryError) as caught:
        DiskPool(folders, disk_bytes, slot, DIGEST, min_free)
    assert isinstance(caught.value, GdskvError) and isinstance(caught.value, OSError)
    assert [names(folder) if folder.is_dir() else set() for folder in folders] == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_directory_is_refused(tmp_path):
    good, missing = tmp_path / "good", tmp_path / "missing"
    good.mkdir()
    assert (
        refused([good, missing])
        == f"{missing} does not exist. Create it (mkdir -p {missing}), or choose another directory."
    )
    assert not missing.exists()
    DiskPool([good], MIB, 4096, DIGEST, 0).close()  # the lock of the good one was let go


def test_a_file_is_no_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("content")
    assert f"{file} is not a directory" in refused([file])
    assert file.read_text() == "content"


def test_a_read_only_directory_is_refused(mounted):
    folder = mounted("ro", "-t", "tmpfs", "-o", "ro", "none")
    assert refused([folder]) == (
        f"{folder} cannot be written: Read-only file system. Make it writable, or choose another directory."
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o555)
    assert "cannot be written: Permission denied" in refused([folder])


def test_a_cap_above_the_free_space_is_refused_with_both_numbers(tmp_path, monkeypatch):
    free_now(monkeypatch, 20 << 30)
    assert refused([tmp_path], 30 << 30, 0.05) == (
        f"disk_bytes=30GiB does not fit {tmp_path}: 20GiB free, 5% (5GiB) must stay free. "
        "Lower disk_bytes to at most 14.99GiB, or min_free."
    )
    assert "20GiB free, 1GiB must stay free. Lower disk_bytes to at most 18.99GiB" in refused(
        [tmp_path], 30 << 30, 1 << 30
    )
    assert refused([tmp_path], 30 << 30, 0.5).endswith("must stay free. Free some space, or lower min_free.")


def test_what_the_message_says_fits_does_fit(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    free_now(monkeypatch, 10 * MIB + 2 * SLAB_HEADER + 5000)
    message = refused(folders, 64 * MIB, MIB)
    assert "Lower disk_bytes to at most 9MiB" in message
    DiskPool(folders, 9 * MIB, 4096, DIGEST, MIB).close()


def test_directories_on_one_file_system_share_its_space(tmp_path, monkeypatch):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    free_now(monkeypatch, 20 << 30)
    assert "Lower disk_bytes to at most 19.99GiB" in refused(folders, 24 << 30)


def test_a_cap_below_one_block_a_directory_is_refused(tmp_path):
    assert "less than one block of 64KiB for each of 1 directories" in refused([tmp_path], 4096, slot=65536)


def test_a_full_disk_at_the_last_moment_leaves_nothing(tmp_path, mounted):
    small = mounted("small", "-t", "tmpfs", "-o", "size=4m", "none")
    with pytest.MonkeyPatch.context() as patch:
        free_now(patch, 1 << 30)  # somebody else took the space after we looked
        message = refused([small], 8 * MIB)
    assert message == f"{small} did not give 8.00MiB: No space left on device. Lower disk_bytes, or free some space."
    other = tmp_path / "other"
    other.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        free_now(patch, 1 << 30)
        refused([other, small], 16 * MIB)


def test_an_older_slab_keeps_its_size_when_the_next_owner_is_refused(tmp_path, mounted):
    small = mounted("small", "-t", "tmpfs", "-o", "size=4m", "none")
    DiskPool([small], MIB, 4096, DIGEST, 0).close()
    with pytest.MonkeyPatch.context() as patch:
        free_now(patch, 1 << 30)
        refused([small], 8 * MIB)
    assert (small / DIGEST.hex() / SLAB_NAME).stat().st_size == SLAB_HEADER + MIB


def test_a_file_system_that_cannot_preallocate_is_refused(tmp_path, mounted):
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    made = subprocess.run(["mkfs.ext2", "-q", str(image)], capture_output=True)
    if made.returncode:
        pytest.skip("mkfs.ext2 does not run here")
    folder = mounted("old", "-o", "loop", str(image))
    assert f"{folder} is on ext2, which cannot preallocate a file. Use a directory on ext4 or xfs." == refused([folder])


def test_tmpfs_is_allowed_and_says_that_it_is_buffered(mounted):
    folder = mounted("tmp", "-t", "tmpfs", "-o", "size=8m", "none")
    with contextlib.closing(DiskPool([folder], MIB, 4096, DIGEST, 0)) as pool:
        (info,) = pool.directories
        assert (info.mode, info.file_system) == ("buffered", "tmpfs")
        assert info.why == "tmpfs keeps files in memory"
        assert not pool.slabs[0].direct


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_where_direct_io_does_not_work_the_pool_is_buffered_and_says_why(tmp_path, monkeypatch, call):
    def fails(*arguments: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, call, fails)
    with contextlib.closing(DiskPool([tmp_path], MIB, 4096, DIGEST, 0)) as pool:
        (info,) = pool.directories
        assert info.mode == "buffered" and info.why
        assert len(os.listdir("/proc/self/fd")) < 200


def test_the_probe_keeps_what_is_in_the_slab(tmp_path):
    content = os.urandom(SLAB_HEADER + MIB)
    with contextlib.closing(DiskPool([tmp_path], MIB, 4096, DIGEST, 0)):
        (tmp_path / DIGEST.hex() / SLAB_NAME).write_bytes(content)
    with contextlib.closing(DiskPool([tmp_path], MIB, 4096, DIGEST, 0)):
        assert (tmp_path / DIGEST.hex() / SLAB_NAME).read_bytes() == content


def test_a_second_pool_in_this_process_is_refused(tmp_path):
    link = tmp_path / "link"
    folder = tmp_path / "folder"
    folder.mkdir()
    link.symlink_to(folder)
    with contextlib.closing(DiskPool([folder], MIB, 4096, DIGEST, 0)) as pool:
        for again in (folder, link):
            with pytest.raises(DirectoryBusy, match=f"{again} is in use by this process already. One process per"):
                DiskPool([again], MIB, 4096, bytes(16), 0)
        assert pool.slabs
        other = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from gdskv.pools.disk import DiskPool; DiskPool([{str(folder)!r}], 4096, 4096, b'')",
            ],
            capture_output=True,
            text=True,
            cwd=TESTS.parent,
        )
        assert f"is in use by process {os.getpid()} since" in other.stderr, "a refusal does not lose the lock"
    DiskPool([folder], MIB, 4096, DIGEST, 0).close()


def test_the_lock_of_another_process_is_respected_and_ends_with_it(tmp_path):
    with open_elsewhere(tmp_path) as process:
        message = refused([tmp_path])
        assert message.startswith(f"{tmp_path} is in use by process {process.pid} since ")
        assert message.endswith("One process per directory: choose another, or stop that one.")
        process.kill()
    assert (tmp_path / "gdskv.lock").exists(), "it had no time to tidy up"
    with contextlib.closing(DiskPool([tmp_path], MIB, 4096, DIGEST, 0)):
        holder = json.loads((tmp_path / "gdskv.lock").read_text())
        assert holder["pid"] == os.getpid() and holder["host"] and holder["since"] > 0 and "boot" in holder
    assert not (tmp_path / "gdskv.lock").exists()


def test_a_forked_child_neither_holds_nor_loses_the_directory(tmp_path):
    pool = DiskPool([tmp_path], MIB, 4096, DIGEST, 0)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            pool.close()
            try:
                DiskPool([tmp_path], MIB, 4096, DIGEST, 0)
            except DirectoryBusy as error:
                code = 0 if f"process {os.getppid()} " in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "gdskv.lock").exists()
    with pytest.raises(DirectoryBusy):
        DiskPool([tmp_path], MIB, 4096, DIGEST, 0)
    pool.close()


def test_many_opens_leave_no_descriptors(tmp_path):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(20):
        DiskPool([tmp_path], MIB, 4096, DIGEST, 0).close()
        refused([tmp_path / "missing"])
        refused([tmp_path], 1 << 50)
    assert descriptors() == before
