"""Measure how long a job takes from the loss of a rank to its next step, and what that costs before.

    python tests/benchmarks/recovery.py --json recovery.json --plot recovery.png

Two ranks train the tiny model on the text of the Python standard library. A rank is killed (SIGKILL) again
and again: which one, and when, is drawn at random, and every other kill waits until a save is under way. The
ways to recover take turns: restarts by `llama-pretrain --max-restarts` with hot spares and checkpoints in
memory, the same without spares, without memory, under torchrun, and a start of the whole command anew.

Timed is from the kill to the first step that had not been done before it, as the log on the disk shows it.
The phases are those that the launcher tells. Steps that are done again are counted. Each run is compared with
one that nothing disturbs: losses and gradient norms of every step, and the checksums of weights, optimizer
and position in the data at its end, by which every document was read once. A difference is an error;
nothing is asserted about time. The cost of checkpoints in memory is that of a step with one beside a step
without, in runs that nothing disturbs. A spare is ready some seconds after a restart; ``--gap`` says how many
steps are done between two kills.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _recovery_run import Kill, Recovered, recovered_run, undisturbed_run
from _timing import machine, print_table

WAYS = {
    "memory": "restart, hot spares, memory",
    "no-spares": "restart, memory",
    "storage": "restart, hot spares, storage",
    "torchrun": "torchrun, memory",
    "command": "the whole command, storage",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    names = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        steps = options.gap * (options.kills + 1)
        _say(f"{steps} steps that nothing disturbs, without checkpoints in memory")
        plain = undisturbed_run(work / "plain", steps, memory=False)
        _say(f"{steps} steps that nothing disturbs, with them, after {plain.step_s * steps:.0f} s")
        saving = undisturbed_run(work / "saving", steps, memory=True)
        saving.check_same_as(plain)
        results = {}
        for name in names:
            _say(f"{WAYS[name]}: {steps} steps and {options.kills} kills")
            draw = random.Random(options.seed)
            results[name] = recovered_run(
                work / name,
                name,
                steps,
                kills=options.kills,
                gap=options.gap,
                save_steps=options.save_steps,
                draw=draw,
            )
            results[name].end.check_same_as(plain)
            _show(results)
        where = machine(work, ["torch", "llama-pretrain"])
    ratio = saving.step_s / plain.step_s
    print(
        f"\nEvery curve, and what was saved at its end, is that of an undisturbed run of {steps} steps."
        f"\nA checkpoint in memory at each step: {plain.step_s * 1e3:.1f} ms a step without, "
        f"{saving.step_s * 1e3:.1f} ms with ({ratio:.2f})."
    )
    if options.json is not None:
        document = {
            "machine": where,
            "settings": {name: vars(options)[name] for name in ("kills", "gap", "save_steps", "seed")},
            "step_seconds": {"without": plain.step_s, "with": saving.step_s, "ratio": ratio},
            "ways": {
                name: {**_summary(each.kills), "kills": [asdict(kill) for kill in each.kills]}
                for name, each in results.items()
            },
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot is not None:
        _plot(options.plot, results)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of each way (default: %(default)s)")
    parser.add_argument("--gap", type=int, default=100, help="steps between two kills (default: %(default)s)")
    parser.add_argument(
        "--save-steps", type=int, default=20, help="steps between saves to storage (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the kills (default: %(default)s)")
    parser.add_argument("--only", default=",".join(WAYS), help="comma-separated, of: %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all kills there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them into this picture")
    options = parser.parse_args(arguments)
    if unknown := set(options.only.split(",")) - set(WAYS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: choose from {', '.join(WAYS)}")
    if options.kills < 1 or options.gap < 4:
        parser.error("--kills must be 1 or more, and --gap 4 or more")
    return options


def _summary(kills: Sequence[Kill]) -> dict[str, object]:
    seconds = [kill.seconds for kill in kills]
    again = [kill.steps_again for kill in kills]
    phases = [kill.phases for kill in kills if kill.phases]
    return {
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "steps_again_median": statistics.median(again),
        "steps_again_most": max(again),
        "in_a_save": sum(kill.in_a_save for kill in kills),
        "phases_median_s": [statistics.median(column) for column in zip(*phases, strict=True)],
    }


def _show(results: dict[str, Recovered]) -> None:
    head = ["way", "kills", "in a save", "median s", "worst s", "again", "at most"]
    rows = [[*head, "end", "connect", "load", "steps"]]
    for name, each in results.items():
        found = _summary(each.kills)
        phases: list[float] = list(found["phases_median_s"])  # type: ignore[call-overload]
        rows.append(
            [
                WAYS[name],
                str(len(each.kills)),
                str(found["in_a_save"]),
                f"{found['median_s']:.1f}",
                f"{found['worst_s']:.1f}",
                f"{found['steps_again_median']:g}",
                f"{found['steps_again_most']}",
                *([f"{phase:.2f}" for phase in phases] or [""] * 4),
            ]
        )
    print()
    print_table(rows)


def _plot(path: Path, results: dict[str, Recovered]) -> None:
    """Draw the seconds of every kill as a dot, a row for each way, with the median as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 * len(results) + 1), layout="constrained")
    axis = figure.subplots()
    for row, each in enumerate(results.values()):
        seconds = [kill.seconds for kill in each.kills]
        axis.plot(seconds, [row] * len(seconds), "o", color="tab:blue", alpha=0.5)
        axis.plot([statistics.median(seconds)] * 2, [row - 0.3, row + 0.3], color="black")
    axis.set_yticks(range(len(results)), [WAYS[name] for name in results])
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds from the loss of a rank to the next new step; line: median")
    axis.axvline(10, color="tab:green", linestyle="--")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
