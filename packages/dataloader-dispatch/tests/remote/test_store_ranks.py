"""Exactly once an epoch from a real S3 server, over ranks, workers and kills of the whole job."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_bucket import Bucket

DOCUMENTS = 1500
PARTS = 5

Phases = list[tuple[int, int, int]]
"""Ranks, worker processes of each, and the batch after which it is killed, or 0."""


@pytest.mark.parametrize(
    "phases",
    [
        [(1, 0, 20), (2, 2, 20), (4, 0, 0)],
        pytest.param([(4, 0, 5), (2, 0, 10), (1, 2, 0)], marks=pytest.mark.full),
        pytest.param([(2, 2, 1), (2, 2, 30), (2, 2, 0)], marks=pytest.mark.full),
    ],
    ids=lambda phases: " ".join(f"{ranks}x{workers}" for ranks, workers, _ in phases),
)
def test_every_document_comes_once_whatever_is_killed(
    phases: Phases, bucket: Bucket, launch: Callable[..., list[Any]], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for part in range(PARTS):
        lines = [json.dumps({"text": str(number)}) for number in range(part, DOCUMENTS, PARTS)]
        (disk / f"{part}.jsonl").write_text("\n".join(lines))
    address = bucket.upload(disk)

    def run(where: str, number: int, before: str, ranks: int, workers: int, last: int) -> list[list[int]]:
        out = tmp_path / f"phase {number}"
        out.mkdir()
        ended = launch("store_ranks.py", ranks, where, workers, out, before, last)
        for rank in ended:
            assert rank.code == (-9 if last else 0), rank.err
        told = [line for path in sorted(out.iterdir()) for line in path.read_text().splitlines()]
        return [row for line in told for row in json.loads(line)["rows"]]

    rows = []
    before = "-"
    for number, phase in enumerate(phases):
        rows += run(address, number, before, *phase)
        before = str(tmp_path / f"phase {number}")
    first_tokens = Counter(token for row in rows for token in row if 0 < token < 20_000)
    assert first_tokens == Counter(range(1, DOCUMENTS + 1))
    on_disk = run(str(disk), len(phases), "-", 1, 0, 0)
    assert Counter(map(tuple, rows)) == Counter(map(tuple, on_disk))
