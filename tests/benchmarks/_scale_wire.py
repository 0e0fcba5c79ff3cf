"""What gloo puts on its connections, as the system counts it, beside the formulas of `_scale_transport`."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _scale_transport import allgather_traffic, allreduce_traffic, broadcast_sends

HEADERS_BYTES = 144
"""Beside each message of gloo: its own header, and those by which both ends tell that they are ready."""
_SIZES = (3, 19, 1024, 5000)
_BYTES_RECEIVED = 128
"""Offset in the system's `tcp_info`."""
_REST_SECONDS = 0.05


def check_wire(size: int) -> list[dict[str, object]]:
    """Run collectives on real groups and compare the bytes on their connections with the formulas.

    Returns:
        For each collective: its name, bytes, messages by the formula, and bytes on the connections.

    Raises:
        SystemExit: They differ.
    """
    store, groups = dist.HashStore(), [None] * size

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    _on_all(size, make)
    rows = []
    for kind, act in _COLLECTIVES.items():
        for num_bytes in _SIZES:
            _on_all(size, lambda rank, act=act, num_bytes=num_bytes: act(groups[rank], size, num_bytes))
            before = _received_bytes()
            _on_all(size, lambda rank, act=act, num_bytes=num_bytes: act(groups[rank], size, num_bytes))
            found = _received_bytes() - before
            messages, payload = _expected(kind, size, num_bytes)
            rows.append(
                {"ranks": size, "kind": kind, "bytes": num_bytes, "messages": messages, "wire": found}
            )
            if found != payload + HEADERS_BYTES * messages:
                raise SystemExit(
                    f"gloo sent {found} bytes, not {payload} + {HEADERS_BYTES} * {messages}: {rows[-1]}"
                )
    return rows


def _expected(kind: str, size: int, num_bytes: int) -> tuple[int, int]:
    if kind == "allgather":
        return allgather_traffic(size, num_bytes)
    if kind == "allreduce":
        return allreduce_traffic(size, num_bytes)
    sends = sum(broadcast_sends(size, rank) for rank in range(size))
    return sends, sends * num_bytes


def _allgather(group: dist.ProcessGroup, size: int, num_bytes: int) -> None:
    own = torch.zeros(num_bytes, dtype=torch.uint8)
    group.allgather([[torch.empty_like(own) for _ in range(size)]], [own]).wait()


def _allreduce(group: dist.ProcessGroup, size: int, num_bytes: int) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([torch.zeros(num_bytes, dtype=torch.uint8)], options).wait()


def _broadcast(group: dist.ProcessGroup, size: int, num_bytes: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([torch.zeros(num_bytes, dtype=torch.uint8)], options).wait()


_COLLECTIVES = {"allgather": _allgather, "allreduce": _allreduce, "broadcast": _broadcast}


def _on_all(size: int, act: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(_REST_SECONDS)


def _received_bytes() -> int:
    """Bytes that have come in on all TCP connections of this process."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # one that has been closed meanwhile
            if not Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(descriptor)))
            with connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    found += struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]
    return found
