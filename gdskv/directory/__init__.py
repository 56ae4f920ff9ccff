"""What is in each disk slot, on disk: superblock, slot records, recovery.

Knows records and files; decides nothing and holds no payload.
"""

from .directory import Directory, Recovery, open_directories

__all__ = ["Directory", "Recovery", "open_directories"]
