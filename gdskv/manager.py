"""``BlockManager``: all three tiers, prefix reuse and readiness, for an engine that lets it own its KV memory.

A request: `begin` -> `is_ready` -> compute -> `commit` -> `release`. Knows the store below it; must not know engines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdskv.config import CacheConfig
from gdskv.errors import ConfigError, GdskvError
from gdskv.io.choice import unreachable
from gdskv.io.courtesy import in_call
from gdskv.keys import Content, TokenIds, as_keys, block_keys, extend_keys, root_key
from gdskv.layout import KVLayout, Namespace
from gdskv.pools.device import DevicePool
from gdskv.retention import DEFAULT_PRIORITY, Retention
from gdskv.store import KVStore, Rejected, Wish, Wrap
from gdskv.table import DISK, Begun, Rejection
from gdskv.table.state import COUNTED

__all__ = ["BlockManager", "Matched", "Rejected", "Request"]

Keys = NDArray[np.uint64]


class Matched(NamedTuple):
    """Tokens found, by the tier they were in."""

    device: int
    host: int
    disk: int


class Request:
    """A request's blocks. Made by `BlockManager.begin`; read its attributes, hand it back to the manager's calls."""

    def __init__(self, ident: int, keys: Keys, begun: Begun, tokens_per_block: int, prompt_tokens: int) -> None:
        self.id = ident
        self.keys = keys
        """Of the full blocks, shape (n, 2)."""
        self.tiers = begun.tiers
        """Per matched block, where it was found: 0 device, 1 host, 2 disk."""
        counts = np.bincount(begun.tiers, minlength=3) * tokens_per_block
        self.matched = Matched(*(int(c) for c in counts))
        self.failed = np.empty(0, np.int64)
        """Indices of matched blocks that were lost on the way; known once ready. To be computed again."""
        self.ready = False
        self.released = False
        self._begun = begun
        self._landed = 0
        self._began: int | None = None  # ns; until it was ready
        self._late = 0  # ns; when it waits no longer for what has not come
        self._given_up = np.empty(0, np.int64)
        self._committed = 0
        self._priority = np.empty(0, np.uint8)  # per committed block
        self._kept = np.empty(0, np.bool_)  # retained until its deadline
        self._deadline = np.empty(0, np.int64)  # ns; 0 = none
        self._prompt_tokens = prompt_tokens
        self._root = keys[:0]
        self._retention: Retention | None = None
        self._content: Content = ()

    def _remember(self, n: int, wish: Wish, now: int) -> None:
        """What the first commit of each block has granted it."""
        priority, ttl = wish.priority[self._committed : n], wish.ttl[self._committed : n]
        self._priority = np.concatenate([self._priority, priority])
        self._kept = np.concatenate([self._kept, ttl > 0])
        self._deadline = np.concatenate([self._deadline, np.where(ttl == 0, 0, now + np.where(ttl < 0, ~ttl, ttl))])
        self._committed = max(self._committed, n)

    def _recall(self, wish: Wish, now: int) -> None:
        """Put what is left of that in the place of a new wish: a later commit neither extends it nor takes it back."""
        n = min(self._committed, len(wish.ttl))
        if n == 0:
            return
        left = np.maximum(self._deadline - now, 0)[:n]
        live = self._kept[:n] & (left > 0)
        after = ~left if wish.forget else np.zeros_like(left)
        wish.ttl[:n] = np.where(self._deadline[:n] == 0, 0, np.where(live, left, after))
        over = self._kept[:n] & ~live
        wish.priority[:n] = np.where(over, np.minimum(self._priority[:n], DEFAULT_PRIORITY), self._priority[:n])

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Slots of the device pool, in order."""
        return self._begun.slots

    @property
    def cached_blocks(self) -> int:
        """Leading blocks whose bytes need not be computed. Final once the request is ready."""
        return int(self.failed[0]) if len(self.failed) else self._begun.matched


