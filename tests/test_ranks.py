"""One cache over several ranks: a block is there when all ranks have it, and no rank serves other bytes."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles import Fail, FaultEngine
from faulty import READ, HoldEngine
from ranked import BLOCK, LAYOUT, Engine, chain, namespace

import gdskv
from gdskv.ranks import EngineMemory, Leader, Orders, Report, Worker


def slab(folder: Path, rank: int) -> Path:
    (file,) = (folder / f"rank{rank}").rglob("blocks.slab")
    return file


def fill_up(engine: Engine, documents: int = 8, n: int = 4, first: int = 0) -> None:
    for doc in range(first, first + documents):
        engine.put(doc, n)
    engine.drained()


# ---- real processes


@pytest.mark.parametrize(("ranks", "start"), [(2, "spawn"), (4, "fork")])
def test_ranks_in_processes_of_their_own_store_load_and_come_back_after_a_kill(
    tmp_path: Path, ranks: int, start: str
) -> None:
    engine = Engine(tmp_path, ranks, start=start)
    engine.opened()
    fill_up(engine)
    assert engine.tiers(0, 5) == [2] * 4 and engine.get(0, 4) == 4
    assert engine.tiers(7, 4) == [1] * 4 and engine.get(7, 4, start=1) == 3
    stats = engine.leader.stats()
    assert stats["spills"] == 32 and stats["failed_reads"] == stats["disagreed"] == 0
    for rank in engine.ranks:
        rank.kill()
    again = Engine(tmp_path, ranks, start=start)
    again.opened()
    assert again.leader.recovered == 32
    assert [again.get(doc, 4) for doc in range(8)] == [4] * 8
    assert again.leader.store is not None
    again.leader.store.check()
    again.close()


def test_a_killed_rank_makes_misses_and_what_is_on_disk_is_back_with_it(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, start="fork")
    engine.opened()
    fill_up(engine)
    keys = chain(0, 4)
    load = engine.leader.load(keys, start=0, into=range(32, 36), now=engine.now)
    assert load.ticket is not None
    engine.ranks[1].kill()
    engine.missing = {1}
    engine.until(lambda: load.ticket.id in engine.done)  # given up once it is silent for too long
    assert engine.done.pop(load.ticket.id).failed.tolist() == [0, 1, 2, 3]
    assert not engine.leader.open and engine.tiers(0, 4) == []
    assert engine.leader.take(keys, source=range(4), now=engine.now) is None
    engine.replace(1)
    engine.missing = set()
    engine.opened()
    assert engine.leader.counters["sessions_lost"] == 1
    assert [engine.get(doc, 4) for doc in range(8)] == [4] * 8
    engine.close()


def test_a_slow_rank_is_waited_for_and_one_that_stays_away_is_not(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, start="fork")
    engine.opened()
    fill_up(engine)
    engine.ranks[1].call("slow", True)  # it reports, and does nothing of what it is told
    load = engine.leader.load(chain(0, 4), start=0, into=range(32, 36), now=engine.now)
    assert load.ticket is not None
    for _ in range(20):
        engine.step()
    assert load.ticket.id not in engine.done, "ready when all ranks say so"
    engine.ranks[1].call("slow", False)
    for _ in range(300):
        engine.step()
    assert engine.get(0, 4) == 4, "it has missed orders, and started over"
    engine.missing = {1}
    engine.done.clear()
    load = engine.leader.load(chain(1, 4), start=0, into=range(32, 36), now=engine.now)
    assert load.ticket is not None
    engine.until(lambda: load.ticket.id in engine.done)
    assert not engine.leader.open
    engine.missing = set()
    engine.opened()
    assert engine.get(1, 4) == 4
    engine.close()


# ---- in this process, message by message


def test_a_rank_of_another_generation_gives_misses(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    fill_up(engine)
    engine.close()
    shutil.copytree(tmp_path / "rank1", tmp_path / "old")
    engine = Engine(tmp_path, 2)
    engine.opened()
    fill_up(engine, documents=4, first=100)  # other blocks in half of the slots
    engine.close()
    shutil.rmtree(tmp_path / "rank1")
    (tmp_path / "old").rename(tmp_path / "rank1")
    engine = Engine(tmp_path, 2)
    engine.opened()
    kept = sum(engine.get(doc, 4) for doc in range(8))
    assert 0 < kept == engine.leader.recovered < 32, "those that both have alike"
    assert sum(engine.get(doc, 4) for doc in range(100, 104)) == 0
    engine.drained()
    engine.close()


def test_a_rank_whose_files_are_gone_gives_misses_until_all_is_stored_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    fill_up(engine)
    engine.close()
    shutil.rmtree(tmp_path / "rank0")
    engine = Engine(tmp_path, 2)
    engine.opened()
    assert engine.leader.recovered == 0 and engine.get(0, 4) == 0
    fill_up(engine)
    engine.close()
    engine = Engine(tmp_path, 2)
    engine.opened()
    assert engine.leader.recovered == 32 and engine.get(0, 4) == 4
    engine.close()


def test_bytes_that_changed_on_one_rank_are_a_miss_on_all(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    fill_up(engine)
    size = slab(tmp_path, 1).stat().st_size
    slab(tmp_path, 1).write_bytes(bytes([0x5A]) * size)
    assert engine.get(0, 4) == 0
    assert engine.leader.stats()["bad_payloads"] > 0
    assert engine.put(0, 4).failed.tolist() == []
    assert engine.get(0, 4) == 4
    engine.close()


def test_a_write_that_fails_on_one_rank_leaves_nothing_on_disk(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    worker = engine.ranks[1].rank.worker
    full = True

    def rule(transfer: np.void) -> Fail | None:
        return Fail(errno.ENOSPC) if full and int(transfer["op"]) == 1 and int(transfer["slab"]) == 0 else None

    worker.io = FaultEngine(worker.io, rule)
    engine.put(0, 4)
    engine.until(lambda: engine.leader.flush() > 0)
    engine.until(lambda: engine.leader.store is not None and engine.leader.store.idle)
    stats = engine.leader.stats()
    assert stats["failed_writes"] > 0 and stats["disk_used"] == 0 and stats["directories_read_only"] == 1
    assert engine.get(0, 4) == 4, "from host"
    full = False
    engine.step(5)
    engine.put(1, 4)
    engine.drained()
    assert engine.leader.stats()["disk_used"] > 0
    engine.close()


def test_orders_that_are_lost_on_the_way_are_noticed(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    fill_up(engine)
    engine.leader.load(chain(0, 4), start=0, into=range(32, 36), now=engine.now)
    engine.missing = {0}
    engine.step()
    engine.missing = set()
    engine.until(lambda: engine.leader.counters["sessions"] == 2)
    assert engine.get(0, 4) == 4
    engine.close()


def test_orders_said_twice_are_carried_out_once_and_old_ones_not_at_all(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1)
    engine.opened()
    rank = engine.ranks[0].rank
    said: list[Orders] = []
    step = rank.step
    rank.step = lambda orders: (said.append(orders), step(orders))[1]
    fill_up(engine)
    for orders in said:
        engine.leader.receive(step(orders), now=engine.now)
    assert engine.get(0, 4) == 4
    old = rank.worker.epoch
    rank.worker._over = False  # as after a fault
    engine.until(lambda: engine.leader.counters["sessions"] == 2)
    assert rank.worker.epoch != old
    for orders in said:
        engine.leader.receive(step(orders), now=engine.now)
    assert engine.get(0, 4) == 4 and engine.leader.counters["sessions"] == 2
    engine.close()


def test_reports_of_an_earlier_opening_are_ignored(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1)
    engine.opened()
    before = engine.leader.counters["reports_ignored"]
    engine.leader.receive(Report(0, 12345, 1), now=engine.now)
    assert engine.leader.counters["reports_ignored"] == before + 1 and engine.leader.open
    engine.close()


def test_a_cleared_cache_stays_empty_after_a_restart(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    fill_up(engine)
    engine.leader.forget()
    assert engine.tiers(0, 4) == []
    engine.opened()
    assert engine.tiers(0, 4) == [] and engine.leader.recovered == 0
    engine.close()
    engine = Engine(tmp_path, 2)
    engine.opened()
    assert engine.leader.recovered == 0
    engine.close()


def test_retention_and_its_tenant_survive_a_restart_of_all_ranks(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    engine.put(0, 2, retention=gdskv.Retention(ttl=3600, priority=80, tenant="acme"))
    engine.drained()
    engine.close()
    engine = Engine(tmp_path, 2)
    engine.now = 500.0
    engine.leader = engine.new_leader()
    engine.opened()
    store = engine.leader.store
    assert store is not None and store.table.retained().get("acme") == 2
    entries, _ = store.table.match(chain(0, 2))
    left = store.table.arrays.e["deadline"][entries] / 1e9 - engine.now
    assert ((left > 3500) & (left <= 3600)).all(), left
    engine.close()


def test_what_has_not_started_of_a_store_lets_its_source_go_at_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1)
    engine.opened()
    rank = engine.ranks[0].rank
    taken = engine.leader.take(chain(0, 4), source=range(4), now=engine.now)
    assert taken is not None and taken[1] == 4
    rank.worker.receive(engine.leader.orders(now=engine.now))
    assert rank.worker.advance() == [], "the engine has not computed them yet"
    landed = rank.worker.stop_tickets({taken[0].id})
    assert [(x.address, x.ok) for x in landed] == [(i, False) for i in range(4)]
    engine.until(lambda: taken[0].id in engine.done)
    assert engine.get(0, 4) == 0
    assert engine.put(0, 4).failed.tolist() == [] and engine.get(0, 4) == 4
    engine.close()


def test_a_disk_that_does_not_answer_holds_up_no_request(tmp_path: Path) -> None:
    """What waits for the disk never touches the engine's memory, so its blocks are given back when time is up."""
    engine = Engine(tmp_path, 1)
    engine.opened()
    fill_up(engine)
    rank = engine.ranks[0].rank
    rank.worker.io = hold = HoldEngine(rank.worker.io)
    hold.hold(READ)
    rank.take_landed()
    load = engine.leader.load(chain(0, 4), start=0, into=range(32, 36), now=engine.now)
    assert load.ticket is not None
    engine.step()
    assert rank.take_landed() == []
    for _ in range(7):  # io_timeout is 5 s
        engine.step(1.0)
    landed = sorted((x.address, x.ticket, x.ok) for x in rank.take_landed())
    assert landed == [(i, load.ticket.id, False) for i in range(32, 36)]
    assert engine.leader.open and engine.put(50, 2).failed.tolist() == [], "others go on"
    hold.let()
    engine.until(lambda: load.ticket.id in engine.done)
    engine.drained()
    assert engine.get(0, 4) == 4 and engine.get(50, 2) == 2
    engine.close()


