"""Plans of memory: of one process, of copies, and of layers that are divided; and what they feed a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dist_env import DistributedEnvironmentError, fake_job
from trainer_core import (
    BuiltModel,
    ConfigurationError,
    DataParallelArguments,
    ModelTransform,
    Plan,
    plan,
)
from trainer_core.planning import longest_sequence, planned_batch

WIDTH, VOCABULARY, LENGTH = 64, 32, 128


class Model(nn.Module):
    """A wide layer between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        return self.head(hidden + self.down(torch.tanh(self.up(hidden))))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


PARAMETERS = 2 * VOCABULARY * WIDTH + VOCABULARY + 2 * 16 * WIDTH**2 + 17 * WIDTH


def _args(**given: Any) -> DataParallelArguments:
    return DataParallelArguments(per_device_train_batch_size=2, **given)


def _plan(world_size: int = 1, args: DataParallelArguments | None = None, **given: Any) -> Plan:
    options = {"model_init": Model, "sequence_length": LENGTH, **given}
    return plan(args or _args(), world_size=world_size, **options)


def test_one_process() -> None:
    found = _plan()
    assert found.parameter_count == PARAMETERS
    assert found.parameters == found.gradients == 4 * PARAMETERS
    assert found.optimizer == 8 * PARAMETERS + 4 * 7
    assert (found.gathered, found.reduced, found.on_host) == (0, 0, 0)
    # What tanh gives is kept, and its gradient and that of what it is given come while it is there.
    wide = 2 * LENGTH * 16 * WIDTH * 4
    assert wide < found.saved_activations < 1.5 * wide
    assert 3 * wide < found.activations < 3.3 * wide
    assert max(found.gradients, found.activations) <= found.peak <= found.gradients + found.activations
    assert found.total == found.parameters + found.optimizer + found.peak + found.margin
    assert found.per_rank_state == (found.state,)
    figures = json.loads(json.dumps(found.to_json()))
    assert (figures["total"], figures["layout"]) == (found.total, "dp=1")
    assert figures["per_rank"][0]["total"] == found.fullest.total


def test_microbatches_behind_the_second_change_nothing() -> None:
    two, many = (_plan(args=_args(gradient_accumulation_steps=n)) for n in (2, 1000))
    assert replace(many, notes=()) == replace(two, notes=())
    # Gradients of the first are there while the second is under way.
    assert two.peak == two.gradients + two.activations


def test_copies_sum_their_gradients_in_buckets() -> None:
    one, copies = _plan(), _plan(64, _args(mesh="dp=64"))
    assert copies.state == one.state
    assert copies.reduced == pytest.approx(one.gradients, rel=1e-4)  # with a number for each
    assert any("buckets" in note for note in copies.notes)
    assert "64 GPUs, a whole copy on each" in str(copies)


class Divided(ModelTransform):
    """Columns of the first layer and rows of the second one."""

    axis: ClassVar[str] = "tensor"

    def apply(self, built: BuiltModel) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if built.ranks.meshes is not None:
            plan_of = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(built.model, built.ranks.meshes.tensor, plan_of)


def test_layers_that_a_transform_divides_keep_a_part_of_their_activations() -> None:
    one, divided = _plan(), _plan(4, _args(mesh="tp=4"), parallel=[Divided()])
    wide = 2 * LENGTH * 16 * WIDTH * 4
    assert one.parameters - divided.parameters == 3 * 4 * (2 * 16 * WIDTH**2 + 16 * WIDTH) // 4
    assert one.saved_activations - divided.saved_activations == pytest.approx(3 / 4 * wide, rel=0.1)
    assert one.activations - divided.activations == pytest.approx(3 * 3 / 4 * wide, rel=0.1)


def test_without_passes_only_the_state_is_known() -> None:
    state, whole = _plan(passes=False), _plan()
    assert (state.state, state.activations) == (whole.state, 0)
    assert state.total < whole.total


def test_offloaded_activations_are_on_the_host() -> None:
    usual, away = (_plan(args=_args(enable_activation_offloading=on)) for on in (False, True))
    assert away.on_host == usual.saved_activations
    assert away.activations == usual.activations - usual.saved_activations
    assert away.total < usual.total


def test_settings_of_an_accelerator_are_planned_without_one() -> None:
    for settings in ({"fused_loss": "liger"}, {"mixed_precision": "fp16"}, {"device": "cuda:0"}):
        assert _plan(args=_args(**settings)).parameters == 4 * PARAMETERS


class Reads(Optimizer):
    """Looks at each gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: object = None) -> None:
        assert all(p.grad is None or p.grad.sum().item() for g in self.param_groups for p in g["params"])


def test_optimizer_of_the_run_counts_and_is_named_if_it_reads_values() -> None:
    assert _plan(optimizer_factory=lambda named: SGD([p for _, p in named], lr=0.1)).optimizer == 0
    with pytest.raises(ConfigurationError, match="optimizer_factory='Reads' cannot step on tensors without"):
        _plan(optimizer_factory=lambda named: Reads([p for _, p in named]))


class Looks(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        out = super().forward(input_ids)
        return F.relu(out) if out.sum() > 0 else out


def test_model_that_reads_values_is_named() -> None:
    with pytest.raises(ConfigurationError, match="model='Looks' cannot run on tensors without values"):
        _plan(model_init=Looks)


def test_a_process_group_is_in_the_way() -> None:
    with fake_job(2), pytest.raises(DistributedEnvironmentError, match="beside the process group"):
        _plan()


def test_rows_of_a_length() -> None:
    made = planned_batch(3, 16)
    assert {name: (tuple(value.shape), value.dtype) for name, value in made.items()} == {
        "input_ids": ((3, 16), torch.int64),
        "labels": ((3, 16), torch.int64),
    }


def test_of_a_batch_that_is_given_only_shapes_and_dtypes_count() -> None:
    batch = {"pixels": torch.randn(2, 3, 8), "labels": torch.ones(2, 4, dtype=torch.int64)}
    made = planned_batch(7, batch=batch)
    assert {name: (value.shape, value.dtype) for name, value in made.items()} == {
        name: (value.shape, value.dtype) for name, value in batch.items()
    }
    assert not any(value.any() for value in made.values())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "is needed to compute the activations"),
        (
            {"sequence_length": 8, "batch": {"labels": torch.zeros(1, 8)}},
            "cannot be given together with batch",
        ),
        ({"sequence_length": 1}, "must be at least 2"),
        ({"batch": {"input_ids": torch.zeros(2, 4)}}, "has no tensor 'labels'"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        planned_batch(2, **given)
    with pytest.raises(ConfigurationError, match="world_size=0"):
        _plan(0)


@pytest.mark.parametrize("begin", [1, 512, 4096, 2**20])
@pytest.mark.parametrize(
    "curve", [lambda n: 1000 + 3 * n, lambda n: n * n // 50, lambda n: 5 * n + n * n // 4096]
)
def test_the_longest_rows_are_found_in_a_few_plans(curve: Callable[[int], int], begin: int) -> None:
    asked: list[int] = []

    def needs(length: int) -> int:
        asked.append(length)
        return curve(length)

    limit = 2**20
    found = longest_sequence(needs, limit, begin=begin)
    assert found is not None
    assert found % 256 == 0
    assert found in asked
    assert curve(found) <= limit
    shortest = min(length for length in asked if curve(length) > limit)
    assert shortest - found <= max(256, 0.04 * found), "one that does not fit is planned, and is near"
    assert len(asked) <= 14


def test_rows_that_never_fit() -> None:
    assert longest_sequence(lambda length: 100 + length, 50, begin=4096) is None
