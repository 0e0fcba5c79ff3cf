"""Whether a compiled model learns what the plain one learns: the curves of one run, trained in several ways.

    python tests/benchmarks/compile_parity.py --json compile_parity.json --plot compile_parity.png

As in the reports on pretraining Llama with FSDP, scaled down: no compile, and compile (inductor) with no,
selective and full activation checkpointing. Every way is the command `llama-pretrain train` in a process of
its own, with the default model (preset tiny, bytes) on its default text (the Python standard library), the
same weights, rows and schedule in float32, and then `llama-pretrain eval` on text that none has trained on:
Python's help texts. Deviations are relative to the run without compile, step by step. Speeds are of the
second half of the steps, in which nothing is compiled any more: processor time, and the 90th percentile of
tokens/s, which are the quiet steps. ``--quick`` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _parity_report import plot, rows, summarise
from _parity_ways import WAYS, Way, train
from _timing import machine, print_table

STEPS, QUICK_STEPS = 300, 12
_TOLERANCE = 0.01
"""Most that a loss may deviate, relative: another computation shows as far more, other roundings as less."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in all ways, and tell."""
    options = _parse(arguments)
    results: dict[str, Any] = {
        "benchmark": "compile_parity",
        "machine": machine(Path.cwd(), ["torch"]),
        "steps": options.steps,
        "ways": {},
    }
    began = time.monotonic()
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="compile-parity-") as folder:
            results["ways"][way.label] = train(way, options.steps, Path(folder))
        minutes = (time.monotonic() - began) / 60
        print(f"[{minutes:5.1f} min] {way.label}: {_told(results, way)}", flush=True)
        if options.json:  # After every run: a study that is cut short has told something.
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    results["summary"] = summarise(results["ways"])
    print()
    print_table(rows(results["summary"]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(options.plot, results["ways"])
    apart = [label for label, told in results["summary"].items() if told["loss_deviation"] > _TOLERANCE]
    if apart:
        raise SystemExit(f"no parity: the losses of {apart} deviate by more than {_TOLERANCE}")


def _told(results: dict[str, Any], way: Way) -> str:
    told = results["ways"][way.label]
    return f"loss {told['loss'][-1]:.4f}, {told['seconds']:.0f} s"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help=f"optimizer steps of every run ({STEPS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps: does everything run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them into this picture")
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = QUICK_STEPS if options.quick else STEPS
    if options.steps < 2:
        parser.error("--steps must be 2 or more")
    return options


if __name__ == "__main__":
    main()
