"""Settings that cannot be used are refused when they are made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dist_env import DistributedEnvironmentError
from trainer_core import ConfigurationError, RegressionLoss, TrainingArguments, arguments_from_dict
from trainer_ddp import (
    CompressionArguments,
    DDPArguments,
    DDPTrainer,
    DDPTrainingArguments,
    DiLoCoArguments,
    PostLocalSGDArguments,
)

LOCAL = PostLocalSGDArguments(enabled=True, start_step=1, period=2)
OUTER = DiLoCoArguments(enabled=True)

REFUSED = {
    "uneven_batches='drop' must be one of": {"uneven_batches": "drop"},
    "fuse_optim_with_backward=True steps each parameter": {
        "fuse_optim_with_backward": True,
        "max_grad_norm": None,
    },
    "ddp.bucket_cap_mb=0 must be at least 1": {"ddp": DDPArguments(bucket_cap_mb=0)},
    "ddp.skip_all_reduce_unused_params=True has no effect without": {
        "ddp": DDPArguments(skip_all_reduce_unused_params=True)
    },
    "ddp.static_graph=True replaces what the model returns": {
        "ddp": DDPArguments(static_graph=True),
        "fused_loss": "chunked",
    },
    "ddp.find_unused_parameters=True replaces what the model returns": {
        "ddp": DDPArguments(find_unused_parameters=True),
        "fused_loss": "auto",
    },
    "ddp.find_unused_parameters=True looks in each step": {
        "ddp": DDPArguments(find_unused_parameters=True, static_graph=True)
    },
    "compression.method='int8' must be one of": {"compression": CompressionArguments(method="int8")},
    "compression.matrix_rank=0 must be at least 1": {
        "compression": CompressionArguments(method="powerSGD", matrix_rank=0)
    },
    "compression.start_step=5 has no effect with compression.method='fp16'": {
        "compression": CompressionArguments(method="fp16", start_step=5)
    },
    "post_local_sgd.start_step=None must be set": {
        "post_local_sgd": PostLocalSGDArguments(enabled=True, period=2)
    },
    "post_local_sgd.period=None must be set": {
        "post_local_sgd": PostLocalSGDArguments(enabled=True, start_step=2)
    },
    "post_local_sgd.period=0 must be at least 1": {
        "post_local_sgd": PostLocalSGDArguments(enabled=True, start_step=2, period=0)
    },
    "post_local_sgd.period=3 has no effect while post_local_sgd.enabled is off": {
        "post_local_sgd": PostLocalSGDArguments(period=3)
    },
    "diloco.inner_steps=7 has no effect while diloco.enabled is off": {
        "diloco": DiLoCoArguments(inner_steps=7)
    },
    "diloco.outer_momentum=1.0 must be below 1": {
        "diloco": DiLoCoArguments(enabled=True, outer_momentum=1.0)
    },
    "diloco.enabled=True cannot be combined with post_local_sgd.enabled": {
        "diloco": OUTER,
        "post_local_sgd": LOCAL,
    },
    "compression.method='bf16' makes gradients smaller": {
        "compression": CompressionArguments(method="bf16"),
        "diloco": OUTER,
    },
    "compression.method='powerSGD' adds what is lost of one gradient": {
        "compression": CompressionArguments(method="powerSGD"),
        "mixed_precision": "fp16",
    },
    "mixed_precision='fp16' skips steps": {"mixed_precision": "fp16", "post_local_sgd": LOCAL},
    "ema_decay=0.9 averages the weights of all ranks": {"ema_decay": 0.9, "diloco": OUTER},
    "optim='schedule_free_adamw' averages the weights": {
        "optim": "schedule_free_adamw",
        "lr_scheduler_type": "constant",
        "post_local_sgd": LOCAL,
    },
    "ddp.static_graph=True promises": {"ddp": DDPArguments(static_graph=True), "post_local_sgd": LOCAL},
}


@pytest.mark.parametrize(("message", "settings"), REFUSED.items(), ids=REFUSED)
def test_refused(message: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        DDPTrainingArguments(**settings)  # type: ignore[arg-type]


def test_nested_groups_come_from_dicts() -> None:
    args = arguments_from_dict(
        DDPTrainingArguments,
        {"ddp": {"bucket_cap_mb": 5}, "post_local_sgd": {"enabled": True, "start_step": 1, "period": 2}},
    )
    assert args.ddp == DDPArguments(bucket_cap_mb=5)
    assert args.post_local_sgd == LOCAL


def test_an_unknown_nested_key_is_named_with_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("post_local_sgd.perod")) as error:
        arguments_from_dict(DDPTrainingArguments, {"post_local_sgd": {"perod": 2}})
    assert "Did you mean 'period'?" in str(error.value)


def test_a_wrong_nested_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("ddp.bucket_cap_mb")):
        arguments_from_dict(DDPTrainingArguments, {"ddp": {"bucket_cap_mb": "large"}})


def test_evaluation_follows_training_unless_told() -> None:
    assert DDPTrainingArguments().dispatches_evaluation
    assert not DDPTrainingArguments(dispatch_batches=False).dispatches_evaluation
    assert DDPTrainingArguments(dispatch_batches=False, dispatch_eval_batches=True).dispatches_evaluation


def test_arguments_of_another_trainer_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not the arguments class of DDPTrainer"):
        DDPTrainer(TrainingArguments(use_cpu=True), model_init=lambda: None)  # type: ignore[arg-type, return-value]


def test_variables_of_a_launcher_that_are_not_whole_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(DistributedEnvironmentError, match="WORLD_SIZE=2 is set but RANK is not"):
        DDPTrainer(DDPTrainingArguments(use_cpu=True), model_init=lambda: None)  # type: ignore[arg-type, return-value]


def test_an_optimizer_with_an_average_beside_local_steps_is_refused(tmp_path: Path) -> None:
    args = DDPTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", post_local_sgd=LOCAL
    )
    trainer = DDPTrainer(
        args,
        model=torch.nn.Linear(2, 2),
        train_dataset=[{"input": torch.zeros(2), "labels": torch.zeros(2)}],
        compute_loss_func=RegressionLoss(),
        optimizer_cls_and_kwargs=(Switching, {"lr": 0.1}),
    )
    with pytest.raises(ConfigurationError, match="optimizer='Switching' averages weights"):
        trainer.train()


class Switching(torch.optim.SGD):
    """Has the two methods by which the optimizers of schedulefree change what the model holds."""

    def train(self) -> None:
        """Put the weights into the model."""

    def eval(self) -> None:
        """Put the average into the model."""
