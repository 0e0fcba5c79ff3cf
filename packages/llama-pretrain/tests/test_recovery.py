"""A rank is lost, and the others continue with a new one: real processes, killed, under both launchers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from small_run import small_run_words, unlaunched_environ, write_small_run

from llama_pretrain.cli import main
from perf_metrics import read_goodput

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses memory of Linux")
LIMIT_S = 600
STEPS = 36
TORCHRUN = ("-m", "torch.distributed.run")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a shape and some text."""
    return write_small_run(tmp_path)


class Run:
    """A run under a launcher, whose messages go to a file: nobody reads a pipe while it is killed."""

    def __init__(
        self, work: Path, output: str, *more: str, launcher: Sequence[str] = (), steps: int = STEPS
    ) -> None:
        words = small_run_words(work, output, *more, steps=steps)
        self.path = work / output
        self._said = work / f"{output}-{time.monotonic_ns()}.txt"
        with self._said.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "llama_pretrain", *words],
                stdout=file,
                stderr=file,
                env=unlaunched_environ(),
            )

    def said(self) -> str:
        return self._said.read_text()

    def steps(self) -> list[int]:
        log = self.path / "trainer_logs.json"
        if not log.is_file():
            return []
        return [entry["global_step"] for entry in json.loads(log.read_text()) if "loss" in entry]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: max(self.steps(), default=0) >= step)

    def rank(self, number: int) -> int:
        """The process of a rank: a child of the launcher, which was started for it or took its place."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != self.process.pid:
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
                if b"RANK=%d" % number in variables or (folder / "comm").read_text() == f"rank {number}\n":
                    return int(folder.name)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
        raise LookupError(f"process {self.process.pid} has no child that is rank {number}")

    def memory(self) -> list[Path]:
        """Directories in memory that are of this launcher."""
        return list(Path("/dev/shm").glob(f"checkpoint-core-*-{self.process.pid}-*"))

    def ends(self) -> int:
        return self.process.wait(LIMIT_S)


def curve_of(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each entry of a run."""
    entries = json.loads((run / "trainer_logs.json").read_text())
    return [(each["global_step"], each["loss"], each["grad_norm"]) for each in entries if "loss" in each]


def finished(work: Path, output: str) -> list[tuple[int, float, float]]:
    """The curve of a run that nothing disturbs."""
    run = Run(work, output, "--mesh", "dp=2")
    assert run.ends() == 0, run.said()
    return curve_of(run.path)


