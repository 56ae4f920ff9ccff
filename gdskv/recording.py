"""``Recorder``: the requests of a cache as a trace that ``gdskv replay`` reads; nothing in it leads to a prompt.

Knows keys and one file. The caller hands over arrays and goes on; a thread of its own writes them down.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gdskv.errors import ConfigError

__all__ = ["Recorder"]

FILES = 4  # the one being written and those that were full
WAITING = 4096  # requests not written down yet; one more is dropped, and counted
_NAP_S = 0.2
_ODD = np.uint64(0x9E3779B97F4A7C15)
_30, _27 = np.uint64(30), np.uint64(27)


class Recorder:
    """Writes one JSON line a request, in Mooncake's schema.

    Ids are the keys under a secret that is drawn at open and kept nowhere: equal keys have equal ids within one
    recording, and no id can be compared with another recording's or with a prompt.

    Parameters
    ----------
    path : Path
        The file; those that are full get the endings .1 (the newest) to .3.
    most_bytes : int
        Of all files together.
    tokens_per_block : int

    Raises
    ------
    ConfigError
        The file cannot be written.
    """

    def __init__(self, path: Path, most_bytes: int, tokens_per_block: int) -> None:
        self.path, self._file_bytes, self._tokens = path, max(4096, most_bytes // FILES), tokens_per_block
        self.recorded = self.dropped = 0
        self._secret = np.frombuffer(os.urandom(16), np.uint64)
        self._waiting: deque[tuple[float, NDArray[np.uint64], int]] = deque()
        self._over = threading.Event()
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"record={path} cannot be written: {error.strerror}. Name a writable file.") from None
        self._size = self._file.tell()
        self._thread = threading.Thread(target=self._run, name="gdskv-record", daemon=True)
        self._thread.start()

    def add(self, keys: NDArray[np.uint64], tokens: int, now: float) -> None:
        """A request has asked for these blocks. Never waits."""
        if len(self._waiting) >= WAITING:
            self.dropped += 1
        elif len(keys):
            self._waiting.append((now, keys.copy(), tokens))

    def close(self) -> None:
        """Write down what waits, and end."""
        self._over.set()
        self._thread.join(5.0)
        self._secret = np.zeros(2, np.uint64)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_NAP_S)
            with contextlib.suppress(OSError):  # a full disk ends no cache; what is lost is counted
                self._write_down()
        self._file.close()

    def _write_down(self) -> None:
        while self._waiting:
            now, keys, tokens = self._waiting.popleft()
            ids = self._ids(keys).tolist()
            line = {"timestamp": round(now * 1000), "input_length": tokens, "output_length": 0, "hash_ids": ids}
            text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            self.dropped += 1  # until it is written
            if self._size + len(text) > self._file_bytes and self._size:
                self._rotate()
            self._file.write(text)
            self._size += len(text)
            self.dropped -= 1
            self.recorded += 1
        self._file.flush()

    def _ids(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (keys[:, 0] ^ self._secret[0]) * _ODD
        x = (x ^ (x >> _30) ^ keys[:, 1] ^ self._secret[1]) * _ODD
        x = (x ^ (x >> _27)) * (_ODD ^ (self._secret[0] | np.uint64(1)))
        ids: NDArray[np.uint64] = (x ^ (x >> _30)) >> np.uint64(11)  # 53 bits: whole in every JSON reader
        return ids

    def _rotate(self) -> None:
        self._file.close()
        for n in range(FILES - 1, 0, -1):
            older = self.path if n == 1 else self.path.with_name(f"{self.path.name}.{n - 1}")
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, self.path.with_name(f"{self.path.name}.{n}"))
        self._file = self.path.open("wb")
        self._size = 0
