"""The settings of a pretraining run, and which of them belong to which trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Self, TypeVar

from trainer_core import ConfigurationError, DataParallelArguments, Trainer, TrainingArguments, suggest
from trainer_ddp import CompressionArguments, DDPArguments, DDPTrainer, DiLoCoArguments, PostLocalSGDArguments
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer
from trainer_pipeline import PipelineArguments, PipelineTrainer, PipelineTrainingArguments

from .exit_codes import PROG
from .mesh import check_mesh, parse_mesh

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


# This application builds its own loader of packed rows and never overwrites: these have no effect on it. The
# last one has beside resume_from_checkpoint=False: `--fresh` sets both.
WITHOUT_EFFECT = (
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_drop_last",
    "dataloader_shuffle",
    "overwrite_output_dir",
)


@dataclass(frozen=True, kw_only=True)
class PretrainArguments(DataParallelArguments):
    """Settings of one pretraining run: those of the trainers, with other defaults, and the application's own.

    What belongs to one trainer only is refused while another one is chosen; see `trainers`.

    The defaults train a byte-level model on the text of the Python standard library, in less than three
    minutes on two CPU cores.
    """

    model: str = "tiny"
    """A preset (tiny, 160m, 1b, 7b, 13b, 34b, 70b) or a directory with a config.json."""
    data: str | None = None
    """Directory, glob or file of .txt, .md, .py, .jsonl or .parquet; none: the Python standard library."""
    text_column: str = "text"
    """Key of a .jsonl object, or column of a .parquet file, that holds the text."""
    undecodable: str = "error"
    """What to do with a document that is not UTF-8: error, skip or replace."""
    shards: int | None = None
    """Documents that are read side by side, so that a batch mixes subjects; none: up to 64."""
    tokenizer: str = "byte"
    """byte, or a directory with a Hugging Face tokenizer (needs the extra hf)."""
    vocab_size: int | None = None
    """Ids that a preset has embeddings for; none: those of the tokenizer, up to a multiple of 64."""
    sequence_length: int = 128
    """Tokens of one training row."""
    held_out: float = 0.02
    """Share of the documents kept for evaluation; 0: none, and no evaluation."""
    prompt: str = "def "
    """Text that the sample at the end of the run continues."""
    sample_tokens: int = 120
    """Tokens of that sample; 0: none."""

    trainer: str = "single"
    """single (one process), or how the processes that torchrun starts share the work: ddp (each holds the
    model), fsdp2 (each holds a part of every layer) or pipeline (each holds some of the layers)."""
    mesh: str = ""
    """Processes in each dimension, such as dp=2,shard=4 or pp=2,dp=2: dp replicates the weights, shard
    divides them, pp divides the layers. It chooses the trainer, and starts that many processes on this
    machine unless a launcher has."""
    ddp: DDPArguments = field(default_factory=DDPArguments)
    """With trainer ddp: options of torch's wrapper."""
    compression: CompressionArguments = field(default_factory=CompressionArguments)
    """With trainer ddp: how gradients are made smaller before they travel."""
    post_local_sgd: PostLocalSGDArguments = field(default_factory=PostLocalSGDArguments)
    """With trainer ddp: local steps, after which weights are averaged."""
    diloco: DiLoCoArguments = field(default_factory=DiLoCoArguments)
    """With trainer ddp: local steps, after which an outer optimizer steps."""
    fsdp2: FSDP2Arguments = field(default_factory=FSDP2Arguments)
    """With trainer fsdp2, or a mesh with pp and shard: how weights are spread over the processes."""
    pipeline: PipelineArguments = field(default_factory=PipelineArguments)
    """With trainer pipeline: which layers each process has, and in which order they compute."""

    output_dir: str = "runs/default"
    """Directory of checkpoints, logs, figures and config.yaml."""
    seed: int = 1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 16
    num_train_epochs: float = -1
    max_steps: int = 800
    logging_steps: int = 20
    logging_first_step: bool = True
    eval_strategy: str = "steps"
    eval_steps: int = 200
    max_eval_steps: int = -1
    save_steps: int = 200
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    adam_beta2: float = 0.95
    lr_scheduler_type: str = "cosine_with_min_lr"
    warmup_steps: int = 40
    max_grad_norm: float | None = 1.0

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        self._check_unused()
        check_mesh(self.mesh, self.trainer)
        check_trainer(self.trainer, self, shards_stages=self.shards_stages)
        if self.undecodable not in ("error", "skip", "replace"):
            raise ConfigurationError(
                "undecodable", self.undecodable, "must be error, skip or replace", "choose one of these"
            )
        if self.shards is not None and self.shards < 1:
            raise ConfigurationError("shards", self.shards, "must be at least 1", "use 1 or more")
        if self.seed < 0:
            raise ConfigurationError(
                "seed", self.seed, "must be 0 or more, because a run must be repeatable", "choose a seed"
            )
        if self.sequence_length < 2:
            raise ConfigurationError(
                "sequence_length",
                self.sequence_length,
                "must be at least 2, to predict a token from one",
                "raise it",
            )
        if not 0 <= self.held_out < 1:
            raise ConfigurationError(
                "held_out", self.held_out, "must be from 0 to below 1", "use a share such as 0.05"
            )
        if self.sample_tokens < 0:
            raise ConfigurationError(
                "sample_tokens", self.sample_tokens, "must be 0 or more", "use 0 for no sample"
            )
        if self.sample_tokens and not self.prompt:
            raise ConfigurationError(
                "prompt", self.prompt, "must not be empty", "give a text, or sample_tokens=0"
            )

    @property
    def starts_fresh(self) -> bool:
        """Whether what an earlier run left in `output_dir` moves aside for this one."""
        return self.resume_from_checkpoint is False and self.overwrite_output_dir

    @property
    def uses_blocks(self) -> bool:
        """Whether a setting works on the blocks that transformer_layers_path leads to."""
        return self.trainer in ("fsdp2", "pipeline") or super().uses_blocks

    @property
    def shards_stages(self) -> bool:
        """Whether the processes that have a stage of a pipeline share out its weights."""
        shards = parse_mesh(self.mesh).shard > 1 or self.pipeline.shard_replicas
        return self.trainer == "pipeline" and shards

    def _check_unused(self) -> None:
        for name in WITHOUT_EFFECT:
            default = next(f.default for f in fields(TrainingArguments) if f.name == name)
            if getattr(self, name) != default and not (name == "overwrite_output_dir" and self.starts_fresh):
                raise ConfigurationError(
                    name,
                    getattr(self, name),
                    "has no effect: this application makes its own loader and never overwrites files",
                    "leave it out",
                )


GROUP_NAMES = frozenset(item.name for item in fields(PretrainArguments) if is_dataclass(item.default_factory))
"""Settings that are groups of settings."""
