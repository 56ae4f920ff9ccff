"""Facts about the node that decide how bytes move, each read under one root path, so that tests bring their own files.

Reads only; must not open a device, load a library or judge a whole node.
"""

from __future__ import annotations

import contextlib
import os
import re
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from gdskv.io.modes import nvidia_fs_bytes

__all__ = ["Finding", "Place", "distance", "node", "place"]


class Finding(NamedTuple):
    """One fact."""

    name: str
    value: str
    ok: bool
    """Whether it leaves everything possible."""
    remedy: str
    """What to do about it; empty when there is nothing to do."""


class Place(NamedTuple):
    """What holds a directory."""

    file_system: str
    device: str
    """Block device such as ``nvme0n1``; empty where there is none."""
    options: str
    numa: str
    """NUMA node of the device; empty where the system does not say."""
    findings: list[Finding]


def node(root: Path = Path("/")) -> list[Finding]:
    """Findings on the whole node: kernel side of GDS, /run/udev, huge pages, locked memory, cufile.json."""
    return [_gds(root), _udev(root), _huge(root), _memlock(root), _cufile(root)]


def place(directory: str, root: Path = Path("/")) -> Place:
    """What holds a directory, from ``proc/self/mountinfo`` and ``sys/dev/block`` under `root`."""
    best, number, system, source, options = "", "", "unknown", "", ""
    here = directory.rstrip("/") + "/"
    for line in _read(root, "proc/self/mountinfo").splitlines():
        mount, _, rest = line.partition(" - ")
        fields, kind = mount.split(), rest.split()
        if len(fields) < 6 or len(kind) < 2:
            continue
        point = fields[4].replace("\\040", " ").rstrip("/") + "/"
        if here.startswith(point) and len(point) >= len(best):
            best, number, system, source = point, fields[2], kind[0], kind[1]
            options = ",".join([fields[5], *kind[2:3]])
    device = ""
    folder = root / "sys/dev/block" / number
    with contextlib.suppress(OSError):
        real = Path(os.path.realpath(folder))
        device = (real.parent if (real / "partition").exists() else real).name if real.exists() else ""
    device = device or (source.rpartition("/")[2] if source.startswith("/dev/") else "")
    numa = _read(root, f"sys/block/{device}/device/numa_node").strip() if device else ""
    return Place(system, device, options, "" if numa == "-1" else numa, _of_place(system, device, options))


def distance(device: str, bus: str, root: Path = Path("/")) -> Finding | None:
    """How far a drive is from a GPU on PCIe, from the paths of both under ``sys``; None where the system does not say.

    Parameters
    ----------
    device
        Of the drive, such as ``nvme0n1``.
    bus
        Address of the GPU, such as ``0000:3b:00.0``.
    """
    gpu, drive = root / "sys/bus/pci/devices" / bus, root / "sys/block" / device
    if not (bus and device and gpu.exists() and drive.exists()):
        return None
    bridges = [[part for part in Path(os.path.realpath(p)).parts if _PCI.match(part)] for p in (gpu, drive)]
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*bridges, strict=False)))
    if not bridges[1]:
        return None
    name = f"GPU {bus}"
    if shared > 1:
        return Finding(name, f"{len(bridges[0]) + len(bridges[1]) - 2 * shared} PCIe hops, below one bridge", True, "")
    nodes = [_read(root, f"sys/bus/pci/devices/{part[-1]}/numa_node").strip() for part in bridges]
    if shared == 1 or (nodes[0] == nodes[1] and nodes[0] not in ("", "-1")):
        return Finding(name, "of the same socket, through the root complex", True, "")
    return Finding(name, "on another socket", False, "use the drives near each GPU: directories=['/nvme{rank}/kv']")


_PCI = re.compile(r"pci[0-9a-f]{4}:|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]$")


def _of_place(system: str, device: str, options: str) -> list[Finding]:
    found = []
    drive = "use a directory on ext4 or xfs on the drive itself"
    if system == "overlay":
        found.append(Finding("file system", "overlayfs cannot register a cuFile handle", False, drive))
    elif system in ("tmpfs", "ramfs"):
        found.append(Finding("file system", f"{system} keeps files in memory", False, drive))
    elif system not in ("ext4", "xfs"):
        found.append(Finding("file system", f"{system} is not ext4 or xfs", False, drive))
    elif system == "ext4" and "data=journal" in options:
        found.append(Finding("mount", "ext4 journals data", False, "mount with data=ordered"))
    if system in ("ext4", "xfs") and not device.startswith("nvme"):
        found.append(
            Finding("device", f"{device or 'no block device'} is no local NVMe drive", False, "use a local NVMe drive")
        )
    return found


def _gds(root: Path) -> Finding:
    if nvidia_fs_bytes(str(root)) is not None or (root / "proc/driver/nvidia-fs").exists():
        return Finding("nvidia-fs", "loaded", True, "")
    release = _read(root, "proc/sys/kernel/osrelease").strip()
    version = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    config = _read(root, f"boot/config-{release}")
    if "CONFIG_PCI_P2PDMA=y" in config and version >= (6, 2):
        return Finding("nvidia-fs", f"not loaded; Linux {release} has PCI P2PDMA", True, "")
    return Finding("nvidia-fs", "not loaded", False, "install nvidia-gds and run modprobe nvidia-fs")


def _udev(root: Path) -> Finding:
    if (root / "run/udev").is_dir():
        return Finding("/run/udev", "there", True, "")
    return Finding("/run/udev", "missing: cuFile finds no device", False, "in a container: -v /run/udev:/run/udev:ro")


def _huge(root: Path) -> Finding:
    text = _read(root, "sys/kernel/mm/transparent_hugepage/enabled")
    mode = next(iter(re.findall(r"\[(\w+)\]", text)), "unknown")
    ok = mode in ("always", "madvise")
    remedy = "" if ok else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", mode, ok, remedy)


def _memlock(root: Path) -> Finding:
    match = re.search(r"^Max locked memory\s+(\S+)", _read(root, "proc/self/limits"), re.MULTILINE)
    limit = match.group(1) if match else "unknown"
    ok = limit == "unlimited" or (limit.isdigit() and int(limit) >= 64 << 20)
    return Finding("locked memory", limit, ok, "" if ok else "ulimit -l unlimited, or --ulimit memlock=-1")


def _cufile(root: Path) -> Finding:
    name = os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json")
    text = _read(root, name.lstrip("/"))
    if not text:
        return Finding("cufile.json", f"{name} is not there: cuFile's defaults", True, "")
    if re.search(r'^\s*"allow_compat_mode"\s*:\s*true', text, re.MULTILINE):
        return Finding(
            "cufile.json", f"{name} allows compat mode", False, 'set "allow_compat_mode": false to fail loudly'
        )
    return Finding("cufile.json", name, True, "")


def _read(root: Path, name: str) -> str:
    try:
        return (root / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
