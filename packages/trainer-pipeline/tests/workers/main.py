"""Runs the worlds of a launch: `main.py LAUNCH DIRECTORY`.

`LAUNCH-full` is the part of it that only tests marked `full` look at.
"""

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


LEFT = {
    "two": {
        "scored, zbv",
        "uneven, zbv",
        "frozen_embedding, gpipe",
        "frozen_embedding, interleaved_1f1b",
        "frozen_beginning, interleaved_1f1b",
        "frozen_end, zbv",
        "split, tied",
        "factory, subclass",
        "kind, tuples",
    },
    "four": {
        "drawn, 1f1b",
        "drawn, unseeded",
        "generators",
        "greedy, 1f1b",
        "greedy, interleaved_1f1b",
        "endings",
        "sampling",
        "undisturbed",
        "called together",
        "refused, temperature",
        "refused, tokens",
        "refused, prompt",
        "scored, 1f1b",
        "uneven, 1f1b",
        "trained, pp=2,dp=2",
        "trained, pp=2,shard=2",
        "allocated, 1f1b, accumulated",
    },
    "failing": {"4, evaluating", "4, generating"},
    "hf": {
        "llama, zbv",
        "llama, tied, 1f1b",
        "gpt2, zbv",
        "gemma2, 1f1b",
        "mixtral, zbv",
        "qwen3, 1f1b",
        "packed, 1f1b",
    },
}
"""Scenarios, or worlds, that only tests marked `full` look at."""


def main(launch: str, directory: Path) -> None:
    """Run the worlds one after the other."""
    usual = launch.removesuffix("-full")
    is_left = launch != usual
    for name, (world_size, scenarios) in LAUNCHES[usual]().items():
        left = LEFT[usual]
        chosen = {s: run for s, run in scenarios.items() if (s in left or name in left) == is_left}
        if chosen:
            run_world(world_size, directory / name, chosen)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
