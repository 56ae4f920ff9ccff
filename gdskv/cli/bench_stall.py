"""``gdskv bench stall``: how long the calling thread is in a call while the manager's own traffic saturates the disk.

Knows the manager's public calls. The same calls are timed with a drained disk and with a device that takes 100 ms more.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdskv.cli import benchlib, console

if TYPE_CHECKING:
    from gdskv.io.base import IOEngine, Results, Tags, Transfers
    from gdskv.manager import BlockManager, Request

__all__ = ["stall"]

BLOCK = 64 << 10
CALLS = ("match", "allocate", "commit", "release", "poll")
CONTROL = "control"  # calls nothing of gdskv and takes about as long as `allocate`: its tail is the machine's own
PACES = ("saturated", "drained", "delayed")
CONTROL_STEPS = 16_000  # .3 ms
ROUNDS = 5
DELAY_S = 0.1


@dataclass(frozen=True)
class Shape:
    """Sizes of everything, in blocks."""

    request: int = 1000
    found: int = 600  # leading blocks of a request that an earlier one had, and that are on disk by now
    documents: int = 12  # asked in turn; in between, more blocks pass than memory holds
    flying: int = 5  # requests in flight

    @property
    def device(self) -> int:
        return 6 * self.request

    @property
    def host(self) -> int:
        return 2 * self.request

    @property
    def disk(self) -> int:
        return 20 * self.request


def stall(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for the disk tier; a temporary one.", show_default=False)
    ] = None,
    requests: Annotated[int, typer.Option(min=ROUNDS, help="Requests at each pace.")] = 1000,
    blocks: Annotated[int, typer.Option(min=10, help="Blocks of 64 KiB in a request.")] = 1000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time match, allocate, commit, release and poll with requests of 1,000 blocks, most of which are on disk.

    Saturated: the next request begins as soon as one has ended, so that loads and spills fill the disk's queues all the
    time. Beside it, in turn: every call waits for a drained disk; each transfer's end is seen 100 ms late. A plain loop
    that takes as long as allocate, once a request, shows what the machine itself does to any thread meanwhile.
    Figures count only if no request was rejected and no block shed.
    """
    shape = Shape(blocks, blocks * 6 // 10)
    with console.workplace(directory) as place, console.progress("bench stall", len(PACES) * ROUNDS + 1) as step:
        figures = _run(place, shape, requests, step)
    if not json:
        counts = figures["counts"]
        disk, control = figures["disk"], figures["percentiles_ms"]["saturated"][CONTROL]
        console.out.print(
            f"{counts['admitted']:,} requests of {blocks:,} blocks admitted, {counts['rejected']} rejected, "
            f"{counts['shed']} blocks shed; saturated, {disk['read_gb_s']:.2f} GB/s were read and "
            f"{disk['written_gb_s']:.2f} GB/s written, with transfers in flight {disk['busy']:.0%} of the time; "
            f"a loop of {control['p50']:.2f} ms took {control['p99.9']:.2f} at the 99.9th percentile; "
            f"the host of this machine kept {figures['stolen_s']:.1f} s of processor time"
        )
    results = figures.pop("results")
    benchlib.show("stall", results, json=json, **figures)
    if figures["counts"]["rejected"] or figures["counts"]["shed"]:
        raise typer.Exit(1)


class Late:
    """An I/O engine whose results are handed over `seconds` after they were there."""

    def __init__(self, inner: IOEngine) -> None:
        self.seconds = 0.0
        self.submit: Callable[[Transfers], int] = inner.submit
        self.cancel: Callable[[Tags], int] = inner.cancel
        self.counters, self.path, self.close = inner.counters, inner.path, inner.close
        self._inner = inner
        self._held: deque[tuple[float, Results]] = deque()
        self._count = 0

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight + self._count

    def poll(self, out: Results) -> int:
        if not self.seconds and not self._held:
            return self._inner.poll(out)
        now = time.monotonic()
        n = self._inner.poll(out)
        if n:
            self._held.append((now + self.seconds, out[:n].copy()))
            self._count += n
        n = 0
        while self._held and self._held[0][0] <= now and n < len(out):
            due, results = self._held.popleft()
            part = min(len(results), len(out) - n)
            out[n : n + part] = results[:part]
            if part < len(results):
                self._held.appendleft((due, results[part:]))
            n += part
        self._count -= n
        return n


@dataclass
class Clocked:
    """Samples per call, ns."""

    samples: dict[str, array[int]] = field(default_factory=lambda: {call: array("q") for call in (*CALLS, CONTROL)})

    def __call__(self, call: str, job: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter_ns()
        answer = job(*arguments, **named)
        self.samples[call].append(time.perf_counter_ns() - start)
        return answer

    def percentiles(self) -> dict[str, dict[str, float]]:
        """ms."""
        import numpy as np

        at = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
        out = {}
        for call, samples in self.samples.items():
            values = np.percentile(np.frombuffer(samples, np.int64), list(at.values())) / 1e6
            out[call] = {name: round(float(value), 4) for name, value in zip(at, values, strict=True)}
        return out


class Load:
    """Requests one after the other, against one manager."""

    def __init__(self, kv: BlockManager, shape: Shape) -> None:
        import numpy as np

        self.kv, self.shape = kv, shape
        self.admitted = self.rejected = self.polls = self.busy_polls = 0
        self._random = np.random.default_rng(11)
        self._documents = [self._keys(shape.found) for _ in range(shape.documents)]
        self._begun = 0

    @staticmethod
    def control() -> int:
        return sum(range(CONTROL_STEPS))

    def _keys(self, n: int) -> Any:
        import numpy as np

        return self._random.integers(1, 1 << 63, (n, 2), np.uint64)

    def run(self, requests: int, pace: str, clocked: Clocked) -> None:
        """Take `requests` through their lives at a pace."""
        import numpy as np

        from gdskv.io.measure import busy_pause

        kv, table = self.kv, self.kv.store.table
        flying: list[Request] = []
        left = requests
        start = time.monotonic()
        while left or flying:
            # What waits to be written stays below what the queue takes: a full one sheds, and then no figure counts
            while left and len(flying) < self.shape.flying and table.writing < kv.store.config.write_queue // 2:
                document = self._documents[self._begun % len(self._documents)]
                keys = np.concatenate([document, self._keys(self.shape.request - self.shape.found)])
                self._begun += 1
                left -= 1
                self._rest(pace)
                clocked("match", kv.match, keys=keys, now=time.monotonic() - start)
                self._rest(pace)
                clocked(CONTROL, self.control)
                self._rest(pace)
                request = clocked("allocate", kv.begin, keys=keys, now=time.monotonic() - start)
                if not hasattr(request, "blocks"):
                    self.rejected += 1
                    continue
                self.admitted += 1
                flying.append(request)
            self._rest(pace)
            self.polls += 1
            self.busy_polls += not kv.store.idle
            clocked("poll", kv.poll, now=time.monotonic() - start)
            for request in [r for r in flying if kv.is_ready(r)]:
                self._rest(pace)
                clocked("commit", kv.commit, request, now=time.monotonic() - start)
                self._rest(pace)
                clocked("release", kv.release, request, now=time.monotonic() - start)
                flying.remove(request)
            busy_pause()

    def _rest(self, pace: str) -> None:
        if pace == "drained":
            self.drain()

    def drain(self) -> None:
        """Poll until nothing moves."""
        while not self.kv.store.idle:
            self.kv.poll(now=0.0)
            time.sleep(0.0002)


def _run(directory: Path, shape: Shape, requests: int, step: Callable[[int], None]) -> dict[str, Any]:
    import gdskv

    late: list[Late] = []

    def wrap(engine: IOEngine) -> IOEngine:
        late.append(Late(engine))
        return late[0]

    config = gdskv.CacheConfig(
        device_bytes=shape.device * BLOCK,
        host_bytes=shape.host * BLOCK,
        disk_bytes=shape.disk * BLOCK,
        directories=(directory,),
        policy="lru",  # everything is written: a policy that refuses blocks saves the disk work
    )
    with gdskv.BlockManager(config, gdskv.KVLayout.raw(BLOCK), gdskv.Namespace(model="bench"), io=wrap) as kv:
        load = Load(kv, shape)
        load.run(3 * shape.disk // shape.request, "saturated", Clocked())  # every slot was written over
        load.drain()
        step(1)
        stolen = benchlib.stolen_s()
        clocked = {pace: Clocked() for pace in PACES}
        read = written = seconds = 0.0
        load.admitted = load.polls = load.busy_polls = 0
        gc.collect()
        for number in range(ROUNDS):
            share = requests * (number + 1) // ROUNDS - requests * number // ROUNDS
            for pace in PACES:
                late[0].seconds = DELAY_S if pace == "delayed" else 0.0
                before, start = kv.stats(), time.perf_counter()
                load.run(share, pace, clocked[pace])
                if pace == "saturated":
                    after = kv.stats()
                    seconds += time.perf_counter() - start
                    read += _moved(after, "read") - _moved(before, "read")
                    written += _moved(after, "write") - _moved(before, "write")
                load.drain()
                step(1)
        kv.check()
        stats = kv.stats()
        stolen = benchlib.stolen_s() - stolen
    percentiles = {pace: clocked[pace].percentiles() for pace in PACES}
    return {
        "results": _results(percentiles),
        "percentiles_ms": percentiles,
        "samples": {pace: {call: len(s) for call, s in clocked[pace].samples.items()} for pace in PACES},
        "counts": {
            "admitted": load.admitted,
            "rejected": load.rejected + stats["rejected"],
            "shed": stats["shed_queue"] + stats["shed_no_slot"],
            "evicted_disk": stats["evicted_disk"],
            "failed": stats["failed_reads"] + stats["failed_writes"],
        },
        "disk": {
            "read_gb_s": read / seconds / 1e9,
            "written_gb_s": written / seconds / 1e9,
            "busy": load.busy_polls / max(1, load.polls),
        },
        "stolen_s": stolen,
        "blocks": {"request": shape.request, "device": shape.device, "host": shape.host, "disk": shape.disk},
    }


def _moved(stats: dict[str, int], way: str) -> int:
    return sum(count for name, count in stats.items() if name.startswith(f"io_{way}_bytes"))


def _results(percentiles: dict[str, dict[str, dict[str, float]]]) -> list[benchlib.Result]:
    out = []
    for pace, suffix in (("saturated", ""), ("delayed", " delayed")):
        for call in CALLS:
            drained = percentiles["drained"][call]["p99.9"]
            value = percentiles[pace][call]["p99.9"]
            out.append(benchlib.Result.of(f"{call} p99.9{suffix}", value, "ms", drained, "the same, disk drained"))
    return out
