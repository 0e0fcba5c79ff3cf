"""The page of `verify`: what was looked at, and how far each run was from the CPU's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from trainer_core import Verification, VerificationCheck

from .run_report import page, section, table

_WORDS = {True: "passed", False: "FAILED", None: "not looked at"}
_COLORS = {True: "#1a7f37", False: "#cf222e"}
_LEFT, _WIDTH, _ROW = 250, 460, 24
_SMALLEST, _LARGEST = -9, 1
"""Powers of ten at the ends of the scale; what is smaller stands at its beginning, with what is equal."""


def verification_page(found: Verification) -> str:
    """Return the page, of HTML that asks no other host for anything."""
    failed = sum(check.passed is False for check in found.checks)
    verdict = "All that was looked at holds" if found.passed else f"{failed} of these do not hold"
    facts = [(name, value) for name, value in found.facts.items()]
    rows = [(check.part, check.name, _WORDS[check.passed], check.found, check.rule) for check in found.checks]
    parts = [
        section("On", table(("", ""), [*facts, ("seconds", f"{found.seconds:.0f}")])),
        section("Checks", table(("part", "what", "result", "found", "rule"), rows)),
    ]
    compared = [check for check in found.checks if "largest_relative_difference" in check.figures]
    if compared:
        parts.insert(1, section("How far losses are from what they are held against", _picture(compared)))
    return page(f"Verification: {verdict}", "\n".join(parts))


def _picture(checks: Sequence[VerificationCheck]) -> str:
    """Return a dot for each run on a logarithmic scale of relative differences."""
    height = _ROW * len(checks) + 40
    marks = []
    for power in range(_SMALLEST, _LARGEST + 1, 2):
        x = _place(10.0**power)
        marks.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height - 30}" stroke="#d9dce0"/>')
        marks.append(f'<text x="{x}" y="{height - 12}" text-anchor="middle">1e{power}</text>')
    for number, check in enumerate(checks):
        y, value = _ROW * number + 16, float(str(check.figures["largest_relative_difference"]))
        color = _COLORS[check.passed is not False]
        marks.append(f'<text x="0" y="{y + 5}">{escape(f"{check.part} {check.name}")}</text>')
        marks.append(f'<circle cx="{_place(value)}" cy="{y}" r="5" fill="{color}"/>')
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 40} {height}" width="{_LEFT + _WIDTH + 40}" role="img" '
        f'font-size="13" fill="#1f2328">{"".join(marks)}</svg>'
    )


def _place(value: float) -> float:
    power = _SMALLEST if value <= 0 else _LARGEST if not math.isfinite(value) else math.log10(value)
    share = (min(max(power, _SMALLEST), _LARGEST) - _SMALLEST) / (_LARGEST - _SMALLEST)
    return round(_LEFT + share * _WIDTH, 1)
