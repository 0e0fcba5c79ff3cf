"""Where the ranks meet: opens the key-value store of the job.

Three ways, told apart by the variables:

* `TORCHELASTIC_USE_AGENT_STORE=True`: torchrun's agent holds the store at MASTER_ADDR:MASTER_PORT; every rank
  is a client.
* A port was named, or the job spans hosts: rank 0 holds the store at MASTER_PORT.
* Nobody named a port and all ranks are on this host: rank 0 takes the first free one of a short list, and the
  other ranks look for the store that carries the mark of their job.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed as dist

from dist_env.errors import DistributedEnvironmentError, RankTimeoutError
from dist_env.variables import DEFAULT_MASTER_PORT, Variables

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CANDIDATE_PORTS = range(DEFAULT_MASTER_PORT, DEFAULT_MASTER_PORT + 32)
# A name that a cluster's resolver learns late gets this long; a misspelt one is refused after it.
_RESOLVE_SECONDS = 1.5
# A store answers at once; one with thousands of ranks at its door takes longer.
_HANDSHAKE_SECONDS = 30.0
_NEIGHBOUR_SECONDS = 2.0
_SILENT_SECONDS = 10.0


Address = tuple[socket.AddressFamily, str]


@dataclass(frozen=True)
class Rendezvous:
    """The open store, the port it is at, whether this process holds it, and whether rank 0 does."""

    store: Store
    port: int
    hosts_store: bool
    held_by_rank_0: bool


# An open store lasts: whatever still refers to an earlier group would keep its port taken.
_kept: tuple[Variables, str | None, Rendezvous] | None = None


def open_store(variables: Variables, timeout: float) -> Rendezvous:
    """Open the store of the job, as its host or as a client; the same variables give the same store again.

    Args:
        variables: Place of this process in the job.
        timeout: Seconds to wait for the host of the store.

    Raises:
        DistributedEnvironmentError: The port is taken, or MASTER_ADDR cannot be resolved.
        RankTimeoutError: Rank 0 was not reached in time.
    """
    global _kept
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if _kept is not None and _kept[:2] == (variables, agent):
        return _kept[2]
    _kept = None
    rendezvous = _meet(variables, timeout, at_agent=agent == "True")
    if variables.world_size > 1:
        _kept = (variables, agent, rendezvous)
    return rendezvous


def _meet(variables: Variables, timeout: float, *, at_agent: bool) -> Rendezvous:
    may_choose = variables.single_node and not variables.port_asked
    if variables.rank == 0 and not at_agent:
        addresses = _resolve(variables.master_addr, variables.master_port)
        return _host(variables, _listen(variables, addresses[0], may_choose), timeout)
    if may_choose and not at_agent:
        return _find(variables, timeout)
    store = _connect(variables, variables.master_port, timeout)
    return Rendezvous(store, variables.master_port, hosts_store=False, held_by_rank_0=not at_agent)


def _listen(variables: Variables, address: Address, may_choose: bool) -> socket.socket:
    """Bind the port of the store; on this host only, if all ranks are here."""
    ports = [variables.master_port]
    if may_choose:
        # One process alone takes any port; several look for one another on a short list.
        ports = [variables.master_port, 0] if variables.world_size == 1 else list(_CANDIDATE_PORTS)
    for port in ports:
        try:
            return _bind(variables, address, port)
        except OSError as error:
            refusal = error
            if error.errno != errno.EADDRINUSE:
                break
    if refusal.errno == errno.EADDRNOTAVAIL:
        raise DistributedEnvironmentError(
            f"MASTER_ADDR={variables.master_addr} is not an address of this host ({socket.gethostname()}), "
            "where rank 0 runs. Set the address of the host of rank 0."
        )
    if variables.world_size > 1 and not may_choose and _is_held_by_rank_0(variables):
        raise DistributedEnvironmentError(
            f"RANK=0 of this program is there already, and holds MASTER_PORT={variables.master_port} on "
            f"{variables.master_addr}. Give each process its own RANK; if that is an earlier job, end it, or "
            "set MASTER_PORT to a free port on every rank."
        )
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise DistributedEnvironmentError(
        f"MASTER_PORT={tried} cannot be used on {variables.master_addr} "
        f"({os.strerror(refusal.errno or 0)}). Set MASTER_PORT to a free port on every rank, or start the "
        "job with torchrun --standalone."
    )


def _bind(variables: Variables, address: Address, port: int) -> socket.socket:
    if variables.single_node:
        return socket.create_server((address[1], port), family=address[0], backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _host(variables: Variables, listener: socket.socket, timeout: float) -> Rendezvous:
    port = listener.getsockname()[1]
    try:
        store = _host_store(variables.master_addr, port, timeout, listener.detach())
    except dist.DistError:
        raise DistributedEnvironmentError(
            f"MASTER_ADDR={variables.master_addr} does not lead back to this host ({socket.gethostname()}), "
            "where rank 0 runs. Set the address of the host of rank 0."
        ) from None
    store.set("dist_env/mark", _mark(variables))
    return Rendezvous(store, port, hosts_store=True, held_by_rank_0=True)


def _connect(variables: Variables, port: int, timeout: float) -> Store:
    """A client of the store at a known port; waits until somebody listens there."""
    deadline = time.monotonic() + timeout
    _resolve(variables.master_addr, port)
    for pause in _pauses(deadline):
        if _is_open(variables.master_addr, port):
            break
        time.sleep(pause)
    else:
        raise _unreachable(variables, port, timeout)
    try:
        return _connect_store(variables.master_addr, port, timeout, _HANDSHAKE_SECONDS)
    except ConnectionError:
        raise DistributedEnvironmentError(
            f"MASTER_PORT={port} on {variables.master_addr} is held by another program, which does not "
            "answer like the store of rank 0. Set MASTER_PORT to a free port on every rank."
        ) from None


def _find(variables: Variables, timeout: float) -> Rendezvous:
    """Look through the candidate ports for the store of this job and claim this rank in it."""
    _resolve(variables.master_addr, variables.master_port)
    silent_until: dict[int, float] = {}
    for pause in _pauses(time.monotonic() + timeout):
        for port in _CANDIDATE_PORTS:
            if silent_until.get(port, 0.0) > time.monotonic() or not _is_open(variables.master_addr, port):
                continue
            try:
                store = _connect_store(variables.master_addr, port, timeout, _NEIGHBOUR_SECONDS)
                if _is_ours(store, variables):
                    return Rendezvous(store, port, hosts_store=False, held_by_rank_0=True)
            except (ConnectionError, dist.DistError):
                # Another program, or rank 0 on a machine too busy to answer.
                silent_until[port] = time.monotonic() + _SILENT_SECONDS
        time.sleep(pause)
    raise _unreachable(variables, variables.master_port, timeout)


def _is_ours(store: Store, variables: Variables) -> bool:
    """Whether the store belongs to this job and this rank's place in it is free; takes the place."""
    return _has_mark(store, variables) and store.add(f"dist_env/found/{variables.rank}", 1) == 1


