"""Names of a package that load their modules when they are first used: help of a command needs no torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Functions ``__getattr__`` and ``__dir__`` for a package.

    Its names are those that its ``__init__.py`` imports from its modules under ``if TYPE_CHECKING``, where
    type checkers find them too. So each is written once, and once more in ``__all__``.

    Args:
        package: ``__name__`` of the package.

    Example:
        >>> if not TYPE_CHECKING:  # doctest: +SKIP
        ...     __getattr__, __dir__ = lazy_names(__name__)
    """
    module = sys.modules[package]

    @cache
    def modules() -> dict[str, str]:
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> object:
        if name not in module.__all__ or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(modules()[name]), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *module.__all__})
