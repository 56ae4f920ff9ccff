"""The block table does what its twin in plain Python does, over random sequences of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from pair import NS, Pair, Request

CALLS = 400  # of a sequence, at most
SEQUENCES = 900  # about a minute
ERRORS = ("short", "EIO", "cancelled", "flipped")
TTLS = (0, 0, 5, 20)
PRIORITIES = (35, 35, 80, 10)
KEYS = 8  # of the longest prompt


class Numbers:
    """Small numbers taken out of a big one."""

    def __init__(self, big: int) -> None:
        self.left = big

    def below(self, n: int) -> int:
        self.left, small = divmod(self.left, n)
        return small

    def of(self, choices: Any) -> Any:
        return choices[self.below(len(choices))]


def prompt(n: Numbers) -> list[int]:
    """A path from a root: prompts of a document share the blocks before the fork."""
    document, fork, branch, length = n.below(3), n.below(KEYS), n.below(2), 1 + n.below(KEYS)
    return [1 + i + 16 * (document + 4 * (0 if i < fork else 1 + fork + 16 * branch)) for i in range(length)]


def child_of(key: int, which: int) -> int:
    """A key that follows from its parent's."""
    return int.from_bytes(blake2b(b"%d/%d" % (key, which), digest_size=8).digest(), "little")


