"""Hand one run from trainer to trainer, and draw its curve beside that of one process.

    python tests/resilience/chain.py --output DIR --plot docs/performance/chain.png

The run is begun by one process, and continues by data parallelism in two, sharded over four, through a
pipeline of two stages in two copies, and by one process again. Each is asked to stop by SIGTERM, saves and
exits; the next one begins with the same command, but for the trainer. A model of 0.9 million parameters
learns the text of the Python standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:
    sys.path.append(str(Path(__file__).parents[1]))

from resilience.curve import EXACT, curve, deviations
from resilience.faults import STOPPED
from resilience.job import Job
from resilience.layouts import DDP_2, FSDP2_4, PIPELINE_2X2, SINGLE, Layout

LEGS = (SINGLE, DDP_2, FSDP2_4, PIPELINE_2X2, SINGLE)
Words = Callable[[Path, Layout], list[str]]
"""Makes the command line from the output directory and the layout."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What one trainer did of the run."""

    trainer: str
    ranks: int
    first: int
    """Its first step."""
    last: int
    exit_code: int
    """What every rank exited with."""
    seconds: float
    deviation: float
    """Largest relative deviation of the loss from the undisturbed run, over its steps."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The run, and the undisturbed one."""

    legs: list[Leg]
    losses: dict[int, float]
    undisturbed: dict[int, float]
    deviations: dict[int, float]
    """Relative deviation of the loss at each step."""

    @property
    def holds(self) -> bool:
        """Whether it is one curve."""
        return max(self.deviations.values()) <= EXACT


def run_chain(words: Words, steps: int, folder: Path, layouts: Sequence[Layout] = LEGS) -> Chain:
    """Train the run by all trainers in turn, and once more by one process.

    Args:
        words: Makes the command line of a run of `steps` steps, with a log entry at each.
        steps: Its length; each trainer does about as many.
        folder: A new directory for everything.
        layouts: Who trains, one after the other.

    Raises:
        ValueError: If a start did not end as it should, or steps are missing in a log.
        TimeoutError: If processes hang.
    """
    alone = _Runner(words, folder, "undisturbed")
    alone.run(SINGLE, 0)
    chain = _Runner(words, folder, "chain")
    *stopped, last = layouts
    done = [*(chain.run(layout, steps // len(layouts)) for layout in stopped), chain.run(last, 0)]
    losses, undisturbed = curve(chain.output, "loss"), curve(alone.output, "loss")
    if list(undisturbed) != list(range(1, steps + 1)):
        raise ValueError(f"the undisturbed run logged the steps {list(undisturbed)}")
    off = deviations(losses, undisturbed)
    legs = [_leg(layout, *told, off) for layout, told in zip(layouts, done, strict=True)]
    return Chain(legs=legs, losses=losses, undisturbed=undisturbed, deviations=off)


class _Runner:
    """Starts the same run again and again."""

    def __init__(self, words: Words, folder: Path, name: str) -> None:
        self.output = folder / name
        self._words, self._name, self._starts = words, name, folder / "starts"
        self._count = 0

    def run(self, layout: Layout, steps: int) -> tuple[int, int, int, float]:
        """Train some steps and stop, or to the end with `steps` 0.

        Returns:
            The first and the last step, the exit code of every rank, and seconds.
        """
        began = time.monotonic()
        self._count += 1
        folder = self._starts / f"{self._name}-{self._count}"
        words = self._words(self.output, layout)
        with Job(folder, words, layout.ranks, self._starts / "bytecode") as job:
            while steps and job.steps_done() < steps and not job.is_over():
                job.check_patience()
                time.sleep(0.01)
            if steps:
                job.terminate()
            job.wait()
        codes = set(job.exit_codes().values())
        if codes != {STOPPED if steps else 0}:
            raise ValueError(f"{folder.name} ended with {codes}: {job.output(0)[-2000:]}")
        numbers = [number for number, _ in job.steps(0)]
        return numbers[0], numbers[-1], STOPPED if steps else 0, time.monotonic() - began


def _leg(layout: Layout, first: int, last: int, exit_code: int, seconds: float, off: dict[int, float]) -> Leg:
    return Leg(
        trainer=layout.name,
        ranks=layout.ranks,
        first=first,
        last=last,
        exit_code=exit_code,
        seconds=seconds,
        deviation=max(off[step] for step in range(first, last + 1)),
    )


def print_chain(chain: Chain) -> None:
    """Print the table."""
    cells = [("trainer", "ranks", "steps", "exit code", "seconds", "largest deviation of the loss")]
    for leg in chain.legs:
        steps = f"{leg.first} to {leg.last}"
        figures = (str(leg.exit_code), f"{leg.seconds:.1f}", f"{leg.deviation:.1e}")
        cells.append((leg.trainer, str(leg.ranks), steps, *figures))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    largest = max(chain.deviations.values())
    print(f"largest deviation over all {len(chain.losses)} steps: {largest:.1e}", flush=True)


def _words(steps: int) -> Words:
    """The command line of a run on the text of the standard library."""

    def words(output: Path, layout: Layout) -> list[str]:
        settings = {
            "output-dir": output,
            "device": "cpu",
            "max-steps": steps,
            "warmup-steps": 20,
            "logging-steps": 1,
            "held-out": 0,
            "save-steps": 50,
            "sample-tokens": 0,
        }
        given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return ["train", *given, *layout.words]

    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 1 if it is not one curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=250, help="of the whole run (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the curve into this picture")
    options = parser.parse_args(arguments)
    if options.steps < 5 * len(LEGS):
        parser.error(f"--steps must be {5 * len(LEGS)} or more")
    if options.output.exists():
        parser.error(f"--output {options.output} exists; name a new directory")
    chain = run_chain(_words(options.steps), options.steps, options.output.absolute())
    print_chain(chain)
    (options.output / "chain.json").write_text(json.dumps(asdict(chain), indent=1) + "\n")
    if options.plot:
        from resilience.chain_picture import plot

        plot(chain, options.plot)
    return 0 if chain.holds else 1


if __name__ == "__main__":
    sys.exit(main())
