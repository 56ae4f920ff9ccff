"""What compiled code of the table a process needs is there before the first request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path

import numpy as np

import gdskv
from gdskv.table import entries, index, journal, moves, notes, order, plan, slots
from harness import LAYOUT, NAMESPACE, TOKENS, Engine, config, tokens


def compiled():
    rooms = (entries, index, journal, moves, notes, order, plan, slots)
    names = [(room, name) for room in rooms for name in vars(room)]
    functions = {(room.__name__, name): getattr(room, name) for room, name in names}
    return {w: len(f.signatures) for w, f in functions.items() if hasattr(f, "signatures")}


kv = gdskv.BlockManager(config(Path(sys.argv[1])), LAYOUT, NAMESPACE)
before = compiled()
engine = Engine(kv, check=False)
for document in range(6):
    engine.run(document, 4 * TOKENS)
    engine.run(document, 4 * TOKENS, retention=gdskv.Retention(ttl=30))
keys = gdskv.block_keys(tokens(1, 64), TOKENS, namespace=NAMESPACE.digest(LAYOUT))
keys.flags.writeable = False
kv.prefetch(keys=keys[::2], now=engine.now)
kv.close()
assert compiled() == before, {w: n for w, n in compiled().items() if n != before[w]}
assert max(before.values()) == 1, {w: n for w, n in before.items() if n > 1}
"""


def test_no_request_waits_for_the_compiler_and_nothing_is_compiled_twice(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(program, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
