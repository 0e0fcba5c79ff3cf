"""Which layout is recommended for which memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import pytest
from torch import nn

from dist_env import ParallelLayout
from trainer_core import ConfigurationError
from trainer_fsdp2 import FSDP2TrainingArguments, MemoryPlan, Recommendation, plan, recommend

Settings = Callable[..., FSDP2TrainingArguments]
Model = Callable[..., nn.Module]
GIB = 2**30
_PLANS: dict[str, MemoryPlan] = {}


@pytest.fixture
def recommended(
    tiny: Model, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recommendation]:
    """`recommended(80, gpus=16)`: for 3 layers of width 4096, 0.6 billion parameters.

    All ask for the same model, whose plans do not depend on the memory: each is made once.
    """

    def once(model: object, args: object, **more: Any) -> MemoryPlan:
        key = repr((args, sorted(more.items())))
        if key not in _PLANS:
            _PLANS[key] = plan(model, args, **more)  # type: ignore[arg-type]
        return _PLANS[key]

    monkeypatch.setattr("trainer_fsdp2.planning.plan", once)

    def ask(memory: float, *, gpus: int = 16, length: int = 2048, **given: Any) -> Recommendation:
        args = settings(**{"per_device_train_batch_size": 4, "param_dtype": "bfloat16", **given})
        model = lambda: tiny(width=4096, layers=3, frozen=False)  # noqa: E731
        return recommend(model, args, world_size=gpus, gpu_memory=memory, sequence_length=length)

    return ask


def test_first_layout_that_fits_is_taken(recommended: Callable[..., Recommendation]) -> None:
    nothing = recommended(0.1)
    assert not nothing.fits
    layouts = [each.layout for each in nothing.rejected]
    hsdp, fsdp, all_blocks = "HSDP, a copy on each node", "FSDP over all GPUs", ", all blocks checkpointed"
    levels = ["", ", a third of the blocks checkpointed", ", half of the blocks checkpointed", all_blocks]
    assert layouts == [
        "DDP, a copy on each GPU",
        *(mesh + level for level in levels for mesh in (hsdp, fsdp)),
        *(f"{mesh}{all_blocks}, batch {batch}" for batch in (2, 1) for mesh in (hsdp, fsdp)),
        *(f"{fsdp}{all_blocks}, batch {batch}, state on the host" for batch in (4, 2, 1)),
    ]
    # Each step plans all layouts before: a few in small steps, the others in large ones.
    memory, places, steps = 1000.0, [], chain((0.6, 0.9, 0.9), repeat(0.6))
    while (found := recommended(memory)).fits:
        places.append(layouts.index(found.layout))
        assert [each.layout for each in found.rejected] == layouts[: places[-1]]
        assert found.plan.total <= memory * GIB
        memory = next(steps) * found.plan.total / GIB
    assert places == sorted(set(places))
    assert places[0] == 0
    assert len(places) > 3
    assert found.plan.total > memory * GIB


def test_recommended_settings_give_the_same_plan(
    recommended: Callable[..., Recommendation], tiny: Model
) -> None:
    found = recommended(5.7, fused_loss="chunked")
    assert found.plan.layout == ParallelLayout(shard=16)
    assert found.args.activation_checkpointing == "share"
    assert found.args.fused_loss == "chunked"
    model = lambda: tiny(width=4096, layers=3, frozen=False)  # noqa: E731
    assert plan(model, found.args, world_size=16, sequence_length=2048) == found.plan


def test_whole_copies_compute_in_bf16_through_autocast(recommended: Callable[..., Recommendation]) -> None:
    found = recommended(200)
    assert found.uses_ddp
    assert found.args.mixed_precision == "bf16"
    assert found.args.fsdp2.param_dtype is None
    assert found.plan.gathered == 0
    assert found.plan.reduced == pytest.approx(found.plan.gradients, rel=1e-6)  # the buckets of DDP


def test_one_node_needs_no_second_kind_of_sharding(recommended: Callable[..., Recommendation]) -> None:
    assert [each.layout for each in recommended(0.1, gpus=8).rejected][:2] == [
        "DDP, a copy on each GPU",
        "FSDP over all GPUs",
    ]
    assert recommended(0.1, gpus=1).rejected[0].layout == "one GPU"


@pytest.mark.full
def test_state_goes_to_the_host_only_if_gpus_are_too_few(recommended: Callable[..., Recommendation]) -> None:
    short = recommended(4, gpus=8)
    assert short.fits
    assert short.args.fsdp2.cpu_offload
    assert short.gpus_needed is not None
    assert f"or   {short.gpus_needed} GPUs, without state on the host" in str(short)
    enough = recommended(4, gpus=short.gpus_needed)
    assert not enough.args.fsdp2.cpu_offload
    half = short if short.gpus_needed == 16 else recommended(4, gpus=short.gpus_needed // 2)
    assert half.args.fsdp2.cpu_offload


def test_no_number_of_gpus_is_enough_for_too_long_a_sequence(
    recommended: Callable[..., Recommendation],
) -> None:
    hopeless = recommended(3, gpus=8)
    assert not hopeless.fits
    assert hopeless.gpus_needed is None
    assert "shorten the sequence" in str(hopeless)


@pytest.mark.parametrize(("name", "given"), [("gpu_memory", {"memory": 0}), ("world_size", {"gpus": 12})])
def test_numbers_that_make_no_sense(
    recommended: Callable[..., Recommendation], name: str, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=name):
        recommended(**{"memory": 80, **given})
