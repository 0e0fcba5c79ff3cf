"""Runs the worlds of a launch: `main.py LAUNCH DIRECTORY`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ranks import Scenario, run_world

Worlds = dict[str, tuple[int, dict[str, Scenario]]]


def worlds_of_two() -> Worlds:
    """Two ranks."""
    import accumulating
    import kinds
    import refusals
    import scoring
    import splitters
    import texts
    import values

    scored = scoring.OF_BOTH | scoring.OF_TWO | splitters.SCENARIOS | kinds.SCENARIOS
    others = accumulating.OF_TWO | refusals.OF_TWO
    return {"2": (2, values.SCENARIOS | texts.SCENARIOS | scored | others)}


def worlds_of_four() -> Worlds:
    """Four ranks; first what measures memory."""
    import accumulating
    import memory
    import planned
    import scoring
    import texts
    import values

    measured = memory.SCENARIOS | planned.SCENARIOS
    scored = scoring.OF_BOTH | scoring.OF_FOUR | accumulating.OF_FOUR
    return {"4": (4, measured | values.SCENARIOS | texts.SCENARIOS | scored)}


def worlds_that_fail() -> Worlds:
    """Something goes wrong in each."""
    import failing

    return failing.WORLDS


def worlds_of_hugging_face() -> Worlds:
    """Two ranks with models of transformers, which only this launch imports."""
    import hf_models

    return {"2": (2, hf_models.SCENARIOS)}


LAUNCHES: dict[str, Callable[[], Worlds]] = {
    "two": worlds_of_two,
    "four": worlds_of_four,
    "failing": worlds_that_fail,
    "hf": worlds_of_hugging_face,
}


def main(launch: str, directory: Path) -> None:
    """Run the worlds one after the other."""
    for name, (world_size, scenarios) in LAUNCHES[launch]().items():
        run_world(world_size, directory / name, scenarios)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
