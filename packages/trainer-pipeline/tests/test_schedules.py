"""The table of schedules: each name leads to a class of torch that takes what it is given."""

from __future__ import annotations

from functools import partial

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from trainer_core import ConfigurationError
from trainer_pipeline import PipelineArguments
from trainer_pipeline.arguments import stage_layout
from trainer_pipeline.diagram.table import fake_stages, no_loss
from trainer_pipeline.schedules import SCHEDULES, kind_of_factory, schedule_kind

NAMES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipe_v",
)


def test_names() -> None:
    assert tuple(SCHEDULES) == NAMES
    assert all(schedule_kind(name).name == name for name in NAMES)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_made(name: str, ranks: int) -> None:
    kind = schedule_kind(name)
    args = PipelineArguments(schedule=name, n_microbatches=8)
    layout = stage_layout(args, kind, ranks)
    assert layout.stages_per_rank == (1 if name in ("gpipe", "1f1b") else 2)
    for rank in range(ranks):
        stages = fake_stages(layout.stages_per_rank, rank, ranks)
        made = kind.factory(
            stages if kind.several_stages else stages[0],
            n_microbatches=8,
            loss_fn=no_loss,
            scale_grads=False,
        )
        assert type(made).__name__ == kind.class_name
        assert isinstance(made, PipelineScheduleMulti if kind.several_stages else PipelineScheduleSingle)


@pytest.mark.parametrize("name", NAMES)
def test_a_class_is_known_by_what_it_derives_from(name: str) -> None:
    kind = SCHEDULES[name]
    cls = getattr(pipelining, kind.class_name)
    mine = type("Mine", (cls,), {})
    for factory, called in ((cls, kind.class_name), (mine, "Mine"), (partial(mine), "Mine")):
        found = kind_of_factory(factory)
        assert found.name == called
        assert found.factory is factory
        assert (found.several_stages, found.layout, found.splits_backward, found.needs_stages) == (
            kind.several_stages,
            kind.layout,
            kind.splits_backward,
            kind.needs_stages,
        )


def test_a_class_of_ones_own_takes_several_stages() -> None:
    mine = type("Mine", (PipelineScheduleMulti,), {})
    found = kind_of_factory(mine)
    assert found.several_stages
    assert found.splits_backward


def test_what_this_torch_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pipelining, "ScheduleDualPipeV")
    kind = type(SCHEDULES["dualpipe_v"])("dualpipe_v", "ScheduleDualPipeV")
    with pytest.raises(
        ConfigurationError,
        match=r"needs ScheduleDualPipeV, which torch .* does not have\. Choose another schedule",
    ):
        _ = kind.factory
