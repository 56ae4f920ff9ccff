"""The README's program runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_program_in_the_readme_runs(tmp_path, capsys):
    pytest.importorskip("torch")
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program.count("/nvme0/kv") == 1
    exec(compile(program.replace("/nvme0/kv", str(tmp_path)), str(README), "exec"), {})
    assert capsys.readouterr().out == "Matched(device=0, host=0, disk=0)\n"
