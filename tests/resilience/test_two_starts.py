"""Two starts of one run at the same moment: exactly one trains, and the other says who does.

`TWO_STARTS=20 pytest -s tests/resilience/test_two_starts.py` does it so often, and prints what each took.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import pytest

from checkpoint_core import find_lease_holder

ROUNDS = int(os.environ.get("TWO_STARTS", "0"))
LIMIT_S = 240
SHAPE = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
KINDS = [("", ""), ("dp=2", "dp=2"), ("", "dp=2")]
"""Meshes of two starts at once; without one it is a single process, which is all that the suite pays for."""


class Start:
    """A start of the run.

    Args:
        work: Folder of the shape, the text and the output.
        mesh: Mesh of the processes; empty for one process.
        steps: The last step of the run.
    """

    def __init__(self, work: Path, mesh: str, steps: int) -> None:
        settings = {
            "model": work / "shape",
            "data": work / "text.jsonl",
            "output-dir": work / "run",
            "sequence-length": 32,
            "max-steps": steps,
            "held-out": 0,
            "logging-steps": 1,
            "save-steps": 5,
            "sample-tokens": 0,
            "lr-scheduler-type": "constant",
        } | ({"mesh": mesh} if mesh else {})
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        self.began = time.time()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `kill`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llama_pretrain", "train", *words],
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={name: value for name, value in os.environ.items() if name not in launched}
            | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def end(self) -> str:
        """What it wrote to standard error, once it has ended."""
        self.process.wait(LIMIT_S)
        self.errors.seek(0)
        return self.errors.read()

    def kill(self) -> None:
        """Kill all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()


def start_twice(work: Path, meshes: tuple[str, str], steps: int, started: list[Start]) -> tuple[Start, float]:
    """Start the run twice; the start that trains, and how long after it the other one had ended."""
    both = [Start(work, mesh, steps) for mesh in meshes]
    started += both
    deadline = time.monotonic() + LIMIT_S
    while not (ended := [start for start in both if start.process.poll() is not None]):
        assert time.monotonic() < deadline, "both run"
        time.sleep(0.02)
    holder = find_lease_holder(work / "run")
    loser = ended[0]
    said = loser.end()
    assert holder is not None, said
    assert loser.process.returncode == 2, said
    named = re.search(r"is in use by process (\d+) on \S+, since .* UTC; wait until that run has ended", said)
    assert named is not None, said
    assert int(named[1]) == holder.pid
    winner = both[1 - both.index(loser)]
    assert winner.process.poll() is None
    # Before that the one that trains was still being loaded, and nobody had anything to be refused for.
    return winner, time.time() - max(holder.since, loser.began)


def steps_of_log(work: Path) -> list[int]:
    entries = json.loads((work / "run" / "trainer_logs.json").read_text())
    return [entry["global_step"] for entry in entries if "loss" in entry]


def wait_for_a_checkpoint(work: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not list((work / "run").glob("checkpoint-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("meshes", list(islice(cycle(KINDS), ROUNDS or 1)))
def test_one_of_two_starts_trains(tmp_path: Path, meshes: tuple[str, str]) -> None:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(SHAPE))
    lines = (json.dumps({"text": f"{n} is the number after {n - 1}. " * 8}) for n in range(60))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    started: list[Start] = []
    try:
        fresh, refused_in = start_twice(tmp_path, meshes, 100_000, started)
        wait_for_a_checkpoint(tmp_path)
        holder = find_lease_holder(tmp_path / "run")
        assert holder is not None
        # With a launcher it is a rank; the launcher and the other rank end by themselves.
        os.kill(holder.pid, signal.SIGKILL)
        fresh.process.wait(LIMIT_S)
        assert holder.has_ended()
        # The rest is in a directory that has a checkpoint, and the lease of the run that was killed. In the
        # suite one start is enough, which takes it over.
        last = steps_of_log(tmp_path)[-1] + 10
        if ROUNDS:
            resumed, refused_again_in = start_twice(tmp_path, meshes, last, started)
            print(f"{meshes}: refused in {refused_in:.1f} s, and after a kill in {refused_again_in:.1f} s")
        else:
            resumed = Start(tmp_path, "", last)
            started.append(resumed)
        said = resumed.end()
        assert resumed.process.returncode == 0, said
        assert f"taken over from process {holder.pid}" in said
    finally:
        for start in started:
            start.kill()
    assert steps_of_log(tmp_path) == list(range(1, last + 1))
    assert not list((tmp_path / "run").glob(".lease-*"))
