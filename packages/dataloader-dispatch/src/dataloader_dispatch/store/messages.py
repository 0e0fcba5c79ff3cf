"""What a process and its fetcher say to one another: JSON with its length in front, and bytes behind it."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
_LENGTH_BYTES = 8


class EndedError(Exception):
    """The other process has ended."""


def send(channel: socket.socket, message: Message, blobs: Sequence[Any] = ()) -> None:
    """Send a message, with bytes behind it.

    Raises:
        EndedError: The other process has ended.
    """
    # Names of objects may hold halves of surrogate pairs, which only an escape can hold.
    head = json.dumps({**message, "blobs": [memoryview(blob).nbytes for blob in blobs]}).encode("ascii")
    try:
        channel.sendall(len(head).to_bytes(_LENGTH_BYTES, "little") + head)
        for blob in blobs:
            channel.sendall(blob)
    except (BrokenPipeError, ConnectionError) as error:
        raise EndedError from error


def receive(channel: socket.socket) -> tuple[Message, list[bytes]]:
    """The next message, with the bytes behind it.

    Raises:
        EndedError: The other process has ended.
    """
    length = int.from_bytes(_exactly(channel, _LENGTH_BYTES), "little")
    message: Message = json.loads(_exactly(channel, length))
    return message, [bytes(_exactly(channel, size)) for size in message.pop("blobs")]


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = channel.recv_into(view)
        except ConnectionError as error:
            raise EndedError from error
        if not count:
            raise EndedError
        view = view[count:]
    return data
