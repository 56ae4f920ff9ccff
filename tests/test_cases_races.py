"""Kinds R1 to R10: races, limits and life cycles that broke other caches, with transfers held and let go."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doubles import DelayEngine, Fail, Flip
from faulty import COPY, READ, WRITE, Bench, aligned
from harness import BLOCK, LAYOUT, NAMESPACE, TOKENS, Engine, config, payload, tokens

import gdskv


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as b:
        yield b


def chain(doc: int, n: int) -> np.ndarray:
    return gdskv.block_keys(tokens(doc, n * TOKENS), TOKENS)


def put(b: Bench, doc: int, n: int) -> gdskv.store.Done:
    """Store a document's blocks in a KVStore."""
    memory = aligned(n)
    for i, key in enumerate(chain(doc, n)):
        memory[i] = payload(key)
    b.kv.store(chain(doc, n), source=memory, now=b.engine.now)
    return b.finished()


def right(memory: np.ndarray, doc: int) -> bool:
    return all(np.array_equal(memory[i], payload(key)) for i, key in enumerate(chain(doc, len(memory))))


# ---- R1


@pytest.mark.parametrize("host", [4, 0])
def test_r1_what_was_matched_cannot_leave_before_it_is_loaded(tmp_path: Path, host: int) -> None:
    with Bench(tmp_path, store=True, host=host, disk=4) as b:
        put(b, 0, 2)
        found = b.kv.match(chain(0, 2), now=0)
        for doc in range(1, 20):
            put(b, doc, 2)
        memory = aligned(2)
        b.kv.load(found, into=memory, now=0)
        assert b.finished().failed.tolist() == []
        assert right(memory, 0)
        b.settled()


def test_r1_a_hit_that_vanished_is_a_miss(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0, disk=8) as b:
        put(b, 0, 2)
        first, second = b.kv.match(chain(0, 2), now=0), b.kv.match(chain(0, 2), now=0)
        b.fail(READ, Flip(0), times=2)
        b.kv.load(first, into=aligned(2), now=0)
        assert b.finished().failed.tolist() == [0, 1]
        b.kv.load(second, into=aligned(2), now=0)
        done = b.finished()
        assert done.failed.tolist() == [0, 1] and done.bytes == 0
        assert b.kv.match(chain(0, 2), now=0).length == 0
        s = b.stats
        assert (s["bad_payloads"], s["quarantined"], s["disk_bad"]) == (2, 2, 2)
        b.settled()


def test_r1_a_match_of_the_manager_holds_nothing(bench: Bench) -> None:
    bench.engine.run(0, 2 * TOKENS)
    bench.found(0, 2)
    assert bench.stats["device_leased"] == 0


# ---- R2


def test_r2_all_slots_leased_is_an_answer_and_not_a_wait(bench: Bench) -> None:
    held = [bench.engine.begin(doc, 2 * TOKENS) for doc in range(4)]
    started = time.monotonic()
    answers = [bench.engine.begin(9, TOKENS) for _ in range(100)]
    assert time.monotonic() - started < 10
    assert set(answers) == {gdskv.Rejected("device slots are leased", 8, 8)}
    assert bench.stats["rejected"] == 100
    assert bench.kv.allocate(held[0], 1, now=0) == gdskv.Rejected("device slots are leased", 8, 8)
    for request in held:
        bench.kv.release(request, now=0)
    bench.engine.run(9, 8 * TOKENS)
    bench.settled()


def test_r2_no_host_slot_for_staging_is_a_shorter_answer_and_counted(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=2, disk=16) as b:
        put(b, 0, 2)
        put(b, 1, 2)  # document 0 is on disk alone
        b.drain()
        holder = b.kv.match(chain(1, 2), now=0)
        assert holder.tier.tolist() == [1, 1]
        crooked = np.zeros(2 * BLOCK + 1, np.uint8)[1:].reshape(2, BLOCK)
        b.kv.load(b.kv.match(chain(0, 2), now=0), into=crooked, now=0)
        assert b.finished().failed.tolist() == [0, 1]
        assert b.stats["staged"] == 2
        assert put(b, 2, 2).ticket.blocks == 0
        assert b.stats["shed_no_slot"] == 2
        b.kv.release(holder)
        b.kv.load(b.kv.match(chain(0, 2), now=0), into=crooked, now=0)
        assert b.finished().failed.tolist() == []
        assert right(crooked, 0)
        b.settled()


