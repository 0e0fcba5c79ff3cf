"""Measure what a training loop costs beside a hand-written one: CPU milliseconds per step, and the set-up.

    python tests/benchmarks/step_overhead.py --json step.json --plot step.png

One process, one thread. Every contender trains the same model on the same batches; in each round all of them
run once, in an order that moves on by one. A run is a warm-up of 10 steps and some windows of 50 steps, each
with one log entry. ``--quick`` only shows that everything runs. Nothing is asserted about time; a contender
that ends elsewhere than the plain loop is an error.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# One thread, decided before torch starts its pools.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _printing import printing_into
from _step_agreement import agreement
from _step_contenders import CONTENDERS, Contender, Sample, measure
from _step_report import plot, rows, summarise
from _step_work import LOG_EVERY, SIZES, WARM_UP, Size, Work
from _timing import machine, print_table
from torch import nn

DISTRIBUTIONS = ("torch", "torchdata", "accelerate", "transformers", "lightning")


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds, and windows of a run."""

    rounds: int
    windows: int


# Short runs at the larger size: what is compared has to be measured within few seconds.
EFFORTS = {"nano": Effort(rounds=30, windows=6), "tiny": Effort(rounds=30, windows=1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "benchmark": "step_overhead",
        "machine": machine(Path.cwd(), DISTRIBUTIONS),
        "method": {"warm_up_steps": WARM_UP, "window_steps": LOG_EVERY, "threads": 1},
        "sizes": {name: _measure(SIZES[name], _effort(name, options)) for name in options.only},
    }
    for name, result in results["sizes"].items():
        print()
        print_table(rows(result["contenders"], name))
        print(_agreement_line(result["agreement"]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(options.plot, results["sizes"])


def _measure(size: Size, effort: Effort) -> dict[str, Any]:
    """All contenders once in each round, after one round that checks them and warms up imports."""
    samples: dict[str, list[Sample]] = {contender.label: [] for contender in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="step-benchmark-") as folder:
        work = Work.of(size, effort.windows, Path(folder))
        trained = {contender.label: _run(contender, work) for contender in CONTENDERS}
        agreed = agreement({label: model for label, (_, model) in trained.items()}, work)
        first_setup = {label: asdict(sample.setup) for label, (sample, _) in trained.items()}
        del trained
        began = time.monotonic()
        for number in range(effort.rounds):
            shift = number % len(CONTENDERS)
            for contender in CONTENDERS[shift:] + CONTENDERS[:shift]:
                samples[contender.label].append(_run(contender, work)[0])
            minutes = (time.monotonic() - began) / 60
            print(f"[{minutes:5.1f} min] {size.name}: round {number + 1}/{effort.rounds}", flush=True)
    return {
        **asdict(effort),
        "contenders": summarise(samples),
        "first_setup_ms": first_setup,
        "agreement": agreed,
    }


def _run(contender: Contender, work: Work) -> tuple[Sample, nn.Module]:
    gc.collect()
    with printing_into(Path(os.devnull)):
        return measure(contender, work)


def _agreement_line(agreed: dict[str, Any]) -> str:
    told = ", ".join(f"{kind} {value:.1e} ({label})" for kind, (value, label) in agreed["largest"].items())
    return f"largest deviation from the plain loop after {agreed['steps']} steps: {told}"


def _effort(name: str, options: argparse.Namespace) -> Effort:
    usual = EFFORTS[name]
    if options.quick:
        return Effort(rounds=2, windows=1)
    return Effort(options.rounds or usual.rounds, options.windows or usual.windows)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SIZES), help="comma-separated, of: %(default)s")
    parser.add_argument("--rounds", type=int, help="rounds at each size, instead of 30")
    parser.add_argument("--windows", type=int, help="windows of 50 steps in a run, instead of 6 and 1")
    parser.add_argument("--quick", action="store_true", help="two short rounds: does everything run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them into this picture")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(SIZES):
        parser.error(f"--only names {sorted(unknown)}; choose among {list(SIZES)}")
    for name in ("rounds", "windows"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return options


if __name__ == "__main__":
    main()