def _has_mark(store: Store, variables: Variables) -> bool:
    return bool(store.check(["dist_env/mark"])) and store.get("dist_env/mark").decode() == _mark(variables)


def _is_held_by_rank_0(variables: Variables) -> bool:
    """Whether a job like this one has its store at the port."""
    where = variables.master_addr, variables.master_port
    try:
        return _has_mark(_connect_store(*where, _NEIGHBOUR_SECONDS, _NEIGHBOUR_SECONDS), variables)
    except (ConnectionError, dist.DistError):
        return False


def _mark(variables: Variables) -> str:
    """What the ranks of one job share: the user, the program, where it runs, and the number of ranks."""
    return json.dumps(
        [os.getuid() if hasattr(os, "getuid") else 0, sys.argv[0], str(Path.cwd()), variables.world_size]
    )


def _is_open(address: str, port: int) -> bool:
    try:
        with closing(socket.create_connection((address, port), timeout=2.0)):
            return True
    except OSError:
        return False


def _resolve(address: str, port: int) -> list[Address]:
    """Addresses of a host, IPv4 first."""
    for pause in _pauses(time.monotonic() + _RESOLVE_SECONDS):
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            time.sleep(pause)
            continue
        pairs = [(entry[0], str(entry[4][0])) for entry in found]
        return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)
    raise DistributedEnvironmentError(
        f"MASTER_ADDR={address} cannot be resolved to an address on {socket.gethostname()}. Set the name or "
        "address of the host of rank 0."
    )


def _pauses(deadline: float) -> Iterator[float]:
    """Growing pauses, from 20 ms to 1 s, until the deadline; at least one."""
    pause = 0.02
    while True:
        yield min(pause, max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            return
        pause = min(pause * 1.5, 1.0)


def _unreachable(variables: Variables, port: int, timeout: float) -> RankTimeoutError:
    where = f"MASTER_ADDR={variables.master_addr}, MASTER_PORT={port}"
    if not variables.port_asked and variables.single_node:
        where = f"ports {_CANDIDATE_PORTS[0]} to {_CANDIDATE_PORTS[-1]}, as MASTER_PORT is not set"
    return RankTimeoutError(
        f"rank {variables.rank} on {socket.gethostname()} did not reach rank 0 within "
        f"init_timeout={timeout:g} s ({where}). Check that rank 0 runs, and that its host and port can be "
        "reached from here.",
        {0: variables.master_addr},
    )


def _host_store(address: str, port: int, timeout: float, listener: int) -> Store:
    """A store that this process holds.

    Args:
        address: Host name or address that leads here.
        port: Port that `listener` is bound to.
        timeout: Seconds for connecting, and default of later waits.
        listener: File descriptor of a listening socket; the store takes it over.

    Raises:
        torch.distributed.DistError: The address does not lead here.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch does not declare it
        address,
        port,
        None,
        True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _connect_store(address: str, port: int, timeout: float, handshake: float) -> Store:
    """A client of the store at an address where somebody listens.

    Args:
        address: Host name or address.
        port: Port.
        timeout: Seconds of later waits.
        handshake: Seconds for the answer of the store.

    Raises:
        ConnectionError: Whoever listens there does not answer like a store.
    """
    opened: list[Store] = []

    def connect() -> None:
        with suppress(dist.DistError):
            limit = timedelta(seconds=timeout)
            opened.append(dist.TCPStore(address, port, None, False, timeout=limit, wait_for_workers=False))  # type: ignore[attr-defined]

    # A listener that accepts and stays silent would hold the constructor for ever, whatever its timeout.
    thread = threading.Thread(target=connect, name="connect_store", daemon=True)
    thread.start()
    thread.join(handshake)
    if not opened:
        raise ConnectionError(f"{address}:{port} does not answer like a store")
    return opened[0]
