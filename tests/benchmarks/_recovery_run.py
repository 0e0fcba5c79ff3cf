"""The runs of `recovery.py`: one that nothing disturbs, and one whose ranks are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf_metrics import read_goodput

_POLL_S = 0.01
_LONG_S = 600.0
_COMPARED = ("model.safetensors", "optimizer.safetensors", "dataset.json")
_PHASES = re.compile(
    r"was done [\d.]+ s after the loss: ([\d.]+) s to end the ranks, ([\d.]+) s to start and connect, "
    r"([\d.]+) s to build and load, ([\d.]+) s for steps"
)


@dataclass(frozen=True)
class Undisturbed:
    """What a run has come to."""

    curve: Sequence[tuple[int, float, float]]
    """Step, loss and gradient norm."""
    saved: Mapping[str, object]
    """Checksums of files of its last checkpoint."""
    step_s: float
    """Seconds of a step, with the data it waits for and what it saves."""

    def check_same_as(self, other: Undisturbed) -> None:
        """Raise ValueError where it is another run than it should be."""
        if self.curve != other.curve:
            wrong = [a for a, b in zip(self.curve, other.curve, strict=False) if a != b]
            found = wrong[0] if wrong else f"{len(self.curve)} steps and not {len(other.curve)}"
            raise ValueError(f"the curve is not that of the undisturbed run: {found}")
        if self.saved != other.saved:
            raise ValueError(f"the last checkpoint is not that of the undisturbed run: {self.saved}")


@dataclass(frozen=True)
class Kill:
    """One loss, and the recovery from it."""

    rank: int
    step: int
    """The last step that was in the log."""
    in_a_save: bool
    """Whether a checkpoint was being written."""
    seconds: float
    """To the first step behind that one."""
    steps_again: int
    """Steps of the log that were done again."""
    phases: Sequence[float]
    """Seconds to end the ranks, to start and connect, to build and load, and for steps; none if not told."""


@dataclass(frozen=True)
class Recovered:
    """A run whose ranks were killed."""

    kills: Sequence[Kill]
    end: Undisturbed


def undisturbed_run(output: Path, steps: int, *, memory: bool) -> Undisturbed:
    """A run that nothing disturbs, with a checkpoint in memory at each step or without."""
    more = ("--max-restarts", "1", "--no-hot-spares", "--memory-save-steps", "1") if memory else ()
    run = _Run(output, [*_words(output, steps, steps + 1), "--mesh", "dp=2", *more])
    run.start()
    run.finish()
    return _result(output)


def recovered_run(
    output: Path, way: str, steps: int, *, kills: int, gap: int, save_steps: int, draw: random.Random
) -> Recovered:
    """A run one of whose ranks is killed once in each gap of so many steps, in which it recovers in a way."""
    words = _words(output, steps, save_steps)
    # Not all restarts of the quick succession that a failing machine would bring: only what is asked for.
    restarts = ["--max-restarts", str(kills)]
    memory = ["--memory-save-steps", "1"]
    launcher: list[str] = []
    if way == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *restarts]
        words += ["--trainer", "ddp", *memory]
    elif way == "command":
        words += ["--mesh", "dp=2"]
    else:
        words += ["--mesh", "dp=2", *restarts, *([] if way == "storage" else memory)]
        words += ["--no-hot-spares"] if way == "no-spares" else []
    run = _Run(output, words, launcher)
    run.start()
    done = []
    for number in range(kills):
        run.wait_for_step(gap * (number + 1) - draw.randrange(gap // 4))
        done.append(_kill(run, draw.randrange(2), draw.random(), waits=bool(number % 2), way=way))
    run.finish()
    return Recovered(done, _result(output))


def _kill(run: _Run, rank: int, moment: float, *, waits: bool, way: str) -> Kill:
    time.sleep(moment * 0.5)
    process = run.rank(rank)
    folder = run.output if way in ("storage", "command") else run.memory()
    deadline = time.monotonic() + 5.0
    while waits and not _is_saving(folder) and time.monotonic() < deadline:
        pass  # A save takes some hundredths of a second.
    os.kill(process, signal.SIGKILL)
    began, in_a_save = time.monotonic(), _is_saving(folder)
    step, sessions, told = run.last_step(), len(run.sessions()), len(run.phases())
    if way == "command":
        run.wait_for_end()
        run.start()
    run.wait_for_step(step + 1)
    seconds = time.monotonic() - began
    time.sleep(0.2)  # The launcher tells the phases when it sees the step, at its next look.
    first = int(str(run.sessions()[sessions]["first_step"]))
    phases = run.phases()[told:]
    return Kill(rank, step, in_a_save, seconds, max(0, step - first), phases[0] if phases else ())


def _is_saving(folder: Path) -> bool:
    # The name under which a checkpoint is written before it is renamed.
    return (
        any(path.name.startswith(".tmp-checkpoint-") for path in folder.iterdir())
        if folder.is_dir()
        else False
    )


def _words(output: Path, steps: int, save_steps: int) -> list[str]:
    settings = {
        "output-dir": output,
        "max-steps": steps,
        "save-steps": save_steps,
        "logging-steps": 1,
        "held-out": 0,
        "sample-tokens": 0,
        # By default a CPU is measured for its MFU at the first step of each start.
        "peak-hardware-flops": "1e12",
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


class _Run:
    """A command that trains, and what its files say."""

    def __init__(self, output: Path, words: Sequence[str], launcher: Sequence[str] = ()) -> None:
        self.output = output
        self._command = [sys.executable, *launcher, "-m", "llama_pretrain", "train", *words]
        self._said = output.with_name(f"{output.name}.txt")
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: tuple[int, int] = (0, 0)
        self._last = 0

    def start(self) -> None:
        with self._said.open("ab") as file:
            self._process = subprocess.Popen(self._command, stdout=file, stderr=file)

    def finish(self) -> None:
        if (code := self.wait_for_end()) != 0:
            raise RuntimeError(f"the run ended with {code}:\n{self._said.read_text()[-4000:]}")

    def wait_for_end(self) -> int:
        assert self._process is not None
        return self._process.wait(_LONG_S * 10)

    def wait_for_step(self, step: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _LONG_S
        while self.last_step() < step:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"step {step} did not come:\n{self._said.read_text()[-4000:]}")
            time.sleep(_POLL_S)

    def last_step(self) -> int:
        """The last step in the log; it is read when it has changed."""
        path = self.output / "trainer_logs.json"
        try:
            stat = path.stat()
            if self._seen != (stat.st_mtime_ns, stat.st_size):
                self._seen = (stat.st_mtime_ns, stat.st_size)
                # The last entries are enough, and the file grows.
                with path.open("rb") as file:
                    file.seek(max(0, stat.st_size - 8192))
                    found = re.findall(rb'"global_step": (\d+)', file.read())
                self._last = int(found[-1]) if found else self._last
        except FileNotFoundError:
            pass
        return self._last

    def sessions(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads((self.output / "sessions.json").read_text())
        return found

    def phases(self) -> list[list[float]]:
        """Seconds of the phases of each restart that the launcher has told of."""
        return [[float(part) for part in parts] for parts in _PHASES.findall(self._said.read_text())]

    def memory(self) -> Path:
        """The directory in memory of this launcher's ranks."""
        assert self._process is not None
        return next(Path("/dev/shm").glob(f"checkpoint-core-*-{self._process.pid}-*"))

    def rank(self, number: int) -> int:
        """The process of a rank: a child of the launcher, started for it or in its place."""
        assert self._process is not None
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != self._process.pid:
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
                if b"RANK=%d" % number in variables or (folder / "comm").read_text() == f"rank {number}\n":
                    return int(folder.name)
            except (FileNotFoundError, ProcessLookupError):
                continue  # It has ended meanwhile.
        raise LookupError(f"rank {number} is not there")


def _result(output: Path) -> Undisturbed:
    entries = [each for each in json.loads((output / "trainer_logs.json").read_text()) if "loss" in each]
    curve = [(each["global_step"], each["loss"], each["grad_norm"]) for each in entries]
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    spent = [session.seconds for session in read_goodput(output).sessions]
    total = sum(each["steps"] + each["data"] + each["saving"] for each in spent)
    return Undisturbed(curve, {name: files[name] for name in _COMPARED}, total / len(curve))
