"""Processes of `multiprocessing`, and workers of loaders, that die with the process that started them."""

from __future__ import annotations

import gc
import multiprocessing
import operator
import os
import runpy
import signal
import sys
from multiprocessing import context, process
from typing import TypeAlias, TypeVar

from dist_env import orphans

_Loader = TypeVar("_Loader")
_Context: TypeAlias = "context.ForkContext | context.SpawnContext | context.ForkServerContext"


def tie_loader_workers(loader: _Loader) -> _Loader:
    """Let the worker processes of a loader die with the process that iterates it; returns the loader.

    torch's own watch begins when a worker is ready to work: a process that is killed while its workers start
    leaves them for ever. Call it before the loader is iterated first.

    Args:
        loader: A `DataLoader` of torch, or one derived from it. Anything else, a loader without workers, and
            one with a context of the user's own class are left as they are.
    """
    from torch.utils.data import DataLoader

    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        chosen = loader.multiprocessing_context
        if chosen is None or type(chosen) in _PLAIN:
            method = None if chosen is None else chosen.get_start_method()
            loader.multiprocessing_context = die_with_parent_context(method)
    return loader


def die_with_parent_context(method: str | None = None) -> _Context:
    """A context of `multiprocessing` whose processes die with the one that starts them.

    They ignore SIGINT: Ctrl-C in a terminal reaches all processes, and the parent decides what becomes of its
    children. It can be the `multiprocessing_context` of a `DataLoader`.

    Args:
        method: How processes are started: "fork", "spawn" or "forkserver"; as `multiprocessing` is set when
            None.

    Raises:
        ValueError: There is no such start method here.
    """
    # To ask without allow_none would settle the method for the whole program.
    method = method or multiprocessing.get_start_method(allow_none=True)
    method = method or multiprocessing.get_all_start_methods()[0]
    if method not in _CONTEXTS:
        raise ValueError(f"method={method!r} is not a start method here. Choose {' or '.join(_CONTEXTS)}.")
    return _CONTEXTS[method]


_CONTEXTS: dict[str, _Context]
_PLAIN: tuple[type, ...]

if sys.platform == "win32":
    # There workers end with their parent's pipes only, as torch makes them.
    _CONTEXTS = {"spawn": multiprocessing.get_context("spawn")}
    _PLAIN = ()
else:

    class _Tied(process.BaseProcess):
        """Ties itself before it does anything."""

        def start(self) -> None:
            self._tie = os.getpid(), orphans.is_main_thread(), self._is_direct_child()
            super().start()

        def run(self) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            orphans.tie(*self._tie)
            super().run()

        def _is_direct_child(self) -> bool:
            return True

    class _NamedTied(_Tied):
        """Ties itself before it imports the program, which takes seconds.

        A process that is not forked from its parent unpickles some settings first, its name among them, then
        imports the program, and only then learns what to run (`multiprocessing.spawn._main` of Python 3.11 to
        3.14). Should a later Python send the name at another time, it is tied when it begins to run.
        """

        def start(self) -> None:
            self.name = _TyingName(self.name)
            self.name.tie = os.getpid(), orphans.is_main_thread(), self._is_direct_child()
            super().start()

    class _TyingName(str):
        """A name that ties the process that unpickles it."""

        tie: tuple[int, bool, bool]

        def __reduce__(self) -> tuple[object, ...]:
            return operator.getitem, (_Tying({"arguments": self.tie, "name": str(self)}), "name")

    class _Tying:
        """Unpickled, these variables are those of `orphans.py`, which has run and has tied the process.

        It runs by its path, because importing this package would import torch.
        """

        def __init__(self, variables: dict[str, object]) -> None:
            self._variables = variables

        def __reduce__(self) -> tuple[object, ...]:
            return runpy.run_path, (orphans.__file__, self._variables, orphans.TIES)

    class _ForkProcess(_Tied, context.ForkProcess):
        def run(self) -> None:
            # What was garbage in the parent is the parent's to end: destructors of process groups look for
            # threads that were not forked, and crash.
            gc.freeze()
            super().run()

    class _SpawnProcess(_NamedTied, context.SpawnProcess):
        pass

    class _ForkServerProcess(_NamedTied, context.ForkServerProcess):
        def _is_direct_child(self) -> bool:
            return False  # but one of the server, which lives as long as any of its children

    class _ForkContext(context.ForkContext):
        Process = _ForkProcess

    class _SpawnContext(context.SpawnContext):
        Process = _SpawnProcess

    class _ForkServerContext(context.ForkServerContext):
        Process = _ForkServerProcess

    _CONTEXTS = {"fork": _ForkContext(), "spawn": _SpawnContext(), "forkserver": _ForkServerContext()}
    _PLAIN = (context.ForkContext, context.SpawnContext, context.ForkServerContext)
