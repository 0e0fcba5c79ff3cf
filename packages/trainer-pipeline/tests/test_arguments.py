"""Settings that cannot be used are refused when they are made, or before the ranks meet."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleZBVZeroBubble

import trainer_pipeline
from dist_env import DistributedEnvironmentError, ParallelLayout, StaticDistributedEnvironment
from dist_env.logging import forget_warnings
from trainer_core import (
    ConfigurationError,
    DataParallelArguments,
    Ranks,
    Trainer,
    TrainingArguments,
    arguments_from_dict,
)
from trainer_pipeline import PipelineArguments, PipelineStages, PipelineTrainer, PipelineTrainingArguments

REFUSED: dict[str, dict[str, object]] = {
    "pipeline.schedule='1f1' must be one of gpipe, 1f1b": {"schedule": "1f1"},
    "pipeline.schedule='GPipes' must be one of": {"schedule": "GPipes"},
    "pipeline.n_microbatches=0 must be at least 1. Set it": {"n_microbatches": 0},
    "pipeline.n_microbatches='4' must be a whole number": {"n_microbatches": "4"},
    "pipeline.n_microbatches=True must be a whole number": {"n_microbatches": True},
    "pipeline.n_microbatches=None must be a whole number": {"n_microbatches": None},
    "pipeline.stages_per_rank=0 must be at least 1. Set it": {"stages_per_rank": 0},
    "pipeline.stages_per_rank=1.5 must be a whole number": {"stages_per_rank": 1.5},
    "pipeline.replicas=0 must be at least 1. Set it": {"replicas": 0},
    "pipeline.replicas=-2 must be at least 1. Set it": {"replicas": -2},
    "pipeline.balance='time' must be one of flops, parameters, layers": {"balance": "time"},
    "pipeline.layers_per_stage=() must be a tuple of numbers of layers. Write (4, 4)": {
        "layers_per_stage": ()
    },
    "pipeline.layers_per_stage=4 must be a tuple of numbers of layers": {"layers_per_stage": 4},
    "pipeline.layers_per_stage=(4, 0) must have at least one layer for each stage": {
        "layers_per_stage": (4, 0)
    },
    "pipeline.layers_per_stage=(2.5, 1.5) must have at least one layer": {"layers_per_stage": (2.5, 1.5)},
    "fuse_optim_with_backward=True steps each parameter after every microbatch": {
        "fuse_optim_with_backward": True
    },
    "mixed_precision='fp16' needs a loss scale that all stages share": {"mixed_precision": "fp16"},
    "default_dtype='float16' needs a loss scale": {"default_dtype": "float16"},
    "dispatch_batches=False lets every rank read its own batches": {"dispatch_batches": False},
    "dispatch_eval_batches=False lets every rank read its own batches": {"dispatch_eval_batches": False},
}
SUGGESTED = {
    "1f1": "1f1b",
    "GPIPE": "gpipe",
    "interleaved_1f1": "interleaved_1f1b",
    "zvb": "zbv",
    "dual_pipe_v": "dualpipe_v",
}
# By message: ranks, then settings.
OF_LAYOUT: dict[str, tuple[int, dict[str, object]]] = {
    "pipeline.stages_per_rank=2 must be 1 with gpipe, which has one stage on each rank. Leave it out": (
        2,
        {"schedule": "gpipe", "stages_per_rank": 2},
    ),
    "pipeline.stages_per_rank=3 must be 1 with 1f1b, which has one stage on each rank. Leave it out": (
        2,
        {"schedule": "1f1b", "stages_per_rank": 3},
    ),
    "pipeline.stages_per_rank=1 must be 2 with zbv, which has two stages on each rank. Leave it out": (
        2,
        {"schedule": "zbv", "stages_per_rank": 1},
    ),
    "pipeline.stages_per_rank=3 must be 2 with dualpipe_v": (
        2,
        {"schedule": "dualpipe_v", "stages_per_rank": 3, "n_microbatches": 8},
    ),
    "pipeline.replicas=3 must divide the 4 ranks and leave at least two for each pipeline": (
        4,
        {"replicas": 3},
    ),
    "pipeline.replicas=4 must divide the 4 ranks and leave at least two": (4, {"replicas": 4}),
    "pipeline.layers_per_stage=(2, 2, 2) must have one number for each of the 2 stages": (
        2,
        {"layers_per_stage": (2, 2, 2)},
    ),
    "pipeline.layers_per_stage=(4, 4) must have one number for each of the 4 stages": (
        2,
        {"schedule": "zbv", "layers_per_stage": (4, 4)},
    ),
    "pipeline.n_microbatches=3 must be at least 4 with 1f1b, the number of stages. Raise it, or use gpipe": (
        4,
        {"n_microbatches": 3},
    ),
    "pipeline.n_microbatches=7 must be at least 8 with dualpipe_v, the number of stages": (
        4,
        {"schedule": "dualpipe_v", "n_microbatches": 7},
    ),
    "torch_compile=True cannot be used with zbv": (2, {"schedule": "zbv", "torch_compile": True}),
    "torch_compile=True cannot be used with interleaved_zero_bubble": (
        2,
        {"schedule": "interleaved_zero_bubble", "torch_compile": True},
    ),
    "activation_checkpointing='full' cannot be used with zbv": (
        2,
        {"schedule": "zbv", "activation_checkpointing": "full"},
    ),
    "activation_checkpointing='full' cannot be used with dualpipe_v": (
        2,
        {"schedule": "dualpipe_v", "activation_checkpointing": "full"},
    ),
}
# By deprecated setting, for eight ranks.
OF_REPLICAS: dict[str, dict[str, object]] = {
    "pp=4,dp=2": {"replicas": 2},
    "pp=2,dp=4": {"replicas": 4},
    "pp=2,shard=4": {"replicas": 4, "shard_replicas": True},
}
WITH_MESH: dict[str, dict[str, object]] = {
    "pipeline.replicas=2 cannot be given together with mesh='pp=2,dp=2'": {
        "mesh": "pp=2,dp=2",
        "replicas": 2,
    },
    "pipeline.replicas=2 cannot be given together with mesh='pp=2'": {
        "mesh": "pp=2",
        "replicas": 2,
        "shard_replicas": True,
    },
}
NO_SCHEDULES = (dict, nn.Linear, lambda stage, **options: None, "gpipe")


def arguments(settings: dict[str, object]) -> PipelineTrainingArguments:
    """Arguments; settings of the pipeline go by their own names."""
    names = PipelineArguments.__dataclass_fields__
    pipeline = {name: value for name, value in settings.items() if name in names}
    others = {name: value for name, value in settings.items() if name not in names}
    return PipelineTrainingArguments(
        pipeline=PipelineArguments(**pipeline),  # type: ignore[arg-type]
        **{"use_cpu": True, **others},  # type: ignore[arg-type]
    )


def of_rank_0(ranks: int) -> StaticDistributedEnvironment:
    """The first of several ranks, which have not met."""
    return StaticDistributedEnvironment(world_size=ranks, local_world_size=ranks)


def model() -> nn.Module:
    """A model with blocks."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(("message", "settings"), REFUSED.items(), ids=REFUSED)
