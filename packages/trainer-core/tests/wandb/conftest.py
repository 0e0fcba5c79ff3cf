"""Reads the offline run files of Weights & Biases: records in the block format of LevelDB's log."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

FILE_HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """Records are cut into parts that do not cross blocks; each part has checksum, length and kind."""
    data = path.read_bytes()
    position, parts = FILE_HEADER, b""
    while position + RECORD_HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < RECORD_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += RECORD_HEADER
        if position + length > len(data):
            return  # it is being written
        parts += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def parsed(path: Path) -> list[wandb_internal_pb2.Record]:
    found = []
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def of_kind(folder: Path, kind: str) -> Iterator[wandb_internal_pb2.Record]:
    """Records of a run that has ended; the service may still write when the run says it is done."""
    (path,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 30
    while not any(record.WhichOneof("record_type") == "exit" for record in parsed(path)):
        assert time.monotonic() < deadline, f"the end of the run is not in {path}"
        time.sleep(0.05)
    yield from (record for record in parsed(path) if record.WhichOneof("record_type") == kind)


@pytest.fixture
def offline_rows() -> Callable[[Path], list[dict[str, object]]]:
    """The history of an offline run, row by row, with `_step` and the names as logged."""

    def read(folder: Path) -> list[dict[str, object]]:
        rows = []
        for record in of_kind(folder, "history"):
            items = record.history.item
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            rows.append({**row, "_step": record.history.step.num})
        return rows

    return read


@pytest.fixture
def offline_config() -> Callable[[Path], dict[str, object]]:
    """The config that an offline run began with."""

    def read(folder: Path) -> dict[str, object]:
        record = next(of_kind(folder, "run"))
        return {item.key: json.loads(item.value_json) for item in record.run.config.update}

    return read
