"""Reference policies over a flat trace: LRU, ARC, S3-FIFO, and Belady's bound with bypass.

Each takes (blocks, starts, next use, distinct, capacity) and answers (hits, blocks written). A request hits its longest
cached run from its first block. A request's blocks are used from its last to its first, so that a parent is always
more recent than its children. Offline tools: nothing here runs where requests are served.
"""

from __future__ import annotations

import numpy as np

from gdskv._jit import jit

__all__ = ["arc", "belady", "lru", "s3fifo"]

NOWHERE = -1


@jit
def _push(links: np.ndarray, ends: np.ndarray, q: int, b: int) -> None:
    """Put block `b` at the tail of list `q`; `links` is [before, after, list] per block, `ends` [head, tail, count]."""
    tail = ends[q, 1]
    links[b, 0], links[b, 1], links[b, 2] = tail, NOWHERE, q
    if tail == NOWHERE:
        ends[q, 0] = b
    else:
        links[tail, 1] = b
    ends[q, 1] = b
    ends[q, 2] += 1


@jit
def _drop(links: np.ndarray, ends: np.ndarray, b: int) -> None:
    """Take block `b` out of its list."""
    before, after, q = links[b]
    if before == NOWHERE:
        ends[q, 0] = after
    else:
        links[before, 1] = after
    if after == NOWHERE:
        ends[q, 1] = before
    else:
        links[after, 0] = before
    links[b, 2] = NOWHERE
    ends[q, 2] -= 1


