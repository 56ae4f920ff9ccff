"""Runs the ``gdskv`` command in the process of a test."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import pytest

from gdskv.cli import main


class Answer(NamedTuple):
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        assert self.out.count("\n") == 1
        value: dict[str, Any] = json.loads(self.out)
        return value


class Command:
    """The command line: call it with its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["gdskv", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = self._capsys.readouterr()
        return Answer(int(end.value.code or 0), out, err)
