"""Opens what a plan asks for, runs the trace against it and closes it again, with nothing left behind.

Knows which player fits which tiers; it must not know how a player works.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gdskv.config import CacheConfig
from gdskv.layout import KVLayout, Namespace
from gdskv.replay.player import Plan, Player, Tally, play
from gdskv.replay.traces import Trace

__all__ = ["run"]

_NAMESPACE = Namespace(model="gdskv-replay")


def run(trace: Trace, plan: Plan, *, io: Any = None, step: Callable[[int], None] = lambda done: None) -> Tally:
    """Run ``trace`` against the tiers of ``plan``.

    Parameters
    ----------
    trace, plan
        What to run, and against what. Without a directory the disk tier lies in a temporary one.
    io
        Handed to the manager or the store: a callable that wraps its I/O engine.
    step
        Called with 1 for each request that has started.

    Raises
    ------
    ConfigError, DirectoryError
        The tiers cannot be had as planned.
    """
    layout = KVLayout.raw(plan.block_bytes)
    blocks = plan.blocks
    policies = {"policy": plan.policy, "memory_policy": plan.memory_policy}
    if len(blocks) == 1 and "disk" not in blocks:
        policies["memory_policy"] = plan.policy
    if plan.simulate and (list(blocks) != ["disk"] or plan.ttl.share):
        # only the number of blocks matters; the topmost tier takes the place of the device tier
        top = next(iter(blocks))
        blocks = {"device": blocks.pop(top)} | blocks
        if list(plan.blocks) == ["disk"]:
            policies["memory_policy"] = plan.policy
    io = "null" if plan.simulate else io
    with ExitStack() as stack:
        directories = plan.directories
        if "disk" in blocks and not directories:
            directories = (Path(stack.enter_context(TemporaryDirectory(prefix="gdskv-replay-"))),)
        config = CacheConfig(
            device_bytes=blocks.get("device", 0) * layout.slot_bytes,
            host_bytes=blocks.get("host", 0) * layout.slot_bytes,
            disk_bytes=blocks.get("disk", 0) * layout.slot_bytes,
            directories=directories,
            **policies,
            write_budget=plan.write_budget,
            retained_fraction=plan.ttl.retained_fraction,
        )
        player: Player
        if "device" in blocks:
            from gdskv.manager import BlockManager
            from gdskv.replay.managed import ManagedPlayer

            manager = BlockManager(config, layout, _NAMESPACE, io=io)
            store, player = manager.store, ManagedPlayer(manager, plan)
        else:
            from gdskv.replay.stored import StoredPlayer
            from gdskv.store import KVStore

            longest = max(len(request.hash_ids) for request in trace.requests)
            store = KVStore(config, layout, _NAMESPACE, io=io)
            player = StoredPlayer(store, plan, longest)
        if store.disk_pool is not None:
            player.tally.directories = list(store.disk_pool.directories)
        try:
            play(trace, player, plan, step)
        finally:
            player.close()
    return player.tally