# ---- R3


def test_r3_leases_end_with_their_owner_and_only_once(bench: Bench) -> None:
    kv = bench.kv
    first, second = bench.engine.begin(0, 4 * TOKENS), bench.engine.begin(1, 4 * TOKENS)
    for _ in range(3):
        kv.cancel(first, now=0)
        kv.release(first, now=0)
    assert bench.stats["device_leased"] == 4
    bench.engine.finish(second)
    kv.release(second, now=0)
    bench.settled()


def test_r3_matches_that_are_never_loaded_hold_what_they_found_and_nothing_else(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=4, disk=0) as b:
        put(b, 0, 2)
        found = [b.kv.match(chain(0, 2), now=0) for _ in range(6000)]  # more than there are tickets
        assert b.stats["host_leased"] == 2
        put(b, 1, 2)
        put(b, 2, 2)
        for f in found:
            b.kv.release(f)
            b.kv.release(f)
        b.settled()


# ---- R4


def test_r4_a_full_write_queue_sheds_and_counts_and_stops_nobody(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=64, write_queue=2, queue_depth=16) as b:
        for doc in range(2):
            b.engine.run(doc, 8 * TOKENS)
        b.hold.hold(WRITE)
        request = b.engine.begin(2, 8 * TOKENS)  # eight blocks leave host for it
        assert isinstance(request, gdskv.Request)
        s = b.stats
        assert (s["writing"], s["spills"], s["shed_queue"], s["dropped_last"]) == (2, 2, 6, 6)
        b.hold.let()
        b.engine.finish(request)
        for doc in range(20):
            b.engine.run(doc, 8 * TOKENS)
            assert b.stats["writing"] <= 2
        b.settled()


def test_r4_retained_blocks_are_shed_last(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=0, disk=64, write_queue=2) as b:
        b.hold.hold(WRITE)
        b.engine.run(0, 8 * TOKENS, retention=gdskv.Retention(ttl=100))
        s = b.stats
        assert (s["retained_writes"], s["writing"]) == (4, 4), "up to twice the queue"
        other = b.engine.begin(1, 8 * TOKENS)
        b.hold.let()
        b.engine.finish(other)
        assert b.stats["shed_queue"] > 0
        b.settled()


def test_r4_reads_do_not_wait_for_writes(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=16, disk=64, host_clean=0.5) as b:
        for doc in range(20):
            b.engine.run(doc, 2 * TOKENS)
        b.drain()
        assert b.found(0, 2).disk == 2 * TOKENS
        b.hold.hold(WRITE)
        for doc in range(20, 22):  # what leaves host for these is on disk already
            b.engine.run(doc, 2 * TOKENS)
        assert b.hold.waiting(WRITE) > 0
        request = b.engine.run(0, 2 * TOKENS)
        assert request.matched.disk == 2 * TOKENS
        assert b.hold.waiting(WRITE) > 0
        b.settled()


def test_r4_a_burst_of_requests_larger_than_every_queue(tmp_path: Path) -> None:
    with Bench(tmp_path, device=64, host=32, disk=256, queue_depth=16, write_queue=8) as b:
        for burst in range(6):
            live = [b.engine.begin(doc, 2 * TOKENS) for doc in range(burst * 16, burst * 16 + 32)]
            for request in live:
                assert isinstance(request, gdskv.Request)
                b.engine.finish(request)
        assert b.engine.verified > 0
        b.settled()


