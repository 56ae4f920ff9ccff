"""Doubles of the modules `triton` and `torchvision`, so that SGLang's storage interfaces can be imported without a GPU.

Nothing of them is called; decorators pass functions through, and other names stand for nothing. Import this first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar


class _Nothing:
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not named else self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index: Any) -> _Nothing:
        return self


class _Names(type):
    """Of a class that only has to be one, whatever is asked of it."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return type.__call__(cls)

    def __getattr__(cls, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {}) if name[0].isupper() else _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ("triton", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
