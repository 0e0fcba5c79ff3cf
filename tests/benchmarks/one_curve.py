"""The loss curve of one run under several layouts of devices, each on the others, and how far they are apart.

    python tests/benchmarks/one_curve.py --json one-curve.json --plot docs/performance/one-curve

Every layout is the command `llama-pretrain train --mesh ...` with the default model (preset tiny, bytes) on
the default text (the Python standard library), in float32, with the same rows in each step: they are divided
among the ranks that have rows of their own. `--plot` draws two pictures, for light and dark pages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _timing import machine, print_table

ROWS = 8
LAYOUTS = {
    "one process": (),
    "--mesh dp=2": ("--mesh", "dp=2", "--per-device-train-batch-size", str(ROWS // 2)),
    "--mesh shard=2": ("--mesh", "shard=2", "--per-device-train-batch-size", str(ROWS // 2)),
    "--mesh pp=2": ("--mesh", "pp=2", "--per-device-train-batch-size", str(ROWS)),
}
"""By what the picture calls them: the options."""
STEPS, QUICK_STEPS = 150, 6
TOLERANCE = 1e-5
"""Most that a loss may deviate, relative: another order of sums in float32."""
INKS = {"light": "#24292f", "dark": "#d6dae2"}
COLOURS = ("#8b95a7", "#3f7fe0", "#e08a2e", "#2fa36b")


def train(options: Sequence[str], steps: int, output: Path) -> list[float]:
    """Train one layout, and return the loss of every step.

    Raises:
        SystemExit: It failed, or the log leaves steps out.
    """
    words = ("--max-steps", str(steps), "--save-steps", str(steps), "--output-dir", str(output), "--use-cpu")
    usual = ("--held-out", "0", "--sample-tokens", "0", "--logging-steps", "1", "--warmup-steps", "20")
    command = [sys.executable, "-W", "ignore", "-m", "llama_pretrain", "train", *words, *usual, *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    entries = json.loads((output / "trainer_logs.json").read_text(encoding="utf-8"))
    losses = {entry["global_step"]: entry["loss"] for entry in entries if "loss" in entry}
    if list(losses) != list(range(1, steps + 1)):
        raise SystemExit(f"{output.name}: the log has the steps {list(losses)}")
    return list(losses.values())


def deviations(losses: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Relative, step by step."""
    return [abs(loss / other - 1) for loss, other in zip(losses, plain, strict=True)]


def draw(path: Path, curves: dict[str, list[float]], ink: str) -> None:
    """Draw the curves on one another, wide lines below narrow ones, and under them how far they are apart."""
    import matplotlib.pyplot as plt

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with plt.rc_context({**dict.fromkeys(names, ink), "font.size": 10, "svg.hashsalt": "one curve"}):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8.6, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        plain, *others = curves.values()
        steps = range(1, len(plain) + 1)
        for place, (label, losses) in enumerate(curves.items()):
            width = 1.6 * (len(curves) - place) - 0.6
            above.plot(steps, losses, color=COLOURS[place], linewidth=width, label=label)
        for place, losses in enumerate(others, start=1):
            # A deviation of 0 has no place on a logarithmic axis.
            apart = [value or float("nan") for value in deviations(losses, plain)]
            below.plot(steps, apart, ".", markersize=3, color=COLOURS[place])
        above.set_ylabel("loss, nats per byte")
        above.legend(frameon=False)
        below.set_yscale("log")
        below.set_ylim(1e-9, 1e-4)
        below.axhline(TOLERANCE, color=ink, linewidth=0.8, linestyle=":")
        below.set_ylabel("relative\ndeviation")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(alpha=0.2, color=ink)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in all layouts, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of every run (%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps: does everything run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there, or read them")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw PATH-light.svg and PATH-dark.svg")
    parser.add_argument("--draw-only", action="store_true", help="read --json instead of training")
    options = parser.parse_args(arguments)
    steps = QUICK_STEPS if options.quick else options.steps
    if options.draw_only:
        curves = json.loads(options.json.read_text(encoding="utf-8"))["losses"]
    else:
        with tempfile.TemporaryDirectory(prefix="one-curve-") as folder:
            curves = {
                label: train(words, steps, Path(folder, str(number)))
                for number, (label, words) in enumerate(LAYOUTS.items())
            }
        if options.json:
            facts = machine(Path.cwd(), ["torch"])
            told = {"benchmark": "one_curve", "machine": facts, "steps": steps, "losses": curves}
            options.json.write_text(json.dumps(told, indent=1) + "\n")
    plain = curves["one process"]
    largest = {label: max(deviations(losses, plain)) for label, losses in curves.items()}
    rows = [[label, f"{losses[-1]:.5f}", f"{largest[label]:.1e}"] for label, losses in curves.items()]
    print_table([["layout", "last loss", "largest deviation"], *rows])
    if options.plot:
        for name, ink in INKS.items():
            draw(options.plot.with_name(f"{options.plot.name}-{name}.svg"), curves, ink)
    apart = [label for label, value in largest.items() if value > TOLERANCE]
    if apart:
        raise SystemExit(f"not one curve: the losses of {apart} deviate by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
