"""What the package needs at run time, and what it must not load."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "workers" / "without_numpy.py"


def test_works_without_numpy_and_loads_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, str(WORKER), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
