"""Pages that are the same on every rank (MLA): rank 0 keeps them, and serves the other ranks of its node.

A reader asks over a Unix socket, a question at a time on each connection, and the pages come in memory that both have
mapped. Whatever goes wrong with a connection ends it, and its memory with it: a miss. Must not import SGLang.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from gdskv.engines.sglang_pages import Addresses, PageStore
from gdskv.errors import ConfigError, GdskvError

__all__ = ["PageReader", "PageServer"]

log = logging.getLogger(__name__)

LARGEST = 1 << 17  # bytes of a message; hashes of 64 characters, BATCH of them at most
BATCH = 128  # pages of a question
WINDOW = 64 << 20  # bytes of a connection's memory, unless a page is larger


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Comes first, with the file of the connection's memory."""

    namespace: bytes
    pieces: int
    stride: int
    """Bytes from one piece to the next in that memory, a multiple of 4 KiB."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    hashes: list[str]
    load: bool
    """Bring the pages; else say how many there are."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    pages: int
    """From the first; -1 to a `Hello` about other pages."""


class PageServer:
    """Lets other processes of this user and node read from a `PageStore`, with a thread for each connection.

    Parameters
    ----------
    pages : PageStore
    address : str
        Name of the socket; it is gone when the process is.
    namespace : bytes
        Of the pages; a reader must name the same.
    stride : int
        Bytes that a piece takes in the shared memory.

    Raises
    ------
    ConfigError
        Another process serves there.
    """

    def __init__(self, pages: PageStore, address: str, namespace: bytes, stride: int) -> None:
        self._pages, self._hello = pages, Hello(namespace, pages.pieces, stride)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._adrift: list[mmap.mmap] = []
        """Memory in which a device may still write; kept for good."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(address)
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                f"another process of this machine serves the pages of rank 0 to its ranks ({error}). Start one server "
                "with the same directories and port at a time."
            ) from None
        self._listener.listen()
        threading.Thread(target=self._accept, name="gdskv-sglang-accept", daemon=True).start()

    def close(self) -> None:
        """Take no more questions. The store is closed by then, so a question that is being answered ends soon."""
        with self._lock:
            _shut(self._listener)
            for connection in self._connections:
                _shut(connection)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                if not _same_user(connection):
                    connection.close()
                    continue
                with self._lock:
                    self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="gdskv-sglang-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        memory = None
        try:
            message, files, _, _ = socket.recv_fds(connection, LARGEST, 1)
            hello = msgspec.msgpack.decode(message, type=Hello)
            for file in files:
                memory = memory or mmap.mmap(file, 0)
                os.close(file)
            if hello != self._hello or memory is None:
                _send(connection, Answer(-1))
                return
            _send(connection, Answer(0))
            pieces = len(memory) // hello.stride
            addresses = np.uint64(_address(memory)) + np.arange(pieces, dtype=np.uint64) * np.uint64(hello.stride)
            while message := connection.recv(LARGEST):
                ask = msgspec.msgpack.decode(message, type=Ask)
                fit = ask.hashes[: pieces // hello.pieces]
                n = self._pages.load(fit, addresses) if ask.load else self._pages.found(ask.hashes)
                _send(connection, Answer(n))
        except (OSError, ValueError, GdskvError, msgspec.MsgspecError) as error:  # the reader is gone, or is none
            log.info("a rank's connection has ended: %s", error)
        finally:
            if memory is not None and self._pages.adrift:
                self._adrift.append(memory)
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Connection:
    """Of a reader: a socket and the memory that pages come in."""

    def __init__(self, address: str, hello: Hello, portion: int, timeout: float) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.settimeout(timeout)
            self.socket.connect(address)
            if not _same_user(self.socket):
                raise OSError("another user has taken the socket's name")
            file = os.memfd_create("gdskv-pages", os.MFD_CLOEXEC)
            try:
                os.ftruncate(file, portion * hello.pieces * hello.stride)
                self.memory = mmap.mmap(file, 0)
                socket.send_fds(self.socket, [msgspec.msgpack.encode(hello)], [file])
            finally:
                os.close(file)
            if self._answer() < 0:
                raise OSError("rank 0 keeps pages of another model or layout")
        except BaseException:
            self.socket.close()
            raise
        self.base = _address(self.memory)

    def ask(self, hashes: Sequence[str], load: bool) -> int:
        _send(self.socket, Ask(list(hashes), load))
        return self._answer()

    def _answer(self) -> int:
        message = self.socket.recv(LARGEST)
        if not message:
            raise OSError("rank 0 has closed the connection")
        return msgspec.msgpack.decode(message, type=Answer).pages


class PageReader:
    """Stands for the `PageStore` of rank 0 on another rank: it finds and loads, and stores nothing.

    Any thread may call. No call waits for longer than `timeout` for an answer; without one everything is a miss, and
    the next call tries again.

    Parameters
    ----------
    address, namespace, stride
        As of `PageServer`.
    pieces, piece_bytes : int
        Pieces of a page, and bytes of one.
    timeout : float
        Seconds.
    """

    def __init__(
        self, address: str, namespace: bytes, stride: int, pieces: int, piece_bytes: int, timeout: float
    ) -> None:
        self.pieces, self._piece_bytes = pieces, piece_bytes
        self._address, self._hello, self._timeout = address, Hello(namespace, pieces, stride), timeout
        self._portion = max(1, min(BATCH, WINDOW // (pieces * stride)))
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._open, self._lost = True, False
        self.counters = {"pages_asked": 0, "pages_loaded": 0, "pages_missed": 0, "rank0_unanswered": 0}

    def found(self, hashes: Sequence[str]) -> int:
        """As `PageStore.found`."""
        return sum(self._runs(hashes, BATCH, None))

    def load(self, hashes: Sequence[str], addresses: Addresses) -> int:
        """As `PageStore.load`."""
        pages = sum(self._runs(hashes, self._portion, addresses))
        with self._lock:
            for name, n in (("asked", len(hashes)), ("loaded", pages), ("missed", len(hashes) - pages)):
                self.counters[f"pages_{name}"] += n
        return pages

    def store(self, hashes: Sequence[str], addresses: Addresses, after: Sequence[str] = ()) -> int:
        """Nothing: rank 0 stores."""
        return 0

    def clear(self) -> bool:
        """Nothing: rank 0 clears."""
        return True

    def stats(self) -> dict[str, int]:
        with self._lock:
            return dict(self.counters)

    def close(self, timeout: float = 0.0) -> bool:
        with self._lock:
            self._open = False
            for connection in self._idle:
                connection.socket.close()
            self._idle.clear()
        return True

    # ----

    def _runs(self, hashes: Sequence[str], most: int, addresses: Addresses | None) -> list[int]:
        """Pages of each part, up to the first that is not whole."""
        runs: list[int] = []
        for first in range(0, len(hashes), most):
            part = hashes[first : first + most]
            runs.append(self._run(part, None if addresses is None else addresses[first * self.pieces :]))
            if runs[-1] < len(part):
                break
        return runs

    def _run(self, hashes: Sequence[str], addresses: Addresses | None) -> int:
        connection = None
        try:
            with self._lock:
                if not self._open:
                    return 0
                connection = self._idle.pop() if self._idle else None
            connection = connection or _Connection(self._address, self._hello, self._portion, self._timeout)
            n = min(connection.ask(hashes, addresses is not None), len(hashes))
            if addresses is not None:
                for i in range(n * self.pieces):
                    ctypes.memmove(
                        int(addresses[i]), connection.base + i * self._hello.stride, self._piece_bytes
                    )  # without the GIL
        except (OSError, msgspec.MsgspecError) as error:  # the connection is dropped: its memory may still be written
            if connection is not None:
                connection.socket.close()
            with self._lock:
                self.counters["rank0_unanswered"] += 1
                again, self._lost = self._lost, True
            if not again:
                log.warning("rank 0, which keeps the pages, does not answer (%s): all are misses until it does", error)
            return 0
        with self._lock:
            self._lost = False
            if self._open:
                self._idle.append(connection)
            else:
                connection.socket.close()
        return n


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(msgspec.msgpack.encode(message))


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it


def _same_user(connection: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
