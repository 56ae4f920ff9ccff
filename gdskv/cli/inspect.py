"""``gdskv inspect``: what a directory of the disk tier holds, whether it is whole, and how to get space back.

Reads files; owns the directory only while it removes something.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdskv.cli import console

if TYPE_CHECKING:
    from gdskv.directory.survey import Held

__all__ = ["inspect"]

_DAY_NS = 86_400 * 10**9
_SPANS = (("1 min", 60), ("1 h", 3600), ("1 day", 86_400), ("1 week", 604_800))


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of the disk tier.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every block.")] = False,
    rate: Annotated[str, typer.Option(help="Bytes per second that --verify reads at most.")] = "1GiB",
    clear: Annotated[bool, typer.Option("--clear", help="Remove all namespaces.")] = False,
    reclaim: Annotated[bool, typer.Option("--reclaim", help="Remove the least recently opened namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a directory holds. Exit code 1 if --verify found a block that is not what its record says."""
    from gdskv.directory.survey import survey
    from gdskv.units import parse_size

    held = survey(directory)
    shown = [_describe(one) for one in held]
    removed: list[str] = []
    if verify:
        for one, entry in zip(held, shown, strict=True):
            entry["verified"] = _verify(one, parse_size(rate))
    elif clear or reclaim:
        removed = _remove(directory, held if clear else held[-1:], yes)
    free = os.statvfs(directory)
    result = {
        "directory": str(directory),
        "free_bytes": free.f_bavail * free.f_frsize,
        "bytes": sum(one.bytes for one in held),
        "namespaces": shown,
        "removed": removed,
    }
    if json:
        console.print_json(result)
    else:
        _show(result)
    if any(entry.get("verified", {}).get("bad") for entry in shown):
        raise typer.Exit(1)


def _describe(held: Held) -> dict[str, Any]:
    import numpy as np

    from gdskv.directory.directory import tenant_crc
    from gdskv.directory.records import IS_BAD, PRESENT

    entry: dict[str, Any] = {"digest": held.folder.name, "bytes": held.bytes, "why": held.why}
    block = held.superblock
    if block is None:
        return entry
    there = held.blocks[(held.blocks["flags"] & PRESENT) != 0]
    now = int(max(time.time() * 1e9, block.highest_wall))
    live = there[there["deadline"] > now]
    last_day = block.written_last_day(now)
    names = {tenant_crc(name): name for name in block.tenants} | {0: ""}
    tenants = {
        names.get(int(crc), f"#{int(crc):08x}"): int((live["tenant"] == crc).sum()) * block.slot_bytes
        for crc in np.unique(live["tenant"])
    }
    return entry | {
        "fields": block.fields,
        "format": block.format,
        "slot_bytes": block.slot_bytes,
        "directory": f"{block.index + 1} of {block.of}",
        "slots": block.blocks,
        "capacity_bytes": block.blocks * block.slot_bytes,
        "blocks": len(there),
        "used_bytes": len(there) * block.slot_bytes,
        "retained_blocks": len(live),
        "retained_bytes": len(live) * block.slot_bytes,
        "tenants": tenants,
        "quarantined": int(((held.blocks["flags"] & IS_BAD) != 0).sum()),
        "closed": block.clean,
        "opened": block.opened / 1e9,
        "bytes_written": block.bytes_written,
        "bytes_read": block.bytes_read,
        "write_errors": block.write_errors,
        "read_only_periods": block.closures,
        "threads": {"read": block.read_threads, "write": block.write_threads},
        "written_per_byte_read": block.bytes_written / block.bytes_read if block.bytes_read else None,
        "bytes_written_last_day": last_day,
        "drive_writes_per_day": last_day / (block.blocks * block.slot_bytes),
        "drive_writes_per_day_last_run": (
            block.last_written / (block.blocks * block.slot_bytes) * _DAY_NS / block.last_ns if block.last_ns else None
        ),
        "sizing_curve": {scale: float(ratio) for scale, ratio in block.sizing_curve.items()},
        "ages": _histogram((now - there["written"]) / 1e9),
        "deadlines": _histogram((live["deadline"] - now) / 1e9)
        | {"passed": int(((there["deadline"] != 0) & (there["deadline"] <= now)).sum())}
        | {"none": int((there["deadline"] == 0).sum())},
    }


def _histogram(seconds: Any) -> dict[str, int]:
    """How many are below each of the spans, and not below the one before."""
    out, below = {}, 0
    for name, span in _SPANS:
        n = int((seconds < span).sum())
        out[f"below {name}"], below = n - below, n
    return out | {"above": len(seconds) - below}


