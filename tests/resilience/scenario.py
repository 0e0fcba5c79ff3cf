"""Kill, stop, starve and damage one run again and again, and show that nothing of it is lost.

    python tests/resilience/scenario.py --episodes 20 --seed 0 --output DIR

Each episode is one start of `python -m llama_pretrain train`, by another trainer and in another number of
processes than the one before, that a fault ends at a random moment. The last start is left in peace. Then
the log must have each step once, with the losses of a run that one process did undisturbed; and each step
must have been trained on the documents that this run trained on, each of them once in every epoch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:
    sys.path.append(str(Path(__file__).parents[1]))

from resilience.curve import EXACT, largest_deviations
from resilience.disk import Disk
from resilience.documents import Passes, count_passes
from resilience.episode import Result, Run
from resilience.history import History
from resilience.job import Job
from resilience.layouts import PIPELINE_2X2, SINGLE, Layout
from resilience.plan import make_plan
from resilience.workload import Workload

_TITLES = ("#", "trainer", "continued from", "fault", "struck at", "exit codes of the ranks", "s", "ending")


@dataclass(frozen=True)
class Outcome:
    """What a scenario showed."""

    episodes: list[Result]
    steps: int
    deviations: dict[str, float]
    """Largest relative deviation from the undisturbed run over all steps, by key of the log."""
    other_steps: list[int]
    """Steps that were trained on other words than in the undisturbed run."""
    passes: Passes
    words: int
    """Words of an epoch."""
    documents: int
    disk: str
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether curve and documents are those of the undisturbed run."""
        return max(self.deviations.values()) <= EXACT and not self.other_steps and self.passes.whole >= 2


def run_scenario(episodes: int, seed: int, folder: Path, last: Layout = PIPELINE_2X2) -> Outcome:
    """Carry out a scenario, and print a line for each episode.

    Args:
        episodes: How many starts a fault ends.
        seed: Of the plan.
        folder: A new directory for everything.
        last: How the start is trained that nothing disturbs.

    Raises:
        ValueError: If something went wrong in an episode.
        TimeoutError: If processes hang.
    """
    began = time.monotonic()
    # An episode takes the run some nine steps further; it must not be at its end before the last one.
    work = Workload.write(folder / "work", steps=20 + 12 * episodes)
    undisturbed = _undisturbed(work, folder)
    results: list[Result] = []
    with Disk(folder / "disk") as disk:
        run = Run(work, disk, folder / "starts")
        print(f"seed {seed}, {work.steps} steps; the disk: {disk.kind}")
        print(_line(_TITLES), flush=True)
        for plan in make_plan(episodes, seed):
            results.append(run.suffer(plan))
            _print(results[-1])
        results.append(run.finish(last))
        _print(results[-1])
        deviations = largest_deviations(run.output, folder / "undisturbed", work.steps)
    words = work.words_of_an_epoch()
    steps = run.history.steps
    return Outcome(
        episodes=results,
        steps=len(steps),
        deviations=deviations,
        other_steps=[step for step, words in undisturbed.steps.items() if steps.get(step) != words],
        passes=count_passes(steps, words),
        words=len(words),
        documents=len({word.document for word in words}),
        disk=disk.kind,
        seconds=time.monotonic() - began,
    )


def print_outcome(outcome: Outcome) -> None:
    """Print the comparison."""
    print(
        f"\n{outcome.steps} steps in trainer_logs.json, each once. Largest relative deviation over all steps"
    )
    print("from the undisturbed run of one process:")
    for key, value in outcome.deviations.items():
        print(f"  {key:<14} {value:.1e}")
    whole, begun = outcome.passes
    print(f"steps trained on other documents than there: {outcome.other_steps or 'none'}")
    print(
        f"{outcome.documents} documents of {outcome.words} words: each word exactly once in each of {whole} "
        f"epochs, and {begun} words once in the epoch after them"
    )
    print(f"{outcome.seconds:.0f} s: {'holds' if outcome.holds else 'DOES NOT HOLD'}", flush=True)


def _undisturbed(work: Workload, folder: Path) -> History:
    """Train in one process without a fault."""
    starts = folder / "starts"
    words, history = work.words(folder / "undisturbed", SINGLE), History()
    with Job(starts / "undisturbed", words, SINGLE.ranks, starts / "bytecode") as job:
        job.wait()
    if job.exit_code != 0:
        raise ValueError(f"the undisturbed run ended with {job.exit_code}: {job.output(0)[-2000:]}")
    history.add(job)
    return history


def _print(result: Result) -> None:
    seconds = f"{result.seconds:.1f}", f"{result.ending_seconds:.1f}"
    told = (result.resumed, result.fault, result.struck, result.exit_codes)
    print(_line((result.name, result.trainer, *told, *seconds)))
    if result.damaged:
        print(f"     then damaged: {result.damaged}")
    sys.stdout.flush()


def _line(cells: tuple[str, ...]) -> str:
    widths = (3, 12, 14, 20, 12, 38, 5, 6)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def main() -> int:
    """Run the command line; exit code 1 if something did not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=20, help="starts that a fault ends (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the plan (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    options = parser.parse_args()
    if options.episodes < 1:
        parser.error("--episodes must be 1 or more")
    if options.output.exists():
        parser.error(f"--output {options.output} exists; name a new directory")
    outcome = run_scenario(options.episodes, options.seed, options.output.absolute())
    print_outcome(outcome)
    (options.output / "scenario.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
