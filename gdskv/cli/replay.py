"""``gdskv replay``: a trace against the tiers, with every loaded block compared with what its key must hold.

Reads options and shows the report; what happens in between is ``gdskv.replay``.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gdskv.cli import console

if TYPE_CHECKING:
    from gdskv.replay.player import Plan, Tally
    from gdskv.replay.traces import Trace

__all__ = ["replay"]

_GENERATED_REQUESTS = 2000


class OnExpiry(Enum):
    """What becomes of a block when its deadline has passed."""

    demote = "demote"
    forget = "forget"


def replay(
    trace: Annotated[
        Path | None, typer.Argument(help="Trace file, one JSON object a line; a made-up one if none is given.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Decisions only: no bytes, no files.")] = False,
    policy: Annotated[
        str, typer.Option(help="Order of eviction among equals on disk, or in the only tier: lru or hazard.")
    ] = "hazard",
    memory_policy: Annotated[str, typer.Option(help="The same in the tiers above the disk.")] = "lru",
    write_budget: Annotated[
        str, typer.Option(help="Writes to disk per day of trace time: bytes, or as 0.5dwpd; 0: any number.")
    ] = "0",
    device_blocks: Annotated[int, typer.Option(help="Blocks of the device tier; 0: no such tier.")] = 0,
    host_blocks: Annotated[int, typer.Option(help="Blocks of the host tier.")] = 0,
    disk_blocks: Annotated[
        str, typer.Option(help="Blocks of the disk tier; with --compare several sizes, as 1000,3000,5000.")
    ] = "0",
    compare: Annotated[
        str, typer.Option(help="Instead, compare policies on one tier: some of lru,arc,s3fifo,hazard,belady.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Image file for the comparison.")] = None,
    block_bytes: Annotated[str, typer.Option(help="Bytes of a block, such as 64KiB.")] = "64KiB",
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a block, if not the schema's own (512; Qwen-Bailian 16).")
    ] = None,
    directory: Annotated[
        list[Path] | None, typer.Option("--dir", help="Directory of the disk tier, again for more; a temporary one.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Run at most that many requests.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    speed: Annotated[float, typer.Option(help="Factor of the trace's own time; 0: as fast as it goes.")] = 0.0,
    ttl_share: Annotated[float, typer.Option(help="Share of the requests that carry a ttl.")] = 0.0,
    ttl: Annotated[float, typer.Option(help="Their ttl in seconds of trace time.")] = 600.0,
    on_expiry: Annotated[OnExpiry, typer.Option(help="What becomes of their blocks then.")] = OnExpiry.demote,
    retained_fraction: Annotated[float, typer.Option(help="Share of the lowest tier that they may hold.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the made-up trace.")] = 0,
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Count broken lines and go on.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a trace against the tiers and say what was found where.

    A request finds its longest cached run of blocks from the first. What was loaded is compared with what its key
    must hold, what is missing is made and inserted. Exit code 1 if any block was wrong.
    """
    from gdskv.errors import ConfigError
    from gdskv.replay.generator import generate_trace
    from gdskv.replay.player import Plan
    from gdskv.replay.promises import TtlPlan
    from gdskv.replay.run import run
    from gdskv.replay.traces import read_trace
    from gdskv.units import parse_size

    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"block_tokens={block_tokens} is below 1. Give the tokens that one hash id stands for.")
    sizes = _numbers(disk_blocks)
    if compare:
        if not simulate or trace is None:
            raise ConfigError("compare needs a trace file and --simulate: the other policies move no bytes.")
        loaded = read_trace(trace, block_tokens=block_tokens, limit=limit, skip_bad_lines=skip_bad_lines)
        _compare(str(trace), loaded, compare.split(","), sizes, plot, json)
        return
    if len(sizes) != 1:
        raise ConfigError(f"disk_blocks={disk_blocks} names {len(sizes)} sizes. Give one, or --compare POLICIES.")
    plan = Plan(
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        disk_blocks=sizes[0],
        block_bytes=parse_size(block_bytes),
        directories=tuple(directory or ()),
        policy=policy,
        memory_policy=memory_policy,
        write_budget=write_budget,
        simulate=simulate,
        concurrency=concurrency,
        speed=speed,
        ttl=TtlPlan(ttl_share, ttl, on_expiry.value, retained_fraction),
    )
    if trace is None:
        loaded = generate_trace(limit or _GENERATED_REQUESTS, seed)
        name = f"generated (seed {seed})"
        if block_tokens is not None:
            loaded = loaded._replace(block_tokens=block_tokens)
    else:
        loaded = read_trace(trace, block_tokens=block_tokens, limit=limit, skip_bad_lines=skip_bad_lines)
        name = str(trace)
    with console.progress("replay", len(loaded.requests)) as step:
        tally = run(loaded, plan, step=step)
    report = _report(name, loaded, plan, tally)
    if json:
        console.print_json(report)
    else:
        _show(report)
    if tally.wrong_blocks:
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    from gdskv.errors import ConfigError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"disk_blocks={text!r} is no number of blocks. Write 5000, or 1000,5000 to compare."
        ) from None