def test_r4_a_device_100_times_slower_for_a_while_delays_and_breaks_nothing(tmp_path: Path) -> None:
    delays: list[DelayEngine] = []

    def slow(engine: object) -> DelayEngine:
        delays.append(DelayEngine(engine, 0.02))
        return delays[0]

    with gdskv.BlockManager(config(tmp_path, 8, 8, 64), LAYOUT, NAMESPACE, io=slow) as kv:
        engine = Engine(kv)
        for i in range(40):
            delays[0].seconds = 0.02 if 10 <= i < 20 else 0.0
            engine.run(i * 7 % 11, (1 + i % 4) * TOKENS)
        delays[0].seconds = 0
        engine.drain()
        s = kv.stats()
        assert (s["failed_reads"], s["failed_writes"], s["timed_out"]) == (0, 0, 0)
        assert s["device_leased"] == s["in_flight"] == s["deferred"] == 0
        assert engine.verified > 20


def test_r4_a_request_that_needs_no_disk_does_not_wait_for_one_that_does(tmp_path: Path) -> None:
    with Bench(tmp_path, device=8, host=8, disk=64) as b:
        b.to_disk(0, 2)
        b.engine.run(1, 2 * TOKENS)
        b.hold.hold(READ, WRITE)
        parked = b.engine.begin(0, 2 * TOKENS)
        for _ in range(10):
            assert b.engine.run(1, 2 * TOKENS).matched.device == 2 * TOKENS
        assert not b.kv.is_ready(parked)
        b.hold.let()
        b.engine.finish(parked)
        b.settled()


# ---- R5


def test_r5_spills_go_on_when_every_host_slot_was_parked_behind_a_read(tmp_path: Path) -> None:
    with Bench(tmp_path, device=4, host=2, disk=32) as b:
        b.to_disk(0, 4)
        b.hold.hold(READ)
        for doc in (0, 0):
            b.kv.prefetch(tokens(doc, 4 * TOKENS), now=b.engine.now)
        b.polls()
        assert b.hold.waiting(READ) >= 1
        requests = []
        for doc in range(1, 6):
            b.engine.now += 1
            request = b.engine.begin(doc, 4 * TOKENS)
            assert isinstance(request, gdskv.Request), "full of landing reads is not full"
            requests.append(request)
            b.kv.cancel(request, now=b.engine.now)
        b.hold.let()
        before = b.stats["spills"]
        for doc in range(10, 16):
            b.engine.run(doc, 4 * TOKENS)
        assert b.stats["spills"] > before
        b.settled()


# ---- R6


@pytest.mark.parametrize("how", ["cancel", "release"])
@pytest.mark.parametrize("op", [READ, WRITE, COPY], ids=["mid-read", "mid-write", "mid-offload"])
def test_r6_giving_up_in_the_middle_frees_a_slot_only_when_nothing_moves_in_it(
    tmp_path: Path, op: int, how: str
) -> None:
    with Bench(tmp_path, device=2, host=0 if op == WRITE else 4, disk=32) as b:
        b.to_disk(0, 2)
        b.engine.run(1, 2 * TOKENS)
        b.hold.hold(op)
        request = b.engine.begin(0, 2 * TOKENS)
        b.polls()
        assert b.hold.waiting(op) > 0 and not b.kv.is_ready(request)
        getattr(b.kv, how)(request, now=b.engine.now)
        assert b.stats["device_leased"] == 0
        other = b.engine.begin(2, 2 * TOKENS)
        assert isinstance(other, gdskv.Request)
        b.polls()
        assert not b.kv.is_ready(other), "older bytes may still land in its slots, or leave them"
        b.hold.let()
        b.engine.finish(other)
        for doc in (0, 1, 2):
            b.engine.run(doc, 2 * TOKENS)
        assert b.engine.verified >= 6
        b.settled()