class BlockManager:
    """KV blocks in device, host and disk, found again by prefix.

    One thread calls it and no call waits for a disk: a request whose blocks are on their way is parked, and `is_ready`
    says when it may run. Decisions follow from the calls and their `now` alone.

    Parameters
    ----------
    config : CacheConfig
        `device_bytes` must be set.
    layout : KVLayout
    namespace : Namespace
    now : float
        Seconds on the caller's clock.
    wall, io
        As for `KVStore`.

    Raises
    ------
    ConfigError, DirectoryError, DirectoryBusy
    """

    def __init__(
        self,
        config: CacheConfig,
        layout: KVLayout,
        namespace: Namespace,
        *,
        now: float = 0.0,
        wall: float | None = None,
        io: Wrap | str | None = None,
    ) -> None:
        sizing = config.sizing(layout)
        if not sizing.device_blocks:
            raise ConfigError(
                "device_bytes=0 leaves a BlockManager nowhere to run requests. "
                f"Set it to at least one block ({layout.slot_bytes} bytes), or use KVStore under your own device pool."
            )
        if config.device != "cpu" and (why := unreachable(config)) is not None:
            raise ConfigError(
                f"device={config.device!r} is out of the I/O engine's reach: {why}. "
                'Use device="cpu", or KVStore with copies of your own between GPU and host memory.'
            )
        self._device_pool = DevicePool(sizing.device_blocks, layout, config.device) if io != "null" else None
        try:
            self.store = KVStore(
                config,
                layout,
                namespace,
                now=now,
                wall=wall,
                io=io,
                device_pool=self._device_pool,
                device_blocks=sizing.device_blocks,
            )
        except BaseException:
            if self._device_pool is not None:
                self._device_pool.close()
            raise
        self.layout, self.sizing = layout, sizing
        self._table = self.store.table
        self._next = 0
        self._late: list[Begun] = []  # slots that were given up, leased until what moves in them has landed
        self._timed_out = 0
        self._skipped_slow = 0

    @property
    def device_pool(self) -> DevicePool:
        """The device tier's memory: `device_pool[slot]` is a tensor of `layout.shape`."""
        if self._device_pool is None:
            raise GdskvError('io="null" moves no bytes and has no device pool. Open the manager without it.')
        return self._device_pool

    # ---- a request's life

    @in_call
    def begin(
        self,
        token_ids: TokenIds | None = None,
        *,
        keys: Keys | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        content: Content = (),
        retention: Retention | None = None,
        max_wait: float | None = None,
        now: float,
    ) -> Request | Rejected:
        """Find the cached prefix, bring it to the device tier, and lease a device slot for every block.

        Parameters
        ----------
        token_ids : sequence of int, optional
            The prompt. The last block may be partly filled; it gets a slot and is not looked up.
        keys : ndarray of uint64, shape (n, 2), optional
            Instead of tokens: the keys of `n` full blocks.
        salt, adapter, content
            What else the blocks depend on; see `gdskv.keys.block_keys`.
        retention : Retention, optional
            How long the blocks shall stay; it takes effect with `commit`.
        max_wait : float, optional
            Seconds. Where the blocks on disk are expected to take longer, by the requests so far, they are left to be
            computed again (`skipped_slow`).
        now : float
            Seconds.

        Returns
        -------
        Request or Rejected
            Rejected at once, with the reason counted, when slots or transfers cannot be had.
        """
        size = self.layout.tokens_per_block
        if keys is None:
            if token_ids is None:
                raise GdskvError("begin needs token_ids or keys.")
            tokens = len(token_ids)
            keys = block_keys(token_ids, size, namespace=self.store.digest, salt=salt, adapter=adapter, content=content)
        else:
            keys = as_keys(keys)
            tokens = len(keys) * size
        self.store._begin_call(now)
        wanted = keys if max_wait is None else keys[: self._quick(keys, max_wait)]
        begun = self._table.begin(wanted, -(-tokens // size))
        if isinstance(begun, Rejection):
            self.store._pump()
            return Rejected(*begun)
        if self.store.recorder is not None:
            self.store.recorder.add(keys, tokens, now)
        self._next += 1
        request = Request(self._next, keys, begun, size, tokens)
        if not len(keys):  # what the first key is made from, once there is one
            request._root = root_key(size, namespace=self.store.digest, salt=salt, adapter=adapter)
        request._retention, request._content = retention, content
        request._began, request._late = self._table.now, self._table.now + self.store.timeout
        self.store._start()
        return request

    def _quick(self, keys: Keys, max_wait: float) -> int:
        """Leading blocks worth waiting for: all, or those before the first one on disk."""
        _, tiers = self._table.match(keys)
        slow = np.flatnonzero(tiers == DISK)
        if self.store.pace.seconds(len(slow)) <= max_wait:
            return len(keys)
        self._skipped_slow += len(tiers) - int(slow[0])
        return int(slow[0])

    @in_call
    def match(
        self,
        token_ids: TokenIds | None = None,
        *,
        keys: Keys | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        content: Content = (),
        now: float,
    ) -> Matched:
        """Tokens that `begin` would find, by tier. Holds nothing and changes nothing."""
        if keys is None:
            keys = block_keys(
                token_ids if token_ids is not None else (),
                self.layout.tokens_per_block,
                namespace=self.store.digest,
                salt=salt,
                adapter=adapter,
                content=content,
            )
        self.store._begin_call(now)
        counts = np.bincount(self._table.match(as_keys(keys))[1], minlength=3) * self.layout.tokens_per_block
        return Matched(*(int(c) for c in counts))

    def deadlines(self, *, keys: Keys) -> NDArray[np.float64]:
        """Until when each block of a chain is retained, in seconds on the caller's clock; 0 where it is not."""
        entries, _ = self._table.match(keys)
        out = np.zeros(len(keys))
        rows = self._table.arrays.e[entries]
        out[: len(entries)] = np.where(rows["flags"] & COUNTED, rows["deadline"], 0) / 1e9
        return out

    @in_call
    def allocate(self, request: Request, n_blocks: int, *, now: float) -> Rejected | None:
        """Lease `n_blocks` further device slots, as decoding needs them; they join the end of `request.blocks`, and the
        request is ready again once they are free of older bytes."""
        self._live(request)
        self.store._begin_call(now)
        more = self._table.begin(np.empty((0, 2), np.uint64), n_blocks)
        if isinstance(more, Rejection):
            self.store._pump()
            return Rejected(*more)
        old = request._begun
        request._begun = old._replace(
            slots=np.concatenate([old.slots, more.slots]),
            need_w=np.concatenate([old.need_w, more.need_w]),
            need_r=np.concatenate([old.need_r, more.need_r]),
        )
        request.ready = False
        request._late = self._table.now + self.store.timeout
        self.store._start()
        return None

    def is_ready(self, request: Request) -> bool:
        """Have the request's blocks landed? Then `cached_blocks` and `failed` are final. Call `poll` between."""
        if request.ready:
            return True
        table = self._table
        if table.launched or table.deferred:
            request._landed = table.landed(request._begun, request._landed)
            if request._landed < len(request._begun.slots):
                if table.now >= request._late:
                    self._give_up(request)
                return False
        if request._committed == 0:
            request.failed = np.union1d(table.lost(request._begun), request._given_up)
            if request._began is not None and not len(request.failed):
                self.store.pace.see(int((request.tiers == DISK).sum()), table.now - request._began)
            request._began = None
        request._landed = len(request._begun.slots)
        request.ready = True
        return True

    def _give_up(self, request: Request) -> None:
        """Wait no longer for blocks that a slow device has not brought: they get other slots, to be computed in."""
        request._late = self._table.now + self.store.timeout
        begun, table = request._begun, self._table
        n = len(table.waiting(begun))
        other = table.begin(np.empty((0, 2), np.uint64), n)
        if isinstance(other, Rejection):
            return  # parked on, until slots come back
        late = table.abandon(begun)
        slots, need_w, need_r = begun.slots.copy(), begun.need_w.copy(), begun.need_r.copy()
        self._late.append(Begun(0, begun.entries[:0], begun.tiers[:0], slots[late], need_w[late], need_r[late]))
        slots[late], need_w[late], need_r[late] = other.slots, other.need_w, other.need_r
        request._begun = begun._replace(slots=slots, need_w=need_w, need_r=need_r)
        request._given_up = np.union1d(request._given_up, late[late < begun.matched])
        request._landed = 0
        self._timed_out += n

    def _let_late_ones_go(self) -> None:
        table = self._table
        landed = [b for b in self._late if table.landed(b, 0) == len(b.slots)]
        if landed:
            self._late = [b for b in self._late if all(b is not other for other in landed)]
            for begun in landed:
                table.release(begun.slots)

    @in_call
    def commit(
        self,
        request: Request,
        token_ids: TokenIds | None = None,
        *,
        keys: Keys | None = None,
        now: float,
    ) -> int:
        """The request's full blocks are computed: they become findable and their ttl starts.

        Call it again as decoding fills blocks. A later call gives only the blocks that are new in it a deadline.
        On a GPU their bytes must be there: synchronise the stream that computes them first. The manager copies on a
        stream of its own.

        Parameters
        ----------
        token_ids : sequence of int, optional
            The tokens computed so far, from the first on: blocks that they do not fill stay unknown to others.
            Left out: all full blocks of `begin`.
        keys : ndarray of uint64, optional
            Instead: keys of all full blocks so far.

        Returns
        -------
        int
            Blocks that were not in the device tier before.

        Raises
        ------
        GdskvError
            The request is not ready, or released, or has too few slots for that many blocks.
        """
        self._live(request)
        if not self.is_ready(request):
            raise GdskvError(f"request {request.id} is not ready: its blocks are still on their way. Poll until it is.")
        self.store._begin_call(now)
        if keys is not None:
            request.keys = as_keys(keys)
        elif token_ids is not None:
            self._extend(request, token_ids)
        n = len(request.keys)
        if keys is None and token_ids is not None:  # a chunk of the prompt: what stands behind it is not computed yet
            n = len(token_ids) // self.layout.tokens_per_block
        if n > len(request.blocks):
            raise GdskvError(
                f"request {request.id} has {len(request.blocks)} blocks and commits {n}. Call allocate first."
            )
        wish = self.store.resolve(request._retention, n, request._prompt_tokens)
        request._recall(wish, self._table.now)
        done, slots = request.keys[:n], request.blocks[:n]
        new = self._table.commit(done, slots, wish.priority, wish.ttl, wish.forget, wish.tenant)
        if new < 0:
            raise GdskvError(
                f"block {-1 - new} of request {request.id} holds the KV of other tokens than those committed. "
                "Commit the tokens that the request began with."
            )
        request._remember(n, wish, self._table.now)
        self.store._start()
        return new

    def _extend(self, request: Request, token_ids: TokenIds) -> None:
        size = self.layout.tokens_per_block
        have = len(request.keys)
        if len(token_ids) // size <= have:
            return
        last = request.keys[-1] if have else request._root
        more = extend_keys(last, token_ids[have * size :], size, first_token=have * size, content=request._content)
        request.keys = np.concatenate([request.keys, more])

    @in_call
    def release(self, request: Request, *, now: float) -> None:
        """The request is over. What was committed stays cached; once is enough and more does no harm."""
        if request.released:
            return
        request.released = True
        self.store._begin_call(now)
        self._table.release(request.blocks)

    @in_call
    def cancel(self, request: Request, *, now: float) -> None:
        """Give a request up at any point. Transfers under way land before their slots are used again."""
        self.release(request, now=now)

    # ---- besides

    @in_call
    def poll(self, *, now: float) -> None:
        """Take in what has landed and start what waited for it; bounded work."""
        self.store._begin_call(now)
        self.store._pump()
        if self._late:
            self._let_late_ones_go()

    def prefetch(
        self,
        token_ids: TokenIds | None = None,
        *,
        keys: Keys | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        content: Content = (),
        now: float,
    ) -> int:
        """Bring what is on disk alone to host ahead of need; how many blocks are on their way."""
        if keys is None:
            keys = block_keys(
                token_ids if token_ids is not None else (),
                self.layout.tokens_per_block,
                namespace=self.store.digest,
                salt=salt,
                adapter=adapter,
                content=content,
            )
        return self.store.prefetch(keys, now=now)

    def stats(self) -> dict[str, int]:
        """Counters and gauges; see `KVStore.stats`. And device slots that waited longer than `io_timeout`,
        and blocks on disk that were not waited for."""
        return self.store.stats() | {"timed_out": self._timed_out, "skipped_slow": self._skipped_slow}

    def check(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        c = self._table.counters()
        self._table.check(closed=not (c["failed_writes"] or c["lost"] or c["adopted"]), exclusive=True)

    def close(self, timeout: float = 5.0) -> bool:
        """Stop; see `KVStore.close`."""
        drained = self.store.close(timeout)
        if drained and self._device_pool is not None:
            self._device_pool.close()
        return drained

    def __enter__(self) -> BlockManager:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _live(self, request: Request) -> None:
        if request.released:
            raise GdskvError(f"request {request.id} is released. Begin a new one.")
