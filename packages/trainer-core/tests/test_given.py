"""Arguments of a wrong type, and settings beside an optimizer or schedule of one's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, ReduceLROnPlateau

from trainer_core import ConfigurationError, Trainer, TrainingArguments

WRONG = {
    "torch_compile": "no",
    "use_cpu": 1,
    "output_dir": 5,
    "fp8_exclude": "model",
    "lr_scheduler_kwargs": None,
    "resume_from_checkpoint": None,
    "max_steps": 3.0,
    "seed": True,
    "learning_rate": "1e-3",
    "weight_decay": False,
    "warmup_steps": None,
    "lr_scheduler_type": 3,
    "sdpa_backend": 7,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_type_is_refused(name: str) -> None:
    value = WRONG[name]
    beside = {"fp8_recipe": "rowwise"} if name == "fp8_exclude" else {}
    with pytest.raises(ConfigurationError, match=re.escape(f"{name}={value!r}")) as caught:
        TrainingArguments(**{"output_dir": "run", **beside, name: value})  # type: ignore[arg-type]
    assert caught.value.setting == name
    assert type(value).__name__ in str(caught.value)


def test_values_that_serve_for_their_type() -> None:
    args = TrainingArguments(
        output_dir="run",
        learning_rate=1,
        max_grad_norm=2,
        sdpa_backend=["math"],
        fp8_recipe="rowwise",
        fp8_exclude=["*.head"],  # type: ignore[arg-type]
        lr_scheduler_kwargs={},
        resume_from_checkpoint="elsewhere",
    )
    assert (args.learning_rate, list(args.fp8_exclude)) == (1, ["*.head"])


@dataclass(frozen=True, kw_only=True)
class OwnArguments(TrainingArguments):
    """More settings, and other defaults."""

    learning_rate: float = 3e-4
    warmup_steps: int = 5
    lr_scheduler_type: str = "cosine_with_min_lr"
    lr_scheduler_kwargs: dict[str, float | int | str | bool] = field(default_factory=lambda: {"min_lr": 1e-5})
    data_mixture: str = "web"


@pytest.fixture
def start(
    ragged_loader: Callable[..., object], tiny_model: Callable[..., torch.nn.Module], tmp_path: object
) -> Callable[..., Trainer]:
    def make(cls: type[TrainingArguments], given: dict[str, object], **settings: object) -> Trainer:
        common = {
            "output_dir": str(tmp_path),
            "max_steps": 2,
            "save_strategy": "no",
            "per_device_train_batch_size": 4,
        }
        return Trainer(
            cls(**common, **settings),  # type: ignore[arg-type]
            model_init=tiny_model,
            train_dataset=ragged_loader(),
            callbacks=[],
            **given,  # type: ignore[arg-type]
        )

    return make


def own_optimizer(named: object) -> Optimizer:
    return SGD(named, lr=0.1)  # type: ignore[arg-type]


def own_schedule(optimizer: Optimizer) -> LRScheduler:
    return ConstantLR(optimizer)


BESIDE_OPTIMIZER = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6}
BESIDE_SCHEDULE = {
    "warmup_steps": 10,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 0.3},
}


@pytest.mark.parametrize("cls", [TrainingArguments, OwnArguments])
@pytest.mark.parametrize("name", [*BESIDE_OPTIMIZER, *BESIDE_SCHEDULE])
def test_a_setting_that_would_have_no_effect_is_refused(
    start: Callable[..., Trainer], cls: type[TrainingArguments], name: str
) -> None:
    given: dict[str, object] = {"optimizer_factory": own_optimizer}
    settings: dict[str, object] = {}
    if name in BESIDE_SCHEDULE:
        given = {"lr_scheduler_factory": own_schedule}
        kind = {} if name == "warmup_steps" else {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {}}
        settings = {**kind, name: BESIDE_SCHEDULE[name]}
    else:
        settings = {name: BESIDE_OPTIMIZER[name]}
    with pytest.raises(ConfigurationError, match="has no effect together with") as caught:
        start(cls, given, **settings).train()
    assert caught.value.setting in settings


def test_an_optimizer_class_counts_as_ones_own(start: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigurationError, match=r"weight_decay=0\.1 has no effect"):
        start(OwnArguments, {"optimizer_cls_and_kwargs": (SGD, {"lr": 0.1})}, weight_decay=0.1).train()


def test_defaults_of_a_subclass_were_not_said_by_the_user(start: Callable[..., Trainer]) -> None:
    given = {"optimizer_factory": own_optimizer, "lr_scheduler_factory": own_schedule}
    assert start(OwnArguments, given).train().global_step == 2


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (ReduceLROnPlateau, "'ReduceLROnPlateau' steps on a metric.*reduce_lr_on_plateau"),
        (lambda optimizer: ConstantLR(SGD(optimizer.param_groups[0]["params"])), "drives another optimizer"),
        (lambda optimizer: None, "'NoneType' is not a torch LRScheduler"),
    ],
)
def test_a_schedule_that_would_not_set_the_rates_is_refused(
    start: Callable[..., Trainer], scheduler: Callable[[Optimizer], object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        start(OwnArguments, {"lr_scheduler_factory": scheduler}).train()
    assert caught.value.setting == "lr_scheduler_factory"


class OtherTrainer(Trainer):
    """Takes one more input."""

    def __init__(self, args: TrainingArguments, *, extra: int = 0, model: torch.nn.Module) -> None:
        super().__init__(args, model=model)
        self.extra = extra


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (
            {"compute_metrics": len},
            "compute_metrics is not an input of the trainer. Did you mean 'eval_metrics'?",
        ),
        ({"tokenizer": None}, "Did you mean 'processing_class'?"),
        ({"eval_datasets": []}, "Did you mean 'eval_dataset'?"),
        ({"max_epochs": 3}, "Did you mean 'num_train_epochs', a setting of TrainingArguments?"),
        (
            {"lr": 3, "zzz": 1},
            "'learning_rate', a setting of TrainingArguments? zzz is not an input of the trainer. L",
        ),
        ({"strategy": "ddp"}, "choose DDPTrainer, FSDP2Trainer or PipelineTrainer"),
    ],
)
def test_an_input_that_does_not_exist_is_answered_with_ours(given: dict[str, object], hint: str) -> None:
    with pytest.raises(TypeError, match=re.escape(hint)):
        Trainer(TrainingArguments(output_dir="run"), **given)


@pytest.mark.parametrize("order", [1, -1])
def test_the_arguments_come_first_and_nothing_else_has_no_name(order: int) -> None:
    both = (torch.nn.Linear(1, 1), TrainingArguments(output_dir="run"))[::order]
    for unnamed in (both, both[:1] if order == 1 else ("run",)):
        with pytest.raises(
            TypeError, match=r"the arguments come first, and only they have no name. Write Tr"
        ):
            Trainer(*unnamed)  # type: ignore[arg-type, misc]


def test_a_subclass_has_inputs_of_its_own() -> None:
    args = TrainingArguments(output_dir="run")
    trainer = OtherTrainer(args, model=torch.nn.Linear(1, 1), extra=3)
    assert trainer.extra == 3
    with pytest.raises(TypeError, match="OtherTrainer: train_dataset is not an input"):
        OtherTrainer(args, model=torch.nn.Linear(1, 1), train_dataset=[])  # type: ignore[call-arg]


def test_help_shows_what_is_really_taken() -> None:
    assert [*inspect.signature(Trainer).parameters][:3] == ["args", "model", "model_init"]
    assert [*inspect.signature(OtherTrainer).parameters] == ["args", "extra", "model"]
    assert "learning_rate" in inspect.signature(TrainingArguments).parameters
