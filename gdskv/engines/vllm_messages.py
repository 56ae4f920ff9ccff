"""What the two halves of the vLLM connector send each other with each step: vLLM pickles it.

Plain data; orders and reports of `gdskv.ranks` inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from gdskv.ranks import Orders, Report

__all__ = ["Greeting", "LoadNote", "Reports", "SaveNote", "Step"]


@dataclass
class LoadNote:
    """A request that waits for blocks."""

    request: str
    ticket: int
    """-1: no block is on its way."""
    blocks: list[int]
    """vLLM's numbers of those that are."""
    failed: list[int]
    """Those that will not come."""


@dataclass
class SaveNote:
    """Blocks of a request that are copied out of vLLM's pool."""

    request: str
    ticket: int
    count: int


@dataclass
class Step(KVConnectorMetadata):
    """Leader to every worker."""

    orders: Orders
    loads: list[LoadNote] = field(default_factory=list)
    saves: list[SaveNote] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM keeps until the worker says that the copies have left them."""
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are given to others in this step."""
    empty: bool = False
    """No model runs in this step."""


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """Workers to leader."""

    reports: list[Report]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of both."""
        assert isinstance(other, Reports)
        return Reports(self.reports + other.reports)


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    """A worker's first report, before any step: what came back from disk is there for the first request."""

    report: Report
