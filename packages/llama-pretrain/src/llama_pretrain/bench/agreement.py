"""Whether the contenders did the same work: what they have learned in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .contenders import BASELINE
from .turn import Turn

TOLERANCE = {"no": 0.001, "bf16": 0.01}
"""By precision, the most that what a contender has learned may deviate, as a share. Kernels and the order of
roundings differ. A learning rate that was off by a tenth showed as 0.006 to 0.09, no clipping as 0.003."""


@dataclass(frozen=True)
class Agreement:
    """How far contenders are from one of them.

    Attributes:
        beside: The contender that the others are compared with.
        deviations: By name: difference of the losses after all steps, as a share of what `beside` has
            learned; the largest of all rounds.
        tolerance: The most that is the same work.
    """

    beside: str
    deviations: Mapping[str, float]
    tolerance: float

    def other_work(self) -> list[str]:
        """Names of those that did other work."""
        return [name for name, deviation in self.deviations.items() if not deviation <= self.tolerance]


def agreement(turns: Mapping[str, Sequence[Turn]], mixed_precision: str) -> Agreement | None:
    """Compare all contenders with the plain loop, or with the first one if that took no part.

    Returns:
        None if there are fewer than two.
    """
    if len(turns) < 2:
        return None
    beside = BASELINE if BASELINE in turns else next(iter(turns))
    reference = turns[beside][0]
    deviations = {name: max(_deviation(turn, reference) for turn in theirs) for name, theirs in turns.items()}
    return Agreement(beside, deviations, TOLERANCE[mixed_precision])


def _deviation(turn: Turn, reference: Turn) -> float:
    learned = reference.loss_before - reference.loss_after
    apart = abs(turn.loss_after - reference.loss_after) + abs(turn.loss_before - reference.loss_before)
    if math.isnan(apart):
        return math.inf
    return apart / abs(learned) if learned else (math.inf if apart else 0.0)