def test_refused(message: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        arguments(settings)


@pytest.mark.parametrize("name", SUGGESTED)
def test_a_schedule_of_another_spelling_is_suggested(name: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"Did you mean {SUGGESTED[name]!r}?")):
        arguments({"schedule": name})


@pytest.mark.parametrize(("message", "case"), OF_LAYOUT.items(), ids=OF_LAYOUT)
def test_what_does_not_fit_the_ranks_is_refused_before_they_meet(
    message: str, case: tuple[int, dict[str, object]]
) -> None:
    ranks, settings = case
    # With one rank there is no pipeline, and nothing to refuse.
    PipelineTrainer(arguments(settings | {"replicas": 1}), model_init=model)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        PipelineTrainer(arguments(settings), model_init=model, distributed_env=of_rank_0(ranks))


@pytest.mark.parametrize(("mesh", "settings"), OF_REPLICAS.items(), ids=OF_REPLICAS)
def test_deprecated_replicas_are_sizes_of_the_mesh(
    mesh: str, settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    assert arguments(settings).layout(8) == ParallelLayout.parse(mesh)
    assert arguments(settings).layout(8) == arguments({"mesh": mesh}).layout(8)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["pipeline.replicas is deprecated; set mesh='pp=..,dp=..', or 'pp=..,shard=..'"]


def test_without_sizes_all_ranks_are_one_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    forget_warnings()
    assert arguments({}).layout(8) is None
    assert arguments({"replicas": 2}).layout(1) is None
    assert not caplog.records
    trainer = PipelineTrainer(arguments({}), model_init=model)
    assert trainer.ranks.layout == ParallelLayout()


@pytest.mark.parametrize(("message", "settings"), WITH_MESH.items(), ids=WITH_MESH)
def test_deprecated_replicas_beside_mesh_are_refused(message: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)) as error:
        arguments(settings)
    assert "Leave pipeline.replicas out, and set mesh=" in str(error.value)


def test_stages_whose_settings_contradict_the_mesh_are_refused() -> None:
    args = DataParallelArguments(mesh="pp=4,dp=2", use_cpu=True)
    stages = PipelineStages(PipelineArguments(replicas=4))
    with pytest.raises(ConfigurationError, match=re.escape("contradicts the layout pp=4,dp=2")):
        Trainer(args, model_init=model, parallel=[stages], distributed_env=of_rank_0(8))


