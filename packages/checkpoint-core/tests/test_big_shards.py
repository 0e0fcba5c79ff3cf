"""Sharded state costs a rank its own bytes: on the disk's side and in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "workers" / "big_shards.py"
TENSOR = 2048 * 2048 * 4
WHOLE = 8 * TENSOR
MEBIBYTE = 1024 * 1024


def test_bytes_and_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
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
