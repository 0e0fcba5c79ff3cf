"""The curve that a run has logged, and how far it is from another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

EXACT = 1e-5
"""Bound on the relative deviation in float32, as in `tests/equivalence`."""
KEYS = ("loss", "grad_norm", "learning_rate", "total_tokens", "eval_loss", "eval_tokens")


def curve(output: Path, key: str) -> dict[int, float]:
    """The values of a key in `trainer_logs.json`, by step.

    Raises:
        ValueError: If a step is there twice, or they are out of order.
    """
    entries = json.loads((output / "trainer_logs.json").read_text())
    points = [(int(entry["global_step"]), float(entry[key])) for entry in entries if key in entry]
    steps = [step for step, _ in points]
    # The summary at the end of a run repeats totals of the last step.
    if key == "total_tokens":
        return dict(points)
    if steps != sorted(set(steps)):
        raise ValueError(f"{output}: the steps of {key!r} are not in order, or not each once: {steps}")
    return dict(points)


def deviations(found: Mapping[int, float], expected: Mapping[int, float]) -> dict[int, float]:
    """Relative deviation of each step.

    Raises:
        ValueError: If one has steps that the other lacks.
    """
    if other := sorted(found.keys() ^ expected.keys()):
        raise ValueError(f"steps that only one of the curves has: {other}")
    return {step: _relative(found[step], value) for step, value in expected.items()}


def largest_deviations(output: Path, undisturbed: Path, steps: int) -> dict[str, float]:
    """Compare a run with an undisturbed one.

    Args:
        output: Output directory of a run.
        undisturbed: That of the other.
        steps: How many both have, each once.

    Returns:
        The largest relative deviation of each key over all steps.

    Raises:
        ValueError: If a step is missing or too many.
    """
    if list(losses := curve(output, "loss")) != list(range(1, steps + 1)):
        raise ValueError(f"{output}: {steps} steps are logged as {list(losses)}")
    return {key: max(deviations(curve(output, key), curve(undisturbed, key)).values()) for key in KEYS}


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected) if expected else abs(found)
