"""The command `bench`: rounds of trials, tables and a file."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from dist_env import die_with_parent_command

from ..commands.arguments import BenchArguments
from ..console import EXIT_ABORTED, PROG, check_writable
from ..model.config import preset_or_load
from .baselines import BASELINES, INSTALL, Baseline, chosen
from .summary import Agreement, agreement, measured_table, published, published_table, summarise
from .to_loss import (
    EVALUATE_EVERY,
    TimeToLoss,
    check_vocabulary,
    largest_deviation,
    to_loss_table,
)
from .trial import Trial

Result = TypeVar("Result", Trial, TimeToLoss)


@dataclass(frozen=True)
class Measured(Generic[Result]):
    """What was measured.

    Attributes:
        trials: By name of the baseline, one of each round; of those that never failed.
        failures: By name, the last line of what a baseline said when it failed.
    """

    trials: dict[str, list[Result]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run_rounds(args: BenchArguments, baselines: Sequence[Baseline]) -> Measured[Trial]:
    """Let all baselines take their trials, and say how it goes. One that fails takes no further trials."""
    return _run_rounds(args, baselines, Trial.from_json, lambda told: f"{told.step_s * 1e3:.1f} ms a step")


def run_rounds_to_loss(args: BenchArguments, baselines: Sequence[Baseline]) -> Measured[TimeToLoss]:
    """The same with trials that end at `to_loss`."""
    return _run_rounds(
        args,
        baselines,
        TimeToLoss.from_json,
        lambda told: f"{told.seconds:.1f} s and {told.steps} steps to a held-out loss of {args.to_loss}",
    )


def _run_rounds(
    args: BenchArguments,
    baselines: Sequence[Baseline],
    read: Callable[[dict[str, Any]], Result],
    say: Callable[[Result], str],
) -> Measured[Result]:
    measured = Measured[Result](trials={baseline.name: [] for baseline in baselines})
    for number in range(args.rounds):
        shift: int = number % len(baselines)
        for baseline in (*baselines[shift:], *baselines[:shift]):
            if baseline.name in measured.failures:
                continue
            told = _trial_of(baseline, args)
            if isinstance(told, str):
                measured.failures[baseline.name] = told
                del measured.trials[baseline.name]
                shown = f"failed: {told}"
            else:
                result = read(told)
                measured.trials[baseline.name].append(result)
                shown = say(result)
            print(f"round {number + 1}/{args.rounds}  {baseline.label}: {shown}", flush=True)
    return measured


def _trial_of(baseline: Baseline, args: BenchArguments) -> dict[str, Any] | str:
    """What a trial has shown, as JSON, or why it failed."""
    with tempfile.TemporaryDirectory(prefix="llama-pretrain-bench-") as folder:
        result, said = Path(folder) / "trial.json", Path(folder) / "said.txt"
        words = [baseline.name, json.dumps(asdict(args)), str(result), str(time.time())]
        with said.open("wb") as output:
            process = subprocess.run(
                die_with_parent_command([sys.executable, "-m", "llama_pretrain.bench.trial", *words]),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _first_gpu(), "TOKENIZERS_PARALLELISM": "false"},
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if process.returncode == 0:
            told: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return told
        lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else f"ended with {process.returncode}"


def _first_gpu() -> str:
    """The one GPU that a trial may see: transformers would spread a batch over all that it finds."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def bench(args: BenchArguments, words: Sequence[str]) -> int:
    """Measure, print the tables, and write the file if one is named.

    Args:
        args: The settings.
        words: The command line behind the name of the command, for the file.

    Returns:
        Exit code: 0, or 1 if a baseline failed or did other work than the plain loop.

    Raises:
        ConfigurationError: If a setting cannot be used, or a baseline that is named is not installed.
        OSError: If the file cannot be written.
    """
    baselines, missing = chosen(args.contenders)
    config = preset_or_load(args.model, args.sequence_length)
    if args.to_loss is not None:
        check_vocabulary(config)
    check_writable("json", args.json)
    for baseline in missing:
        print(f"{baseline.label} takes no part: {', '.join(baseline.missing())} is not installed; {INSTALL}")
    with _ended_by_sigterm():
        if args.to_loss is not None:
            to_loss = run_rounds_to_loss(args, baselines)
        else:
            measured = run_rounds(args, baselines)
    if args.to_loss is not None:
        return _tell_times_to_loss(args, words, to_loss, missing)
    return _tell_speeds(args, words, measured, missing)


