"""The settings of pipeline training."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer_core import DataParallelArguments

from .checks import check_pipeline


@dataclass(frozen=True, kw_only=True)
class PipelineArguments:
    """How the layers of the model are spread over the ranks, and in which order they compute."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipe_v."""
    n_microbatches: int = 4
    """Pieces of a batch that are in the pipeline at a time. A batch that it does not divide is filled up with
    rows that do not count."""
    stages_per_rank: int | None = None
    """Stages of each rank; none: 1, or 2 for schedules that take several."""
    balance: str = "flops"
    """How layers are divided among stages: flops (counted, embedding and head included), parameters, or
    layers (as many for each)."""
    layers_per_stage: tuple[int, ...] | None = None
    """How many layers each stage has, instead of `balance`."""
    replicas: int = 1
    """Copies of the pipeline that work on different data; each has world size / replicas ranks. Neighbouring
    ranks have the same stage."""
    shard_replicas: bool = False
    """The copies of a stage share its weights, gradients and optimizer (FSDP2); false: each holds them."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrainingArguments(DataParallelArguments):
    """What `PipelineTrainer` takes: adds how the model is cut into stages, and the schedule."""

    pipeline: PipelineArguments = field(default_factory=PipelineArguments)
    """How the model is cut into stages, and the schedule."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        check_pipeline(self)

    @property
    def uses_blocks(self) -> bool:
        """Whether a setting works on the blocks that transformer_layers_path leads to."""
        return True
