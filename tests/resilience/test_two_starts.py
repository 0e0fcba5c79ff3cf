"""Two starts of one run at the same moment: exactly one trains, and the other says who does.

`TWO_STARTS=20 pytest -s tests/resilience/test_two_starts.py` does it so often, and prints what each took.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest
from warm_start import WarmStart

from checkpoint_core import find_lease_holder

pytestmark = pytest.mark.xdist_group("warm")
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
        warm: Starts it.
        environ: Its environment.
        work: Folder of the shape, the text and the output.
        mesh: Mesh of the processes; empty for one process.
        steps: The last step of the run.
    """

    def __init__(self, warm: WarmStart, environ: dict[str, str], work: Path, mesh: str, steps: int) -> None:
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
        self.began = time.time()
        told = Path(tempfile.mkdtemp(dir=work))
        self.errors = told / "err"
        self.process = warm.start(
            ["-m", "llama_pretrain", "train", *words], environ, told / "out", self.errors
        )

    def end(self) -> str:
        """What it wrote to standard error, once it has ended."""
        self.process.wait(LIMIT_S)
        return self.errors.read_text()

    def kill(self) -> None:
        """Kill it, with which the processes of a mesh end as well."""
        self.process.kill()
        self.process.wait(LIMIT_S)


def start_twice(
    start: Callable[[str, int], Start], work: Path, meshes: tuple[str, str], steps: int, started: list[Start]
) -> tuple[Start, float]:
    """Start the run twice; the start that trains, and how long after it the other one had ended."""
    both = [start(mesh, steps) for mesh in meshes]
    started += both
    deadline = time.monotonic() + LIMIT_S
    while not (ended := [each for each in both if each.process.returncode is not None]):
        assert time.monotonic() < deadline, "both run"
        time.sleep(0.02)
    holder = find_lease_holder(work / "run")
    loser = ended[0]
    said = loser.end()
    assert holder is not None, said
    assert loser.process.returncode == 2, said
    named = re.search(r"is in use by process (\d+) on \S+, since .* UTC. Wait until that run has ended", said)
    assert named is not None, said
    assert int(named[1]) == holder.pid
    winner = both[1 - both.index(loser)]
    assert winner.process.returncode is None
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
def test_one_of_two_starts_trains(
    tmp_path: Path, meshes: tuple[str, str], warm: WarmStart, environ: dict[str, str]
) -> None:
    start = partial(Start, warm, environ, tmp_path)
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(SHAPE))
    lines = (json.dumps({"text": f"{n} is the number after {n - 1}. " * 8}) for n in range(60))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    started: list[Start] = []
    try:
        fresh, refused_in = start_twice(start, tmp_path, meshes, 100_000, started)
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
            resumed, refused_again_in = start_twice(start, tmp_path, meshes, last, started)
            print(f"{meshes}: refused in {refused_in:.1f} s, and after a kill in {refused_again_in:.1f} s")
        else:
            resumed = start("", last)
            started.append(resumed)
        said = resumed.end()
        assert resumed.process.returncode == 0, said
        assert f"taken over from process {holder.pid}" in said
    finally:
        for each in started:
            each.kill()
    assert steps_of_log(tmp_path) == list(range(1, last + 1))
    assert not list((tmp_path / "run").glob(".lease-*"))
