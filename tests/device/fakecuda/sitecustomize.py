"""With this folder on PYTHONPATH and FAKECUDA=1, every Python process has the fake device."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Finder(MetaPathFinder):
    """Load the library before torch, which asks for CUDA only once, and fill torch's Python part after it."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Wrap the loader of torch; this finder has nothing to do with other modules."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            import fakecuda_library  # noqa: F401

            run(module)
            import fakecuda  # noqa: F401 - or it is what imports torch, and continues afterwards

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("FAKECUDA") == "1":
    # pathlib would make the start of every process slower.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    if here not in sys.path:
        sys.path.append(here)
    sys.meta_path.insert(0, Finder())
