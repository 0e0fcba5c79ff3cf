"""The trainers that `train` can be told to use, and which settings belong to which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Self, TypeVar

from dist_env import DistributedEnvironment
from trainer_core import ConfigurationError, Trainer, TrainingArguments, suggest
from trainer_ddp import DDPTrainer
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer
from trainer_pipeline import PipelineTrainer, PipelineTrainingArguments

from .mesh import parse_mesh
from .program import PROG

Arguments = TypeVar("Arguments", bound=TrainingArguments)

TRAINERS: Mapping[str, type[Trainer]] = {
    "single": Trainer,
    "ddp": DDPTrainer,
    "fsdp2": FSDP2Trainer,
    "pipeline": PipelineTrainer,
}
"""Name to class. The fields of its `arguments_class` are settings of the application."""
_OF_ALL = "mesh"
"""A setting of some trainers from which the application finds the trainer."""


@dataclass(frozen=True, kw_only=True)
class ShardedPipelineArguments(PipelineTrainingArguments):
    """What `PipelineTrainer` is told where stages are sharded: adds how, for `FullyShard`."""

    fsdp2: FSDP2Arguments = field(default_factory=FSDP2Arguments)
    """How weights are spread over the processes that have a stage."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        if self.fsdp2.replicas != 1:
            raise ConfigurationError(
                "fsdp2.replicas", self.fsdp2.replicas, "has no effect in a pipeline", "set dp in mesh"
            )

    def for_planning(self, batch_size: int) -> Self:
        """The settings of a run that takes as much memory, without an accelerator; of FP8 it takes bf16's."""
        plain = replace(self, fsdp2=replace(self.fsdp2, fp8_all_gather=False))
        return super(ShardedPipelineArguments, plain).for_planning(batch_size)


def arguments_class(name: str, *, shards_stages: bool) -> type[TrainingArguments]:
    """The class of what a trainer is told.

    Args:
        name: The setting `trainer`.
        shards_stages: Whether processes share out the weights of the stages of a pipeline.
    """
    return ShardedPipelineArguments if shards_stages else TRAINERS[name].arguments_class


def check_trainer(name: str, args: TrainingArguments, *, shards_stages: bool) -> None:
    """Check the choice of a trainer, the settings that only it has, and that none belongs only to others.

    Args:
        name: The setting `trainer`.
        args: The settings of the application; they have every field of every `arguments_class`.
        shards_stages: Whether processes share out the weights of the stages of a pipeline.

    Raises:
        ConfigurationError: For an unknown name, a setting of another trainer, or a broken rule of this one.
    """
    if name not in TRAINERS:
        choices = ", ".join(map(repr, TRAINERS))
        raise ConfigurationError("trainer", name, f"must be one of {choices}", suggest(name, TRAINERS))
    chosen = arguments_class(name, shards_stages=shards_stages)
    own = {_OF_ALL, *(each.name for each in fields(chosen))}
    for each in fields(args):
        owners = [other for other in TRAINERS if each.name in _settings_of(other)]
        if owners and each.name not in own:
            _refuse_changed(name, each, getattr(args, each.name), owners)
    trainer_arguments(chosen, args)


def trainer_arguments(cls: type[Arguments], args: TrainingArguments) -> Arguments:
    """Return what a trainer is told: those settings of the application that it knows.

    Args:
        cls: The class of its arguments.
        args: The settings of the application.

    Raises:
        ConfigurationError: For the first of its rules that is broken.
    """
    return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


def check_processes(name: str, mesh: str, world_size: int) -> None:
    """Refuse a trainer of one process where a launcher has started several, and a mesh of another size.

    Raises:
        ConfigurationError: If it has; the message says what to type.
    """
    if mesh and parse_mesh(mesh).world_size != world_size:
        raise ConfigurationError(
            "mesh",
            mesh,
            f"is of {parse_mesh(mesh).world_size} processes, and {world_size} were started",
            "start as many, or change the mesh",
        )
    if name == "single" and world_size > 1:
        raise ConfigurationError(
            "trainer",
            name,
            f"is one process, and {world_size} were started",
            f"use `{PROG} train` for one, or `{launch_command(world_size, 'ddp')}` to share the work",
        )


def refuse_several_processes(command: str) -> None:
    """Refuse to do the same thing in each of the processes that a launcher has started.

    Raises:
        ConfigurationError: If it has started several.
    """
    processes = DistributedEnvironment().world_size
    if processes > 1:
        raise ConfigurationError(
            "WORLD_SIZE",
            processes,
            f"{command} is one process, and {processes} were started",
            f"use `{PROG} {command}` without a launcher",
        )


def launch_command(processes: int, trainer: str) -> str:
    """What to type to train with several processes on one machine."""
    axis = {"fsdp2": "shard", "pipeline": "pp"}.get(trainer, "dp")
    return f"{PROG} train --mesh {axis}={processes}"


def _settings_of(name: str) -> set[str]:
    return {field.name for field in fields(TRAINERS[name].arguments_class)}


def _refuse_changed(name: str, field: Field[object], value: object, owners: list[str]) -> None:
    for setting, given in _changes(field.name, value, _default_of(field)):
        others = " or ".join(f"trainer={owner!r}" for owner in owners)
        raise ConfigurationError(
            setting, given, f"has no effect with trainer={name!r}", f"leave it out, or use {others}"
        )


def _changes(name: str, value: object, default: object) -> Iterator[tuple[str, object]]:
    """Settings that are not at their defaults, with dots for nested ones."""
    if is_dataclass(value) and type(value) is type(default):
        for field in fields(value):
            yield from _changes(
                f"{name}.{field.name}", getattr(value, field.name), getattr(default, field.name)
            )
    elif value != default:
        yield name, value


def _default_of(field: Field[object]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
