"""What the ranks of a pipeline will need of memory, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trainer_core import MARGIN_STANDS_FOR, margin_of

_GIB = 2**30
_HEADS = ("rank", "layers", "parameters", "gradients", "optimizer state", "activations", "total")


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one rank of a pipeline, in bytes; copies of it on other ranks need the same."""

    rank: int
    """Its place in the pipeline."""
    stages: tuple[int, ...]
    """Its stages."""
    layers: tuple[tuple[int, int], ...]
    """First and last layer of each of its stages; empty if the user's splitter makes them of other things."""
    parameters: int
    """What it holds of the parameters."""
    gradients: int
    """What it holds of the gradients."""
    optimizer: int
    """What it holds of the optimizer's state."""
    activations: int
    """Most bytes at a time beside these: activations of all microbatches under way, hidden states and their
    gradients that are sent and received, and weights that are gathered from copies."""

    @property
    def total(self) -> int:
        """All of it at once, without a margin."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def row(self) -> tuple[str, ...]:
        """Its line of the table, in GiB."""
        sizes = (self.parameters, self.gradients, self.optimizer, self.activations, self.total)
        spans = (f"{first} to {last}" if last > first else f"{first}" for first, last in self.layers)
        return (str(self.rank), ", ".join(spans), *(f"{size / _GIB:.2f}" for size in sizes))


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Memory of the ranks of a pipeline.

    Parameters, gradients and optimizer state are exact; activations are an estimate, of a step in which the
    schedule itself ran.
    """

    schedule: str
    """Name of the schedule."""
    n_microbatches: int
    """Pieces of a batch."""
    replicas: int
    """Pipelines side by side."""
    parameter_count: int
    """Parameters of the whole model, tied ones once."""
    batch_size: int
    """Examples of one pipeline at a time, all microbatches together."""
    sequence_length: int
    """Tokens of one example."""
    optimizer_name: str
    """Class of the optimizer."""
    per_rank: tuple[StageMemory, ...]
    """The ranks of a pipeline, in order."""
    notes: tuple[str, ...] = ()
    """What one should know about the estimate."""

    @property
    def fullest(self) -> StageMemory:
        """The rank that needs most."""
        return max(self.per_rank, key=lambda rank: rank.total)

    @property
    def margin(self) -> int:
        """5 % of what the fullest rank needs and 1 GiB, for what is left out."""
        return margin_of(self.fullest.total)

    @property
    def total(self) -> int:
        """Memory of the device of the fullest rank, with the margin."""
        return self.fullest.total + self.margin

    def to_json(self) -> dict[str, object]:
        """All figures as plain values, bytes as whole numbers."""
        ranks = [{**asdict(rank), "total": rank.total} for rank in self.per_rank]
        own = {**vars(self), "per_rank": ranks, "notes": list(self.notes)}
        return {**own, "margin": self.margin, "total": self.total}

    def __str__(self) -> str:
        several = f"{self.replicas} pipelines of " if self.replicas > 1 else ""
        head = (
            f"{self.parameter_count:,} parameters; {several}{len(self.per_rank)} GPUs; {self.schedule}, "
            f"{self.n_microbatches} microbatches; {self.batch_size} x {self.sequence_length} tokens in each "
            f"pipeline; {self.optimizer_name}; GiB per GPU:"
        )
        margin = (
            f"rank {self.fullest.rank} needs most: {self.fullest.total / _GIB:.2f}, and with a margin of 5 % "
            f"and 1 GiB {self.total / _GIB:.2f}"
        )
        notes = (margin, f"left out: {MARGIN_STANDS_FOR}", *self.notes)
        rows = _aligned([_HEADS, *(rank.row() for rank in self.per_rank)])
        return "\n".join([head, *rows, *(f"  {note}" for note in notes)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]