def test_a_cancel_that_comes_too_late_does_not_reach_what_has_the_tag_next(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.opened()
    engine.put(0, 4)
    load = engine.leader.load(chain(0, 4), start=0, into=range(32, 36), now=engine.now)
    assert load.ticket is not None and engine.leader.store is not None
    while engine.leader.store.fleet.owing:  # every rank has done it, and the table has not heard
        orders = engine.leader.orders(now=engine.now)
        for rank in engine.ranks:
            engine.leader.receive(rank.rank.step(orders), now=engine.now)
    engine.leader.cancel(load.ticket)
    assert engine.leader.poll(now=engine.now)[0].failed.tolist() == []
    assert engine.put(1, 4).failed.tolist() == [] and engine.tiers(1, 4) == [1] * 4
    engine.close()


def test_ranks_of_unequal_size_are_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2)
    engine.settings["disk_bytes"] += 4 * BLOCK
    engine.ranks[1].call("close")
    engine.replace(1)
    with pytest.raises(gdskv.ConfigError, match=r"rank 1 has room for 8 host blocks and \[36\] disk blocks, rank 0"):
        engine.opened()
    engine.close()


def test_a_worker_needs_host_memory_and_a_pool_of_its_layout(tmp_path: Path) -> None:
    memory = EngineMemory([torch.zeros(8, BLOCK // 4)], 8)
    disk = gdskv.CacheConfig(disk_bytes=4 * BLOCK, directories=[tmp_path], min_free=0)
    with pytest.raises(gdskv.ConfigError, match="host_bytes=0 holds no block"):
        Worker(disk, LAYOUT, namespace(1, 0), memory)
    host = gdskv.CacheConfig(host_bytes=4 * BLOCK)
    with pytest.raises(gdskv.ConfigError, match=f"blocks have {BLOCK // 2} bytes and the layout's {BLOCK}"):
        Worker(host, LAYOUT, namespace(1, 0), EngineMemory([torch.zeros(8, BLOCK // 8)], 8))
    worker = Worker(host, LAYOUT, namespace(1, 0), memory)
    leader = Leader(host, LAYOUT, namespace(1, 0))
    leader.receive(worker.report(), now=0.0)
    assert leader.open and leader.orders(now=0.0).epochs == [worker.epoch]
    assert worker.close()


@pytest.mark.parametrize(
    ("shape", "order", "pieces"),
    [
        ((16, 2, 32, 64), (0, 1, 2, 3), 1),  # blocks first: one piece
        ((2, 16, 32, 2, 64), (0, 1, 2, 3, 4), 2),  # keys and values apart
        ((2, 16, 2, 32, 64), (0, 1, 3, 2, 4), 2),  # heads before tokens in memory
        ((16, 2, 32, 2, 64), (1, 0, 2, 3, 4), 2),  # blocks first to the eye only
        ((16, 32, 576), (0, 1, 2), 1),  # one latent vector
    ],
)
def test_where_a_block_lies_in_an_engines_tensor(shape: tuple[int, ...], order: tuple[int, ...], pieces: int) -> None:
    there = torch.arange(int(np.prod(shape)), dtype=torch.int32).view([shape[axis] for axis in order])
    tensor = there.permute([order.index(axis) for axis in range(len(order))])
    assert tuple(tensor.shape) == shape
    memory = EngineMemory([tensor], 16)
    assert len(memory.base) == pieces and memory.block_bytes * 16 == tensor.numel() * 4
    raw = there.view(-1).numpy()
    axis = shape.index(16)
    for block in (0, 7, 15):
        starts = (memory.base + np.uint64(block) * memory.stride - np.uint64(raw.ctypes.data)) // np.uint64(4)
        got = np.concatenate(
            [raw[s : s + n // 4] for s, n in zip(starts.tolist(), memory.length.tolist(), strict=True)]
        )
        assert sorted(got.tolist()) == sorted(tensor.select(axis, block).reshape(-1).tolist())


def test_tensors_of_another_geometry_are_refused() -> None:
    with pytest.raises(gdskv.LayoutError, match="no axis of 16 blocks"):
        EngineMemory([torch.zeros(8, 4, 4)], 16)
    with pytest.raises(gdskv.LayoutError, match="does not hold the bytes of a block together"):
        EngineMemory([torch.zeros(16, 8, 4)[:, ::2]], 16)
    with pytest.raises(gdskv.LayoutError, match="no tensors"):
        EngineMemory([], 16)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_no_rank_serves_wrong_bytes(tmp_path: Path, seed: int) -> None:
    """Documents in random order, with messages lost, ranks that stop and start over, slabs that change."""
    dice = random.Random(seed)
    engine = Engine(tmp_path, 2, host=6, disk=20)
    engine.opened()
    came = 0
    for _ in range(120):
        doc, n = dice.randrange(8), dice.randrange(1, 6)
        what = dice.random()
        if what < 0.45:
            if engine.leader.open:
                engine.put(doc, n)
        elif what < 0.85:
            came += engine.get(doc, n, start=dice.randrange(n))
        elif what < 0.89:
            engine.missing = {dice.randrange(2)}
            engine.step()
            engine.missing = set()
        elif what < 0.92:
            rank = dice.randrange(2)
            engine.ranks[rank].call("close")
            engine.replace(rank)
        elif what < 0.94:
            at = dice.randrange(20) * LAYOUT.slot_bytes + 4096
            with slab(tmp_path, dice.randrange(2)).open("r+b") as file:
                file.seek(at)
                file.write(bytes(LAYOUT.slot_bytes))
        elif what < 0.95:
            engine.close()
            engine = Engine(tmp_path, 2, host=6, disk=20)
        else:
            for _ in range(dice.randrange(30)):
                engine.step(0.05)
        if engine.leader.store is not None:
            engine.leader.store.table.check(closed=False, exclusive=False)
    engine.opened()
    engine.drained()
    assert came > 0
    engine.close()
