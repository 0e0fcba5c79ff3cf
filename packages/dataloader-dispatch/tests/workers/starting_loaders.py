"""Begins each kind of loader with a worker that never gives an item: `starting_loaders.py FOLDER`.

Each worker leaves an empty file NAME.PID in the folder, and so does this process at last.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dataloader_dispatch import DataloaderDispatcher, DocumentStream, StreamLoader, build_loader

FOLDER = Path(sys.argv[1])


def sleep(name: str) -> int:
    (FOLDER / f"{name}.{os.getpid()}").touch()
    time.sleep(120)
    return 0


class Slow:
    """Documents, or items, that take a worker two minutes each."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[int]:
        return [0] if get_worker_info() is None else [sleep(self._name)]


class SlowStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield sleep("iterable")


loaders = [
    build_loader(Slow("map-style"), 2, num_workers=1),
    build_loader(SlowStream(), 2, num_workers=1),
    DataloaderDispatcher(DataLoader(Slow("dispatched"), 2, num_workers=1), None, "cpu"),  # type: ignore[arg-type]
    StreamLoader(DocumentStream(Slow("stream"), sequence_length=4, eos_token_id=0), 2, num_workers=1),  # type: ignore[arg-type]
]
for loader in loaders:
    threading.Thread(target=next, args=(iter(loader),), daemon=True).start()  # type: ignore[call-overload]
sleep("parent")
