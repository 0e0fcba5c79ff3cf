"""Measure what the callbacks of perf-metrics cost: processor time per optimizer step, with them and without.

    python tests/benchmarks/metrics_overhead.py --json metrics.json

One process, one thread at work. `Trainer` with PeakMemory, DefaultMetrics, ProgressCallback (lines into a
file) and JsonLogger beside `Trainer` without callbacks, at a log entry every 1, 10 and 20 steps; both count
tokens and FLOPs. Beside them Hugging Face Trainer and Lightning, with what they show and store by default and
without. All of them train at the same time; those that are compared hand over to each other every other step,
so that they see the same state of the machine. After that, each callback by itself, and what `check_flops`
costs once. ``--quick`` only shows that everything runs. Nothing is asserted about time; ours with callbacks
have to end with the very weights of those without.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

# One thread, decided before torch starts its pools.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _metrics_contenders import OURS, Contender, groups
from _metrics_first_entry import MODELS, measure_first_entry
from _metrics_handlers import measure_handlers
from _metrics_report import difference_rows, handler_rows, logging_line, summarise, verdict
from _metrics_turns import STRETCH, TURN, TurnClock, take_turns
from _printing import printing_into
from _step_agreement import TOLERANCE
from _step_work import LOG_EVERY, SIZES, WARM_UP, Work, mean_loss
from _timing import machine, print_table
from torch import nn
from torch.nn.utils import parameters_to_vector

DISTRIBUTIONS = ("torch", "transformers", "lightning")
ROUNDS = {"nano": 100, "tiny": 35}
PEERS_AT = {"nano": (1, 10), "tiny": (1,)}
"""Intervals of the peers; fewer at the larger size, where a round takes seconds."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "benchmark": "metrics_overhead",
        "machine": machine(Path.cwd(), DISTRIBUTIONS),
        "method": {"warm_up_steps": WARM_UP, "round_steps": TURN, "stretch_steps": STRETCH, "threads": 1},
    }
    with tempfile.TemporaryDirectory(prefix="metrics-benchmark-") as folder:
        results["sizes"] = {
            name: _measure(name, _rounds(name, options), Path(folder) / name) for name in options.only
        }
        models = list(MODELS)[:1] if options.quick else list(MODELS)
        with printing_into(Path(folder) / "printed.txt"):
            results["first_entry_ms"] = measure_first_entry(Path(folder) / "first", models)
    _print(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """All contenders in turn, then the callbacks one by one."""
    compared, began = groups(PEERS_AT[name]), time.monotonic()
    chosen = [contender for group in compared for contender in group]
    labels = [[contender.label for contender in group] for group in compared]
    work = Work.of(SIZES[name], rounds * TURN // LOG_EVERY, folder)
    models: dict[str, nn.Module] = {contender.label: work.model() for contender in chosen}
    runs = {}
    for number, contender in enumerate(chosen):
        clock = TurnClock()
        own = replace(work, directory=folder / str(number))
        own.directory.mkdir(parents=True)
        models[contender.label].clock = clock  # type: ignore[assignment]
        runs[contender.label] = (clock, partial(contender.train, own, models[contender.label]))
    gc.collect()
    with printing_into(folder / "printed.txt"):
        take_turns(runs, labels, rounds)
        agreed = _agreement(chosen, models, work)
        handlers = measure_handlers(Work.of(SIZES[name], min(8, rounds), folder / "handlers"))
    print(f"[{(time.monotonic() - began) / 60:5.1f} min] {name}: {rounds} rounds", flush=True)
    return {
        "rounds": rounds,
        "peers_at": PEERS_AT[name],
        "contenders": summarise(chosen, {label: clock.stretches for label, (clock, _) in runs.items()}),
        "stretches": {
            label: [asdict(told) for told in clock.stretches] for label, (clock, _) in runs.items()
        },
        "handlers": handlers,
        "agreement": agreed,
    }


@torch.no_grad()
def _agreement(chosen: Sequence[Contender], models: Mapping[str, nn.Module], work: Work) -> dict[str, float]:
    """Ours must have the same weights to the bit, peers the same loss within the step benchmark's bounds."""
    ours = [contender.label for contender in chosen if contender.trainer == OURS]
    weights = {label: parameters_to_vector(models[label].parameters()) for label in ours}
    if other := [label for label in ours if not torch.equal(weights[label], weights[ours[0]])]:
        raise SystemExit(f"{', '.join(other)}: other weights in the end than {ours[0]}; callbacks took part")
    batch = work.batches[0]
    losses = {}
    for label, model in models.items():
        model.clock = TurnClock()  # type: ignore[assignment]  # one that never hands over
        losses[label] = mean_loss(model(batch["input_ids"]), batch["labels"]).item()
    worst = max(losses, key=lambda label: abs(losses[label] / losses[ours[0]] - 1))
    deviation = abs(losses[worst] / losses[ours[0]] - 1)
    if not deviation <= TOLERANCE["loss"]:
        raise SystemExit(f"{worst} did other work than {ours[0]}: its loss deviates by {deviation:.1e}")
    return {"largest_loss_deviation": deviation}


def _print(results: Mapping[str, Any]) -> None:
    for name, told in results["sizes"].items():
        step_ms = told["contenders"][f"{OURS}, without, every 1"]["cpu_ms"]["typical"]
        for table in (
            difference_rows(name, told["contenders"]),
            handler_rows(name, told["handlers"], step_ms),
        ):
            print()
            print_table(table)
        print()
        print(logging_line(name, told["contenders"]))
        print("\n".join(verdict(name, told["contenders"], told["handlers"], step_ms)))
    rows = [["check_flops, once, ms of CPU time", "added", "with", "without"]]
    for model, first in results["first_entry_ms"].items():
        cells = (first["with"] - first["without"], first["with"], first["without"])
        rows.append([model, *(f"{cell:.1f}" for cell in cells)])
    print()
    print_table(rows)


def _rounds(name: str, options: argparse.Namespace) -> int:
    return 5 if options.quick else options.rounds or ROUNDS[name]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SIZES), help="comma-separated, of: %(default)s")
    parser.add_argument(
        "--rounds", type=int, help=f"rounds at each size, a multiple of 5, instead of {ROUNDS}"
    )
    parser.add_argument("--quick", action="store_true", help="five rounds: does everything run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(SIZES):
        parser.error(f"--only names {sorted(unknown)}; choose among {list(SIZES)}")
    if options.rounds is not None and (options.rounds < 5 or options.rounds % 5):
        parser.error("--rounds must be a multiple of 5")
    return options


if __name__ == "__main__":
    main()
