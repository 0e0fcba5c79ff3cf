"""The settings of a pretraining run, and which of them belong to which trainer. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import ClassVar, Literal, TypeVar

from trainer_core import ConfigurationError, TrainingArguments, suggest

# The groups of settings are names in the annotations of the __init__ that the class inherits the fields for.
from trainer_ddp import (
    CompressionArguments,  # noqa: F401
    DDPArguments,  # noqa: F401
    DDPTrainingArguments,
    DiLoCoArguments,  # noqa: F401
    PostLocalSGDArguments,  # noqa: F401
)
from trainer_fsdp2 import FSDP2Arguments, FSDP2TrainingArguments  # noqa: F401
from trainer_pipeline import PipelineArguments, PipelineTrainingArguments  # noqa: F401

from .console import PROG
from .mesh import check_mesh, parse_mesh

Arguments = TypeVar("Arguments", bound=TrainingArguments)

ARGUMENTS: Mapping[str, type[TrainingArguments]] = {
    "single": TrainingArguments,
    "ddp": DDPTrainingArguments,
    "fsdp2": FSDP2TrainingArguments,
    "pipeline": PipelineTrainingArguments,
}
"""The setting `trainer` to the settings that belong to it."""

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

UNDECODABLE: tuple[Literal["error", "skip", "replace"], ...] = ("error", "skip", "replace")
"""What may become of documents that are not UTF-8."""

_DATA = "the position in the data has no meaning otherwise, and documents would repeat or be left out"
UNCHANGEABLE: Mapping[str, str] = {
    **TrainingArguments.unchangeable,
    **dict.fromkeys(("data", "text_column", "tokenizer", "sequence_length", "shards"), _DATA),
    **dict.fromkeys(("model", "vocab_size"), "the saved weights have its shape"),
    "rope_scaling": "the saved weights were trained with its positions",
    "held_out": "documents that were trained on would be evaluated on",
}
"""Settings of which a run that continues keeps what they stand for, and why."""


@dataclass(frozen=True, kw_only=True)
class PretrainArguments(DDPTrainingArguments, PipelineTrainingArguments, FSDP2TrainingArguments):
    """Settings of one pretraining run: those of all trainers, with other defaults, and the application's own.

    Every trainer takes them as they are. What belongs to one trainer only is refused while another is chosen.

    The defaults train a byte-level model on the text of the Python standard library, in about a minute on two
    CPU cores.
    """

    unchangeable: ClassVar[Mapping[str, str]] = UNCHANGEABLE

    model: str = "tiny"
    """A preset (tiny, 160m, 1b, 7b, 13b, 34b, 70b) or a directory with a config.json."""
    data: str | None = None
    """Directory, glob, file or address (s3://bucket/corpus) of .txt, .md, .py, .jsonl or .parquet; none: the
    Python standard library."""
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
    document_attention: bool = False
    """Whether tokens attend within their own document only, with positions from its beginning. If not, those
    of a row attend to all before them."""
    rope_scaling: str = ""
    """linear, llama3 or yarn: scale the rotary positions of a model that has fewer than sequence_length, so
    that it has as many; none: such a model is refused."""
    held_out: float = 0.02
    """Share of the documents kept for evaluation; 0: none, and no evaluation."""
    max_eval_samples: int | None = 512
    """Rows of the documents kept for evaluation that are evaluated at most, by all processes; none: all. It
    does not apply beside max_eval_steps."""
    prompt: str = "def "
    """Text that the sample at the end of the run continues."""
    sample_tokens: int = 120
    """Tokens of that sample; 0: none."""

    trainer: str = "single"
    """single (one process), or how the processes that torchrun starts share the work: ddp (each holds the
    model), fsdp2 (each holds a part of every layer) or pipeline (each holds some of the layers)."""
    mesh: str = ""
    """Processes in each dimension, such as dp=2,shard=4 or pp=2,tp=2: dp replicates the weights, shard
    divides them, pp divides the layers, tp what each layer computes, cp the sequences. It chooses the
    trainer, and starts that many processes on this machine unless a launcher has."""

    max_restarts: int = 0
    """How often the processes of this machine are started again after one was lost, at most. They continue
    from the newest checkpoint, with memory_save_steps from one in memory. With torchrun, give it to that."""
    hot_spares: bool = True
    """With max_restarts: keep a process for each rank that has imported torch and waits to replace it, which
    takes a few hundred MB of memory, and seconds off a restart."""

    output_dir: str = "runs/default"
    """Directory of checkpoints, logs, figures and config.yaml."""
    seed: int = 1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 16
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
        # Behind the trainers' classes: of what these add, only the rules of the chosen one apply.
        super(FSDP2TrainingArguments, self).check()
        self._check_unused()
        check_mesh(self.mesh, self.trainer)
        self._check_trainer()
        if self.undecodable not in UNDECODABLE:
            raise ConfigurationError(
                "undecodable", self.undecodable, "must be error, skip or replace", "choose one of these"
            )
        if self.shards is not None and self.shards < 1:
            raise ConfigurationError("shards", self.shards, "must be at least 1", "set it to 1 or more")
        if self.max_restarts < 0:
            raise ConfigurationError(
                "max_restarts", self.max_restarts, "must be 0 or more", "set it to 3, or leave it out"
            )
        if self.seed < 0:
            raise ConfigurationError(
                "seed",
                self.seed,
                "must be 0 or more, because a run must be repeatable",
                "choose a seed, such as 42",
            )
        if self.sequence_length < 2:
            raise ConfigurationError(
                "sequence_length",
                self.sequence_length,
                "must be at least 2, to predict a token from one",
                "set it to 2 or more",
            )
        if self.rope_scaling not in ("", "linear", "llama3", "yarn"):
            raise ConfigurationError(
                "rope_scaling",
                self.rope_scaling,
                "must be linear, llama3 or yarn",
                "choose one of these, or leave it out",
            )
        if not 0 <= self.held_out < 1:
            raise ConfigurationError(
                "held_out", self.held_out, "must be at least 0 and below 1", "use a share such as 0.05"
            )
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise ConfigurationError(
                "max_eval_samples",
                self.max_eval_samples,
                "must be at least 1, or none for all rows",
                "raise it, or use held_out=0 for no evaluation",
            )
        usual = self.max_eval_samples in (None, PretrainArguments.max_eval_samples)
        if self.max_eval_steps > 0 and not usual:
            raise ConfigurationError(
                "max_eval_samples",
                self.max_eval_samples,
                f"has no effect beside max_eval_steps={self.max_eval_steps}",
                "leave one of them out",
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
    def rows_evaluated(self) -> int | None:
        """How many rows an evaluation has at most, of all processes; None: as many as there are."""
        return None if self.max_eval_steps > 0 else self.max_eval_samples

    @property
    def starts_fresh(self) -> bool:
        """Whether what an earlier run left in `output_dir` moves aside for this one."""
        return self.resume_from_checkpoint is False and self.overwrite_output_dir

    @property
    def uses_blocks(self) -> bool:
        """Whether a setting works on the blocks that transformer_layers_path leads to."""
        if self.trainer == "pipeline":
            return True
        if self.trainer == "fsdp2":
            return super(PipelineTrainingArguments, self).uses_blocks
        return super(FSDP2TrainingArguments, self).uses_blocks

    @property
    def shards_stages(self) -> bool:
        """Whether the processes that have a stage of a pipeline share out its weights."""
        layout = parse_mesh(self.mesh)
        shards = layout.shards_weights or self.pipeline.shard_replicas
        return self.trainer == "pipeline" and shards

    def _check_trainer(self) -> None:
        if self.trainer not in ARGUMENTS:
            choices = ", ".join(map(repr, ARGUMENTS))
            raise ConfigurationError(
                "trainer", self.trainer, f"must be one of {choices}", suggest(self.trainer, ARGUMENTS)
            )
        own = {"mesh"} | _names(ARGUMENTS[self.trainer])  # the application finds the trainer from its mesh
        if self.shards_stages:
            own |= _names(FSDP2TrainingArguments)
        for each in fields(self):
            owners = [name for name, cls in ARGUMENTS.items() if each.name in _names(cls)]
            if owners and each.name not in own:
                _refuse_changed(self.trainer, each, getattr(self, each.name), owners)
        if self.trainer == "ddp":
            self.check_replication()
        elif self.trainer == "fsdp2":
            self.check_sharding()
        elif self.trainer == "pipeline":
            self.check_stages()
            if self.fsdp2.replicas != 1:
                raise ConfigurationError(
                    "fsdp2.replicas",
                    self.fsdp2.replicas,
                    "has no effect in a pipeline",
                    "set dp in mesh, such as mesh='pp=2,dp=2'",
                )

    def _check_unused(self) -> None:
        for name in WITHOUT_EFFECT:
            default = next(f.default for f in fields(TrainingArguments) if f.name == name)
            if getattr(self, name) != default and not (name == "overwrite_output_dir" and self.starts_fresh):
                raise ConfigurationError(
                    name,
                    getattr(self, name),
                    "has no effect, because llama-pretrain makes its own loader and never overwrites files",
                    "leave it out",
                )


GROUP_NAMES = frozenset(item.name for item in fields(PretrainArguments) if is_dataclass(item.default_factory))
"""Settings that are groups of settings."""


def settings_of(cls: type[Arguments], args: PretrainArguments) -> Arguments:
    """Return those settings of a run that the class of another trainer has too.

    A run is not made of them, but plans of other layouts.

    Raises:
        ConfigurationError: For the first of its rules that is broken.
    """
    return cls(**{name: getattr(args, name) for name in _names(cls)})


def check_processes(name: str, mesh: str, world_size: int) -> None:
    """Refuse a trainer of one process where a launcher has started several, and a mesh of another size.

    Raises:
        ConfigurationError: If it has; the message says what to type.
    """
    if mesh and parse_mesh(mesh).world_size != world_size:
        raise ConfigurationError(
            "mesh",
            mesh,
            f"needs {parse_mesh(mesh).world_size} processes, but {world_size} were started",
            f"start {parse_mesh(mesh).world_size}, or change the mesh",
        )
    if name == "single" and world_size > 1:
        raise ConfigurationError(
            "trainer",
            name,
            f"runs in one process, but {world_size} were started",
            f"use `{PROG} train` for one, or `{launch_command(world_size, 'ddp')}` to share the work",
        )


def check_restarts(
    args: PretrainArguments, given: Mapping[str, object], *, launches: bool, is_launcher: bool
) -> None:
    """Refuse restarts of processes that somebody else starts, and what no restart would use.

    Args:
        args: The settings.
        given: Those of the command line.
        launches: Whether this process starts the ranks, if there are to be several.
        is_launcher: Whether this is a rank that our own launcher has started.

    Raises:
        ConfigurationError: Saying which setting to use instead.
    """
    if args.max_restarts and not launches and not is_launcher:
        raise ConfigurationError(
            "max_restarts",
            args.max_restarts,
            "has no effect on processes that another launcher has started",
            f"leave it out, and start them with `torchrun --max-restarts {args.max_restarts}`",
        )
    if "hot_spares" in given and not args.max_restarts:
        raise ConfigurationError(
            "hot_spares",
            args.hot_spares,
            "has no effect, because it concerns processes that take the place of lost ones, and max_restarts "
            "is 0",
            "set max_restarts, such as --max-restarts 3, or leave it out",
        )
    if args.memory_save_steps and launches and not args.max_restarts:
        raise ConfigurationError(
            "memory_save_steps",
            args.memory_save_steps,
            "keeps checkpoints for processes that are started again, and max_restarts is 0",
            "set max_restarts, such as --max-restarts 3, or leave it out",
        )


def launch_command(processes: int, trainer: str) -> str:
    """What to type to train with several processes on one machine."""
    axis = {"fsdp2": "shard", "pipeline": "pp"}.get(trainer, "dp")
    return f"{PROG} train --mesh {axis}={processes}"


def _names(cls: type[TrainingArguments]) -> set[str]:
    return {field.name for field in fields(cls)}


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
