"""Transforms: their order, what a layout asks of them, and what they add to a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_core
from checkpoint_core import SharingPattern, StateComponent
from dist_env import ParallelLayout, StaticDistributedEnvironment
from trainer_core import (
    BuiltModel,
    ConfigurationError,
    DataParallelArguments,
    GradSync,
    InfoCallback,
    ModelTransform,
    ReplicateGradients,
    StepHooks,
    Trainer,
    TrainingArguments,
)
from trainer_core.distributed.build import meta_copy


class Model(nn.Module):
    """Logits of a vocabulary of 7."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map [rows, positions] to [rows, positions, 7]."""
        return self.head(self.embed(input_ids))


ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(32 * 6).view(32, 6) % 7]


class Noted(StepHooks, GradSync):
    """Notes what a run tells it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def attach(self, optimizer: Optimizer | None) -> None:
        self.told.append(f"attach {type(optimizer).__name__}")

    def begin(self, step: int) -> None:
        self.told.append(f"begin {step}")

    def after_step(self, step: int) -> None:
        self.told.append(f"step {step}")

    def log_entries(self) -> Mapping[str, object]:
        return {"noted": len(self.told)}

    def state_components(self) -> Sequence[StateComponent]:
        return [StateComponent(key="noted", stateful=Counter(), sharing_pattern=SharingPattern.GLOBAL)]

    def before_backward(self, part: nn.Module, *, last: bool) -> None:
        self.told.append(f"before {type(part).__name__}, last={last}")

    def after_backward(self, part: nn.Module, *, last: bool) -> None:
        self.told.append("after")

    def finish(self) -> None:
        self.told.append("finish")


class Counter:
    """A state that counts its saves."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.value = int(str(state["value"]))


class Noting(ModelTransform):
    """Adds `Noted` to a run of one process."""

    axis: ClassVar[str] = "tensor"

    def __init__(self) -> None:
        self.noted = Noted()

    def is_active(self, layout: ParallelLayout) -> bool:
        return True

    def apply(self, built: BuiltModel) -> None:
        assert all(parameter.is_meta for parameter in built.model.parameters())
        built.hooks.append(self.noted)
        built.grad_sync = self.noted


