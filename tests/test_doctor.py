"""gdskv doctor: each finding over system files of our own, and the command on this node."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Command

from gdskv.doctor import findings
from gdskv.io.modes import nvidia_fs_bytes

THP = "sys/kernel/mm/transparent_hugepage/enabled"
LIMIT = "Limit                     Soft Limit\nMax locked memory         {}              65536                bytes\n"
NODE = [  # files, finding, whether it is well, in its value
    ({}, "nvidia-fs", False, "not loaded"),
    ({"proc/driver/nvidia-fs/stats": "Reads : n=1 readMiB=3\n"}, "nvidia-fs", True, "loaded"),
    (
        {"proc/sys/kernel/osrelease": "6.8.0-x", "boot/config-6.8.0-x": "CONFIG_PCI_P2PDMA=y"},
        "nvidia-fs",
        True,
        "P2PDMA",
    ),
    ({"proc/sys/kernel/osrelease": "5.4.0", "boot/config-5.4.0": "CONFIG_PCI_P2PDMA=y"}, "nvidia-fs", False, "not"),
    ({}, "/run/udev", False, "missing"),
    ({"run/udev/data": ""}, "/run/udev", True, "there"),
    ({THP: "always madvise [never]"}, "huge pages", False, "never"),
    ({THP: "always [madvise] never"}, "huge pages", True, "madvise"),
    ({"proc/self/limits": LIMIT.format(65536)}, "locked memory", False, "65536"),
    ({"proc/self/limits": LIMIT.format("unlimited")}, "locked memory", True, "unlimited"),
    ({}, "cufile.json", True, "defaults"),
    ({"etc/cufile.json": '{\n "allow_compat_mode": true\n}'}, "cufile.json", False, "allows compat"),
    ({"etc/cufile.json": '{\n "allow_compat_mode": false\n}'}, "cufile.json", True, "cufile.json"),
]
MOUNTS = """\
1 0 0:30 / / rw - overlay overlay rw,lowerdir=/a
2 1 259:1 / /nvme rw,noatime - ext4 /dev/nvme0n1 rw
3 1 259:2 / /journal rw - ext4 /dev/nvme1n1 rw,data=journal
4 1 0:40 / /dev/shm rw - tmpfs tmpfs rw
5 1 8:1 / /a\\040b rw - xfs /dev/sda1 rw
"""


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("files", "name", "ok", "value"), NODE)
def test_a_finding_on_the_node(tmp_path, monkeypatch, files, name, ok, value):
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    (found,) = [f for f in findings.node(lay(tmp_path, files)) if f.name == name]
    assert found.ok is ok and value in found.value
    assert bool(found.remedy) is not ok


@pytest.mark.parametrize(
    ("directory", "system", "device", "value"),
    [
        ("/kv", "overlay", "", "overlayfs cannot register"),
        ("/nvme/kv", "ext4", "nvme0n1", None),
        ("/journal", "ext4", "nvme1n1", "journals data"),
        ("/dev/shm/kv", "tmpfs", "", "in memory"),
        ("/a b/kv", "xfs", "sda1", "no local NVMe"),
        ("/nvme2", "overlay", "", "overlayfs"),
    ],
)
def test_a_finding_on_a_directory(tmp_path, directory, system, device, value):
    place = findings.place(directory, lay(tmp_path, {"proc/self/mountinfo": MOUNTS}))
    assert (place.file_system, place.device) == (system, device)
    assert [value in f.value for f in place.findings] == ([True] if value else [])


@pytest.mark.parametrize(
    ("drive", "ok", "value"),
    [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:03:00.0/nvme/nvme0", True, "4 PCIe hops, below one"),
        ("pci0000:00/0000:00:1d.0/0000:05:00.0/nvme/nvme0", True, "same socket"),
        ("pci0000:40/0000:40:01.0/0000:41:00.0/nvme/nvme0", True, "same socket"),
        ("pci0000:80/0000:80:01.0/0000:81:00.0/nvme/nvme0", False, "another socket"),
        ("virtual/nvme-subsystem", None, ""),
    ],
)
def test_how_far_a_drive_is_from_a_gpu(tmp_path, drive, ok, value):
    devices, gpu = tmp_path / "sys/devices", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:04:00.0"
    nodes = {"0000:04:00.0": "0", "0000:03:00.0": "0", "0000:05:00.0": "0", "0000:41:00.0": "0", "0000:81:00.0": "1"}
    for path in (gpu, drive):
        (devices / path).mkdir(parents=True)
    by_address = tmp_path / "sys/bus/pci/devices"
    by_address.mkdir(parents=True)
    for folder in [p for p in devices.rglob("0000:*") if p.name in nodes]:
        (folder / "numa_node").write_text(nodes[folder.name] + "\n")
        (by_address / folder.name).symlink_to(folder)
    (devices / drive / "nvme0n1").mkdir()
    (tmp_path / "sys/block").mkdir()
    (tmp_path / "sys/block/nvme0n1").symlink_to(devices / drive / "nvme0n1")
    found = findings.distance("nvme0n1", "0000:04:00.0", tmp_path)
    assert (found is None) == (ok is None)
    assert found is None or (found.ok is ok and value in found.value and bool(found.remedy) is not ok)
    assert findings.distance("nvme9n1", "0000:04:00.0", tmp_path) is None
    assert findings.distance("nvme0n1", "", tmp_path) is None


def test_nvidia_fs_counts_reads_and_writes(tmp_path):
    stats = "Reads : n=63 ok=63 err=0 readMiB=63 io_state_err=0\nWrites : n=2 ok=2 err=0 writeMiB=2\n"
    assert nvidia_fs_bytes(str(lay(tmp_path, {"proc/driver/nvidia-fs/stats": stats}))) == 65 << 20
    assert nvidia_fs_bytes(str(tmp_path / "none")) is None


@pytest.fixture
def gdskv(monkeypatch, capsys) -> Command:
    return Command(monkeypatch, capsys)


def test_doctor_says_the_mode_the_reason_and_the_speed(gdskv, tmp_path):
    answer = gdskv("doctor", tmp_path, "--json")
    (place,) = answer.json["directories"]
    assert answer.code == answer.json["exit"] == (place["mode"] != "direct")
    assert place["why"] and place["write"] > 0 and place["read"] > 0
    assert list(tmp_path.iterdir()) == []
    assert gdskv("doctor", tmp_path, "--require-gds").code in (0, 2)


def test_a_directory_that_cannot_work_is_exit_2_with_a_remedy(gdskv, tmp_path):
    answer = gdskv("doctor", tmp_path / "none")
    assert answer.code == 2 and "remedy: make" in answer.out and "No such file" in answer.out


def test_effective_settings_and_where_they_came_from(gdskv, tmp_path):
    file = tmp_path / "kv.toml"
    file.write_text(f"disk_bytes = '1GiB'\ndirectories = ['{tmp_path}']\n")
    settings = gdskv("doctor", "--config", file, "--json").json["settings"]
    assert settings["disk_bytes"] == {"value": 1 << 30, "from": f"file {file}"}
    assert settings["io"] == {"value": "auto", "from": "default"}
