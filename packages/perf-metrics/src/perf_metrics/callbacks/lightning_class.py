"""Makes classes that are callbacks of Lightning, under whichever of its two names it is in use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

Framework: TypeAlias = Literal["lightning.pytorch", "pytorch_lightning"]
FRAMEWORKS: tuple[Framework, ...] = ("lightning.pytorch", "pytorch_lightning")

Made = TypeVar("Made")


def framework_in_use() -> Framework:
    """Return the framework that is imported, or else the first one that is installed.

    Raises:
        ValueError: Both are imported.
        ModuleNotFoundError: Neither is installed.
    """
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    if len(imported) > 1:
        raise ValueError(
            "framework=None: both lightning.pytorch and pytorch_lightning are imported; "
            "name the one whose Trainer this is for"
        )
    for name in imported or FRAMEWORKS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError(
        "LightningCallbacks needs Lightning, which is not installed: pip install lightning"
    )


def callback_base(framework: Framework) -> type:
    """Return `Callback` of a framework.

    Raises:
        ValueError: There is no such framework.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r}: must be one of {', '.join(FRAMEWORKS)}, or None")
    base: type = importlib.import_module(framework).Callback
    return base


def checkpoint_base(framework: Framework) -> type:
    """Return the base class of the callbacks that save, which a framework puts last."""
    base: type = importlib.import_module(f"{framework}.callbacks").Checkpoint
    return base


def as_callback(cls: type[Made], framework: Framework) -> type[Made]:
    """Return a subclass of `cls` that is a callback of the framework as well; `cls` itself if it is one."""
    base = callback_base(framework)
    if issubclass(cls, base):
        return cls

    def reduce(self: Made) -> tuple[object, ...]:
        # The class below cannot be imported by name, so it is made again.
        return _remake, (cls, framework), self.__dict__

    body = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, base), body)


def callback_of(framework: Framework, **hooks: Callable[..., None]) -> object:
    """Return a callback of the framework with these hooks."""
    return type("AfterOthers", (callback_base(framework),), hooks)()


def _remake(cls: type[Made], framework: Framework) -> Made:
    return object.__new__(as_callback(cls, framework))
