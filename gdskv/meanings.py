"""What the counters and gauges of ``stats()`` mean, in words, for every page of metrics that shows them.

Knows words only, so that anything can import it.
"""

from __future__ import annotations

__all__ = ["COUNTERS", "GAUGES"]

GAUGES = {
    "host_blocks": "Blocks that host memory has room for",
    "host_used": "Blocks in host memory",
    "disk_blocks": "Blocks that the disk tier has room for",
    "disk_used": "Blocks on disk",
    "retained": "Blocks with a live deadline, ancestors included",
    "in_flight": "Transfers handed to the I/O engine, or to the ranks, that have not landed",
    "deferred": "Transfers that wait for others",
    "writing": "Blocks being written to disk, or waiting to be",
    "directories_read_only": "Directories that take no blocks at present",
    "io_read_threads": "I/O threads that read",
    "io_write_threads": "I/O threads that write",
}
COUNTERS = {
    "committed": "Blocks taken in",
    "spills": "Blocks written to disk",
    "evicted_host": "Blocks that left host memory",
    "evicted_disk": "Blocks that left the disk",
    "shed_queue": "Blocks not written because too many waited",
    "shed_no_slot": "Blocks not taken in because no slot was free",
    "failed_reads": "Reads from disk that failed",
    "failed_writes": "Writes to disk that failed",
    "bad_payloads": "Blocks whose bytes were not what had been written",
    "transient_errors": "Read errors after which the block is tried again",
    "quarantined": "Disk slots out of use",
    "expired": "Deadlines that passed",
    "forgotten": "Blocks forgotten at their deadline",
    "over_budget": "Blocks that found no room in the retention budget",
}