def _tell_speeds(
    args: BenchArguments, words: Sequence[str], measured: Measured[Trial], missing: Sequence[Baseline]
) -> int:
    agreed = agreement(measured.trials, args.mixed_precision)
    print(f"\n{_headline(args, measured)}")
    summaries = summarise(measured.trials, args)
    print(measured_table(summaries, measured.failures))
    for name in measured.trials if args.mixed_precision == "bf16" else ():
        if note := BASELINES[name].in_bf16:
            print(f"{BASELINES[name].label}: {note}")
    if agreed is not None:
        print(_agreement_line(agreed))
    print("\nnot measured here, but published by others of their runs:")
    print(published_table(published(args.model)), flush=True)
    contenders = {
        name: {**asdict(summary), "turns": [asdict(trial) for trial in measured.trials[name]]}
        for name, summary in summaries.items()
    }
    results = {
        **_results(args, words, measured, missing, contenders),
        "agreement": None if agreed is None else asdict(agreed),
        "published": [asdict(row) for row in published(args.model)],
    }
    _write(args, results)
    other_work = agreed is not None and agreed.other_work()
    return EXIT_ABORTED if measured.failures or other_work else 0


def _tell_times_to_loss(
    args: BenchArguments, words: Sequence[str], measured: Measured[TimeToLoss], missing: Sequence[Baseline]
) -> int:
    rows = f"{args.per_device_train_batch_size} x {args.sequence_length} bytes"
    print(
        f"\n{args.model}, {rows}, until {args.to_loss} nats per byte on held-out files of the standard "
        f"library, evaluated every {EVALUATE_EVERY} steps; medians of {args.rounds} rounds:"
    )
    print(to_loss_table(measured.trials, measured.failures))
    apart = largest_deviation(measured.trials)
    print(f"the same work: held-out losses after the same steps are at most {apart:.1e} apart", flush=True)
    contenders = {
        name: {"turns": [asdict(trial) for trial in trials]} for name, trials in measured.trials.items()
    }
    results = _results(args, words, measured, missing, contenders)
    _write(args, {**results, "largest_deviation": apart})
    return EXIT_ABORTED if measured.failures else 0


def _write(args: BenchArguments, results: Mapping[str, object]) -> None:
    if args.json is not None:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM is an exception, as Ctrl-C is, so that no baseline is left computing."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _results(
    args: BenchArguments,
    words: Sequence[str],
    measured: Measured[Trial] | Measured[TimeToLoss],
    missing: Sequence[Baseline],
    contenders: Mapping[str, object],
) -> dict[str, object]:
    trials: list[Trial | TimeToLoss] = [trial for theirs in measured.trials.values() for trial in theirs]
    return {
        "command": [PROG, "bench", *words],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": trials[0].device if trials else None,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "threads": trials[0].threads if trials else None,
        "versions": _versions(trials),
        "settings": asdict(args),
        "contenders": contenders,
        "failed": measured.failures,
        "not_installed": {baseline.name: baseline.missing() for baseline in missing},
    }


def _versions(trials: Sequence[Trial | TimeToLoss]) -> Mapping[str, str]:
    found = {"python": platform.python_version(), PROG: version(PROG)}
    for trial in trials:
        found |= trial.versions
    return found


def _headline(args: BenchArguments, measured: Measured[Trial]) -> str:
    trial = next((theirs[0] for theirs in measured.trials.values()), None)
    rows = f"{args.per_device_train_batch_size} x {args.sequence_length} tokens"
    kind = ("bf16" if args.mixed_precision == "bf16" else "float32") + (", compiled" * args.torch_compile)
    where = "" if trial is None else f" on {trial.device}, {trial.threads} threads"
    return f"{args.model}, {rows}, {kind}{where}; medians of {args.rounds} rounds of {args.steps} steps:"


def _agreement_line(agreed: Agreement) -> str:
    others = {name: value for name, value in agreed.deviations.items() if name != agreed.beside}
    name = max(others, key=others.__getitem__)
    beside = BASELINES[agreed.beside].label
    if wrong := agreed.other_work():
        told = ", ".join(f"{BASELINES[each].label} ({agreed.deviations[each]:.1%})" for each in wrong)
        return (
            f"OTHER WORK than the {beside}, so the figures compare nothing: {told} apart in what was learned"
        )
    return (
        f"the same work: what {BASELINES[name].label} learned is farthest from the {beside}, "
        f"by {others[name]:.1e} of it"
    )
