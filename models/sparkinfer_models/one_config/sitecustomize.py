"""Found by Python at its start when this folder is on PYTHONPATH: Triton's autotuner keeps the first configuration.

vLLM's Gated DeltaNet kernels have more than a hundred configurations to compile before a server is up, minutes of a
GPU host's time. They compute the same, in another order at most: for figures that are no times one of each will do.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

MODULE = "triton.runtime.autotuner"


class _Loader(importlib.abc.Loader):
    """The module's own loader, and then the change."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        autotuner: Any = module.Autotuner
        whole = autotuner.__init__

        def first_only(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
            whole(self, fn, arg_names, configs[:1], *rest, **named)

        autotuner.__init__ = first_only


class _Finder(importlib.abc.MetaPathFinder):
    """Steps in for one module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
