"""One cache over the ranks of an engine: a leader's table decides for all, a worker per rank holds and moves the bytes.

They talk in messages (`messages.py`) that the engine carries; neither opens a connection or starts a thread for it.
"""

from .leader import Held, Leader, Load
from .memory import EngineMemory
from .messages import Hello, Orders, Report
from .worker import Landed, Worker

__all__ = ["EngineMemory", "Held", "Hello", "Landed", "Leader", "Load", "Orders", "Report", "Worker"]
