"""Settings that cannot be used are refused when they are made, or before the ranks meet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dist_env import DistributedEnvironmentError, StaticDistributedEnvironment
from trainer_core import ConfigurationError, TrainingArguments, arguments_from_dict
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer, FSDP2TrainingArguments

REFUSED = {
    "fuse_optim_with_backward=True steps each parameter": {"fuse_optim_with_backward": True},
    "fsdp2.param_dtype='float16' exceeds the range of float16": {
        "fsdp2": FSDP2Arguments(param_dtype="float16")
    },
    "fsdp2.reduce_dtype='float16' exceeds the range of float16": {
        "fsdp2": FSDP2Arguments(reduce_dtype="float16")
    },
    "default_dtype='float16' exceeds the range of float16": {"default_dtype": "float16"},
    "torch_compile_full_graph=True cannot be used with torch_compile_scope='model'": {
        "torch_compile": True,
        "torch_compile_full_graph": True,
    },
    "fsdp2.replicas='2' must be a whole number": {"fsdp2": FSDP2Arguments(replicas="2")},  # type: ignore[arg-type]
    "fsdp2.reshard_after_forward=None must be True, False or": {
        "fsdp2": FSDP2Arguments(reshard_after_forward=None)  # type: ignore[arg-type]
    },
    "fsdp2.layer_classes='Block' must be a tuple": {"fsdp2": FSDP2Arguments(layer_classes="Block")},  # type: ignore[arg-type]
    "fsdp2.param_dtype='bf16' must be 'float32' or 'bfloat16'": {"fsdp2": FSDP2Arguments(param_dtype="bf16")},
    "fsdp2.reduce_dtype='half' must be 'float32'": {"fsdp2": FSDP2Arguments(reduce_dtype="half")},
    "fsdp2.replicas=0 must be at least 1": {"fsdp2": FSDP2Arguments(replicas=0)},
    "fsdp2.prefetch_depth=0 must be at least 1": {"fsdp2": FSDP2Arguments(prefetch_depth=0)},
    "fsdp2.reshard_after_forward=1 must be True, False or a number of ranks of at least 2": {
        "fsdp2": FSDP2Arguments(reshard_after_forward=1)
    },
    "fsdp2.layer_classes=() names no class": {"fsdp2": FSDP2Arguments(layer_classes=())},
    "fsdp2.fp8_all_gather=True needs fp8_recipe='tensorwise'": {"fsdp2": FSDP2Arguments(fp8_all_gather=True)},
    "fsdp2.layer_classes=('Block',) has no effect without fsdp2.shard_transformer_layers": {
        "fsdp2": FSDP2Arguments(layer_classes=("Block",), shard_transformer_layers=False)
    },
    "fsdp2.reduce_each_microbatch=True has no effect with gradient_accumulation_steps=1": {
        "fsdp2": FSDP2Arguments(reduce_each_microbatch=True)
    },
    "fsdp2.prefetch_depth=2 has no effect without fsdp2.shard_transformer_layers": {
        "fsdp2": FSDP2Arguments(prefetch_depth=2, shard_transformer_layers=False)
    },
    "transformer_layers_path='layers' has no effect": {
        "transformer_layers_path": "layers",
        "fsdp2": FSDP2Arguments(shard_transformer_layers=False),
    },
    "uneven_batches='drop' must be one of": {"uneven_batches": "drop"},
}
MISNAMED = {
    "fsdp2.reshard_after_foward": ({"reshard_after_foward": True}, "Did you mean 'reshard_after_forward'?"),
    "fsdp2.buffer_dtype": ({"buffer_dtype": "float32"}, "is not a known setting"),
}
WRONG_TYPES = {
    "reshard_after_forward": "always",
    "replicas": 1.5,
    "cpu_offload": "yes",
    "layer_classes": "Block",
}


def model() -> nn.Module:
    """A model with blocks."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(("message", "settings"), REFUSED.items(), ids=REFUSED)
def test_refused(message: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        FSDP2TrainingArguments(**settings)  # type: ignore[arg-type]


def test_nested_groups_come_from_dicts() -> None:
    args = arguments_from_dict(
        FSDP2TrainingArguments,
        {"fsdp2": {"reshard_after_forward": 2, "replicas": 2, "layer_classes": ["Block"]}},
    )
    assert args.fsdp2 == FSDP2Arguments(reshard_after_forward=2, replicas=2, layer_classes=("Block",))


@pytest.mark.parametrize("name", MISNAMED)
def test_an_unknown_nested_key_is_named(name: str) -> None:
    settings, words = MISNAMED[name]
    with pytest.raises(ConfigurationError, match=re.escape(name)) as error:
        arguments_from_dict(FSDP2TrainingArguments, {"fsdp2": settings})
    assert words in str(error.value)


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_nested_type_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"fsdp2.{name}")):
        arguments_from_dict(FSDP2TrainingArguments, {"fsdp2": {name: WRONG_TYPES[name]}})


def test_arguments_of_another_trainer_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not the arguments class of FSDP2Trainer"):
        FSDP2Trainer(TrainingArguments(use_cpu=True), model_init=model)


def test_variables_of_a_launcher_that_are_not_whole_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(DistributedEnvironmentError, match="WORLD_SIZE=2 is set but RANK is not"):
        FSDP2Trainer(FSDP2TrainingArguments(use_cpu=True), model_init=model)


@pytest.mark.parametrize("fsdp2", [FSDP2Arguments(param_dtype="bfloat16"), FSDP2Arguments(cpu_offload=True)])
def test_one_process_that_asks_for_sharding_needs_a_group(fsdp2: FSDP2Arguments) -> None:
    with pytest.raises(ConfigurationError, match="needs a process group of that size") as error:
        FSDP2Trainer(
            FSDP2TrainingArguments(fsdp2=fsdp2),
            model_init=model,
            distributed_env=StaticDistributedEnvironment(),
        )
    assert "DistributedEnvironment" in str(error.value)


def test_copies_do_not_fit_one_process() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("fsdp2.replicas=2 must divide the world size, 1")):
        FSDP2Trainer(
            FSDP2TrainingArguments(fsdp2=FSDP2Arguments(replicas=2)),
            model_init=model,
            distributed_env=StaticDistributedEnvironment(),
        )


def test_one_process_shards_nothing(tmp_path: Path) -> None:
    trainer = FSDP2Trainer(
        FSDP2TrainingArguments(output_dir=str(tmp_path), seed=3),
        model_init=model,
        distributed_env=StaticDistributedEnvironment(),
    )
    found = dict(trainer.unwrapped_model().named_parameters())
    torch.manual_seed(3)
    for name, value in model().named_parameters():
        assert not isinstance(found[name], DTensor)
        assert torch.equal(found[name], value), name


def test_one_process_refuses_a_path_to_layers_that_are_not_there(tmp_path: Path) -> None:
    args = FSDP2TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, transformer_layers_path="nothing", save_strategy="no"
    )
    with pytest.raises(ConfigurationError, match="transformer_layers_path='nothing'"):
        FSDP2Trainer(args, model_init=model).unwrapped_model()


def test_utilization_is_held_against_the_peak_of_what_layers_compute_in() -> None:
    in_bfloat16 = FSDP2Arguments(param_dtype="bfloat16")
    assert FSDP2TrainingArguments().matmul_dtype == "fp32"
    assert FSDP2TrainingArguments(fsdp2=in_bfloat16).matmul_dtype == "bf16"
    assert FSDP2TrainingArguments(mixed_precision="bf16").matmul_dtype == "bf16"
