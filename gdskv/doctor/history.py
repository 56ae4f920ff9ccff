"""What earlier owners of a directory met: write errors, and times when it took no blocks.

Reads superblocks only; must not open a store.
"""

from __future__ import annotations

from pathlib import Path

from gdskv.directory.survey import superblocks
from gdskv.doctor.findings import Finding

__all__ = ["history"]


def history(directory: Path) -> list[Finding]:
    """A finding if writes failed since the directory was made, over all namespaces; as of the last close."""
    found = superblocks(directory)
    errors, closures = sum(s.write_errors for s in found), sum(s.closures for s in found)
    if not errors:
        return []
    value = f"{errors} writes failed and it was read-only {closures} times, as of the last close"
    return [Finding("history", value, False, "look at the drive: dmesg, smartctl -a, nvme smart-log")]
