"""What every rank computes, and in which order, as torch's schedules have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch

from trainer_core import ConfigurationError

from ..schedules import SETTING, ScheduleKind

Kind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward pass, full backward pass, its half for the inputs, its half for the weights: torch's letters."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One pass of one microbatch through one stage."""

    stage: int
    kind: Kind
    microbatch: int


Table: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in the order in which the rank does them."""


def compute_actions(
    schedule: ScheduleKind, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Table:
    """Return what each rank computes in one step, in order, from torch's own class of the schedule.

    No process group is needed: the class is built on stages that only note what is asked of them. A schedule
    with several stages on a rank works through the table `pipeline_order`, which is read. A schedule with one
    stage has that table too, but does not work by it (the one of Schedule1F1B in torch 2.13 numbers the
    microbatches of the last rank wrongly); there one step is run on each rank, and what it does is noted.
    A forward and a backward pass that DualPipeV puts together follow one another here.

    Args:
        schedule: What is known of the schedule.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of one step.
        stages_per_rank: By default 1, or 2 for schedules with several stages on a rank.

    Returns:
        For each rank its actions.

    Raises:
        ConfigurationError: A count is below one, torch does not have the schedule, or refuses to make it from
            these counts.
    """
    _check_count("ranks", ranks)
    _check_count("microbatches", microbatches)
    local = _stages_per_rank(schedule, stages_per_rank)
    try:
        if not schedule.several_stages:
            return tuple(_noted_actions(schedule, rank, ranks, microbatches) for rank in range(ranks))
        return _table_actions(schedule, ranks, microbatches, local)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(
            SETTING,
            schedule.name,
            f"cannot be made from {microbatches} microbatches on {ranks} ranks with {local} "
            f"{'stage' if local == 1 else 'stages'} each ({' '.join(str(error).split())})",
            "change the microbatches or the stages per rank, or choose another schedule",
        ) from error


def _stages_per_rank(schedule: ScheduleKind, asked: int | None) -> int:
    if asked is None:
        return 2 if schedule.several_stages else 1
    _check_count("stages_per_rank", asked)
    if asked > 1 and not schedule.several_stages:
        raise ConfigurationError(
            "stages_per_rank",
            asked,
            f"must be 1 for the schedule {schedule.name}, which has one stage on each rank",
            "leave it out, or choose a schedule with several stages, such as interleaved_1f1b",
        )
    return asked


def _check_count(setting: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(setting, value, "must be at least 1", "give a positive number, such as 4")


def _noted_actions(schedule: ScheduleKind, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    [stage] = fake_stages(1, rank, ranks)
    made = schedule.factory(stage, n_microbatches=microbatches, loss_fn=no_loss, scale_grads=False)
    with torch.enable_grad():
        made.step(return_outputs=False)
    return tuple(Action(rank, kind, microbatch) for kind, microbatch in stage.noted)


def _table_actions(schedule: ScheduleKind, ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    stages = fake_stages(stages_per_rank, 0, ranks)
    made = schedule.factory(stages, n_microbatches=microbatches, loss_fn=no_loss, scale_grads=False)
    order = made.pipeline_order or {}
    if sorted(order) != list(range(ranks)):
        raise ConfigurationError(
            SETTING,
            schedule.name,
            f"has a pipeline_order for the ranks {sorted(order)}, but the pipeline has {ranks} ranks",
            "set pipeline_order for each rank when the schedule is made, as torch's own schedules do",
        )
    table: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        slots = [slot for slot in order[rank] if slot is not None]
        parts = [part for slot in slots for part in (slot.sub_actions or (slot,))]
        table.append(
            tuple(
                Action(part.stage_index, part.computation_type.value, part.microbatch_index)
                for part in parts
                if part.computation_type.value in KINDS and part.microbatch_index is not None
            )
        )
    return tuple(table)


class FakeStage:
    """What schedules of torch are given in place of a stage: it notes what they make it do.

    Args:
        stage_index: Number of the stage in the pipeline.
        num_stages: Stages of the whole pipeline.
        rank: The rank that holds it.
        ranks: Ranks of the pipeline.
    """

    submod = None
    device = "cpu"
    # Neither first nor last: no input is asked for and no loss is computed.
    is_first = False
    is_last = False

    def __init__(self, stage_index: int, num_stages: int, rank: int, ranks: int) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group_rank = rank
        self.group_size = ranks
        self.noted: list[tuple[Literal["F", "B"], int]] = []
        """(kind, microbatch) of each forward pass ("F") and full backward pass ("B"), in order."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        """Note a forward pass."""
        self.noted.append(("F", fwd_chunk_id))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        """Note a backward pass."""
        self.noted.append(("B", bwd_chunk_id))

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        """Answer what else a schedule asks of a stage: no messages to send or await, nothing to prepare."""
        from torch.distributed.pipelining import PipelineStage

        if not hasattr(PipelineStage, name):
            raise AttributeError(f"a stage of torch has no {name!r}")
        return lambda *args, **kwargs: []


def fake_stages(count: int, rank: int, ranks: int) -> list[FakeStage]:
    """Return fakes of the `count` stages of a rank; their places do not change a schedule's table."""
    return [FakeStage(rank + ranks * i, ranks * count, rank, ranks) for i in range(count)]


def no_loss(*args: object, **kwargs: object) -> torch.Tensor:
    """Stand for a loss function: with one, torch takes the schedule for one that trains."""
    return torch.zeros(())
