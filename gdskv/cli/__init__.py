"""The ``gdskv`` command."""

from gdskv.cli.app import main

__all__ = ["main"]
