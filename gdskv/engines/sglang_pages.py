"""Pages by SGLang's hashes, for several threads at once: what its storage calls come down to on a `KVStore`.

A page is one block, or several where SGLang's memory has it in pieces of equal size. Must not import SGLang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdskv.errors import ConfigError, StoreClosed
from gdskv.keys import Keys, keys_from_hashes
from gdskv.retention import Retention
from gdskv.store import Done, KVStore, Ticket

__all__ = ["PageStore"]

Addresses = NDArray[np.uint64]
Begun = tuple[Ticket, int] | None
"""A transfer, and how many of its blocks come before those asked for; None: there is no room, ask again."""

NAP = 0.0002  # seconds between two looks of a thread at its own transfer
PUMP = 0.002  # the same for transfers that nobody waits for
TRIES = 3  # of a step that found no room


class PageStore:
    """A `KVStore` that any thread may call.

    A lock is held while a call plans and looks, never while bytes move: a thread waits for its own transfer beside the
    others. A thread of its own moves on what nobody waits for, such as writes to disk.

    Parameters
    ----------
    open_store : callable
        Makes the store; called again after `clear`.
    pieces : int
        Blocks of a page.
    retention : Retention, optional
        Of every page that is stored.

    Raises
    ------
    ConfigError
        There is a host tier, and it is too small to pass pages through it.
    """

    def __init__(self, open_store: Callable[[], KVStore], pieces: int = 1, retention: Retention | None = None) -> None:
        self.pieces = pieces
        self._retention = retention
        self._open_store = open_store
        self._lock = threading.Lock()
        self._done: dict[int, Done] = {}
        self._opened = 0
        """Counts openings: a ticket of an earlier one is not waited for."""
        self.adrift = False
        """A close or clear gave up waiting for a device, which may still write to a caller's memory."""
        self._work = threading.Event()
        self._store: KVStore | None = open_store()
        host = self._store.sizing.host_blocks
        if 0 < host < 4 * pieces:
            self._store.close(0.0)
            raise ConfigError(
                f"host_bytes={self._store.config.host_bytes} holds {host // pieces} pages, and several threads pass "
                f"pages through it. Set host_bytes to {4 * pieces * self._store.layout.slot_bytes} or more."
            )
        # several threads share the host tier, and what one call leases cannot leave it
        self._portion = max(1, host // 4 // pieces) * pieces if host else 1024 * pieces
        self._span = max(1, host)
        self.counters = {
            "pages_asked": 0,
            "pages_loaded": 0,
            "pages_missed": 0,
            "pages_offered": 0,
            "pages_stored": 0,
            "pages_not_stored": 0,
        }
        self._pumping = threading.Thread(target=self._pump, name="gdskv-sglang", daemon=True)
        self._pumping.start()

    # ---- pages

    def found(self, hashes: Sequence[str]) -> int:
        """Leading pages that can be served now."""
        with self._lock:
            return self._found(self._keys(hashes)) // self.pieces if self._store is not None else 0

    def load(self, hashes: Sequence[str], addresses: Addresses) -> int:
        """Bring pages to the caller's memory; how many, from the first, have arrived with their own bytes.

        Parameters
        ----------
        hashes : sequence of str
        addresses : ndarray of uint64, one per piece, page by page
            Memory that stays until the call returns; then nothing moves in it any more.
        """
        keys, here, stuck = self._keys(hashes), 0, 0
        while here < len(keys) and stuck < TRIES:
            ended = self._run(_load, keys[here : here + self._portion], addresses[here:])
            if ended is None or not ended[0].ticket.blocks:
                break
            arrived = _leading(ended[0])
            here += arrived
            stuck = 0 if arrived else stuck + 1
        pages = here // self.pieces
        self._count(pages_asked=len(hashes), pages_loaded=pages, pages_missed=len(hashes) - pages)
        return pages

    def store(self, hashes: Sequence[str], addresses: Addresses, after: Sequence[str] = ()) -> int:
        """Take pages in, those that are not there yet; how many, from the first, are there then.

        Parameters
        ----------
        hashes : sequence of str
            Of consecutive pages of a prompt.
        addresses : as of `load`
        after : sequence of str
            Hashes of the pages before the first, as far as SGLang tells them: the pages are kept as their continuation,
            and leave before them. Without them, or when they are gone, the pages stand for themselves.
        """
        here = stuck = 0
        keys, lead = self._keys(hashes), self._keys(after[-1:])
        while here < len(keys) and stuck < TRIES:
            before = np.concatenate([lead, keys[:here]])
            if stuck == 0:
                before = before[-1:]
            elif stuck == 1:  # the table lets a prompt's own beginning leave for its end only where it is shown
                before = np.concatenate([self._keys(after[-self._span :]), keys[:here]])[-self._span :]
            else:
                before = before[:0]
            part = slice(here, here + self._portion)
            ended = self._run(_store, before, keys[part], addresses[part], self._retention)
            if ended is None:
                break
            arrived = max(0, _leading(ended[0]) - ended[1])
            here += arrived
            stuck = 0 if arrived else stuck + 1
        pages = here // self.pieces
        self._count(pages_offered=len(hashes), pages_stored=pages, pages_not_stored=len(hashes) - pages)
        return pages

    # ---- the whole

    def clear(self) -> bool:
        """Forget everything, on disk too. False: a transfer did not end, and the store stays closed."""
        with self._lock:
            if self._store is None:
                return True
            drained = self._store.close(self._store.config.io_timeout, forget=True)
            self.adrift |= not drained
            self._store = self._open_store() if drained else None
            self._opened += 1
            self._done.clear()
            return drained

    def stats(self) -> dict[str, int]:
        """All counters and gauges."""
        with self._lock:
            return (self._store.stats() if self._store is not None else {}) | self.counters

    def close(self, timeout: float = 10.0) -> bool:
        """Write what memory alone holds, for at most `timeout` seconds, and stop; afterwards every page is a miss."""
        with self._lock:
            store, self._store = self._store, None
            closed = store.close(timeout) if store is not None else True
            self.adrift |= not closed
        self._work.set()
        if threading.current_thread() is not self._pumping:
            self._pumping.join(timeout)
        return closed

    # ---- under the lock

    def _keys(self, hashes: Sequence[str]) -> Keys:
        """Keys of all pieces; those of a page are neighbours of the one that is made of its hash."""
        digest = self._store.digest if self._store is not None else b""
        keys = np.repeat(keys_from_hashes([h.encode() for h in hashes], namespace=digest), self.pieces, axis=0)
        keys[:, 1] += np.tile(np.arange(self.pieces, dtype=np.uint64), len(hashes))
        return keys

    def _found(self, keys: Keys) -> int:
        assert self._store is not None
        n = 0
        while n < len(keys):  # a run ends where pages were stored without their predecessor
            found = self._store.match(keys[n:], now=time.monotonic())
            self._store.release(found)
            if not found.length:
                break
            n += found.length
        return n

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, n in more.items():
                self.counters[name] += n

    def _run(self, begin: Callable[..., Begun], *arguments: Any) -> tuple[Done, int] | None:
        """Begin a transfer and wait until it has ended; None if the store was closed or cleared."""
        begun: Begun = None
        opened = 0
        while True:
            with self._lock:
                store = self._store
                if store is None or (begun is not None and self._opened != opened):
                    return None
                now = time.monotonic()
                if begun is None:
                    opened, begun = self._opened, begin(store, now, *arguments)
                    self._work.set()
                self._look(store, now)
                if begun is not None and begun[0].id in self._done:
                    return self._done.pop(begun[0].id), begun[1]
            time.sleep(NAP)

    def _look(self, store: KVStore, now: float) -> None:
        for done in store.poll(now=now):
            self._done[done.ticket.id] = done

    def _pump(self) -> None:
        while True:
            self._work.wait()
            with self._lock:
                if self._store is None:
                    return
                try:
                    self._look(self._store, time.monotonic())
                except StoreClosed:  # a forked child: nothing of it belongs to it
                    return
                if self._store.idle:
                    self._work.clear()
            time.sleep(PUMP)


def _leading(done: Done) -> int:
    return int(done.failed[0]) if len(done.failed) else done.ticket.blocks


def _load(store: KVStore, now: float, keys: Keys, addresses: Addresses) -> Begun:
    found = store.match(keys, now=now)
    answer = store.load(found, into=np.ascontiguousarray(addresses[: found.length]), now=now)
    return (answer, 0) if isinstance(answer, Ticket) else None


def _store(
    store: KVStore, now: float, before: Keys, keys: Keys, addresses: Addresses, retention: Retention | None
) -> Begun:
    """Store a chain, below `before` where all of that is cached; how many of its blocks were not asked for."""
    found = store.match(before, now=now)
    store.release(found)
    lead = len(before) if found.length == len(before) else 0
    if lead:  # nothing leaves between these calls, so no byte is taken from nowhere
        keys, addresses = np.concatenate([before, keys]), np.concatenate([np.zeros(lead, np.uint64), addresses])
    return store.store(keys, source=np.ascontiguousarray(addresses), retention=retention, now=now), lead
