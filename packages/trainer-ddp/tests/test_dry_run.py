"""A dry run: the first of many ranks that hold the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dist_env import fake_job
from trainer_core import Collective, ConfigurationError, DryRun, Trainer
from trainer_ddp import (
    CompressionArguments,
    DDPArguments,
    DDPTrainer,
    DDPTrainingArguments,
    DiLoCoArguments,
    PostLocalSGDArguments,
    Replicate,
)

WIDTH = 512


class Model(nn.Module):
    """Embedding and head, with a running mean that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) - self.mean
        return self.head(hidden)


class Rows:
    """Batches of two rows of 16."""

    batch_size = 2

    def __iter__(self):  # type: ignore[no-untyped-def]
        ids = torch.arange(32).view(2, 16)
        while True:
            yield {"input_ids": ids, "labels": ids}


PARAMETERS = 2 * WIDTH * WIDTH


def _dry_run(folder: Path, ranks: int, **settings: object) -> DryRun:
    given = {"output_dir": str(folder / "run"), "max_steps": 1, "per_device_train_batch_size": 2}
    args = DDPTrainingArguments(**(given | settings))  # type: ignore[arg-type]
    with fake_job(ranks) as env:
        trainer = DDPTrainer(args, model_init=Model, train_dataset=Rows(), callbacks=[], distributed_env=env)
        return trainer.dry_run()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_summed_once_a_step(tmp_path: Path, accumulation: int) -> None:
    found = _dry_run(tmp_path, 64, gradient_accumulation_steps=accumulation)
    assert found.weights == found.gradients == 4 * PARAMETERS
    assert found.rows == 2 * 64 * accumulation
    seen = {each.kind: each for each in found.collectives}
    assert (seen["all-reduce"].ranks, seen["all-reduce"].bytes) == (64, 4 * PARAMETERS)
    # The running mean of rank 0 goes to all before the forward pass whose gradients travel.
    assert seen["broadcast"] == Collective("broadcast", 64, seen["broadcast"].calls, 4 * WIDTH)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("compression.method='bf16'", {"compression": CompressionArguments(method="bf16")}),
        (
            "post_local_sgd.enabled=True",
            {"post_local_sgd": PostLocalSGDArguments(enabled=True, start_step=1, period=2)},
        ),
        ("diloco.enabled=True", {"diloco": DiLoCoArguments(enabled=True)}),
        ("ddp.static_graph=True", {"ddp": DDPArguments(static_graph=True)}),
        ("ddp.find_unused_parameters=True", {"ddp": DDPArguments(find_unused_parameters=True)}),
    ],
)
def test_what_needs_values_is_refused(tmp_path: Path, name: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} needs real tensor values"):
        _dry_run(tmp_path, 2, **settings)


@pytest.mark.parametrize(("mesh", "parallel"), [("dp=4", []), (None, [Replicate()])])
def test_a_plain_trainer_replicates_as_its_arguments_say(
    tmp_path: Path, mesh: str | None, parallel: list[Replicate]
) -> None:
    options, outer = DDPArguments(bucket_cap_mb=3), DiLoCoArguments(enabled=True)
    settings = {"output_dir": str(tmp_path), "per_device_train_batch_size": 2, "ddp": options}

    def of(trainer_mesh: str | None, **more: object) -> Replicate:
        args = DDPTrainingArguments(**settings, mesh=trainer_mesh, **more)  # type: ignore[arg-type]
        with fake_job(4) as env:
            trainer = Trainer(
                args, model_init=Model, train_dataset=Rows(), distributed_env=env, parallel=parallel
            )
        (transform,) = (each for each in trainer.transforms if each.axis == "replicate")
        assert isinstance(transform, Replicate)
        return transform

    found = of(mesh, diloco=outer)
    assert (found.ddp, found.diloco) == (options, outer)
    for other in ("dp=2,tp=2", "tp=4"):
        with pytest.raises(ConfigurationError, match=r"ddp\.bucket_cap_mb=3 needs a whole model"):
            of(other)


def test_what_a_transform_was_given_goes_first(tmp_path: Path) -> None:
    args = DDPTrainingArguments(output_dir=str(tmp_path), ddp=DDPArguments(bucket_cap_mb=3))
    given = Replicate(DDPArguments(bucket_cap_mb=7))
    with fake_job(4) as env:
        Trainer(args, model_init=Model, distributed_env=env, parallel=[given])
    assert given.ddp.bucket_cap_mb == 7
