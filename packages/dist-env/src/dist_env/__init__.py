"""Which rank am I, on what device, and is the process group healthy?"""

from typing import TYPE_CHECKING

from dist_env.orphans import die_with_parent, die_with_parent_command
from dist_env.orphans import die_with_torchrun as _die_with_torchrun

if TYPE_CHECKING:
    from dist_env.collectives import barrier, broadcast_object, gather_objects, main_process_first
    from dist_env.command_line import (
        add_version,
        leave_broken_pipe,
        parse_size,
        printable,
        size_text,
    )
    from dist_env.control_group import ControlGroup
    from dist_env.encoding import decode_value, encode_value
    from dist_env.environment import DistributedEnvironment
    from dist_env.errors import DistributedEnvironmentError, RankFailedError, RankTimeoutError
    from dist_env.heartbeat import Heartbeat, RankStatus, StallReport
    from dist_env.interface import DistributedEnvInterface, StaticDistributedEnvironment, fake_job, is_alone
    from dist_env.layout import ParallelLayout
    from dist_env.liveness import naming_lost_ranks
    from dist_env.logging import forget_warnings, get_logger
    from dist_env.meshes import Meshes
    from dist_env.tree_sums import HostSums
    from dist_env.worker_processes import die_with_parent_context, tie_loader_workers

__all__ = [
    "ControlGroup",
    "DistributedEnvInterface",
    "DistributedEnvironment",
    "DistributedEnvironmentError",
    "Heartbeat",
    "HostSums",
    "Meshes",
    "ParallelLayout",
    "RankFailedError",
    "RankStatus",
    "RankTimeoutError",
    "StallReport",
    "StaticDistributedEnvironment",
    "add_version",
    "barrier",
    "broadcast_object",
    "decode_value",
    "die_with_parent",
    "die_with_parent_command",
    "die_with_parent_context",
    "encode_value",
    "fake_job",
    "forget_warnings",
    "gather_objects",
    "get_logger",
    "is_alone",
    "leave_broken_pipe",
    "main_process_first",
    "naming_lost_ranks",
    "parse_size",
    "printable",
    "size_text",
    "tie_loader_workers",
]

# A name loads its module when it is first used: a layout, and the help of the command, need no torch.
_NAMES = {
    "collectives": ("barrier", "broadcast_object", "gather_objects", "main_process_first"),
    "command_line": (*("add_version", "leave_broken_pipe", "parse_size", "printable", "size_text"),),
    "control_group": ("ControlGroup",),
    "encoding": ("decode_value", "encode_value"),
    "environment": ("DistributedEnvironment",),
    "errors": ("DistributedEnvironmentError", "RankFailedError", "RankTimeoutError"),
    "heartbeat": ("Heartbeat", "RankStatus", "StallReport"),
    "interface": ("DistributedEnvInterface", "StaticDistributedEnvironment", "fake_job", "is_alone"),
    "layout": ("ParallelLayout",),
    "liveness": ("naming_lost_ranks",),
    "logging": ("forget_warnings", "get_logger"),
    "meshes": ("Meshes",),
    "tree_sums": ("HostSums",),
    "worker_processes": ("die_with_parent_context", "tie_loader_workers"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_RENAMED = {"imagined_job": "fake_job"}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _RENAMED:
            import warnings

            new = _RENAMED[name]
            warnings.warn(f"dist_env.{name} is called {new} now.", DeprecationWarning, stacklevel=2)
            return getattr(import_module(f"{__name__}.{_MODULES[new]}"), new)
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_die_with_torchrun()
