"""KV events over vLLM's own publisher: who subscribes knows which blocks gdskv's tiers serve, by vLLM's hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq
from conftest import Wanted, wait_for
from test_vllm import PROMPTS, Start, document, settings
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch


class Subscriber:
    """What a router knows: hashes per medium, and what was told of each."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self.socket.connect(endpoint)
        self.next = 0
        self.there: dict[str, set[Any]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.told: dict[str, dict[Any, BlockStored]] = {medium: {} for medium in self.there}
        self.twice = 0

    def hear(self) -> None:
        while self.socket.poll(200):
            _, number, data = self.socket.recv_multipart()
            assert int.from_bytes(number, "big") == self.next, "a batch was lost"
            self.next += 1
            for event in msgspec.msgpack.decode(data, type=KVEventBatch).events:
                self.take(event)

    def take(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):  # vLLM means its own pool
            self.there["GPU"].clear()
            return
        there = self.there[event.medium]
        for name in event.block_hashes:
            if not isinstance(event, BlockStored):
                there.remove(name)
                continue
            if event.medium != "GPU":
                self.twice += name in there
                self.told[event.medium][name] = event
            there.add(name)

    def knows(self, stats: dict[str, int]) -> bool:
        self.hear()
        return [len(self.there[m]) for m in ("CPU", "STORAGE")] == [stats["host_used"], stats["disk_used"]]


def test_a_subscriber_knows_what_each_tier_serves(start: Start, kv: Path, tmp_path: Path, wanted: Wanted) -> None:
    heard = Subscriber(endpoint := f"ipc://{tmp_path}/events")
    engine = start(settings(kv, host=64, disk=160), events=endpoint)
    assert engine.generate(PROMPTS)["tokens"] == wanted(PROMPTS)
    stats = engine.settle()
    wait_for(lambda: heard.knows(stats), 10, "every block that was stored is told of")
    assert heard.there["CPU"] == heard.there["STORAGE"] == heard.there["GPU"], "by the hashes of vLLM's own events"
    first = [e for e in heard.told["CPU"].values() if e.parent_block_hash is None]
    assert sorted(e.token_ids for e in first) == sorted(prompt[:32] for prompt in PROMPTS)
    parents = {e.parent_block_hash for e in heard.told["STORAGE"].values()} - {None}
    assert parents < heard.there["STORAGE"] and {e.block_size for e in heard.told["STORAGE"].values()} == {32}
    prompts = heard.there["STORAGE"].copy()
    for n in range(12):  # more than the tiers hold
        engine.generate([document(100 + n)])
    stats = engine.settle()
    assert stats["evicted_host"] > 0 and stats["evicted_disk"] > 0
    wait_for(lambda: heard.knows(stats), 10, "what left is told of")
    kept = heard.there["STORAGE"].copy()
    assert heard.twice == 0 and stats["unnamed_events"] == 0
    engine.stop()

    again = Subscriber(endpoint)
    engine = start(settings(kv, host=64, disk=160), events=endpoint)
    engine.generate([document(111), PROMPTS[0]])
    engine.settle()
    wait_for(lambda: again.hear() is None and len(again.there["STORAGE"]) >= 15, 10, "what was asked for is told of")
    assert again.there["STORAGE"] <= kept | prompts and again.there["STORAGE"] & kept
    before = again.there["STORAGE"].copy()
    assert engine.reset(connector=True)
    engine.generate([document(200)])  # events leave with the next step
    stats = engine.settle()
    wait_for(lambda: again.knows(stats), 10, "all that was there is gone")
    assert not again.there["STORAGE"] & before
    assert again.twice == 0 and engine.stats()["unnamed_events"] == 0