class Player:
    """Plays a sequence of calls, each of which is a number."""

    def __init__(self, config: int) -> None:
        n = Numbers(config)
        self.faulty = n.of((0, 0, 16, 4))  # one of so many transfers fails
        device = n.of((0, 1, 2, 4, 8, 8))
        host, disk = n.of((0, 1, 2, 4, 6)), n.of((0, 1, 3, 8, 12))
        if device == 0 and host + disk == 0:
            host = 1
        self.shape = {"device": device, "host": host, "disk": disk}
        self.settings = {
            "clean": n.of((0, 0, 1, 3)),
            "transfers": n.of((4096, 4096, 24)),
            "write_limit": n.of((4096, 4096, 3, 1)),
            "spill": n.of(("all", "all", "reused", "retained")),
            "protect_unexpired": n.below(4) == 3,
            "checksums": n.below(8) != 7,
            "grace": n.of((30, 30, 0)),
            "retained_limit": n.of((1 << 40, 1 << 40, 3)),
            "tenant_limit": n.of((1 << 40, 1 << 40, 2)),
        }
        self.pair = Pair(**self.shape, **self.settings)
        self.requests: list[Request] = []
        self.found: list[Any] = []
        self.tickets = 0
        engine = (self.begin, self.begin, self.finish, self.finish, self.abandon, self.grow, self.give_up)
        owner = (self.store, self.store, self.find, self.load, self.leave, self.cancel, self.cancel)
        both = (self.prefetch, self.launch, self.launch, *[self.complete] * 4, self.wait)
        self.calls: tuple[Callable[[Numbers], str], ...] = (*(engine if device else owner), *both)

    def play(self, call: int) -> str:
        n = Numbers(call)
        return self.calls[n.below(len(self.calls))](n)

    # ---- an engine

    def begin(self, n: Numbers) -> str:
        keys = prompt(n)
        if len(self.requests) == 4:
            return "too many requests"
        more = n.below(3) == 2
        request = self.pair.begin(keys, len(keys) + more)
        if request:
            self.requests.append(request)
        return f"begin {keys} and {more:d} more: {request and request.matched}"

    def finish(self, n: Numbers) -> str:
        if not self.requests:
            return "no request"
        request = self.requests[n.below(len(self.requests))]
        if not self.pair.is_ready(request):
            return "not ready"
        keys = len(request.keys)
        priority, ttl = [n.of(PRIORITIES) for _ in range(keys)], [n.of(TTLS) * NS for _ in range(keys)]
        forget, tenant = n.below(2) == 1, n.below(2)
        new = self.pair.commit(request, priority, ttl, forget, tenant)
        if n.below(3):
            self.requests.remove(request)
            self.pair.release(request)
        return f"commit {request.keys} {priority=} {ttl=} {forget=} {tenant=}: {new}"

    def abandon(self, n: Numbers) -> str:
        if not self.requests:
            return "no request"
        request = self.requests.pop(n.below(len(self.requests)))
        self.pair.release(request)
        return f"release {request.keys}"

    def grow(self, n: Numbers) -> str:
        if not self.requests:
            return "no request"
        request = self.requests[n.below(len(self.requests))]
        if not request.keys or len(request.slots) > len(request.keys):
            return "no growth"
        keys: list[int] = []
        for _ in range(1 + n.below(2)):
            keys.append(child_of((request.keys + keys)[-1], n.below(2)))
        return f"grow {request.keys} by {keys}: {self.pair.grow(request, keys)}"

    def give_up(self, n: Numbers) -> str:
        self.pair.let_late_ones_go()
        if not self.requests or n.below(2):
            return "no giving up"
        request = self.requests[n.below(len(self.requests))]
        return f"give up {request.keys}: {self.pair.give_up(request)}"

    # ---- the owner of a device pool

    def store(self, n: Numbers) -> str:
        keys = prompt(n)
        priority, ttl = [n.of(PRIORITIES) for _ in keys], [n.of(TTLS) * NS for _ in keys]
        forget, tenant = n.below(2) == 1, n.below(2)
        cached = self.pair.store(keys, priority, ttl, self.ticket(), forget, tenant)
        return f"store {keys} {priority=} {ttl=} {forget=} {tenant=}: {cached}"

    def find(self, n: Numbers) -> str:
        keys = prompt(n)
        if len(self.found) == 4:
            return "too many found"
        self.found.append(self.pair.find(keys))
        return f"find {keys}: {self.found[-1][1]}"

    def load(self, n: Numbers) -> str:
        if not self.found:
            return "nothing found"
        return f"load: {self.pair.load(self.found[n.below(len(self.found))], self.ticket())}"

    def leave(self, n: Numbers) -> str:
        if not self.found:
            return "nothing found"
        self.pair.leave(self.found.pop(n.below(len(self.found))))
        return "leave"

    def cancel(self, n: Numbers) -> str:
        if not self.faulty or not self.tickets:
            return "no cancel"
        ticket = (self.tickets - 1 - n.below(min(3, self.tickets))) % 24
        for x in self.pair.cancel(ticket):
            if n.below(2):
                self.pair.complete(x, "cancelled")
        return f"cancel {ticket}"

    def ticket(self) -> int:
        self.tickets += 1
        return (self.tickets - 1) % 24

    # ---- both

    def prefetch(self, n: Numbers) -> str:
        keys, most = prompt(n), 1 + n.below(4)
        return f"prefetch {keys} {most}: {self.pair.prefetch(keys, most)}"

    def launch(self, n: Numbers) -> str:
        return f"launch: {self.pair.launch(n.of((64, 64, 1, 3)))}"

    def complete(self, n: Numbers) -> str:
        under_way = self.pair.twin.launched
        if not under_way:
            return "nothing under way"
        x = under_way[n.below(len(under_way))]
        error = n.of(ERRORS) if self.faulty and n.below(self.faulty) == 0 else ""
        self.pair.complete(x, error if error != "flipped" else "", error == "flipped" and self.pair.twin.checksums)
        return f"complete {x} {error}"

    def wait(self, n: Numbers) -> str:
        seconds = n.of((0, 1, 3, 10, 40))
        self.pair.advance(self.pair.twin.now + seconds * NS)
        return f"wait {seconds} s"

    def end(self) -> None:
        """All is given back and has landed: nobody holds anything, and nothing is missing."""
        pair = self.pair
        for request in self.requests:
            pair.release(request)
        for found in self.found:
            pair.leave(found)
        for x in list(pair.twin.launched):
            pair.complete(x)
        while pair.twin.deferred:  # each waits for earlier ones only, so there is no circle
            oldest = pair.twin.deferred[0]
            for x in pair.launch(1):
                pair.complete(x)
            assert oldest.over
        pair.let_late_ones_go()
        counted = pair.table.counters()
        for tier in ("device", "host", "disk"):
            assert counted[f"{tier}_leased"] == 0
            assert counted[f"{tier}_used"] + counted[f"{tier}_free"] + counted[f"{tier}_bad"] == self.shape[tier]
        pair.agree_on_order()


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), min_size=CALLS, max_size=CALLS))
def agree(config: int, calls: list[int]) -> None:
    """Play one sequence; one that fails is printed call by call, in its shortest form."""
    player = Player(config)
    note(f"{player.shape} {player.settings} faulty={player.faulty}")
    for call in calls:
        if call:  # shrinking turns calls that do not matter into 0
            note(player.play(call))
    player.end()
    PLAYED["sequences"] += 1
    PLAYED["calls"] += player.pair.calls


PLAYED: Counter[str] = Counter()


def test_table_and_twin_agree_over_random_calls(summary: list[str], pytestconfig: pytest.Config) -> None:
    minutes = pytestconfig.getoption("soak")
    play = settings(
        max_examples=max(SEQUENCES, int(minutes * SEQUENCES)),
        derandomize=not minutes,  # the same sequences each time, but for a soak
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(agree)
    play()
    summary.append(
        f"block table: {PLAYED['calls']:,} calls in {PLAYED['sequences']:,} random sequences, as its twin in plain "
        "Python answers"
    )
    assert PLAYED["calls"] >= 200_000
