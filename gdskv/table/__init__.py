"""The block table: which blocks are where, which leave, and which bytes must move for it.

Imports nothing of the project. Decides from the calls made and the times given, as a second rank does.
"""

from .blocktable import Begun, BlockTable, Rejection
from .events import EVENT
from .journal import CHANGE
from .state import COUNTERS, DEFAULT_PRIORITY, DEVICE, DISK, HOST, TIERS, XFER
from .warm import warm

__all__ = [
    "CHANGE",
    "COUNTERS",
    "DEFAULT_PRIORITY",
    "DEVICE",
    "DISK",
    "EVENT",
    "HOST",
    "TIERS",
    "XFER",
    "Begun",
    "BlockTable",
    "Rejection",
    "warm",
]
