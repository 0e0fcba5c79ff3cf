"""The process that reads from object stores for another one, and writes what it read into the cache.

The library underneath has threads that do not survive a fork, and the worker processes of loaders are forked.
So a process that reads documents never uses it: it starts this one, with a fresh interpreter, and asks it
over a socket. This process ends with the one that started it, however that ends.

Several requests run at a time. What a reader waits for comes before what it announced that it will read.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dataloader_dispatch.store.block_cache import WHOLE, BlockCache, write_at
from dataloader_dispatch.store.messages import EndedError, Message, receive, send
from dist_env import (
    ObjectInfo,
    ObjectStore,
    StoreError,
    StoreSettingsError,
    die_with_parent,
    open_object_store,
)

REQUESTS_AT_ONCE = 24
"""Requests that wait for answers of the store at a time; each wants one block."""
_MOST_ANNOUNCED = 8192
"""Blocks; of more that are announced, those announced first are forgotten."""

GONE, CHANGED, STORE, SETTINGS, CACHE = "gone", "changed", "store", "settings", "cache"
"""What kind of error an answer tells of."""


@dataclass(frozen=True, slots=True)
class Content:
    """One content of an object.

    Attributes:
        root: The store.
        key: The object.
        size: Bytes.
        version: What tells this content from others.
        name: Its name in the cache.
        block_bytes: Bytes of a block.
    """

    root: str
    key: str
    size: int
    version: Mapping[str, str]
    name: str
    block_bytes: int

    def length(self, block: int) -> int:
        """Bytes of a block."""
        return min(self.block_bytes, self.size - block * self.block_bytes)


@dataclass(eq=False, slots=True)
class _Request:
    """Blocks that a reader waits for."""

    number: int
    missing: int
    direct: bool
    """Whether the answer holds the blocks themselves, because the cache loses them too soon."""
    data: dict[int, Any] = field(default_factory=dict)
    failure: Message | None = None
    warning: str = ""


@dataclass(eq=False, slots=True)
class _Task:
    """A block to fetch."""

    content: Content
    block: int
    begun: bool = False
    waiting: list[_Request] = field(default_factory=list)


class Fetcher:
    """Answers one process until that ends.

    Args:
        channel: The socket to it.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._cache: BlockCache | None = None
        self._timeout = 0.0
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._tasks: dict[tuple[str, int], _Task] = {}
        self._urgent: deque[_Task] = deque()
        self._announced: deque[_Task] = deque()

    def serve(self) -> None:
        """Answer until the other process ends or closes the socket."""
        first, _ = receive(self._channel)
        self._timeout = float(first["timeout"])
        if first["directory"]:
            self._cache = BlockCache(first["directory"], first["limit"])
        for _ in range(REQUESTS_AT_ONCE):
            threading.Thread(target=self._work, daemon=True).start()
        while True:
            message, _ = receive(self._channel)
            if message["do"] == "ahead":
                self._announce(message["contents"])
            elif message["do"] == "read":
                self._read(message)
            else:
                action = self._assemble if message["do"] == WHOLE else self._look
                threading.Thread(target=action, args=(message,), daemon=True).start()

    def _look(self, message: Message) -> None:
        """Answer what objects there are."""

        try:
            store, key = open_object_store(message["root"], self._timeout), message["key"]
            if message["do"] == "head":
                found = [store.head(key)]
            else:
                found = store.objects(key) if key else _all_objects(store)
        except Exception as error:  # noqa: BLE001  (the other process waits for an answer)
            self._answer(message["number"], failure=_failure(error))
        else:
            told = [(info.key, info.size, dict(info.version), info.modified) for info in found]
            self._answer(message["number"], {"objects": told})

    def _assemble(self, message: Message) -> None:
        """Answer with the path of a file that holds a whole object."""
        content, number = Content(*message["content"]), message["number"]
        try:
            if self._cache is None:
                raise OSError(errno.EROFS, "there is not any cache")
            with self._cache.turn(content.name):  # processes that want the same object fetch it once
                if not self._cache.holds(content.name, WHOLE, content.size):
                    with self._cache.writing(content.name, WHOLE, content.size) as handle:
                        self._fill(handle, content)
        except Exception as error:  # noqa: BLE001  (the other process waits for an answer)
            self._answer(number, failure=_failure(error))
        else:
            self._answer(number)

    def _fill(self, handle: int, content: Content) -> None:
        def copy(block: int) -> None:
            write_at(handle, self._get(content, block), block * content.block_bytes)

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            # The first failure leaves out what has not begun.
            futures = [pool.submit(copy, block) for block in range(-(-content.size // content.block_bytes))]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _read(self, message: Message) -> None:
        content = Content(*message["content"])
        request = _Request(message["number"], len(message["blocks"]), message["direct"])
        with self._changed:
            for block in message["blocks"]:
                task = self._tasks.get((content.name, block))
                if task is None:
                    task = self._tasks[content.name, block] = _Task(content, block)
                task.waiting.append(request)
                if not task.begun:
                    self._urgent.append(task)
            self._changed.notify(len(message["blocks"]))

    def _announce(self, contents: list[list[Any]]) -> None:
        with self._changed:
            for *told, blocks in contents:
                content = Content(*told)
                for block in blocks:
                    if (content.name, block) not in self._tasks:
                        task = self._tasks[content.name, block] = _Task(content, block)
                        self._announced.append(task)
            while len(self._announced) > _MOST_ANNOUNCED:
                task = self._announced.popleft()
                if not task.begun and not task.waiting:
                    del self._tasks[task.content.name, task.block]
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._urgent or self._announced):
                    self._changed.wait()
                task = (self._urgent or self._announced).popleft()
                if task.begun:
                    continue  # it was announced first, and then asked for
                task.begun = True
            self._fetch(task)

    def _fetch(self, task: _Task) -> None:
        content, block, data, warning = task.content, task.block, None, ""
        failure: Message | None = None
        try:
            kept = self._cache is not None and self._cache.holds(content.name, block, content.length(block))
            if not kept or any(request.direct for request in task.waiting):
                data = self._get(content, block)
            if not kept:
                warning = self._keep(task, data)
        except Exception as error:  # noqa: BLE001  (the other process waits for an answer)
            failure = _failure(error)
        with self._changed:
            late = [one for one in task.waiting if one.direct and data is None and failure is None]
            ready = []
            for request in [one for one in task.waiting if one not in late]:
                request.missing -= 1
                request.failure = request.failure or failure
                request.warning = request.warning or warning
                if data is not None and (request.direct or warning):
                    request.data[block] = data
                if not request.missing:
                    ready.append(request)
            if late:  # asked for while it was being looked for in the cache
                task.begun, task.waiting = False, late
                self._urgent.append(task)
                self._changed.notify()
            else:
                del self._tasks[content.name, block]
        for request in ready:
            blocks = sorted(request.data)
            told = {"blocks": blocks, "warning": request.warning}
            self._answer(request.number, told, request.failure, [request.data[block] for block in blocks])

    def _get(self, content: Content, block: int) -> Any:
        """The bytes of a block, from the store."""
        start, length = block * content.block_bytes, content.length(block)
        store = open_object_store(content.root, self._timeout)
        data = store.get_range(content.key, start, start + length, content.version)
        if data is None:
            raise ReplacedError
        if len(data) != length:
            raise StoreError(
                f"{store.url(content.key)} cannot be read: {len(data)} bytes came of {length} from byte "
                f"{start} on, and it has {content.size}. Look at the network and the store"
            )
        return data

    def _keep(self, task: _Task, data: Any) -> str:
        """Write a block into the cache; why not, if it cannot be written."""
        if self._cache is None:
            return "-"
        try:
            self._cache.write(task.content.name, task.block, data)
        except OSError as error:
            return str(error.strerror or error)
        return ""

    def _answer(
        self,
        number: int,
        told: Message | None = None,
        failure: Message | None = None,
        blobs: Sequence[Any] = (),
    ) -> None:
        message = failure or told or {}
        with self._sending, suppress(EndedError):  # `serve` finds that the other process has ended
            send(self._channel, {"number": number, **message}, () if failure else blobs)


class ReplacedError(Exception):
    """The object has another content now."""


def _failure(error: Exception) -> Message:
    """What to tell of an error. Texts of others are left out, as they may hold credentials."""
    match error:
        case ReplacedError():
            return {"kind": CHANGED, "text": ""}
        case FileNotFoundError():
            return {"kind": GONE, "text": ""}
        case StoreError():
            return {"kind": STORE, "text": str(error)}
        case StoreSettingsError():
            return {"kind": SETTINGS, "text": str(error)}
        case OSError():
            return {"kind": CACHE, "text": error.strerror or type(error).__name__}
    return {"kind": STORE, "text": f"reading from the store failed with {type(error).__name__}"}


def _all_objects(store: ObjectStore) -> list[ObjectInfo]:
    """All objects of a bucket."""
    directories, found = store.children("")
    return found + [info for name in directories for info in store.objects(name)]


def main() -> None:
    """Serve the process at the other end of standard input."""
    # Ctrl-C reaches all processes of a terminal. The reader decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, by_main_thread = sys.argv[2:4]
    die_with_parent(int(parent), by_main_thread=by_main_thread == "1")
    channel = socket.socket(fileno=os.dup(0))
    with suppress(EndedError):
        Fetcher(channel).serve()
    # Threads that wait for a store would keep the process.
    os._exit(0)
