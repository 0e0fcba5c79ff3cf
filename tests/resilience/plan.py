"""What happens in which episode: drawn from a seed, before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .checkpoints import DAMAGES
from .faults import FAULTS, Fault
from .layouts import LAYOUTS, Layout

SHORTEST, LONGEST = 3, 15
"""Steps of an episode before its fault; a save may be waited for behind them."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One start of the run, the fault that ends it, and what is done to its checkpoints then."""

    number: int
    layout: Layout
    fault: Fault
    moment: str
    """starting, step or saving."""
    after: int
    """Steps, since the start, before the fault comes."""
    rank: int
    """Which one is killed, if only one is."""
    damage: str
    """What is done to the newest checkpoint afterwards, or after a later one if there are not two good ones
    by then; empty: nothing."""
    seed: int


def make_plan(count: int, seed: int) -> list[Episode]:
    """Draw the episodes: every fault equally often, in any order, by changing trainers and world sizes.

    Two out of five damage the newest checkpoint afterwards, at least one does.
    """
    generator = random.Random(seed)
    faults = [FAULTS[number % len(FAULTS)] for number in range(count)]
    damages = [DAMAGES[number % len(DAMAGES)] for number in range(max(1, 2 * count // 5))]
    damages += [""] * (count - len(damages))
    generator.shuffle(faults)
    generator.shuffle(damages)
    plan: list[Episode] = []
    for number, (fault, damage) in enumerate(zip(faults, damages, strict=True), start=1):
        before = plan[-1].layout if plan else None
        layout = generator.choice(
            [each for each in LAYOUTS if each != before and each.ranks >= fault.least_ranks]
        )
        plan.append(
            Episode(
                number=number,
                layout=layout,
                fault=fault,
                moment=generator.choice(fault.moments),
                after=generator.randint(SHORTEST, LONGEST),
                rank=generator.randrange(layout.ranks),
                damage=damage,
                seed=generator.randrange(2**32),
            )
        )
    return plan
