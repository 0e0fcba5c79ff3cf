"""Sharded state costs a rank its own bytes: on the disk's side and in memory."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Worked = subprocess.CompletedProcess[str]
TENSOR = 2048 * 2048 * 4
WHOLE = 8 * TENSOR
MEBIBYTE = 1024 * 1024


def test_bytes_and_memory(run_worker: Callable[..., Worked], tmp_path: Path) -> None:
    done = run_worker("big_shards.py", tmp_path)
    for rank, seen in enumerate(json.loads(done.stdout)):
        print(f"rank {rank}: {seen}")
        assert seen["equal"]
        # The file goes straight from and to the shards: no rank ever holds even one whole tensor besides.
        assert seen["export"] < TENSOR
        assert seen["save"] < TENSOR
        assert seen["load"] < TENSOR
        assert WHOLE // 2 <= seen["counted"] < WHOLE // 2 + 16 * 1024
        # The system counts the share of the verification as well, and whatever Python reads beside it.
        assert seen["by the system"] < WHOLE // 2 + WHOLE // 2 + 2 * MEBIBYTE
