"""What each rank computes in one step, as torch's schedules have it."""

from collections import Counter
from functools import partial

import pytest
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from trainer_core import ConfigurationError
from trainer_pipeline.diagram import simulate
from trainer_pipeline.diagram.table import compute_actions, fake_stages
from trainer_pipeline.schedules import SCHEDULES, kind_of_factory

COUNTS = [
    ("gpipe", 1, 1, 1),
    ("gpipe", 4, 3, 1),
    ("1f1b", 1, 2, 1),
    ("1f1b", 2, 2, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved_1f1b", 2, 4, 1),
    ("interleaved_1f1b", 4, 6, 3),
    ("interleaved_1f1b", 4, 2, 2),
    ("looped_bfs", 3, 5, 2),
    ("interleaved_zero_bubble", 4, 8, 2),
    ("interleaved_zero_bubble", 4, 2, 2),
    ("zbv", 2, 1, 2),
    ("zbv", 4, 8, 2),
    ("dualpipe_v", 2, 4, 2),
    ("dualpipe_v", 4, 11, 2),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "stages"), COUNTS)
def test_each_microbatch_goes_once_forward_and_once_back_through_each_stage(
    name: str, ranks: int, microbatches: int, stages: int
) -> None:
    table = compute_actions(SCHEDULES[name], ranks, microbatches, stages)
    assert len(table) == ranks
    counts = Counter(action for actions in table for action in actions)
    assert set(counts.values()) == {1}
    done: dict[tuple[int, int], set[str]] = {}
    for action in counts:
        done.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    assert set(done) == {(s, m) for s in range(ranks * stages) for m in range(microbatches)}
    assert all(kinds in ({"F", "B"}, {"F", "I", "W"}) for kinds in done.values())
    splits = any("I" in kinds for kinds in done.values())
    assert splits == SCHEDULES[name].splits_backward


@pytest.mark.parametrize(("name", "ranks", "microbatches", "stages"), COUNTS)
def test_stages_lie_where_the_trainer_puts_them(
    name: str, ranks: int, microbatches: int, stages: int
) -> None:
    last = ranks * stages - 1
    for rank, actions in enumerate(compute_actions(SCHEDULES[name], ranks, microbatches, stages)):
        own = {action.stage for action in actions}
        if SCHEDULES[name].layout == "v":
            assert own == {rank, last - rank}
        else:
            assert own == set(range(rank, last + 1, ranks))


def test_what_a_step_of_gpipe_does_is_what_its_own_table_says() -> None:
    schedule = ScheduleGPipe(fake_stages(1, 1, 3)[0], 4)  # type: ignore[arg-type]
    assert schedule.pipeline_order is not None
    listed = [
        tuple((action.computation_type.value, action.microbatch_index) for action in actions if action)
        for actions in schedule.pipeline_order.values()
    ]
    noted = compute_actions(SCHEDULES["gpipe"], 3, 4)
    assert [tuple(pair for pair in actions if pair[0] in "FB") for actions in listed] == [
        tuple((action.kind, action.microbatch) for action in actions) for actions in noted
    ]


def test_schedules_have_two_stages_on_a_rank_where_they_can() -> None:
    assert simulate("1f1b", 2, 4).stages == ((0,), (1,))
    assert simulate("looped_bfs", 2, 4).stages == ((0, 2), (1, 3))
    assert simulate("zbv", 2, 4).stages == ((0, 3), (1, 2))


def test_a_class_or_a_partial_of_one_stands_for_its_name() -> None:
    by_name = compute_actions(SCHEDULES["interleaved_1f1b"], 2, 4)
    assert compute_actions(kind_of_factory(ScheduleInterleaved1F1B), 2, 4) == by_name
    assert (
        compute_actions(kind_of_factory(partial(ScheduleInterleaved1F1B, scale_grads=False)), 2, 4) == by_name
    )


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages", "message"),
    [
        ("1f1b", 4, 3, None, r"'1f1b'.* 3 microbatches on 4 ranks with 1 stage each .*Change the microb"),
        ("interleaved_1f1b", 2, 5, 2, r"'interleaved_1f1b'.* 5 microbatches on 2 ranks .*rounds \(2\)"),
        ("dualpipe_v", 2, 3, None, r"'dualpipe_v'.* 3 microbatches .*at least as many"),
        ("zbv", 2, 4, 3, r"'zbv'.* with 3 stages each .*exactly 2 stages"),
        ("gpipe", 2, 4, 2, r"stages_per_rank=2 must be 1 for the schedule gpipe"),
        ("gpipe", 0, 4, None, r"ranks=0 must be at least 1"),
        ("gpipe", 2, 0, None, r"microbatches=0 must be at least 1"),
        ("zbv", 2, 4, 0, r"stages_per_rank=0 must be at least 1"),
        ("zb_v", 2, 4, None, r"'zb_v'.*must be one of gpipe, 1f1b"),
    ],
)
def test_what_torch_does_not_make_is_refused(
    name: str, ranks: int, microbatches: int, stages: int | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(name, ranks, microbatches, stages_per_rank=stages)


class Untold(PipelineScheduleMulti):
    """A schedule that keeps its order to itself."""

    def _step_microbatches(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError


class Backwards(ScheduleInterleaved1F1B):
    """A schedule in which rank 0 begins with what needs all others."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.pipeline_order[0].reverse()


def test_a_schedule_that_cannot_be_drawn_says_why() -> None:
    with pytest.raises(ConfigurationError, match=r"'Untold'.*pipeline_order for the ranks \[\]"):
        simulate(Untold, 2, 4)
    with pytest.raises(ConfigurationError, match=r"'Backwards'.*wait for one another: rank 0 for Action"):
        simulate(Backwards, 2, 4)
