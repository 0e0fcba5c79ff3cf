"""Names of a package that load their modules when they are first used: help of a command needs no torch."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path


def lazy_names(
    package: str, hints: Mapping[str, str] | None = None, *, renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Functions ``__getattr__`` and ``__dir__`` for a package.

    Its names are those that its ``__init__.py`` imports from its modules under ``if TYPE_CHECKING``, where
    type checkers find them too. So each is written once, and once more in ``__all__``.

    Args:
        package: ``__name__`` of the package.
        hints: What to use in place of a name that is gone, as a sentence, by the name.
        renamed: Present names by deprecated ones, which still work and raise a ``DeprecationWarning``.

    Example:
        >>> if not TYPE_CHECKING:  # doctest: +SKIP
        ...     __getattr__, __dir__ = lazy_names(__name__)
    """
    module = sys.modules[package]

    @cache
    def places() -> dict[str, tuple[str, str]]:
        """Module, relative ones with their dots, and name there."""
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        return {
            alias.asname or alias.name: (f"{'.' * node.level}{node.module}", alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def load(name: str) -> object:
        if renamed and name in renamed:
            # Not kept in the module, so that each use warns, where Python's filters let it.
            message = f"{package}.{name} is called {renamed[name]} now."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return load(renamed[name])
        if name not in module.__all__ or name not in places():
            hint = f". {hints[name]}" if hints and name in hints else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        where, own_name = places()[name]
        value: object = getattr(import_module(where, package), own_name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *module.__all__})
