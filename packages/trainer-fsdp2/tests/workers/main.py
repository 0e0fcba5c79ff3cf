"""Runs the worlds of a launch: `main.py LAUNCH DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

import kinds
import lost
import memory
import refusals
import steps
import values
from ranks import Scenario, run_world

LAUNCHES: dict[str, dict[str, tuple[int, dict[str, Scenario]]]] = {
    "few": {
        "2": (2, values.SCENARIOS | steps.SCENARIOS | kinds.SCENARIOS),
        "2, refused": (2, refusals.ACCEPTED | refusals.OF_MODEL),
        "2, killed": (2, lost.SCENARIOS),
        "3": (3, values.SCENARIOS),
    },
    "four": {
        memory.SAVING: (4, memory.SCENARIOS),
        "4, resumed": (4, memory.RESUMED),
        "4, refused": (4, refusals.OF_MESH | {"accumulating": steps.accumulating}),
    },
    # Only a test marked `full` asks for it.
    "meta": {
        memory.SAVING: (4, {"saved": memory.saved}),
        "4, resumed on meta": (4, memory.RESUMED_ON_META),
    },
}


def main(launch: str, directory: Path) -> None:
    """Run the worlds one after the other."""
    for name, (world_size, scenarios) in LAUNCHES[launch].items():
        run_world(world_size, directory / name, scenarios)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
