from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trainer_core import (
    ConfigurationError,
    TrainingArguments,
    arguments_from_dict,
    field_docs,
    load_config_file,
)

BAD = [
    ({"max_step": 3}, "max_step=3.*did you mean 'max_steps'"),
    ({"max_steps": "3"}, "max_steps='3'.*str.*int"),
    ({"max_steps": -2}, "max_steps=-2"),
    ({"max_steps": True}, "max_steps=True"),
    ({"learning_rate": "fast"}, "learning_rate='fast'"),
    ({"learning_rate": -1.0}, r"learning_rate=-1\.0.*0 to 1000"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0.*at least 1"),
    ({"eval_strategy": "step"}, "eval_strategy='step'.*'steps'"),
    ({"num_train_epochs": -1}, "num_train_epochs.*set max_steps"),
    ({"save_total_limit": 0}, "save_total_limit=0"),
    ({"mixed_precision": "bf17"}, "mixed_precision='bf17'.*'bf16'"),
    ({"torch_compile_backend": "inductor"}, "torch_compile_backend.*has no effect"),
    ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor=2.*dataloader_num_workers"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps=3.*constant_with_warmup"),
    ({"peak_hardware_flops": 0.0}, "peak_hardware_flops"),
    ({"lr_scheduler_type": "cos"}, "lr_scheduler_type='cos'.*'cosine'"),
    ({"adam_beta2": 1.0}, "adam_beta2"),
    ({"num_train_epochs": float("inf")}, "num_train_epochs=inf"),
    ({"lr_scheduler_kwargs": {"min_lr": 0.1}}, r"lr_scheduler_kwargs\.min_lr=0\.1: is no option of 'linear'"),
    ({"speed_metrics_start_step": -1}, "speed_metrics_start_step"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[next(iter(bad)) for bad, _ in BAD])
def test_bad_settings_name_setting_value_and_way_out(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments_from_dict(TrainingArguments, settings)


def test_whole_numbers_serve_as_floats_and_arguments_are_frozen() -> None:
    args = arguments_from_dict(TrainingArguments, {"learning_rate": 1, "max_grad_norm": 2})
    assert (args.learning_rate, args.max_grad_norm) == (1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 3  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    docs = field_docs(TrainingArguments)
    assert set(docs) == {field.name for field in dataclasses.fields(TrainingArguments)}
    assert docs["max_steps"].startswith("Most optimizer steps")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "learning_rate: 3e-4\nmax_steps: 10\n"),
        ("run.yml", "learning_rate: 0.0003\nmax_steps: 10\n"),
        ("run.yaml", "learning_rate: 3E-4\nmax_steps: 10\nsave_strategy: no\n"),
        ("run.toml", "learning_rate = 3e-4\nmax_steps = 10\n"),
    ],
)
def test_files_give_the_same_arguments(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    args = arguments_from_dict(TrainingArguments, load_config_file(path))
    assert (args.learning_rate, args.max_steps) == (3e-4, 10)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{}", "must end in"),
        ("run.yaml", "- a\n- b\n", "must hold names with values"),
        ("run.yaml", "a: [1\n", "is malformed"),
        ("run.toml", "a = \n", "is malformed"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_config_file(path)
    assert name in str(caught.value)


def test_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config_file(tmp_path / "none.toml")
    (tmp_path / "empty.yaml").write_text("")
    assert load_config_file(tmp_path / "empty.yaml") == {}
