"""The fused loss with a head that is spread over ranks, in real jobs of 2 and 4 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "workers" / "sharded_head.py"


def test_gradients_equal_those_of_one_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = sorted(tmp_path.glob("rank-*.json"))
    assert len(found) == 6
    for path in found:
        deviations = json.loads(path.read_text())
        assert len(deviations) == (7 if "of-4" in path.name else 6)
        assert {case: value for case, value in deviations.items() if not value < 1e-6} == {}, path.name
