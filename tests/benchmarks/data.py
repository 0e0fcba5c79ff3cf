"""Measure what data loading costs: a shuffled order, going on after a stop, and dispatch to other ranks.

    python tests/benchmarks/data.py --json data.json --plot data.png

``--only shuffle,resume,dispatch`` chooses parts. Nothing is asserted about time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import _data_dispatch
import _data_plot
import _data_resume
import _data_shuffle
from _timing import machine, print_table

PARTS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], list[list[str]]]]] = {
    "shuffle": (_data_shuffle.measure, _data_shuffle.rows),
    "resume": (_data_resume.measure, _data_resume.rows),
    "dispatch": (_data_dispatch.measure, _data_dispatch.rows),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    results: dict[str, Any] = {
        "benchmark": "data",
        "machine": machine(Path.cwd(), ["torch", "torchdata", "accelerate", "numpy"]),
    }
    for name in options.only:
        results[name] = PARTS[name][0]()
    for name in options.only:
        print()
        print_table(PARTS[name][1](results[name]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        _data_plot.plot(options.plot, results)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated, of: %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them into this picture")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only names {sorted(unknown)}; choose among {list(PARTS)}")
    return options


if __name__ == "__main__":
    main()