def _compare(
    name: str, trace: Trace, policies: list[str], sizes: list[int], plot_file: Path | None, json: bool
) -> None:
    from gdskv.replay.policies.compare import compare, plot

    asked = sum(len(request.hash_ids) for request in trace.requests)
    with console.progress("compare", len(sizes) * len({*policies, "lru", "belady"})) as step:
        outcomes = compare(trace, policies, sizes, step)
    if plot_file is not None:
        plot(outcomes, asked, Path(name).stem, plot_file)
    if json:
        rows = [outcome._asdict() | {"hit_ratio": outcome.hits / max(asked, 1)} for outcome in outcomes]
        console.print_json({"trace": name, "blocks_asked": asked, "results": rows})
        return
    shown = {
        "hit ratio": [f"{o.hits / max(asked, 1):.4f}" for o in outcomes],
        "blocks written": [f"{o.blocks_written:,}" for o in outcomes],
        "share of the way from LRU to Belady": [f"{o.way:.3f}" for o in outcomes],
    }
    console.out.print(f"{name}: {asked:,} blocks asked", markup=False)
    for title, cells in shown.items():
        table = Table(title, box=SIMPLE_HEAD)
        for size in sizes:
            table.add_column(f"{size:,}", justify="right")
        for k, policy in enumerate(policies):
            table.add_row(policy, *cells[k :: len(policies)])
        console.out.print(table)


def _report(name: str, trace: Trace, plan: Plan, tally: Tally) -> dict[str, Any]:
    hits = {tier: tally.hits[tier] for tier in ("device", "host", "disk")}
    # Blocks, not the records beside them: what was spilled, or, with nothing above the disk, what requests put there.
    written = tally.stats["spills"] - tally.stats["failed_writes"]
    if next(iter(plan.blocks)) == "disk":
        written = tally.stats["committed"] - tally.stats["failed_writes"]
    bytes_read = (tally.stats["matched_disk"] + tally.stats["prefetches"]) * plan.block_bytes
    if next(iter(plan.blocks)) == "disk":
        bytes_read = hits["disk"] * plan.block_bytes
    return {
        "trace": name,
        "simulate": plan.simulate,
        "policy": plan.policy,
        "memory_policy": plan.memory_policy,
        "write_budget": plan.write_budget,
        "tiers": plan.blocks,
        "directories": console.places(tally.directories),
        "block_bytes": plan.block_bytes,
        "block_tokens": trace.block_tokens,
        "requests": tally.requests,
        "windowed_requests": tally.windowed_requests,
        "requests_cut": tally.requests_cut,
        "blocks_cut": tally.blocks_cut,
        "bad_lines": trace.bad_lines,
        "blocks_asked": tally.blocks_asked,
        "hit_ratio": sum(hits.values()) / max(tally.blocks_asked, 1),
        **{f"hits_{tier}": count for tier, count in hits.items()},
        "tokens_reused": sum(hits.values()) * trace.block_tokens,
        "blocks_written": written,
        "bytes_read": bytes_read,
        "bytes_written": written * plan.block_bytes,
        "sizing_curve": tally.curve,
        "verified_blocks": tally.verified_blocks,
        "wrong_blocks": tally.wrong_blocks,
        "failed_blocks": tally.failed_blocks,
        "elapsed_s": round(tally.elapsed_s, 3),
        "retention": tally.retention,
        "us": {call: timing.percentiles() for call, timing in tally.timings.items()},
        "counters": tally.stats,
    }


def _show(report: dict[str, Any]) -> None:
    asked = max(report["blocks_asked"], 1)
    found = Table(
        "tier",
        "blocks",
        "hits",
        "share of blocks asked",
        title=f"hits of {report['trace']}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for column in found.columns[1:]:
        column.justify = "right"
    for tier, blocks in report["tiers"].items():
        hits = report[f"hits_{tier}"]
        found.add_row(tier, f"{blocks:,}", f"{hits:,}", f"{hits / asked:.4f}")
    console.out.print(found)
    console.print_places(report["directories"])
    if any(report["sizing_curve"].values()):
        sizes = ", ".join(f"{scale}x {ratio:.1%}" for scale, ratio in report["sizing_curve"].items())
        console.out.print(f"would be found with the lowest tier at {sizes}", soft_wrap=True)
    times = Table("call", "p50", "p99", "p99.9", title="time per call in µs", title_justify="left", box=SIMPLE_HEAD)
    for column in times.columns[1:]:
        column.justify = "right"
    for call, percentiles in report["us"].items():
        if percentiles is not None:
            times.add_row(call, *(f"{value:,.1f}" for value in percentiles.values()))
    console.out.print(times)
    gib = 1 << 30
    console.out.print(
        f"{report['requests']:,} requests in {report['elapsed_s']:.1f} s asked for {report['blocks_asked']:,} blocks "
        f"and found {report['hit_ratio']:.1%}; {report['bytes_written'] / gib:.2f} GiB written, "
        f"{report['bytes_read'] / gib:.2f} GiB read."
    )
    for name, books in report["retention"].items():
        console.out.print(
            f"{name}: {books['blocks_kept_to_deadline']:,} of {books['blocks_past_deadline']:,} promised blocks were "
            f"kept to their deadline, {books['blocks_over_budget']:,} were over the budget, "
            f"{books['blocks_served_after_forget']:,} served after they were to be forgotten."
        )
    if not report["simulate"]:
        wrong = report["wrong_blocks"]
        console.out.print(
            f"{report['verified_blocks']:,} loaded blocks were compared with what their keys must hold; "
            + (f"[bold red]{wrong:,} were wrong[/]." if wrong else "none was wrong.")
        )