def arguments(path: Path, **more: object) -> DataParallelArguments:
    settings: dict[str, object] = {"max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True}
    return DataParallelArguments(output_dir=str(path / "run"), **settings | more)  # type: ignore[arg-type]


def trainer_of(args: TrainingArguments, **more: object) -> Trainer:
    options: dict[str, object] = {"model_init": Model, "train_dataset": ROWS, "callbacks": []}
    return Trainer(args, **options | more)  # type: ignore[arg-type]


class Handler:
    """Notes when handlers of a microbatch are called, where the transform notes what it is told."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def on_forward_backward_end(self, *_: object, **__: object) -> None:
        self.told.append("handler")


def test_a_transform_is_told_of_every_step(tmp_path: Path) -> None:
    transform = Noting()
    # The model is sharded for it on the meta device, which takes a mesh, also of one rank.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trainer = trainer_of(
            arguments(tmp_path, gradient_accumulation_steps=2, logging_steps=1, save_strategy="no"),
            parallel=[transform],
            callbacks=[Handler(transform.noted.told)],
        )
        trainer.train()
    finally:
        torch.distributed.destroy_process_group()
    # The last handler sees the gradient of the step, and what it changes of it is not overwritten.
    microbatches = [
        *("before Model, last=False", "after", "handler"),
        *("before Model, last=True", "after", "finish", "handler"),
    ]
    assert transform.noted.told == [
        "attach AdamW",
        "begin 0",
        *microbatches,
        "step 1",
        *microbatches,
        "step 2",
    ]
    assert [entry["noted"] for entry in trainer.state.log_history if "loss" in entry] == [10, 18]


class InBf16(Noting):
    """Computes in another dtype than the arguments say."""

    keeps_parameters = True

    def apply(self, built: BuiltModel) -> None:
        built.matmul_dtype = "bf16"


def test_the_dtype_that_a_transform_computes_in_is_told(tmp_path: Path) -> None:
    told = StringIO()
    trainer_of(
        arguments(tmp_path, save_strategy="no"), parallel=[InBf16()], callbacks=[InfoCallback(told)]
    ).train()
    assert "weights float32; matrix products bf16" in told.getvalue()


def test_values_of_a_deferred_model_are_those_of_one_process(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        deferred = trainer_of(arguments(tmp_path, seed=3), parallel=[Noting()]).unwrapped_model().state_dict()
    finally:
        torch.distributed.destroy_process_group()
    plain = trainer_of(arguments(tmp_path, seed=3)).unwrapped_model().state_dict()
    assert all(torch.equal(deferred[name], plain[name]) for name in plain)


class Other(Noting):
    """Another transform."""

    def __init__(self, axis: str) -> None:
        super().__init__()
        self.axis = axis  # type: ignore[misc]

    def is_active(self, layout: ParallelLayout) -> bool:
        return False


def test_transforms_are_in_one_order(tmp_path: Path) -> None:
    given = [Other(axis) for axis in ("replicate", "tensor", "pipeline", "shard", "expert", "context")]
    trainer = trainer_of(arguments(tmp_path, mesh="dp=1"), parallel=given)
    axes = [transform.axis for transform in trainer.transforms]
    assert axes == ["expert", "tensor", "context", "pipeline", "shard", "replicate"]


@pytest.mark.parametrize(
    ("axes", "rule"),
    [
        (["tensor", "tensor"], "uses the dimension tensor, which Other uses too"),
        (["data"], "not a dimension"),
    ],
)
def test_transforms_that_do_not_fit_are_refused(tmp_path: Path, axes: list[str], rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        trainer_of(arguments(tmp_path, mesh="dp=1"), parallel=[Other(axis) for axis in axes])


def test_a_class_in_place_of_a_transform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"parallel='Noting' is a class.*parallel=\[Noting\(\)\]"):
        trainer_of(arguments(tmp_path, mesh="dp=1"), parallel=[Noting])


@pytest.mark.parametrize(
    ("mesh", "ranks", "rule"),
    [
        ("dp=2", 1, r"mesh='dp=2'.*needs exactly 2 ranks, but there are 1"),
        ("shard=3", 4, r"mesh='shard=3'.*a multiple of 3 ranks, but there are 4"),
        ("tensors=2", 2, r"mesh='tensors=2'.*Did you mean tensor"),
        ("dp=0", 1, r"mesh='dp=0'.*not a possible size"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(tmp_path: Path, mesh: str, ranks: int, rule: str) -> None:
    env = StaticDistributedEnvironment(world_size=ranks, local_world_size=ranks)
    with pytest.raises(ConfigurationError, match=rule):
        trainer_of(arguments(tmp_path, mesh=mesh), distributed_env=env)


@pytest.mark.parametrize(
    ("mesh", "fix"),
    [
        ("shard=2", "Install trainer-fsdp2"),
        ("shard=2,ep=2", "Give a transform with axis='expert'"),
    ],
)
def test_a_dimension_that_nothing_uses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str, fix: str
) -> None:
    monkeypatch.setattr("trainer_core.distributed.build.entry_points", lambda **which: ())
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    with pytest.raises(ConfigurationError, match=f"no given or installed transform uses.*{fix}"):
        trainer_of(arguments(tmp_path, mesh=mesh), distributed_env=env)


def test_several_ranks_need_something_to_do(tmp_path: Path) -> None:
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    with pytest.raises(
        ConfigurationError, match=r"world_size=2 needs a mesh or parallel, which say what the ranks are for"
    ):
        trainer_of(arguments(tmp_path), distributed_env=env)
    with pytest.raises(
        ConfigurationError, match=r"world_size=2 is more than a Trainer for one device can use"
    ):
        trainer_of(TrainingArguments(output_dir=str(tmp_path)), distributed_env=env)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_steps_in_the_backward_pass_need_one_rank(tmp_path: Path, mesh: str) -> None:
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    args = arguments(tmp_path, mesh=mesh, fuse_optim_with_backward=True, max_grad_norm=None)
    given = [Other("tensor")] if mesh == "tp=2" else []
    with pytest.raises(ConfigurationError, match=r"summed over the ranks of the layout"):
        trainer_of(args, parallel=given, distributed_env=env)


def test_a_loss_scale_needs_undivided_tensors(tmp_path: Path) -> None:
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    args = arguments(tmp_path, mesh="tp=2", mixed_precision="fp16")
    with pytest.raises(ConfigurationError, match=r"mixed_precision='fp16'.*layout tp=2 shards"):
        trainer_of(args, parallel=[Other("tensor")], distributed_env=env)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8_recipe": "tensorwise"}, r"fp8_recipe='tensorwise' replaces layers .*layout tp=2"),
        ({"fused_loss": "torch"}, r"fused_loss='torch' needs an output head that is whole"),
    ],
)
def test_tensor_parallelism_refuses_what_needs_whole_layers(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    args = arguments(tmp_path, mesh="tp=2", **settings)
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(args, parallel=[trainer_core.TensorParallel()], distributed_env=env)


def test_ranks_with_equal_batches_are_handed_them(tmp_path: Path) -> None:
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    args = arguments(tmp_path, mesh="pp=2", dispatch_batches=False)
    with pytest.raises(ConfigurationError, match=r"dispatch_batches=False.*pp=2 work on the same batch"):
        trainer_core.BatchPlacement(args, trainer_core.Ranks(env, ParallelLayout(pipeline=2)))


def test_names_of_an_earlier_version_name_their_replacement() -> None:
    for name in ("Parallelism", "SingleDevice", "DataParallel", "Scored", "DATA_PARALLEL"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Use .* \(see the changelog\)"):
            getattr(trainer_core, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = trainer_core.nothing  # type: ignore[attr-defined]


def component(key: str = "mine") -> StateComponent:
    return StateComponent(key=key, stateful=Counter(), sharing_pattern=SharingPattern.GLOBAL)


def test_state_of_ones_own_is_saved_and_restored(tmp_path: Path) -> None:
    first = component()
    first.stateful.value = 5  # type: ignore[attr-defined]
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer_of(args, state_components=[first]).train()
    second = component()
    assert trainer_of(args, state_components=[second]).load_checkpoint()
    assert second.stateful.value == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("keys", [["model"], ["mine", "mine"]])
def test_state_under_a_key_that_is_taken_is_refused(tmp_path: Path, keys: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="is the key of another component"):
        trainer_of(arguments(tmp_path), state_components=[component(key) for key in keys])


def test_transforms_are_a_list_also_a_single_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"parallel=.*is not a list of transforms. Write parallel=\[\.\.\.\]"
    ):
        trainer_of(arguments(tmp_path), parallel=ReplicateGradients())


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 7, bias=False)
        self.again.weight = self.head.weight


def test_the_copy_that_is_counted_has_tied_weights_once(tmp_path: Path) -> None:
    model = Tied()
    copied = meta_copy(model, arguments(tmp_path))
    assert [p.shape for p in copied.parameters()] == [p.shape for p in model.parameters()]
    assert all(p.is_meta for p in copied.parameters())
    assert not any(p.is_meta for p in model.parameters())
