"""Rank 0 sends by hand what no release sends; rank 1 tells what became of it."""

from __future__ import annotations

import os
import pickle
import resource
import struct
from typing import Any

import torch
from dispatch_loaders import RANK, open_group, tell
from torch.distributed.device_mesh import init_device_mesh

from dataloader_dispatch import DataloaderDispatcher, SynchronizedDataLoader
from dataloader_dispatch.connection import (
    DATA_TAG,
    FIRST_CAPACITY,
    Connection,
    Kind,
    MessageHeader,
    Record,
    aligned,
)
from dataloader_dispatch.dispatch.dispatcher import Facts, check_same_on_all_ranks
from dist_env import ControlGroup, encode_value

open_group()
mesh = init_device_mesh("cpu", (2,))


class Bomb:
    """Unpickling it would show."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


BOMB = pickle.dumps(Bomb())


def message(
    kind: int, described: bytes, payload: int, capacity: int = FIRST_CAPACITY, rest: bytes = b""
) -> bytes:
    """A message that begins as it should."""
    head = bytearray(128)
    body = described.ljust(aligned(len(described)), b"\0") + rest.ljust(aligned(len(rest)), b"\0")
    MessageHeader(1, 64 + len(body), capacity).write(memoryview(head))
    Record(kind, 1, len(described), payload).write(memoryview(head), 64)
    return bytes(head) + body


def description(specs: bytes, structure: bytes) -> bytes:
    return struct.pack("<I", len(specs)) + specs + structure


NO_TENSORS = encode_value([])
PICKLED = b"x" + struct.pack("<I", 6) + b"pickle" + encode_value(BOMB)
BATCH = message(Kind.BATCH, description(encode_value([(torch.uint8, 2**40)]), encode_value(0)), 64)
CASES = {
    "a pickle": message(Kind.BATCH, BOMB, 64),
    "a pickle as a structure": message(Kind.BATCH, description(NO_TENSORS, BOMB), 64),
    "a pickle in a structure": message(Kind.BATCH, description(NO_TENSORS, PICKLED), 64),
    "a pickle as specs": message(Kind.BATCH, description(BOMB, encode_value(0)), 64),
    "a pickled failure": message(Kind.FAILURE, b"", len(BOMB), rest=BOMB),
    "a failure of no class": message(
        Kind.FAILURE, b"", 300, rest=encode_value(("raised", "os.system", ("true",), [], "", "")).ljust(300)
    ),
    "unknown kind": message(77, b"", 64),
    "more bytes than came": struct.pack("<QQQ", 1, 2**40, FIRST_CAPACITY).ljust(128, b"\0"),
    "no bytes": struct.pack("<QQQ", 1, 0, FIRST_CAPACITY).ljust(128, b"\0"),
    "a huge message": message(Kind.BATCH, b"", 2**60),
    "a batch larger than memory": message(
        Kind.BATCH, description(encode_value([(torch.uint8, 2**50)]), encode_value(0)), 2**50
    ),
    "a huge receive": message(Kind.BATCH, b"", 64, 2**50),
    "no receive": message(Kind.BATCH, b"", 64, 0),
    "a huge tensor": BATCH,
    "a negative tensor": message(
        Kind.BATCH, description(encode_value([(torch.uint8, -64)]), encode_value(0)), 64
    ),
    "a tensor of another size": message(
        Kind.BATCH, description(encode_value([(torch.uint8, 500)]), encode_value(0)), 64
    ),
    "deep": message(Kind.BATCH, description(NO_TENSORS, b"l*\x01\x00\x00\x00" * 5000), 64),
    "no tensor of that number": message(Kind.BATCH, description(NO_TENSORS, b"y" + struct.pack("<I", 7)), 64),
}


def hostile(data: bytes) -> str:
    if RANK:
        loader: DataloaderDispatcher[Any] = DataloaderDispatcher(None, mesh, "cpu", timeout_seconds=20)
        try:
            return f"received {next(iter(loader))!r}"
        except Exception as error:  # noqa: BLE001 - which it is, the test says
            return f"{type(error).__name__}: {error}"
        finally:
            loader.close()
    group = ControlGroup([0, 1], 20, doing="opening the data loader")
    settings = {"mesh": (0, 1), "dp_mesh_dim": (0, 1), "uneven": "stop", "prefetch": 4}
    settings |= {"timeout_seconds": 20.0, "unpickle_batches": False}
    check_same_on_all_ranks(group, settings, Facts(None, None, False, False, 0), None)
    connection = Connection(group)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    work = connection.send(sent, 1, DATA_TAG)
    work.wait()
    # Until the other has read it and has left.
    torch.distributed.barrier()
    group.close()
    return ""


def hostile_gather(data: bytes, size: int) -> str:
    """In place of what ranks say when they open a loader."""
    if RANK:
        try:
            loader = SynchronizedDataLoader([torch.ones(1)], "cpu", timeout_seconds=20)
            return f"opened {loader}"
        except Exception as error:  # noqa: BLE001 - which it is, the test says
            return f"{type(error).__name__}: {error}"
    group = ControlGroup([0, 1], 20, doing="opening the data loader")
    said = size.to_bytes(8, "big") + data
    own = torch.frombuffer(bytearray(said.ljust(1024, b"\0")), dtype=torch.uint8)
    group.broadcast(own, 0).wait()
    torch.distributed.barrier()
    group.close()
    return ""


told = {}
for name, data in CASES.items():
    told[name] = hostile(data)
    if RANK:
        torch.distributed.barrier()
for name, size in (("a pickle gathered", len(BOMB)), ("a size of many bytes", 2**62)):
    told[name] = hostile_gather(BOMB, size)
    if RANK:
        torch.distributed.barrier()
tell({"told": told, "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024})
