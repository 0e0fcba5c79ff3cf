"""The job array of `data.md` runs as it is, with Slurm's variables; elements are killed, and put back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SCRIPT = GUIDES / "tokenize.sbatch"
OPTIONS = ["--tokenizer", "bytes", "--part-size", "100KB"]
LIMIT_S = 120


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (1 + n % 12)}) + "\n" for n in range(60_000)))
    return path


def start(tmp_path: Path, index: int, last: int) -> subprocess.Popen[str]:
    """An element of `sbatch --array=0-LAST`."""
    slurm = {"ID": index, "MIN": 0, "MAX": last, "COUNT": last + 1}
    variables = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in slurm.items()}
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(SCRIPT), "corpus.jsonl", "tokens", *OPTIONS],
        cwd=tmp_path,
        env={**os.environ, **variables, "SLURM_CPUS_PER_TASK": "1", "PATH": commands},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    shown = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, shown
    return shown


def kill(process: subprocess.Popen[str], out: Path) -> None:
    """End an element as Slurm does at last, in the middle of a part."""
    deadline = time.monotonic() + LIMIT_S
    left = set(out.glob(".unfinished/part-*.bin"))  # by one that was killed before
    while not set(out.glob(".unfinished/part-*.bin")) - left:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_an_array_with_a_kill_and_a_smaller_one_after_it(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    kill(start(tmp_path, 0, 3), out)
    others = [start(tmp_path, index, 3) for index in (1, 2)]
    said = [finish(process) for process in others]
    assert all("parts are missing, of tasks 0" in text for text in said), said
    assert not (out / "manifest.json").exists()
    assert "parts are missing, of task 3/4" in finish(start(tmp_path, 0, 3))  # put back
    kill(start(tmp_path, 3, 3), out)
    # An array of another size makes what is missing.
    smaller = [start(tmp_path, index, 1) for index in range(2)]
    said = [finish(process) for process in smaller]
    assert any("documents, " in text.splitlines()[-4] for text in said), said
    words = [sys.executable, "-m", "dataloader_dispatch", "tokenize", str(corpus), str(tmp_path / "whole")]
    subprocess.run([*words, *OPTIONS, "--workers", "0"], check=True, capture_output=True)
    whole, found = (
        {path.name: path.read_bytes() for path in place.iterdir()} for place in (tmp_path / "whole", out)
    )
    assert found == whole


def test_the_page_shows_the_script() -> None:
    assert '--8<-- "docs/guides/tokenize.sbatch"' in (GUIDES / "data.md").read_text()
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