def test_a_killed_rank_costs_one_step_at_most_and_leaves_the_curve_as_it_is(
    work: Path, start: Callable[..., list[Any]]
) -> None:
    words = small_run_words(work, "undisturbed", "--mesh", "dp=2", steps=STEPS)
    assert [rank.finish()[0] for rank in start(["-m", "llama_pretrain", *words], 2)] == [0, 0]
    curve = curve_of(work / "undisturbed")
    run = Run(work, "run", "--mesh", "dp=2", "--max-restarts", "2", "--memory-save-steps", "1")
    run.wait_for_step(5)
    os.kill(run.rank(1), signal.SIGKILL)
    assert run.ends() == 0, run.said()
    assert curve_of(run.path) == curve
    said = run.said()
    assert "rank 1 was ended by SIGKILL. Restart 1 of 2 begins." in said
    line = re.search(r"restart 1 of 2: continues at step (\d+) from checkpoint-\1 in memory; (.*)\.", said)
    assert line is not None, said
    assert line[2] in ("1 step is done again", "no step is lost")
    assert re.search(r"restart 1 of 2: step \d+ was done [\d.]+ s after the loss: ", said)
    assert run.memory() == []
    assert [path.name for path in run.path.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    sessions = json.loads((run.path / "sessions.json").read_text())
    assert [each["first_step"] for each in sessions] == [0, int(line[1])]
    assert "outcome" not in sessions[0]
    assert sessions[1]["outcome"] == "done"
    first, second = read_goodput(run.path).sessions
    assert second.first_step == int(line[1])
    assert first.seconds["steps"] > 0, "what was done before the loss is in the model"


def test_restarts_that_cannot_work_are_refused(work: Path) -> None:
    run = Run(work, "run", "--mesh", "dp=2", "--memory-save-steps", "1")
    assert run.ends() == 2
    assert "memory_save_steps=1" in run.said()
    assert "--max-restarts 3" in run.said()


@pytest.mark.parametrize("word", ["--hot-spares", "--no-hot-spares"])
def test_spares_without_restarts_are_refused(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert main(["train", word]) == 2
    assert "hot_spares=" in (said := capsys.readouterr().err)
    assert "--max-restarts 3" in said


@pytest.mark.full
def test_several_losses_use_spares_then_the_last_is_the_end(work: Path) -> None:
    run = Run(work, "run", "--mesh", "dp=2", "--max-restarts", "1", "--memory-save-steps", "2", steps=100_000)
    run.wait_for_step(5)
    pids = {run.rank(0), run.rank(1)}
    os.kill(run.rank(0), signal.SIGKILL)
    run.wait_for(lambda: "was done" in run.said())
    assert not pids & {run.rank(0), run.rank(1)}
    os.kill(run.rank(0), signal.SIGKILL)
    assert run.ends() == 1
    assert "rank 0 was ended by SIGKILL, and all 1 restarts are used." in run.said()
    deadline = time.monotonic() + LIMIT_S
    while run.memory():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_a_stop_and_wrong_input_are_no_losses(work: Path) -> None:
    options = ("--mesh", "dp=2", "--max-restarts", "2", "--memory-save-steps", "1")
    run = Run(work, "run", *options, steps=100_000)
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 75, run.said()
    assert run.memory() == []
    assert "Restart" not in run.said()
    wrong = Run(work, "run", *options, "--seed", "77")
    assert wrong.ends() == 2
    assert "Restart" not in wrong.said()


@pytest.mark.full
def test_without_memory_it_continues_from_storage_and_a_fresh_start_begins_once(work: Path) -> None:
    curve = finished(work, "undisturbed")
    assert Run(work, "run", "--mesh", "dp=2", steps=4).ends() == 0
    fresh = work / "fresh.yaml"  # and no word of the command line, which the launcher could leave out
    fresh.write_text("resume_from_checkpoint: false\noverwrite_output_dir: true\n")
    options = ("--max-restarts", "1", "--save-steps", "5", "--config", str(fresh))
    run = Run(work, "run", "--mesh", "dp=2", *options)
    run.wait_for_step(12)
    os.kill(run.rank(1), signal.SIGKILL)
    assert run.ends() == 0, run.said()
    assert f"in {run.path}; " in run.said()
    assert curve_of(run.path) == curve
    assert len(list(run.path.glob("previous-*"))) == 1


@pytest.mark.full
def test_the_launcher_is_killed_and_nothing_is_left(work: Path) -> None:
    run = Run(work, "run", "--mesh", "dp=2", "--max-restarts", "1", "--memory-save-steps", "1", steps=100_000)
    run.wait_for_step(3)
    assert len(run.memory()) == 1
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + LIMIT_S
    while run.memory():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_torchrun_starts_them_again(work: Path, fresh: tuple[str, ...]) -> None:
    curve = finished(work, "undisturbed")
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    run = Run(work, "run", "--trainer", "ddp", "--memory-save-steps", "1", *fresh, launcher=launcher)
    run.wait_for_step(5)
    os.kill(run.rank(0), signal.SIGKILL)
    assert run.ends() == 0, run.said()
    assert curve_of(run.path) == curve
    assert re.search(r"resumed from /dev/shm/checkpoint-core-\S+/checkpoint-\d+ at step", run.said())
    assert run.memory() == []
    assert len(json.loads((run.path / "sessions.json").read_text())) == 2
    assert list(run.path.glob("previous-*")) == []


@pytest.mark.full
def test_fewer_nodes_continue_from_storage_and_say_why(work: Path) -> None:
    """Two agents of torchrun, one of which is killed: the state of its rank was in its memory alone."""
    port = free_port()
    options = ("--trainer", "ddp", "--memory-save-steps", "1", "--save-steps", "3")
    runs = []
    for is_host in (1, 0):
        launcher = (
            *TORCHRUN,
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("--rdzv-conf", f"is_host={is_host},join_timeout=120,last_call_timeout=10"),
        )
        runs.append(Run(work, "run", *options, launcher=launcher, steps=400))
    runs[0].wait_for_step(5)
    assert [len(run.memory()) for run in runs] == [1, 1]
    runs[1].process.kill()
    runs[1].process.wait()
    assert runs[0].ends() == 0, runs[0].said()
    said = runs[0].said()
    assert "it was saved by 2 ranks, 1 continue, and the state of rank" in said
    assert f"resumed from {work}/run/checkpoint-" in said
    sessions = json.loads((runs[0].path / "sessions.json").read_text())
    assert [each["processes"] for each in sessions] == [2, 1]
    assert runs[0].steps() == list(range(1, 401))