@pytest.mark.parametrize(
    ("message", "settings"),
    {
        "fuse_optim_with_backward=True steps each parameter": {"fuse_optim_with_backward": True},
        "mixed_precision='fp16' needs a loss scale": {"mixed_precision": "fp16"},
        "dispatch_batches=False lets every rank read its own batches, but some ranks of the layout pp=2": {
            "dispatch_batches": False
        },
    }.items(),
)
def test_stages_are_refused_with_arguments_of_another_trainer(
    message: str, settings: dict[str, object]
) -> None:
    args = DataParallelArguments(mesh="pp=2", use_cpu=True, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Trainer(args, model_init=model, parallel=[PipelineStages()], distributed_env=of_rank_0(2))


def test_schedules_that_split_the_backward_pass_are_refused_with_shards() -> None:
    for settings, setting in (
        ({"mesh": "pp=2,shard=2"}, "mesh='pp=2,shard=2' cannot be used with zbv"),
        ({"mesh": "pp=2,cp=2"}, "mesh='pp=2,cp=2' cannot be used with zbv"),
        ({"replicas": 2, "shard_replicas": True}, "pipeline.shard_replicas=True cannot be used with zbv"),
    ):
        args = arguments({"schedule": "zbv", **settings})
        ranks = Ranks(of_rank_0(4), args.layout(4))
        with pytest.raises(ConfigurationError, match=re.escape(setting)):
            PipelineStages().check(args, ranks)


def test_the_name_of_the_old_seam_says_what_replaces_it() -> None:
    with pytest.raises(AttributeError, match=r"parallel=\[PipelineStages\(\)\]"):
        _ = trainer_pipeline.PipelineParallelism


def test_a_mesh_with_stages_finds_them() -> None:
    args = DataParallelArguments(mesh="pp=2", use_cpu=True, dispatch_eval_batches=False)
    (entry,) = entry_points(group="trainer_core.transforms", name="pipeline")
    assert isinstance(entry.load()(args), PipelineStages)


def test_a_schedule_class_decides_instead_of_the_name() -> None:
    with pytest.raises(ConfigurationError, match="torch_compile=True cannot be used with ScheduleZBVZero"):
        PipelineTrainer(
            arguments({"schedule": "gpipe", "torch_compile": True}),
            model_init=model,
            pipe_schedule_factory=ScheduleZBVZeroBubble,
            distributed_env=of_rank_0(2),
        )


@pytest.mark.parametrize("factory", NO_SCHEDULES, ids=("dict", "module", "function", "name"))
def test_what_is_no_schedule_class_is_refused(factory: object) -> None:
    with pytest.raises(ConfigurationError, match="pipe_schedule_factory=") as error:
        PipelineTrainer(arguments({}), model_init=model, pipe_schedule_factory=factory)  # type: ignore[arg-type]
    assert "must be a schedule class of torch.distributed.pipelining" in str(error.value)
    assert "name a schedule in pipeline.schedule" in str(error.value)


def test_nested_groups_come_from_dicts() -> None:
    args = arguments_from_dict(
        PipelineTrainingArguments,
        {"pipeline": {"schedule": "zbv", "n_microbatches": 8, "layers_per_stage": [3, 3, 3, 3]}},
    )
    assert args.pipeline == PipelineArguments(schedule="zbv", n_microbatches=8, layers_per_stage=(3, 3, 3, 3))


def test_an_unknown_nested_key_is_named() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("pipeline.n_microbatch")) as error:
        arguments_from_dict(PipelineTrainingArguments, {"pipeline": {"n_microbatch": 2}})
    assert "Did you mean 'n_microbatches'?" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"), {"replicas": "two", "n_microbatches": 1.5, "layers_per_stage": "4"}.items()
)
def test_a_wrong_nested_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"pipeline.{name}")):
        arguments_from_dict(PipelineTrainingArguments, {"pipeline": {name: value}})


def test_arguments_of_another_trainer_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not the arguments class of PipelineTrainer"):
        PipelineTrainer(TrainingArguments(use_cpu=True), model_init=model)


def test_variables_of_a_launcher_that_are_not_whole_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(DistributedEnvironmentError, match="WORLD_SIZE=2 is set but RANK is not"):
        PipelineTrainer(arguments({}), model_init=model)


def test_one_process_has_everything(tmp_path: Path) -> None:
    trainer = PipelineTrainer(
        arguments({"schedule": "zbv", "output_dir": str(tmp_path), "seed": 3}),
        model_init=model,
        distributed_env=StaticDistributedEnvironment(),
    )
    found = dict(trainer.unwrapped_model().named_parameters())
    torch.manual_seed(3)
    for name, value in model().named_parameters():
        assert torch.equal(found[name], value), name
