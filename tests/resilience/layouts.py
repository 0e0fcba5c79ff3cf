"""By which trainer, and in how many processes, a run is trained: always the same rows in a step."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 8
"""Rows of an optimizer step, whoever trains."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one start of a run is trained."""

    trainer: str
    ranks: int = 1
    replicas: int = 1
    """How many of the ranks, or groups of ranks, work on different rows."""
    rows: int = 4
    """Rows of a batch."""
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.trainer == "pipeline":
            return f"pipeline {self.ranks // self.replicas}x{self.replicas}"
        return self.trainer if self.ranks == 1 else f"{self.trainer} {self.ranks}"

    @property
    def words(self) -> list[str]:
        """Its part of the command line."""
        accumulation = ROWS // (self.rows * self.replicas)
        return [
            *("--trainer", self.trainer),
            *("--per-device-train-batch-size", str(self.rows)),
            *("--gradient-accumulation-steps", str(accumulation)),
            *self.options,
        ]


SINGLE = Layout(trainer="single")
DDP_2 = Layout(trainer="ddp", ranks=2, replicas=2)
FSDP2_2 = Layout(trainer="fsdp2", ranks=2, replicas=2, rows=2)
FSDP2_4 = Layout(trainer="fsdp2", ranks=4, replicas=4, rows=2)
PIPELINE_2 = Layout(trainer="pipeline", ranks=2, options=("--microbatches", "2"))
PIPELINE_2X2 = Layout(
    trainer="pipeline", ranks=4, replicas=2, options=("--microbatches", "2", "--pipeline.replicas", "2")
)
LAYOUTS = (SINGLE, DDP_2, FSDP2_2, FSDP2_4, PIPELINE_2, PIPELINE_2X2)
