"""The schedules by name: which class of torch carries one out, what it needs, and where its stages lie."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from trainer_core import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    Schedule = PipelineScheduleSingle | PipelineScheduleMulti

SETTING = "pipeline.schedule"
ScheduleFactory = Callable[..., "Schedule"]
"""A schedule class of torch, or a partial of one: called with a stage, or a list of them, `n_microbatches`,
`loss_fn` and `scale_grads=False`."""


class StageLayout(NamedTuple):
    """Stages on the ranks of a pipeline."""

    ranks: int
    stages_per_rank: int
    style: str
    """loop: rank r has the stages r, r + ranks, r + 2 ranks, ...; v: rank r has r and the r-th from the end,
    so that first and last stage meet on rank 0."""

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        if self.style == "v":
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    @property
    def last_rank(self) -> int:
        """The rank that has the last stage."""
        return self.rank_of(self.num_stages - 1)


@dataclass(frozen=True)
class ScheduleKind:
    """What has to be known of a schedule before there are stages."""

    name: str
    class_name: str
    """Its class in `torch.distributed.pipelining`."""
    several_stages: bool = True
    """Whether it takes a list of stages for each rank."""
    layout: str = "loop"
    """How stages lie on ranks: loop (rank r has r, r + ranks, ...) or v (r and the r-th from the end)."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed apart."""
    needs_stages: bool = False
    """Whether there must be as many microbatches as stages."""
    given: ScheduleFactory | None = None
    """What the user gave instead of a name."""

    @cached_property
    def factory(self) -> ScheduleFactory:
        """What makes the schedule.

        Raises:
            ConfigurationError: If this release of torch does not have it.
        """
        if self.given is not None:
            return self.given
        # Tracing tools come with it, which take a second to import.
        import torch
        from torch.distributed import pipelining

        made: ScheduleFactory | None = getattr(pipelining, self.class_name, None)
        if made is None:
            raise ConfigurationError(
                SETTING,
                self.name,
                f"needs {self.class_name}, which torch {torch.__version__} does not have",
                "choose another schedule, or a newer torch",
            )
        return made


SCHEDULES: Mapping[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("gpipe", "ScheduleGPipe", several_stages=False),
        ScheduleKind("1f1b", "Schedule1F1B", several_stages=False, needs_stages=True),
        ScheduleKind("interleaved_1f1b", "ScheduleInterleaved1F1B"),
        ScheduleKind("looped_bfs", "ScheduleLoopedBFS"),
        ScheduleKind("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", splits_backward=True),
        ScheduleKind("zbv", "ScheduleZBVZeroBubble", layout="v", splits_backward=True),
        ScheduleKind("dualpipe_v", "ScheduleDualPipeV", layout="v", splits_backward=True, needs_stages=True),
    )
}
"""By name, in the order in which they were invented."""


def schedule_kind(name: str) -> ScheduleKind:
    """Look up a schedule.

    Raises:
        ConfigurationError: If there is none of that name; it suggests one.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1)
    raise ConfigurationError(
        SETTING,
        name,
        f"must be one of {', '.join(SCHEDULES)}",
        f"did you mean {near[0]!r}?" if near else "choose one of these",
    )


def kind_of_factory(factory: ScheduleFactory) -> ScheduleKind:
    """What a class of torch, a subclass or a partial of one needs.

    Raises:
        ConfigurationError: If it is not a schedule class.
    """
    from torch.distributed.pipelining import schedules

    cls = factory.func if isinstance(factory, partial) else factory
    if not (
        isinstance(cls, type)
        and issubclass(cls, schedules.PipelineScheduleSingle | schedules.PipelineScheduleMulti)
        and cls not in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)
    ):
        raise ConfigurationError(
            "pipe_schedule_factory",
            factory,
            "must be a schedule class of torch.distributed.pipelining, a subclass, or a partial of one",
            "give such a class, or name a schedule in pipeline.schedule",
        )
    for kind in SCHEDULES.values():
        known = getattr(schedules, kind.class_name, None)
        if known is not None and issubclass(cls, known):
            return replace(kind, name=cls.__name__, given=factory)
    several = issubclass(cls, schedules.PipelineScheduleMulti)
    # Of a schedule that is not known it is safer to believe that it does.
    return ScheduleKind(
        cls.__name__, cls.__name__, several_stages=several, splits_backward=several, given=factory
    )
