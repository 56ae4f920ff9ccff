"""``gdskv doctor``: what this node can do, and why not more."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["doctor"]


def doctor(
    directories: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR]...", help="Default: the temporary folder, or those of --config."),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="What {rank} in the directories of --config stands for.")] = 0,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings: show what is in effect.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    require_gds: Annotated[bool, typer.Option("--require-gds", help="Exit 2 where 1 would be: a fallback.")] = False,
) -> None:
    """Say how the bytes of each directory would move, and what stands in the way.

    Exit codes: 0 direct everywhere, 1 a fallback is in use, 2 a directory cannot work.
    """
    import tempfile

    from gdskv.cli import console
    from gdskv.config import CacheConfig
    from gdskv.doctor import findings

    settings = CacheConfig.from_toml(config) if config is not None else None
    names = list(directories or ()) or [str(d) for d in (settings.places(rank) if settings else ())]
    report: dict[str, Any] = {
        "versions": _versions(),
        "gpus": _gpus(),
        "node": [finding._asdict() for finding in findings.node()],
        "directories": [_directory(name) for name in names or [tempfile.gettempdir()]],
    }
    if settings is not None:
        where = settings.sources()
        report["settings"] = {n: {"value": _plain(getattr(settings, n)), "from": s} for n, s in where.items()}
    modes = [d["mode"] for d in report["directories"]]
    code = 2 if "none" in modes else int(any(mode != "direct" for mode in modes))
    if require_gds or (settings is not None and settings.require_gds):
        code = 2 * bool(code)
    report["exit"] = code
    if json:
        console.print_json(report)
    else:
        _print(report)
    raise typer.Exit(code)


def _plain(value: object) -> object:
    if isinstance(value, (int, float, str)) or value is None:
        return value
    return str(value) if isinstance(value, Path) else [str(one) for one in value]  # type: ignore[attr-defined]


def _versions() -> dict[str, str]:
    from gdskv.io import cuda

    driver = cuda.load()
    found = {"CUDA driver": "none" if driver is None else driver.version + (" (hostdriver)" if driver.double else "")}
    for name, packages in (
        ("KvikIO", ("kvikio-cu13", "kvikio-cu12")),
        ("cuFile", ("nvidia-cufile", "nvidia-cufile-cu12")),
    ):
        found[name] = "none"
        for package in packages:
            try:
                found[name] = importlib.metadata.version(package)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _gpus() -> list[dict[str, object]]:
    from gdskv.io import cuda

    driver = cuda.load()
    return [gpu._asdict() for gpu in driver.gpus()] if driver is not None else []


def _directory(name: str) -> dict[str, Any]:
    from gdskv.doctor import findings
    from gdskv.doctor.history import history
    from gdskv.doctor.trial import trial

    where = findings.place(os.path.realpath(name))
    entry: dict[str, Any] = {
        "path": name,
        "mode": "none",
        "why": "",
        "write": 0.0,
        "read": 0.0,
        "o_direct": False,
        "file_system": where.file_system,
        "device": where.device,
        "numa": where.numa,
        "findings": [finding._asdict() for finding in where.findings],
    }
    far = [findings.distance(where.device, str(gpu["bus"])) for gpu in _gpus()]
    entry["findings"] += [finding._asdict() for finding in far if finding is not None]
    entry["findings"] += [finding._asdict() for finding in history(Path(name))]
    try:
        result = trial(name)
    except OSError as error:
        entry["why"] = error.strerror or str(error)
        entry["findings"].append(
            {"name": "trial", "value": entry["why"], "ok": False, "remedy": f"make {name} a writable directory"}
        )
        return entry
    entry |= {"mode": result.mode.name, "why": result.mode.why, "o_direct": result.o_direct}
    threads = {"read": result.threads.read, "write": result.threads.write}
    return entry | {"write": result.write, "read": result.read, "threads": threads}


def _print(report: dict[str, Any]) -> None:
    from gdskv.cli.console import out

    def line(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    line("  ".join(f"{name} {version}" for name, version in report["versions"].items()))
    for gpu in report["gpus"]:
        line(f"GPU {gpu['name']} {gpu['bytes'] / 2**30:.0f} GiB {gpu['bus']}")
    for finding in report["node"]:
        _finding(line, finding)
    for entry in report["directories"]:
        speeds = f"write {entry['write'] / 1e9:.1f} GB/s  read {entry['read'] / 1e9:.1f} GB/s"
        line(f"{entry['path']}  {entry['mode']}  {entry['why']}  {speeds}  {entry['file_system']} {entry['device']}")
        if "threads" in entry:
            line("  threads that bring most: {read} to read, {write} to write".format(**entry["threads"]))
        for finding in entry["findings"]:
            _finding(line, finding)
    for name, setting in report.get("settings", {}).items():
        line(f"{name} = {setting['value']}  ({setting['from']})")
    fallen = sum(entry["mode"] != "direct" for entry in report["directories"])
    meaning = "0 = direct everywhere, 1 = a fallback, 2 = cannot work"
    line(f"{fallen} of {len(report['directories'])} directories not direct (exit {report['exit']}; {meaning})")


def _finding(line: Any, finding: dict[str, Any]) -> None:
    line(f"  {finding['name']}: {finding['value']}")
    if finding["remedy"]:
        line(f"    remedy: {finding['remedy']}")