def test_r6_a_cancelled_load_is_reported_when_nothing_moves_in_the_callers_memory(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0, disk=16) as b:
        put(b, 0, 4)
        b.hold.hold(READ)
        memory = aligned(4)
        ticket = b.kv.load(b.kv.match(chain(0, 4), now=0), into=memory, now=0)
        b.kv.cancel(ticket)
        done = b.finished()
        assert done.ticket == ticket and done.failed.tolist() == [0, 1, 2, 3]
        b.hold.let()
        b.polls()
        assert not memory.any(), "it is the caller's again, and nothing lands in it"
        assert b.kv.match(chain(0, 4), now=0).length == 4, "a cancelled read says nothing against the block"
        assert b.stats["transient_errors"] == 0


def test_r6_the_callers_memory_stays_alive_while_it_is_written(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0, disk=16) as b:
        put(b, 0, 2)
        b.hold.hold(READ)
        b.kv.load(b.kv.match(chain(0, 2), now=0), into=aligned(2), now=0)  # nobody else knows this memory
        assert len(b.kv._memory) == 1
        b.hold.let()
        b.finished()
        assert len(b.kv._memory) == 0
        b.settled()


def test_r6_a_cancelled_store_is_not_found(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=4, disk=16) as b:
        b.hold.hold(COPY)
        ticket = b.kv.store(chain(0, 2), source=aligned(2), now=0)
        b.kv.cancel(ticket)
        assert b.finished().failed.tolist() == [0, 1]
        assert b.kv.match(chain(0, 2), now=0).length == 0
        b.settled()


# ---- R7


