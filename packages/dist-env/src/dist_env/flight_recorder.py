"""Writes down which collectives this rank has called, when the job hangs.

torch keeps the last collectives of each process in a ring buffer, its flight recorder. In torch 2.13 it has
those of NCCL and of gloo, but no send and recv of gloo. `python -m dist_env doctor --dump` reads what
the ranks have written and says who is missing in which collective.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dist_env.errors import DistributedEnvironmentError
from dist_env.logging import get_logger

if TYPE_CHECKING:
    # Builds of torch without torch.distributed have no stores.
    from torch._C._distributed_c10d import Store

logger = get_logger("dist_env")

VARIABLE = "DIST_ENV_FLIGHT_RECORDER"
FILE_PREFIX = "rank_"
# torch appends the rank; what NCCL's watchdog writes is a pickle.
NCCL_FILE_PREFIX = "nccl_rank_"
# torch reads these when the first group is made, and the older names if these are not set.
_BUFFER, _FILE = "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"
_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_OLDER = {_BUFFER: "TORCH_NCCL_TRACE_BUFFER_SIZE", _FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
_ENTRIES = 2000
_STACK_FRAMES = 30
_RUN_KEY = "flight_recorder/run"


def choose_directory(given: str | os.PathLike[str] | None) -> tuple[Path | None, str | None]:
    """Where to write traces: the variable wins over the setting.

    Args:
        given: The setting.

    Returns:
        The directory, None for no recording; and what the variable has overruled, as text for a warning.

    Raises:
        DistributedEnvironmentError: The directory is an empty text or a file, or torch is told to record
            nothing.
    """
    text = os.environ.get(VARIABLE)
    label = f"{VARIABLE}={text!r}" if text is not None else f"flight_recorder={str(given)!r}"
    chosen = given if text is None else text
    if chosen is None:
        return None, None
    if not str(chosen).strip() or (Path(chosen).exists() and not Path(chosen).is_dir()):
        raise DistributedEnvironmentError(
            f"{label} is not a directory. Name one, such as runs/traces, or unset it."
        )
    for name in (_BUFFER, _OLDER[_BUFFER]):
        if os.environ.get(name, "1").strip() == "0":
            raise DistributedEnvironmentError(
                f"{name}=0 turns off the flight recorder, which {label} needs. Unset it, or set {_ENTRIES}."
            )
    overruled = None
    if text is not None and given is not None and Path(given) != Path(text):
        overruled = f"flight_recorder={str(given)!r} gives way to the variable {label}"
    return Path(chosen).absolute(), overruled


def trace_function() -> Callable[[bool, bool], bytes] | None:
    """torch's function that gives the trace as JSON; None where torch has none.

    Private: `torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives, onlyActive) -> bytes` of
    torch 2.13. Without it, only what NCCL's watchdog writes is left. Its sister `_dump_fr_trace` adds Python
    frames, but is a pickle, and keeps the interpreter's lock while it looks them up, which took minutes on a
    host whose cores were busy; the stacks of the threads tell the same of the collective that hangs.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    found: Callable[[bool, bool], bytes] | None = getattr(module, "_dump_fr_trace_json", None)
    return found


class FlightRecorder:
    """Sets the variables that torch reads, and writes the trace of this rank. One for each open environment.

    Args:
        directory: Where to write; made if it is missing.
        rank: Global rank.
        world_size: Number of ranks.
    """

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self.directory = directory
        self.dumped = False
        self._rank = rank
        self._world_size = world_size
        self._run = secrets.token_hex(8)
        self._added: list[str] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Set the variables. Call it before the process group is made, for torch reads them then.

        Raises:
            DistributedEnvironmentError: The directory cannot be made.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DistributedEnvironmentError(
                f"flight_recorder={str(self.directory)!r} cannot be made: {error}. Name another directory."
            ) from error
        values = {
            _BUFFER: str(_ENTRIES),
            _FILE: str(self.directory / NCCL_FILE_PREFIX),
            _ON_TIMEOUT: "1",
        }
        for name, value in values.items():
            if name not in os.environ and _OLDER.get(name, name) not in os.environ:
                os.environ[name] = value
                self._added.append(name)
        if trace_function() is None:
            logger.warning(
                "torch %s cannot be asked for the trace of its flight recorder, so that %s gets only what "
                "NCCL writes on timeouts of its own, and nothing of gloo. Use torch 2.13.",
                torch.__version__,
                self.directory,
            )
        elif dist.is_initialized():
            logger.warning(
                "the process group was made before flight_recorder=%s was set, so that torch records as its "
                "variables said then.",
                self.directory,
            )

    def agree(self, store: Store) -> None:
        """Give the run a name that all ranks share, by which traces of an earlier run are told."""
        self._run = store.compare_set(_RUN_KEY, "", self._run).decode()

    def stop(self) -> None:
        """Unset the variables that `start` set."""
        for name in self._added:
            os.environ.pop(name, None)
        self._added.clear()

    def dump(self, reason: str) -> Path | None:
        """Write the trace of this rank and the Python stacks of its threads.

        Args:
            reason: Why, for whoever reads it.

        Returns:
            The file, which replaces an earlier one of this rank; None where torch gives no trace or the file
            cannot be written, both of which are logged.
        """
        get_trace = trace_function()
        if get_trace is None:
            return None
        with self._lock:
            content = {
                "rank": self._rank,
                "world_size": self._world_size,
                "host": socket.gethostname(),
                "run": self._run,
                "time": time.time(),
                "reason": reason,
                "torch": str(torch.__version__),
                "stacks": _stacks(),
                "groups": _groups(),
                # Without torch's own process status, all entries: which are finished is said in each.
                "trace": json.loads(get_trace(True, False)),
            }
            path = self.directory / f"{FILE_PREFIX}{self._rank}.json"
            part = path.with_suffix(f".{os.getpid()}.part")
            try:
                part.write_text(json.dumps(content))
                part.replace(path)
            except OSError as error:
                logger.error("the flight recorder's trace cannot be written to %s: %s", path, error)
                return None
            self.dumped = True
            return path


def _stacks() -> dict[str, list[str]]:
    """Python frames of each thread, innermost last, by the number that the recorder has for it on Linux."""
    return {
        str(thread): [
            f"{entry.filename}:{entry.lineno} in {entry.name}"
            for entry in traceback.extract_stack(frame)[-_STACK_FRAMES:]
        ]
        for thread, frame in sys._current_frames().items()
    }


def _groups() -> dict[str, list[int]]:
    """Global ranks by the name of the group, of every group that this rank is in.

    Private: `torch.distributed.distributed_c10d._world.pg_map`, the groups of this process. The trace of gloo
    does not tell members.
    """
    return {
        str(group.group_name): dist.get_process_group_ranks(group)
        for group in list(dist.distributed_c10d._world.pg_map)
    }


_active: FlightRecorder | None = None


def active_recorder() -> FlightRecorder | None:
    """The recorder of the open environment, if it has one."""
    return _active


def use_recorder(recorder: FlightRecorder | None) -> None:
    """Let this process dump to a recorder from now on, or to none."""
    global _active
    _active = recorder


def dump_trace(reason: str) -> None:
    """Write the trace of this rank, if the open environment records."""
    if _active is not None:
        _active.dump(reason)
