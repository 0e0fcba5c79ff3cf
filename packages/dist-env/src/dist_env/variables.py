"""The launcher's variables: read, checked, completed, exported and restored.

The names are torchrun's: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dist_env.errors import DistributedEnvironmentError
from dist_env.interface import check_ranks

DEFAULT_MASTER_ADDR = "localhost"
DEFAULT_MASTER_PORT = 29501
_PROCESS_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Of processes started together. The shell of an allocation has `SLURM_NTASKS` too, where one is alone."""


@dataclass(frozen=True, kw_only=True)
class Variables:
    """The six values that place a process in its job.

    `port_asked` tells whether anybody named the port. If not, a single-node job may choose another.
    `overruled` lists the arguments that a launcher variable replaced, as text for a warning.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    port_asked: bool
    overruled: tuple[str, ...] = ()

    @property
    def single_node(self) -> bool:
        """Whether every process of the job runs on this host."""
        return self.local_world_size == self.world_size


def resolve_variables(
    *,
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Variables:
    """Combine the launcher's variables with the caller's values; a variable wins over a value.

    Args:
        rank: Value for a missing `RANK`; the others likewise.
        local_rank: Value for a missing `LOCAL_RANK`.
        world_size: Value for a missing `WORLD_SIZE`.
        local_world_size: Value for a missing `LOCAL_WORLD_SIZE`.
        master_addr: Value for a missing `MASTER_ADDR`.
        master_port: Value for a missing `MASTER_PORT`.
        environ: Where to read variables; the process environment when None.

    Raises:
        DistributedEnvironmentError: A variable is not a number, out of range, missing although another one
            needs it, or contradicts another one.
    """
    environ = os.environ if environ is None else environ
    overruled: list[str] = []

    def number(name: str, given: int | None) -> int | None:
        found = _read_integer(environ, name)
        if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
            raise DistributedEnvironmentError(f"{name.lower()}={given!r} is not an integer.")
        if found is not None and given is not None and found != given:
            overruled.append(f"{name.lower()}={given} gives way to the variable {name}={found}")
        return given if found is None else found

    ranks = {
        "RANK": number("RANK", rank),
        "LOCAL_RANK": number("LOCAL_RANK", local_rank),
        "WORLD_SIZE": number("WORLD_SIZE", world_size),
        "LOCAL_WORLD_SIZE": number("LOCAL_WORLD_SIZE", local_world_size),
    }
    port = number("MASTER_PORT", master_port)
    address = environ.get("MASTER_ADDR", DEFAULT_MASTER_ADDR if master_addr is None else master_addr)
    if "MASTER_ADDR" in environ and master_addr not in (None, address):
        overruled.append(f"master_addr={master_addr} gives way to the variable MASTER_ADDR={address}")
    _check_address(address)
    if port is not None and not 1 <= port <= 65535:
        raise DistributedEnvironmentError(f"MASTER_PORT={port} must be a port, 1 to 65535.")
    filled = _complete(ranks, local_only=_is_loopback_name(address))
    check_ranks(*filled)
    return Variables(
        rank=filled[0],
        local_rank=filled[1],
        world_size=filled[2],
        local_world_size=filled[3],
        master_addr=address,
        master_port=DEFAULT_MASTER_PORT if port is None else port,
        port_asked=port is not None,
        overruled=tuple(overruled),
    )


def unused_launcher(environ: Mapping[str, str] | None = None, also: Sequence[str] = ()) -> str | None:
    """What to say where a launcher has started several processes, and this one was not told of the others.

    ``srun`` and ``mpirun`` set variables of their own, and not `WORLD_SIZE`: each process is then alone, and
    would do the whole work once more.

    Args:
        environ: Where to read variables; the process environment when None.
        also: More variables that hold a number of processes.

    Returns:
        The sentence; None where nothing is to be said.
    """
    environ = os.environ if environ is None else environ
    for variable in (*_PROCESS_COUNTS, *also):
        size = environ.get(variable, "")
        if size.isdecimal() and int(size) > 1 and "WORLD_SIZE" not in environ:
            return (
                f"{variable}={size} tells of several processes, but WORLD_SIZE is not set, so that each is "
                "a job of its own: start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and "
                "LOCAL_WORLD_SIZE."
            )
    return None


def _read_integer(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as an integer; None when it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", text.strip()):
        raise DistributedEnvironmentError(
            f"{name}={text!r} is not an integer. Set a number, or unset {name}."
        )
    return int(text)


def _complete(ranks: Mapping[str, int | None], *, local_only: bool) -> tuple[int, int, int, int]:
    """Fill in what is missing; refuse where a guess could put two processes in one place."""
    size = ranks["WORLD_SIZE"]
    if size is None:
        size = 1
        if ranks["RANK"]:
            raise DistributedEnvironmentError(
                f"RANK={ranks['RANK']} is set but WORLD_SIZE is not. Set both, or start the job with "
                "torchrun."
            )
    rank = ranks["RANK"]
    if rank is None:
        if size > 1:
            raise DistributedEnvironmentError(
                f"WORLD_SIZE={size} is set but RANK is not. Set RANK to 0..{size - 1}, a different one for "
                "each process, or start the job with torchrun."
            )
        rank = 0
    local_rank, local_size = ranks["LOCAL_RANK"], ranks["LOCAL_WORLD_SIZE"]
    if local_only and size > 1:
        # With a rendezvous on this very host all ranks are here, so local and global numbers agree.
        local_size = size if local_size is None else local_size
        local_rank = rank if local_rank is None else local_rank
    if local_rank is not None and local_size is None and size > 1:
        raise DistributedEnvironmentError(
            f"LOCAL_RANK={local_rank} is set but LOCAL_WORLD_SIZE is not. Set it to the number of processes "
            "on this host."
        )
    if local_rank is None and local_size is not None and local_size > 1:
        raise DistributedEnvironmentError(
            f"LOCAL_WORLD_SIZE={local_size} is set but LOCAL_RANK is not. Set LOCAL_RANK to "
            f"0..{local_size - 1}, a different one for each process of this host."
        )
    return rank, local_rank or 0, size, 1 if local_size is None else local_size


def _check_address(address: str) -> None:
    if not address.strip() or re.search(r"\s|/", address):
        raise DistributedEnvironmentError(
            f"MASTER_ADDR={address!r} is not a host. Set the name or address of the host of rank 0."
        )
    if ":" in address and not _is_address(address):
        raise DistributedEnvironmentError(
            f"MASTER_ADDR={address!r} is not a host. Put the port into MASTER_PORT."
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback_name(address: str) -> bool:
    """Whether the text itself, without asking a resolver, means this host."""
    return address == "localhost" or (_is_address(address) and ipaddress.ip_address(address).is_loopback)


class ExportedVariables:
    """Sets the variables that are missing, and takes away again exactly those."""

    def __init__(self) -> None:
        self._added: list[str] = []

    def export(self, variables: Variables, master_port: int) -> None:
        """Set each of the six variables that is not set, so that later code sees the same values.

        Args:
            variables: The values.
            master_port: The port that the rendezvous really uses.
        """
        values = {
            "RANK": variables.rank,
            "LOCAL_RANK": variables.local_rank,
            "WORLD_SIZE": variables.world_size,
            "LOCAL_WORLD_SIZE": variables.local_world_size,
            "MASTER_ADDR": variables.master_addr,
            "MASTER_PORT": master_port,
        }
        for name, value in values.items():
            if name not in os.environ:
                os.environ[name] = str(value)
                self._added.append(name)

    def restore(self) -> None:
        """Unset what `export` set."""
        for name in self._added:
            os.environ.pop(name, None)
        self._added.clear()
