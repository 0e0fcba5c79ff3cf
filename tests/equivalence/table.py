"""Train every row and print how far its curve is from the reference: `python tests/equivalence/table.py`.

    python tests/equivalence/table.py [part of a row's name ...] [--json FILE]

The exit code is 1 if a row is off.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

# Before torch is imported: sums do not depend on the machine's cores then.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not __package__:
    sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tools")]

from equivalence.case import Case
from equivalence.cases import CASES
from equivalence.reference import Point, Recipe, train
from equivalence.runners import run

TITLES = ("row", "loss", "gradient norm", "bound", "seconds", "verdict")


@dataclass(frozen=True)
class Result:
    """A row that was trained."""

    name: str
    loss: float
    """Largest relative deviation from the reference over all steps."""
    grad_norm: float
    tolerance: float
    seconds: float
    because: str = ""

    @property
    def agrees(self) -> bool:
        """Whether both are within the bound; what is not a number is not."""
        return self.loss <= self.tolerance and self.grad_norm <= self.tolerance


@cache
def expected(recipe: Recipe) -> list[Point]:
    """The reference's curve."""
    return train(recipe)


def measure(case: Case, directory: Path) -> Result:
    """Train a row and compare it with the reference."""
    reference = expected(case.recipe)
    began = time.perf_counter()
    found = run(case, directory)
    seconds = time.perf_counter() - began
    off = largest_deviation(found, reference)
    return Result(case.name, off.loss, off.grad_norm, case.tolerance, seconds, case.because)


def largest_deviation(found: Sequence[Point], reference: Sequence[Point]) -> Point:
    """The largest |found - reference| / |reference|, of losses and of norms.

    It is infinite if a point is missing, or if only one of two figures is a number.
    """
    if len(found) != len(reference):
        return Point(math.inf, math.inf)
    pairs = list(zip(found, reference, strict=True))
    return Point(
        loss=max(_relative(one.loss, other.loss) for one, other in pairs),
        grad_norm=max(_relative(one.grad_norm, other.grad_norm) for one, other in pairs),
    )


def _relative(found: float, reference: float) -> float:
    if math.isnan(found) or math.isnan(reference):
        return 0.0 if math.isnan(found) and math.isnan(reference) else math.inf
    return abs(found - reference) / abs(reference)


def lines(results: Sequence[Result]) -> list[str]:
    """The table as text."""
    cells = [TITLES]
    for result in results:
        figures = (f"{result.loss:.1e}", f"{result.grad_norm:.1e}", f"{result.tolerance:.0e}")
        verdict = ("agrees" if result.agrees else "OFF") + (f" ({result.because})" if result.because else "")
        cells.append((result.name, *figures, f"{result.seconds:.1f}", verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("names", nargs="*", help="only rows whose name contains one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.names or any(name in case.name for name in options.names)]
    results = []
    for case in chosen:
        with tempfile.TemporaryDirectory() as directory:
            results.append(measure(case, Path(directory)))
        print(f"{len(results)}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
    print("\n".join(lines(results)))
    if options.json is not None:
        rows = [{**asdict(result), "agrees": result.agrees} for result in results]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if results and all(result.agrees for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