def _verify(held: Held, rate: float) -> dict[str, int]:
    from gdskv.directory.verify import verify
    from gdskv.pools.disk import SLAB_NAME

    if held.superblock is None or not len(held.blocks):
        return {"good": 0, "bad": 0}
    fd = os.open(held.folder / SLAB_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what the device holds, not what memory remembers of it
        with console.progress(f"verify {held.folder.name[:8]}", len(held.blocks)) as step:
            good = verify(fd, held.blocks, held.superblock.slot_bytes, rate=rate, step=step)
    finally:
        os.close(fd)
    return {"good": int(good.sum()), "bad": int((~good).sum())}


def _remove(directory: Path, held: list[Held], yes: bool) -> list[str]:
    from gdskv.directory.survey import clear
    from gdskv.errors import ConfigError
    from gdskv.pools.lock import DirectoryLock
    from gdskv.units import format_size

    if not held:
        return []
    for one in held:
        typer.echo(f"{one.folder}: {_name(_describe(one))}, {format_size(one.bytes)}", err=True)
    if not yes:
        try:
            typer.confirm("Remove it for good?" if len(held) == 1 else "Remove them for good?", abort=True, err=True)
        except typer.Abort:
            raise ConfigError("nothing was removed. Say yes, or give --yes.") from None
    lock = DirectoryLock(directory)
    try:
        for one in held:
            clear(one)
    finally:
        lock.release()
    return [one.folder.name for one in held]


def _name(entry: dict[str, Any]) -> str:
    fields = entry.get("fields", {})
    return " ".join(filter(None, (fields.get("model"), fields.get("revision"), fields.get("dtype")))) or entry["why"]


def _show(result: dict[str, Any]) -> None:
    from gdskv.units import format_size

    def line(text: str) -> None:
        console.out.print(text, markup=False, soft_wrap=True)

    line(
        f"{result['directory']}: {len(result['namespaces'])} namespaces, {format_size(result['bytes'])}, "
        f"{format_size(result['free_bytes'])} free on the file system"
    )
    for entry in result["namespaces"]:
        line(f"{entry['digest'][:8]}  {_name(entry)}" + ("  removed" if entry["digest"] in result["removed"] else ""))
        if "slots" not in entry:
            continue
        if entry["why"]:
            line(f"  {entry['why']}")
        facts = {
            "capacity": f"{format_size(entry['capacity_bytes'])}, {entry['slots']:,} slots of "
            f"{format_size(entry['slot_bytes'])}, directory {entry['directory']}",
            "used": f"{format_size(entry['used_bytes'])}, {entry['blocks']:,} blocks, {entry['quarantined']} "
            "slots quarantined",
            "retained": f"{format_size(entry['retained_bytes'])}"
            + "".join(f", {name or 'no tenant'} {format_size(size)}" for name, size in entry["tenants"].items()),
            "opened": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["opened"]))
            + (", closed" if entry["closed"] else ", in use or not closed"),
            "lifetime": f"{format_size(entry['bytes_written'])} written, {format_size(entry['bytes_read'])} read "
            "as of the last close",
            "faults": f"{entry['write_errors']:,} writes failed, read-only {entry['read_only_periods']} times "
            "as of the last close",
            "threads": _threads(**entry["threads"]),
            "endurance": _endurance(entry),
            "sizes": ", ".join(f"{scale}x {ratio:.1%}" for scale, ratio in entry["sizing_curve"].items()) or "-",
            "age": _words(entry["ages"]),
            "deadline": _words(entry["deadlines"]),
        }
        if "verified" in entry:
            facts["verified"] = f"{entry['verified']['good']:,} good, {entry['verified']['bad']:,} bad"
        for name, value in facts.items():
            line(f"  {name:<9} {value}")


def _threads(read: int, write: int) -> str:
    return f"{read} to read and {write} to write, measured" if read else "not measured"


def _endurance(entry: dict[str, Any]) -> str:
    from gdskv.units import format_size

    per_byte, last_run = entry["written_per_byte_read"], entry["drive_writes_per_day_last_run"]
    return (
        ("-" if per_byte is None else f"{per_byte:.2f} bytes written per byte served")
        + f", in the last 24 hours {format_size(entry['bytes_written_last_day'])} written, "
        + f"{entry['drive_writes_per_day']:.2f} drive writes"
        + ("" if last_run is None else f" ({last_run:.2f} a day at the last run's rate)")
    )


def _words(histogram: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {name}" for name, n in histogram.items() if n) or "-"