@jit
def _lists(distinct: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    ends = np.zeros((n, 3), np.int64)
    ends[:, :2] = NOWHERE
    return np.full((distinct, 3), NOWHERE, np.int64), ends


@jit
def lru(blocks: np.ndarray, starts: np.ndarray, next_use: np.ndarray, distinct: int, cap: int) -> tuple[int, int]:
    """Least recently used."""
    links, ends = _lists(distinct, 1)
    hits = written = 0
    for r in range(len(starts) - 1):
        first, last = starts[r], min(starts[r + 1], starts[r] + cap)
        run = True
        for i in range(first, last):
            b = blocks[i]
            if links[b, 2] == NOWHERE:
                run = False
                written += 1
            else:
                hits += run
                _drop(links, ends, b)
        for i in range(last - 1, first - 1, -1):
            _push(links, ends, 0, blocks[i])
        while ends[0, 2] > cap:
            _drop(links, ends, ends[0, 0])
    return hits, written


@jit
def arc(blocks: np.ndarray, starts: np.ndarray, next_use: np.ndarray, distinct: int, cap: int) -> tuple[int, int]:
    """ARC (Megiddo and Modha, FAST 2003)."""
    t1, t2, b1, b2 = 0, 1, 2, 3
    links, ends = _lists(distinct, 4)
    hits = written = 0
    p = 0
    for r in range(len(starts) - 1):
        for i in range(starts[r], starts[r + 1]):
            if links[blocks[i], 2] not in (t1, t2):
                break
            hits += 1
        for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
            b = blocks[i]
            q = links[b, 2]
            if q in (t1, t2):
                _drop(links, ends, b)
                _push(links, ends, t2, b)
                continue
            written += 1
            if q == b1:
                p = min(cap, p + max(1, ends[b2, 2] // ends[b1, 2]))
            elif q == b2:
                p = max(0, p - max(1, ends[b1, 2] // ends[b2, 2]))
            else:
                if ends[t1, 2] + ends[b1, 2] == cap:
                    _drop(links, ends, ends[b1 if ends[b1, 2] else t1, 0])
                elif ends[0, 2] + ends[1, 2] + ends[2, 2] + ends[3, 2] >= 2 * cap:
                    _drop(links, ends, ends[b2, 0])
            if ends[t1, 2] + ends[t2, 2] >= cap:
                n1 = ends[t1, 2]
                from_t1 = n1 > 0 and (n1 > p or (q == b2 and n1 == p) or ends[t2, 2] == 0)
                out = ends[t1 if from_t1 else t2, 0]
                _drop(links, ends, out)
                _push(links, ends, b1 if from_t1 else b2, out)
            if q != NOWHERE:
                _drop(links, ends, b)
                _push(links, ends, t2, b)
            else:
                _push(links, ends, t1, b)
    return hits, written


@jit
def s3fifo(blocks: np.ndarray, starts: np.ndarray, next_use: np.ndarray, distinct: int, cap: int) -> tuple[int, int]:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth, a main one, and as many ghosts as blocks."""
    small, main, ghost = 0, 1, 2
    links, ends = _lists(distinct, 3)
    freq = np.zeros(distinct, np.int8)
    small_cap = max(1, cap // 10)
    hits = written = 0
    for r in range(len(starts) - 1):
        for i in range(starts[r], starts[r + 1]):
            if links[blocks[i], 2] not in (small, main):
                break
            hits += 1
        for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
            b = blocks[i]
            q = links[b, 2]
            if q in (small, main):
                freq[b] = min(3, freq[b] + 1)
                continue
            written += 1
            while ends[small, 2] + ends[main, 2] >= cap:
                if ends[small, 2] >= small_cap or ends[main, 2] == 0:
                    out = ends[small, 0]
                    _drop(links, ends, out)
                    if freq[out] > 0:
                        freq[out] = 0
                        _push(links, ends, main, out)
                    else:
                        _push(links, ends, ghost, out)
                        if ends[ghost, 2] > cap:
                            _drop(links, ends, ends[ghost, 0])
                else:
                    out = ends[main, 0]
                    _drop(links, ends, out)
                    if freq[out] > 0:
                        freq[out] -= 1
                        _push(links, ends, main, out)
            again = links[b, 2] == ghost
            if again:
                _drop(links, ends, b)
            freq[b] = 0
            _push(links, ends, main if again else small, b)
    return hits, written


@jit
def _sift_down(heap: np.ndarray, due: np.ndarray, n: int) -> None:
    i, b = 0, heap[0]
    while 2 * i + 1 < n:
        k = 2 * i + 1
        if k + 1 < n and due[heap[k + 1]] > due[heap[k]]:
            k += 1
        if due[heap[k]] <= due[b]:
            break
        heap[i] = heap[k]
        i = k
    heap[i] = b


@jit
def belady(blocks: np.ndarray, starts: np.ndarray, next_use: np.ndarray, distinct: int, cap: int) -> tuple[int, int]:
    """Belady's bound with bypass: keep the blocks whose next use is nearest, and take in no other.

    A parent is always asked before its child, so what this keeps is closed under parents without more ado. The heap
    holds places of the trace, the furthest next use on top; a block's older places are dropped when they surface.
    """
    heap = np.empty(len(blocks) + 1, np.int64)
    newest = np.full(distinct, NOWHERE, np.int64)  # place at which a block that is held was used last
    n = held = hits = written = 0
    for i in range(len(blocks)):
        b = blocks[i]
        inside = newest[b] != NOWHERE
        hits += inside
        if next_use[i] >= np.int64(1) << 62:
            if inside:
                newest[b] = NOWHERE
                held -= 1
            continue
        if not inside and held == cap:
            while newest[blocks[heap[0]]] != heap[0]:
                n -= 1
                heap[0] = heap[n]
                _sift_down(heap, next_use, n)
            if next_use[heap[0]] < next_use[i]:
                continue
            newest[blocks[heap[0]]] = NOWHERE
            held -= 1
        newest[b] = i
        if not inside:
            held += 1
            written += 1
        k = n
        n += 1
        while k > 0 and next_use[heap[(k - 1) >> 1]] < next_use[i]:
            heap[k] = heap[(k - 1) >> 1]
            k = (k - 1) >> 1
        heap[k] = i
    return hits, written
