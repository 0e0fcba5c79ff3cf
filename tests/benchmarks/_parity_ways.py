"""The ways of the compile parity study, and a run of one of them through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _parity_cpu import CPUTimes


@dataclass(frozen=True)
class Way:
    """A way to train the same run.

    Attributes:
        label: Its name in the table.
        options: What is added to the command.
    """

    label: str
    options: tuple[str, ...]


_COMPILE = ("--torch-compile",)
_SELECTIVE = ("--activation-checkpointing", "every_n", "--activation-checkpointing-every", "2")
_FULL = ("--activation-checkpointing", "full")
PLAIN = Way("no compile", ())
WAYS = (
    PLAIN,
    Way("no compile, full checkpointing", _FULL),
    Way("compile", _COMPILE),
    Way("compile, selective checkpointing", (*_COMPILE, *_SELECTIVE)),
    Way("compile, full checkpointing", (*_COMPILE, *_FULL)),
)
_RUN = (
    *("--sequence-length", "64", "--held-out", "0", "--sample-tokens", "0", "--use-cpu"),
    *("--logging-steps", "1", "--warmup-steps", "4", "--save-strategy", "steps"),
)
_EVALUATION_BATCHES = 20
_POLL_SECONDS = 0.1


def train(way: Way, steps: int, folder: Path) -> dict[str, Any]:
    """Train, evaluate, and return what the log says of each step, and the evaluation's loss."""
    run, began = folder / "run", time.monotonic()
    process = _start(
        "train", *_RUN, *way.options, *_of(run), "--max-steps", str(steps), "--save-steps", str(steps)
    )
    cpu = CPUTimes(process.pid)
    _finish(process, while_waiting=cpu.note)
    seconds = time.monotonic() - began
    help_texts = Path(sysconfig.get_path("stdlib")) / "pydoc_data"
    scored = ("--data", str(help_texts), "--max-eval-steps", str(_EVALUATION_BATCHES))
    said = _finish(_start("eval", *_of(run), *scored))
    entries = json.loads((run / "trainer_logs.json").read_text(encoding="utf-8"))
    told = [entry for entry in entries if "loss" in entry]
    if [entry["global_step"] for entry in told] != list(range(1, steps + 1)):
        raise SystemExit(f"{way.label}: the log has {len(told)} entries of {steps} steps")
    half = told[steps // 2 - 1]
    return {
        "options": way.options,
        "loss": [entry["loss"] for entry in told],
        "grad_norm": [entry["grad_norm"] for entry in told],
        "tokens": told[-1]["tokens"],
        "tokens_per_second": [entry["tok_per_sec"] for entry in told],
        "hardware_over_model_flops": told[-1]["hardware_flos"] / told[-1]["flos"],
        "cpu_ms": cpu.between(half["timestamp"], told[-1]["timestamp"]) / (steps - steps // 2) * 1e3,
        "eval_loss": _loss_of(said),
        "seconds": seconds,
    }


def _of(run: Path) -> Sequence[str]:
    return ("--output-dir", str(run))


def _start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "llama_pretrain", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen[str], while_waiting: Callable[[], None] = lambda: None) -> str:
    """Wait for `llama-pretrain`, and return what it has printed.

    Raises:
        SystemExit: It failed.
    """
    while True:
        try:
            said, _ = process.communicate(timeout=_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            while_waiting()
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}: {said}")
    return said


def _loss_of(said: str) -> float:
    """The loss, in nats, out of what `eval` prints."""
    (line,) = (line for line in said.splitlines() if line.startswith("loss"))
    return float(line.split()[1])