@pytest.mark.parametrize("seed", range(3))
def test_r7_free_counts_never_exceed_the_total(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Bench(tmp_path, device=4, host=3, disk=7) as b:
        live: list[gdskv.Request] = []
        for _ in range(300):
            answer = b.engine.begin(rng.randrange(6), rng.randint(1, 4) * TOKENS)
            if isinstance(answer, gdskv.Request):
                live.append(answer)
            if live and rng.random() < 0.8:
                request = live.pop(rng.randrange(len(live)))
                if rng.random() < 0.3:
                    b.kv.cancel(request, now=b.engine.now)
                else:
                    b.engine.finish(request)
            s = b.stats
            for tier in ("device", "host", "disk"):
                assert s[f"{tier}_free"] + s[f"{tier}_used"] + s[f"{tier}_bad"] <= s[f"{tier}_blocks"]
            b.kv.check()
        for request in live:
            b.kv.release(request, now=b.engine.now)
        b.settled()


# ---- R8


def test_r8_the_newest_is_not_the_first_to_leave(bench: Bench) -> None:
    bench.engine.now = 0.0
    for doc in range(4):
        request = bench.engine.begin(doc, 2 * TOKENS)  # all at time 0
        bench.engine.finish(request)
    request = bench.engine.begin(4, 2 * TOKENS)
    bench.engine.finish(request)
    assert bench.found(0, 2).device == 0
    for doc in range(1, 5):
        assert bench.found(doc, 2).device == 2 * TOKENS
    bench.settled()


def test_r8_neither_in_a_store(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=4, disk=0) as b:
        for doc in range(5):
            put(b, doc, 1)
        lengths = []
        for doc in range(5):
            found = b.kv.match(chain(doc, 1), now=0)
            lengths.append(found.length)
            b.kv.release(found)
        assert lengths == [0, 1, 1, 1, 1]


# ---- R9


def test_r9_counts_are_flat_over_100_000_spills_and_returns(tmp_path: Path) -> None:
    with gdskv.BlockManager(config(tmp_path, 8, 8, 64), LAYOUT, NAMESPACE, io="null") as kv:
        keys = [chain(doc, 8) for doc in range(8)]
        held: list[tuple[int, ...]] = []
        spilled = 0
        rounds = 0
        while spilled < 100_000:
            for k in keys:
                request = kv.begin(keys=k, now=float(rounds))
                while not kv.is_ready(request):
                    kv.poll(now=float(rounds))
                kv.commit(request, now=float(rounds))
                kv.release(request, now=float(rounds))
                rounds += 1
            s = kv.stats()
            spilled = s["offloads"] + s["onboards_disk"]
            a = kv.store.table.arrays
            held.append((len(kv.store._pending), len(kv.store._found), s["device_free"], s["host_free"], len(a.e)))
        while not kv.store.idle:
            kv.poll(now=float(rounds))
        assert len(set(held[2:])) == 1
        s = kv.stats()
        assert s["device_leased"] == s["host_leased"] == s["disk_leased"] == s["in_flight"] == 0
        assert s["device_used"] + s["device_free"] == 8
        kv.check()


# ---- R10


def test_r10_one_transient_read_error_does_not_lose_a_good_block(bench: Bench) -> None:
    bench.to_disk(0, 2)
    bench.fail(READ, Fail(errno.EIO))
    request = bench.engine.begin(0, 2 * TOKENS)
    bench.engine.wait(request)
    (lost,) = request.failed.tolist()
    bench.kv.cancel(request, now=bench.engine.now)
    assert bench.found(0, 2).disk == lost * TOKENS, "not tried again at once"
    bench.tick(1.1)
    assert sum(bench.found(0, 2)) == 2 * TOKENS, "and then it is there"
    bench.engine.run(0, 2 * TOKENS)
    s = bench.stats
    assert (s["transient_errors"], s["quarantined"]) == (1, 0)
    bench.settled()


def test_r10_errors_that_stop_are_forgiven(tmp_path: Path) -> None:
    with Bench(tmp_path, device=1, host=0, disk=8) as b:
        b.to_disk(0, 1)
        for _ in range(6):
            b.fail(READ, Fail(errno.EIO))
            request = b.engine.begin(0, TOKENS)
            b.engine.wait(request)
            assert request.failed.tolist() == [0]
            b.kv.cancel(request, now=b.engine.now)
            b.tick(10)
            assert b.engine.run(0, TOKENS).matched.disk == TOKENS
            b.engine.run(1, TOKENS)
        s = b.stats
        assert (s["transient_errors"], s["quarantined"]) == (6, 0)
        b.settled()


def test_r10_the_third_error_in_a_row_takes_the_slot_out_of_use(tmp_path: Path) -> None:
    with Bench(tmp_path, device=1, host=0, disk=8) as b:
        b.to_disk(0, 1)
        b.fail(READ, Fail(errno.EIO), times=3)
        waits = []
        for _ in range(3):
            assert b.found(0, 1).disk == TOKENS
            request = b.engine.begin(0, TOKENS)
            b.engine.wait(request)
            b.kv.cancel(request, now=b.engine.now)
            waits.append(0)
            while b.found(0, 1).disk == 0 and waits[-1] < 40:
                b.tick(0.5)
                waits[-1] += 1
        assert waits[0] < waits[1], "each wait is longer"
        assert waits[2] == 40, "and the third is for good"
        s = b.stats
        assert (s["transient_errors"], s["quarantined"], s["disk_bad"]) == (2, 1, 1)
        assert b.engine.run(0, TOKENS).matched == (0, 0, 0)
        b.settled()


def test_r10_requests_that_read_at_once_count_one_error(tmp_path: Path) -> None:
    with Bench(tmp_path, store=True, host=0, disk=8) as b:
        put(b, 0, 1)
        b.fail(READ, Fail(errno.EIO), times=5)
        found = [b.kv.match(chain(0, 1), now=0) for _ in range(5)]
        b.hold.hold(READ)
        for f in found:
            b.kv.load(f, into=aligned(1), now=0)
        b.hold.let()
        b.drain()
        assert [d.failed.tolist() for d in b.done] == [[0]] * 5
        s = b.stats
        assert (s["failed_reads"], s["transient_errors"], s["quarantined"]) == (5, 1, 0)
        b.tick(1.1)
        found = b.kv.match(chain(0, 1), now=b.engine.now)
        assert found.length == 1
        b.kv.release(found)
        b.settled()
