"""What several test files share: the real traces, and lines for the end of the test output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
SUMMARY = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--soak MINUTES``."""
    parser.addoption(
        "--soak",
        type=float,
        default=0,
        metavar="MINUTES",
        help="random tests go on for that long, and ten times as many kills and cuts are made",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A place for the lines that tests want shown."""
    config.stash[SUMMARY] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show them."""
    for line in config.stash[SUMMARY]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def summary(pytestconfig: pytest.Config) -> list[str]:
    """Return the list of lines that are shown after all tests."""
    return pytestconfig.stash[SUMMARY]


@pytest.fixture
def trace() -> Callable[[str], Path]:
    """Return a function from a trace's name ("conversation", "synthetic", "agent") to its file.

    It looks into the folder in the variable GDSKV_TRACES, else into ../shared/traces beside the checkout. A trace that
    is not there skips the test; under CI=true it fails it.
    """

    def find(name: str) -> Path:
        folder = Path(os.environ.get("GDSKV_TRACES") or CHECKOUT.parent / "shared" / "traces")
        path = folder / f"{name}_trace.jsonl"
        if not path.is_file():
            message = f"{path} is not there: set GDSKV_TRACES to the folder of the traces"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)
        return path

    return find


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the GDSKV_* settings of whoever runs the tests out of them."""
    for name in os.environ:
        if name.upper().startswith("GDSKV_") and name != "GDSKV_TRACES":
            monkeypatch.delenv(name)
