"""A made-up trace of conversations that share system prompts, for a replay without a recorded one.

Knows the trace's shape and must not know a store; the same seed gives the same trace everywhere.
"""

from __future__ import annotations

import heapq
from random import Random

import numpy as np

from gdskv.replay.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest

__all__ = ["generate_trace"]

_SYSTEM_PROMPTS = 8
_SYSTEM_BLOCKS = (2, 24)  # from a short instruction to a long one with tools
_SESSION_GAP_S = 2.5  # mean time between the starts of two conversations
_THINK_S = 60.0  # mean time from one turn to the next
_TURN_BLOCKS = (1, 16)  # new prompt blocks of a turn
_ANSWER_TOKENS = (16, 1024)
_ANOTHER_TURN = 0.75  # chance that a conversation goes on


def generate_trace(requests: int, seed: int = 0) -> Trace:
    """Generate a multi-turn trace.

    Conversations start as a Poisson process, open with one of a few shared system prompts, and each turn asks for
    the whole conversation so far, the last answer included, and something new.

    Parameters
    ----------
    requests
        How many requests, at least 1.
    seed
        Anything else that is equal, the same seed gives the same trace.

    Returns
    -------
    Trace
        With blocks of 512 tokens, ordered by arrival.
    """
    random = Random(seed)  # not NumPy's: its streams may change from one release to the next
    ids = iter(range(2**62))
    systems = [[next(ids) for _ in range(random.randint(*_SYSTEM_BLOCKS))] for _ in range(_SYSTEM_PROMPTS)]

    turns: list[tuple[float, int, int, int, list[int]]] = []  # arrival, conversation, turn, last request, blocks
    arrived: list[TraceRequest] = []
    conversations = 0
    next_start = 0.0
    while len(arrived) < requests:
        if not turns or next_start <= turns[0][0]:
            # a few system prompts serve most of the conversations
            system = systems[min(int(random.expovariate(0.7)), _SYSTEM_PROMPTS - 1)]
            heapq.heappush(turns, (next_start, conversations, 1, -1, system))
            conversations += 1
            next_start += random.expovariate(1.0 / _SESSION_GAP_S)
            continue
        at, conversation, turn, parent, before = heapq.heappop(turns)
        blocks = before + [next(ids) for _ in range(random.randint(*_TURN_BLOCKS))]
        answer = random.randint(*_ANSWER_TOKENS)
        chat = len(arrived)
        tokens = len(blocks) * MOONCAKE_BLOCK_TOKENS
        arrived.append(TraceRequest(at, np.array(blocks, dtype=np.int64), tokens, answer, chat, parent, turn))
        if random.random() < _ANOTHER_TURN:
            later = at + random.expovariate(1.0 / _THINK_S)
            heapq.heappush(turns, (later, conversation, turn + 1, chat, blocks))
    return Trace(arrived, MOONCAKE_BLOCK_TOKENS)
