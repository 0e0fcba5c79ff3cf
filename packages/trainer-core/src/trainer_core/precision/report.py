"""Which linear layers were replaced, and why the others were not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Outcome of replacing linear layers; `str()` gives the text for the log.

    Attributes:
        what: What the layers became.
        converted: Names of the replaced layers.
        left_alone: For each reason, the names of the layers that stay.
        converted_weights: Elements of the weights of the replaced layers.
        all_weights: Elements of the weights of all linear layers; a shared one counts for each layer.
        fp8_share: Share of the FLOPs of all products of linear layers, forward and backward, that run in FP8;
            0 without FP8 hardware. Attention is not among them. For the peak of mixed formats take
            `1 / (fp8_share / peak_fp8 + (1 - fp8_share) / peak_other)`.
        notes: What else to know, a line each.
    """

    what: str
    converted: tuple[str, ...]
    left_alone: Mapping[str, tuple[str, ...]]
    converted_weights: int
    all_weights: int
    fp8_share: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Number of linear layers."""
        return len(self.converted) + sum(map(len, self.left_alone.values()))

    @property
    def weight_share(self) -> float:
        """Share of the weight elements of linear layers that were converted."""
        return self.converted_weights / self.all_weights if self.all_weights else 0.0

    def __str__(self) -> str:
        head = f"{self.what}: {len(self.converted)} of {self.total} linear layers"
        lines = [f"{head}, {self.weight_share:.1%} of their weights"]
        lines += [f"  converted: {', '.join(grouped(self.converted))}"] if self.converted else []
        lines += [
            f"  left alone, {why}: {', '.join(grouped(names))}" for why, names in self.left_alone.items()
        ]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def grouped(names: Iterable[str]) -> list[str]:
    """Names that differ in their numbers only, as one: `layers.*.up (12 times)`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [f"{p} ({len(of)} times)" if len(of) > 1 else of[0] for p, of in groups.items()]
