"""Writes traces with the fields of Kineto's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


class Trace:
    """Events in microseconds; the main thread is 1 and the device has streams."""

    def __init__(self, rank: int | None = 0, **header: object) -> None:
        self.header: dict[str, object] = {"schemaVersion": 1, **header}
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        self.events: list[dict[str, object]] = []

    def event(
        self, category: str, name: str, start: float, length: float, tid: object = 1, **arguments: object
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": length}
            | {"args": arguments}
        )

    def step(self, number: int, start: float, length: float) -> None:
        self.event("user_annotation", f"ProfilerStep#{number}", start, length)

    def kernel(self, name: str, start: float, length: float, stream: int = 7, **arguments: object) -> None:
        self.event("kernel", name, start, length, stream, stream=stream, device=0, **arguments)

    def nccl(
        self, name: str, start: float, length: float, group: str = "mesh_shard", ranks: str = "[0, 1]"
    ) -> None:
        told = {"Collective name": name, "Process Group Description": group, "Process Group Ranks": ranks}
        self.kernel("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", start, length, 20, **told)

    def write(self, path: Path) -> Path:
        text = json.dumps({**self.header, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path
