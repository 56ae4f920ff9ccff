"""The books of the fault suites, at the end of the test output."""

from __future__ import annotations

import pytest
from faults import BOOKS, NOTES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not BOOKS:
        return
    terminalreporter.section("faults")
    for kind, counts in BOOKS.items():
        shown = ", ".join(f"{n:,} {what.replace('_', ' ')}" for what, n in counts.items())
        terminalreporter.write_line(f"{kind}: {shown}")
    for note in NOTES:
        terminalreporter.write_line(note)
    terminalreporter.write_line(f"wrong bytes: {sum(counts['wrong'] for counts in BOOKS.values())} in all")
