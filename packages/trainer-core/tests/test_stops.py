"""Real processes, stopped at bad moments and started again: the run is the same to the last bit."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1, Signals, raise_signal

import pytest
import torch
from warm_start import WarmStart

from trainer_core import EXIT_RESUMABLE
from trainer_core.periodic import StopRequests

SCRIPT = """
import json, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from trainer_core import Trainer, TrainingArguments

directory, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
chained = []

def own_handler(number, frame):
    chained.append(number)
    print("chained", signal.Signals(number).name, flush=True)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, own_handler)

def hold(place, step):
    '''Wait for the signals of the plan, if this is where they are to come.'''
    if [place, step] != plan.get("at"):
        return
    print("here", flush=True)
    deadline = time.monotonic() + 60
    while len(chained) < plan["signals"]:
        if time.monotonic() > deadline:
            sys.exit("no signal came")
        time.sleep(0.01)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(23, 8), nn.Linear(8, 8), nn.Linear(8, 23)
        self.dropout = nn.Dropout(0.3)

    def forward(self, input_ids):
        past = self.embed(input_ids).cumsum(dim=1)
        return self.head(self.dropout(torch.tanh(self.mix(past))))

class Rows:
    batch_size = 2

    def __init__(self, count, seed, place=None):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 23, (count, 8), generator=generator)
        self.lengths = torch.randint(0, 9, (count,), generator=generator).tolist()
        self.place, self.epoch, self.row = place, 0, 0

    def __len__(self):
        return -(-len(self.ids) // 2)

    def __iter__(self):
        while self.row < len(self.ids):
            ids = self.ids[self.row : self.row + 2]
            labels = ids.clone()
            for row, length in enumerate(self.lengths[self.row : self.row + 2]):
                labels[row, length:] = -100
            self.row += 2
            if self.place and self.row == 6:
                hold(self.place, trainer.state.global_step)
            yield {"input_ids": ids, "labels": labels}
        self.epoch, self.row = self.epoch + 1, 0

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.row = epoch, 0

    def state_dict(self):
        return {"epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state):
        self.epoch, self.row = state["epoch"], state["row"]

class Watch:
    name = "watch"

    def on_forward_backward_end(self, args, state, control, **kw):
        hold("step", state.global_step + 1)

    def on_step_end(self, args, state, control, **kw):
        time.sleep(plan.get("slow", 0.0))

    def on_save(self, args, state, control, **kw):
        hold("saved", state.global_step)

    def state_dict(self):
        hold("save", trainer.state.global_step)
        return {}

    def load_state_dict(self, state):
        pass

args = TrainingArguments(
    output_dir=str(directory / "run"), seed=5, use_cpu=True, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, num_train_epochs=3, learning_rate=1e-2, lr_scheduler_type="cosine",
    warmup_steps=2, max_grad_norm=1.0, logging_steps=2, eval_strategy="steps", eval_steps=7,
    save_strategy="steps", save_steps=4, max_train_seconds=plan.get("seconds"),
)
trainer = Trainer(
    args, model_init=Model, train_dataset=Rows(26, 0), eval_dataset=Rows(10, 1, "evaluation"),
    callbacks=[Watch()],
)
trainer.train()
report = {
    "history": trainer.state.log_history,
    "step": trainer.state.global_step,
    "cause": trainer.stop_cause,
    "handlers_are_back": signal.getsignal(signal.SIGTERM) is own_handler
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}
(directory / "report.json").write_text(json.dumps(report))
torch.save(trainer.unwrapped_model().state_dict(), directory / "weights.pt")
sys.exit(trainer.exit_code)
"""

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
CHAINED = (SIGTERM, SIGUSR1)
"""Signals that the script has a handler for. SIGINT has Python's own, which would raise and is left out."""
LAST_STEP = 21
"""Three epochs of 13 microbatches, two to a step."""
_OF_THE_CLOCK = {"interval_seconds", "data_wait_share", "eval_seconds"}


@dataclass(frozen=True)
class Outcome:
    """What a process left behind."""

    code: int
    chained: list[str]
    """Signals that the script's own handler saw."""
    errors: str
    step: int
    cause: list[object] | None
    history: list[dict[str, object]]
    """The log without times, and without the summary of each session."""
    weights: dict[str, torch.Tensor]


class Job:
    """The script in a process; it holds at the place of the plan until the signals have come."""

    def __init__(
        self, start: WarmStart, directory: Path, *, at: tuple[str, int] | None = None, **plan: object
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        script, self.out, self.err = (directory / name for name in ("script.py", "out", "err"))
        script.write_text(SCRIPT)
        words = [str(script), str(directory), json.dumps({"at": at, **plan})]
        self.process = start.start(words, ENVIRON, self.out, self.err)
        self.read = 0
        self.chained: list[str] = []

    def line(self) -> str:
        """The next line of its output; empty at the end."""
        while len(lines := self.out.read_text().split("\n")) < self.read + 2:
            if self.process.returncode is not None:
                return ""
            time.sleep(0.005)
        self.read += 1
        return lines[self.read - 1]

    def signal(self, number: Signals) -> None:
        """Send a signal, and wait until the script's own handler, if it has one, has seen it."""
        self.process.send_signal(number)
        if number in CHAINED:
            self.chained.append(self.line())

    def wait(self) -> tuple[int, str]:
        """Exit status, and what it wrote to stderr."""
        return self.process.wait(120), self.err.read_text()

    def outcome(self) -> Outcome:
        """What it left behind, after it has ended by itself."""
        code, errors = self.wait()
        assert code in (0, EXIT_RESUMABLE), errors
        report = json.loads((self.directory / "report.json").read_text())
        assert report["handlers_are_back"]
        history = [
            {name: value for name, value in entry.items() if name not in _OF_THE_CLOCK}
            for entry in report["history"]
            if "train_runtime" not in entry
        ]
        weights = torch.load(self.directory / "weights.pt")
        return Outcome(code, self.chained, errors, report["step"], report["cause"], history, weights)


def stopped(start: WarmStart, directory: Path, at: tuple[str, int], *numbers: Signals) -> Outcome:
    """Run until `at`, send the signals one after the other, and wait for the end."""
    job = Job(start, directory, at=at, signals=sum(number in CHAINED for number in numbers))
    held = job.line()
    assert held == "here", job.wait()[1]
    for number in numbers:
        job.signal(number)
    return job.outcome()


@pytest.fixture(scope="module")
def start() -> Iterator[WarmStart]:
    """Starts the script."""
    start = WarmStart(["trainer_core.build", "torch._dynamo"], ENVIRON)
    yield start
    start.close()


@pytest.fixture(scope="module")
def whole(start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that nobody disturbs."""
    found = Job(start, tmp_path_factory.mktemp("whole")).outcome()
    assert (found.code, found.step, found.cause) == (0, LAST_STEP, None)
    assert [entry["global_step"] for entry in found.history if "eval_loss" in entry] == [7, 14, 21]
    assert [entry["global_step"] for entry in found.history if "loss" in entry] == [*range(2, 21, 2), 21]
    return found


def assert_same_run(found: Outcome, whole: Outcome) -> None:
    assert (found.code, found.step) == (0, LAST_STEP)
    assert found.history == whole.history
    assert found.weights.keys() == whole.weights.keys()
    assert all(torch.equal(found.weights[name], value) for name, value in whole.weights.items())


def checkpoints(directory: Path) -> dict[str, str]:
    """Digest of every file of every checkpoint."""
    files = sorted(path for path in directory.glob("run/checkpoint-*/**/*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_stopped_again_and_again_is_the_run_nobody_stopped(
    start: WarmStart, tmp_path: Path, whole: Outcome
) -> None:
    stops: list[tuple[tuple[str, int], tuple[Signals, ...]]] = [
        (("step", 3), (SIGTERM,)),
        (("evaluation", 7), (SIGTERM,)),
        (("save", 8), (SIGTERM,)),
        (("step", 9), (SIGINT, SIGUSR1)),  # a second one of another kind changes nothing
        (("saved", 12), (SIGUSR1,)),
    ]
    for (place, step), numbers in stops:
        part = stopped(start, tmp_path, (place, step), *numbers)
        assert (part.code, part.step) == (EXIT_RESUMABLE, step)
        assert part.cause == [numbers[0].name, "signal", False]
        assert part.chained == [f"chained {number.name}" for number in numbers if number in CHAINED]
        assert f"{numbers[0].name}: finishing the step" in part.errors
        assert (tmp_path / "run" / f"checkpoint-{step}" / "manifest.json").is_file()
        assert part.history == whole.history[: len(part.history)]
        cut_short = [entry for entry in part.history if "eval_loss" in entry and entry["global_step"] == step]
        assert not cut_short
    late = Job(start, tmp_path, seconds=0.8, slow=0.2).outcome()
    assert (late.code, late.cause) == (EXIT_RESUMABLE, ["max_train_seconds", "time limit", False])
    assert 12 <= late.step < LAST_STEP
    last = stopped(start, tmp_path, ("evaluation", LAST_STEP), SIGTERM)
    assert (last.code, last.step) == (EXIT_RESUMABLE, LAST_STEP)
    assert_same_run(Job(start, tmp_path).outcome(), whole)


def test_a_second_signal_stops_at_once_and_leaves_earlier_checkpoints(
    start: WarmStart, tmp_path: Path, whole: Outcome
) -> None:
    job = Job(start, tmp_path, at=("save", 8), signals=2)
    held = job.line()
    assert held == "here", job.wait()[1]
    before = checkpoints(tmp_path)
    assert {Path(path).parts[len(tmp_path.parts) + 1] for path in before} == {"checkpoint-4"}
    job.signal(SIGTERM)
    job.process.send_signal(SIGTERM)  # at once: an echo of the first, as of a terminal and a launcher
    time.sleep(1.5)
    assert job.process.returncode is None
    job.process.send_signal(SIGTERM)
    code, errors = job.wait()
    assert code in (-SIGINT, 130, 1)  # the last where a hook at the exit has run code: Python then forgets
    assert "KeyboardInterrupt" in errors
    assert not (tmp_path / "report.json").exists()
    assert checkpoints(tmp_path) == before
    assert_same_run(Job(start, tmp_path).outcome(), whole)


def test_a_signal_that_comes_again_stops_at_once_whatever_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler sends SIGUSR1 some time before SIGTERM; only the latter may come from an impatient user."""
    with StopRequests() as stops:
        raise_signal(SIGUSR1)
        raise_signal(SIGTERM)
        raise_signal(SIGTERM)  # an echo
        assert stops.cause == "SIGUSR1"
        monkeypatch.setattr("trainer_core.periodic._ECHO_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            raise_signal(SIGTERM)
