"""Making the stores of torch.distributed, which exist only in builds that have it."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Store", "clone_store", "connect_store", "hash_store", "host_store", "prefix_store"]


def clone_store(store: Store) -> Store:
    """The same store over a connection of its own, for another thread."""
    return store.clone()  # type: ignore[attr-defined, no-any-return]


def hash_store() -> Store:
    """A store inside this process."""
    return dist.HashStore()  # type: ignore[attr-defined]


def prefix_store(prefix: str, store: Store) -> Store:
    """The same store, seen through a prefix of its keys."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def host_store(address: str, port: int, timeout: float, listener: int) -> Store:
    """A store that this process holds.

    Args:
        address: Host name or address that leads here.
        port: Port that `listener` is bound to.
        timeout: Seconds for connecting, and default of later waits.
        listener: File descriptor of a listening socket; the store takes it over.

    Raises:
        torch.distributed.DistError: The address does not lead here.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        None,
        True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def connect_store(address: str, port: int, timeout: float, handshake: float) -> Store:
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
