"""Why MFU and OFU of a job differ: candidates with their arithmetic, not verdicts.

MFU is what the application counted, over a peak that somebody chose; OFU is what the tensor cores did. Their
ratio points at the mistake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..display.text_table import text_table
from .job_facts import JobFacts
from .mistakes import FITS, Mistake, mistakes


@dataclass(frozen=True)
class Candidate:
    """A mistake that would explain the ratio.

    Attributes:
        name: What it is.
        expected: MFU/OFU that it alone would give, lowest and highest; the same where it is one number.
        distance: How far the ratio is from there, as |ln(ratio / expected)|: 0.05 is about 5 %.
        arithmetic: Where the number comes from, and what it would make of MFU.
        check: What to look at next.
    """

    name: str
    expected: tuple[float, float]
    distance: float
    arithmetic: str
    check: str

    @property
    def expected_text(self) -> str:
        """The expected MFU/OFU as text."""
        return _range(*self.expected)

    @property
    def fits(self) -> bool:
        """Whether it is within the error of OFU."""
        return self.distance <= FITS


@dataclass(frozen=True)
class Diagnosis:
    """Candidates, most likely first, and why others are not among them.

    Attributes:
        ratio: MFU / OFU.
        candidates: Those that fit first, of these a single number before a range; then by distance.
        not_judged: Mistakes that are ruled out, or need facts that are not given, with the reason.
    """

    ratio: float
    candidates: tuple[Candidate, ...]
    not_judged: tuple[str, ...]

    def __str__(self) -> str:
        """A table of the candidates, then what could not be judged."""
        rows = [(one.name, one.expected_text, f"{math.expm1(one.distance):.1%}") for one in self.candidates]
        table = text_table((f"MFU/OFU = {self.ratio:.3f}; candidate", "expected", "off"), rows)
        return "\n".join((table, *(f"left out: {reason}" for reason in self.not_judged)))


def diagnose(mfu: float, ofu: float, facts: JobFacts | None = None) -> Diagnosis:
    """Return what may explain the difference between MFU and OFU.

    Each candidate is held against the ratio alone; two mistakes at once multiply, and may look like a third.

    Args:
        mfu: As the application reports it, as a share (0.42, not 42).
        ofu: As a share, over the same devices and time.
        facts: What is known of the job.

    Raises:
        ValueError: A share is not positive or is given in percent, or a fact is not of its kind.
    """
    for name, share, most in (("mfu", mfu, 10.0), ("ofu", ofu, 1.5)):
        if not 0 < share < most:
            raise ValueError(f"{name}={share!r}: must be a share above 0, such as 0.42 for 42 %")
    facts = facts or JobFacts()
    ratio = mfu / ofu
    judged: list[Candidate] = []
    not_judged: list[str] = []
    for mistake in mistakes(ofu, facts):
        if isinstance(mistake, str):
            not_judged.append(mistake)
        else:
            judged.append(_held_against(mistake, mfu, ofu))
    judged.sort(key=lambda one: (not one.fits, one.fits and one.expected[0] != one.expected[1], one.distance))
    return Diagnosis(ratio, tuple(judged), tuple(not_judged))


def _held_against(mistake: Mistake, mfu: float, ofu: float) -> Candidate:
    ratio = mfu / ofu
    low, high = mistake.low, mistake.high
    distance = abs(math.log(ratio / min(max(ratio, low), high)))
    arithmetic = (
        f"{mistake.why} = {_range(low, high)}; MFU/OFU = {mfu:.1%} / {ofu:.1%} = {ratio:.3f}, "
        f"{math.expm1(distance):.1%} off"
    )
    if low == high != 1:
        right = f"OFU would be {ofu * low:.1%}" if mistake.in_ofu else f"MFU would be {mfu / low:.1%}"
        arithmetic += f"; put right, {right}"
    return Candidate(mistake.name, (low, high), distance, arithmetic, mistake.check)


def _range(low: float, high: float) -> str:
    return f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"
