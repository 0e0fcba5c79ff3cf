"""The arguments that users of the Hugging Face Trainer know, and their rules.

The string below a field is its documentation and the help text of command lines built from it
(see `field_docs`). Values that are resolved at run time never change an argument object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Self

from dist_env import STORE_SCHEMES, StoreSettingsError, split_address

from ..errors import ConfigurationError, Dependent, refuse_without_effect
from ..hints import SignatureOfInit, suggest
from . import rules
from .choices import SCHEDULE_FREE, WITHOUT_WARMUP, check_optimizer, check_schedule, trackers_of
from .rules import check_types

GUARDED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_kwargs")
"""Settings that a run that continues keeps, unless `allow_changes` names them."""

_POSITION = "the position in the data has no meaning otherwise, and examples would repeat or be left out"
UNCHANGEABLE: Mapping[str, str] = {
    "seed": "the order of the data and all random numbers follow from it",
    "seed_per_rank": "the random numbers of each rank follow from it",
    "dataloader_shuffle": _POSITION,
    "dataloader_drop_last": _POSITION,
    "qat_recipe": "the saved weights were trained for its rounding",
}
"""Settings that never change while a run continues, and why: the saved state has no meaning otherwise."""

_COLLAPSED = re.compile(rf"({'|'.join(STORE_SCHEMES)}):/?[^/]", re.IGNORECASE)
_CHECKPOINT = re.compile(r"(^|/)checkpoint-\d+$")


@dataclass(frozen=True, kw_only=True)
class MinimalTrainingArguments:
    """The subset that users of the Hugging Face Trainer know, under the same names."""

    # What `allow_changes` may not name, and why.
    unchangeable: ClassVar[Mapping[str, str]] = UNCHANGEABLE

    output_dir: str = "output"
    """Directory of checkpoints, weights and logs; or the address of a place in an object store for the
    checkpoints, such as s3://bucket/run, beside which the rest is in logging_dir."""
    logging_dir: str | None = None
    """Directory of logs; the output directory when not given, or runs/<bucket>/<path> of its address."""
    overwrite_output_dir: bool = False
    """Let save_model replace weights that are already there, and a start with resume_from_checkpoint=False
    move the checkpoints of an earlier run to previous-<time>/ in output_dir."""
    lease_heartbeat_seconds: float = 3.0
    """How often a run shows other machines that it lives, in the lease of its output directory."""
    lease_takeover_seconds: float = 60.0
    """A run on another machine without a sign of life for so long loses its output directory to the next."""

    device: str | None = None
    """Device of a run without a distributed environment, such as cuda:0; none: the accelerator if any."""
    use_cpu: bool = False
    """Run on the CPU; beats device."""
    seed: int = -1
    """Seed of python, numpy and torch generators; -1 leaves them alone."""

    per_device_train_batch_size: int = 16
    """Examples per device and microbatch."""
    per_device_eval_batch_size: int = 16
    """Examples per device and evaluation batch."""
    gradient_accumulation_steps: int = 1
    """Microbatches per optimizer step."""
    num_train_epochs: float | None = None
    """Passes over the training data; fractions allowed; none: as many as max_steps takes, or one without
    max_steps; negative: epochs do not limit the run."""
    max_steps: int = -1
    """Most optimizer steps; -1: no cap; 0 trains nothing. Beside num_train_epochs the smaller limit holds."""
    epoch_train_steps: int | None = None
    """Optimizer steps of an epoch, for data that cannot tell their length."""

    dataloader_num_workers: int = 0
    """Worker processes of a loader built from a dataset; 0: load in this process."""
    dataloader_pin_memory: bool = True
    """Page-locked host memory for batches, when there is an accelerator."""
    dataloader_persistent_workers: bool = False
    """Keep worker processes alive between epochs."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each worker loads ahead; 2 when there are workers."""
    dataloader_drop_last: bool = False
    """Drop a last training batch that is not full."""
    dataloader_shuffle: bool = True
    """Shuffle a training dataset of known length, each epoch anew."""

    eval_strategy: str = "no"
    """When to evaluate: no, steps or epoch."""
    eval_steps: int = 100
    """Optimizer steps between evaluations."""
    eval_delay: float = 0
    """Optimizer steps, or epochs with eval_strategy=epoch, before the first evaluation."""
    logging_strategy: str = "steps"
    """When to log: no, steps or epoch."""
    logging_steps: int = 50
    """Optimizer steps between log entries."""
    logging_first_step: bool = False
    """Log the first optimizer step too."""
    report_to: str | tuple[str, ...] = "none"
    """Experiment trackers that get every log entry: of wandb, tensorboard and mlflow, or none."""
    save_strategy: str = "steps"
    """When to save checkpoints: no, steps or epoch; 'no' leaves out the one at the end as well."""
    save_steps: int = 1000
    """Optimizer steps between checkpoints."""
    save_total_limit: int | None = 2
    """Checkpoints to keep, oldest removed first; none: keep all."""
    remote_dir: str | None = None
    """Address such as s3://bucket/run, to which checkpoints are uploaded in the background from output_dir, a
    directory that all ranks share, or with save_on_each_node one of each node, which then keeps the files of
    its ranks; a resume takes the newest of both."""
    remote_save_total_limit: int | None = 2
    """Checkpoints to keep in remote_dir, oldest removed first; none: keep all."""
    memory_save_steps: int = 0
    """Optimizer steps between checkpoints in the memory of each node, of which the two newest stay until the
    job ends, for ranks that torchrun --max-restarts or the like starts again; 0: none. They take three times
    the size of a checkpoint in /dev/shm. State that is divided between nodes cannot be kept so."""
    save_safetensors: bool = True
    """Weights are safetensors, always; false is refused."""
    save_on_each_node: bool = False
    """Write checkpoints on every node, for storage that nodes do not share: a copy of all of it on each, or
    with remote_dir a part."""
    resume_from_checkpoint: bool | str = True
    """True: continue from the newest checkpoint in the output directory, if any; a path: from that one;
    false: start anew, which needs a directory without checkpoints or overwrite_output_dir."""
    allow_changes: tuple[str, ...] = ()
    """Settings of the optimizer that may differ from those of the checkpoint that a run continues from:
    learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, optim_kwargs. The new values hold from
    there on."""

    load_best_model_at_end: bool = False
    """After the last step, put the weights of the best checkpoint into the model; tracks the best one."""
    metric_for_best_model: str | None = None
    """Another name of best_model_metric."""
    greater_is_better: bool | None = None
    """Another name of best_model_greater_is_better."""

    torch_compile: bool = False
    """Compile the model with torch.compile."""
    torch_compile_backend: str | None = None
    """Backend of torch.compile; inductor when not given."""
    torch_compile_mode: str | None = None
    """Mode of torch.compile: default, reduce-overhead or max-autotune."""
    torch_compile_dynamic: bool | None = None
    """Compile for changing shapes; not given: torch decides."""
    torch_compile_full_graph: bool = False
    """Fail when the model does not compile as one graph."""
    torch_compile_cache_dir: str | None = None
    """Directory in which each rank keeps what it has compiled, for restarts: code that runs execute."""

    optim: str = "adamw"
    """Built-in optimizer: adamw, muon (for matrices of hidden layers, AdamW for the rest), or
    schedule_free_adamw (needs the extra schedulefree)."""
    optim_kwargs: dict[str, int | float | str | bool] = field(default_factory=dict)
    """Options of muon (lr, weight_decay, momentum, nesterov, ns_steps, eps, adjust_lr_fn) or of
    schedule_free_adamw (r, weight_lr_power)."""
    learning_rate: float = 5e-5
    """Highest learning rate of the built-in AdamW."""
    weight_decay: float = 0.0
    """Weight decay of the built-in AdamW; biases and norm weights are exempt."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    lr_scheduler_type: str = "linear"
    """Learning-rate schedule under its Hugging Face name; empty: a constant rate."""
    lr_scheduler_kwargs: dict[str, int | float | str | bool] = field(default_factory=dict)
    """Options of the schedule, such as min_lr_rate for cosine_with_min_lr."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm; none or 0: measure only."""
    gradient_checkpointing: bool = False
    """Recompute every block in the backward pass; another name of activation_checkpointing=full."""

    __signature__: ClassVar[SignatureOfInit] = SignatureOfInit()

    def __new__(cls, *unnamed: object, **given: object) -> Self:
        """Refuse what the class does not have, with the name that was probably meant.

        Raises:
            TypeError: A setting is unknown, or has no name.
        """
        if unnamed:
            raise TypeError(
                f"{cls.__name__} got {unnamed[0]!r} without a name. Name each setting, as in "
                "output_dir='runs/a'."
            )
        known = [each.name for each in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            sentences = [
                f"{name}={given[name]!r} is not a known setting. {suggest(name, known)}" for name in unknown
            ]
            raise TypeError(f"{cls.__name__}: {' '.join(sentences)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("output_dir", "logging_dir", "resume_from_checkpoint", "torch_compile_cache_dir"):
            if isinstance(value := getattr(self, name), str):
                # No shell has replaced the ~ of a file, or of --output-dir=~/runs: it would be made in place.
                object.__setattr__(self, name, os.path.expanduser(value))  # noqa: PTH111  (may be an address)
        self.check()

    def check(self) -> None:
        """Check every rule of this class; subclasses extend it.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        check_types(self)
        check_minimal(self)

    @property
    def epoch_limit(self) -> float | None:
        """Passes over the training data after which the run ends; None where epochs do not limit it."""
        return epoch_limit(self.num_train_epochs, self.max_steps)

    @property
    def log_path(self) -> Path:
        """Directory of logs."""
        return self.run_path if self.logging_dir is None else Path(self.logging_dir)

    @property
    def run_path(self) -> Path:
        """Directory of what belongs to the run beside its checkpoints: `output_dir`, unless it is an address.

        Then it is `logging_dir`, or `runs/` with bucket and path of the address.
        """
        return run_path(self.output_dir, self.logging_dir)

    @property
    def saves_to_store(self) -> bool:
        """Whether `output_dir` is an address in an object store, and not a directory."""
        return split_address(self.output_dir) is not None

    @property
    def store_address(self) -> str | None:
        """Where checkpoints go in an object store: `output_dir` or `remote_dir`; None if nowhere."""
        return self.output_dir if self.saves_to_store else self.remote_dir


def run_path(output_dir: str, logging_dir: str | None = None) -> Path:
    """The directory of what belongs to a run beside its checkpoints.

    Args:
        output_dir: Setting of the run.
        logging_dir: Setting of the run.

    Returns:
        `output_dir`; where that is an address in an object store, `logging_dir`, or `runs/` with bucket and
        path of the address, so that no two runs share it.
    """
    address = split_address(output_dir)
    if address is None:
        return Path(output_dir)
    bucket = address[0].partition("://")[2]
    return Path("runs", bucket, address[1]) if logging_dir is None else Path(logging_dir)


def epoch_limit(num_train_epochs: float | None, max_steps: int) -> float | None:
    """Passes over the training data after which a run with these settings ends; None without such a limit."""
    if num_train_epochs is None:
        return 1.0 if max_steps < 0 else None
    return num_train_epochs if num_train_epochs >= 0 else None


STRATEGIES = ("no", "steps", "epoch")
COMPILE_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_minimal(args: MinimalTrainingArguments) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    _check_counts(args)
    _check_length(args)
    _check_allowed_changes(args)
    _check_optimizer(args)
    if args.lr_scheduler_type:
        check_schedule(args.lr_scheduler_type, args.lr_scheduler_kwargs)
    _check_files(args)
    trackers_of(args.report_to)
    rules.one_of("torch_compile_mode", args.torch_compile_mode, COMPILE_MODES)
    refuse_without_effect(args, _unused(args))


def _check_counts(args: MinimalTrainingArguments) -> None:
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "eval_steps",
        "logging_steps",
        "save_steps",
    ):
        rules.at_least(name, getattr(args, name), 1)
    rules.at_least("memory_save_steps", args.memory_save_steps, 0)
    for name in ("eval_strategy", "logging_strategy", "save_strategy"):
        rules.one_of(name, getattr(args, name), STRATEGIES)
    rules.at_least_or("max_steps", args.max_steps, 0, off=-1)
    rules.at_least_or("seed", args.seed, 0, off=-1)
    if args.seed >= 2**64:
        raise ConfigurationError(
            "seed", args.seed, "must be below 2**64, the limit of torch", "choose a smaller seed, such as 42"
        )
    rules.at_least("warmup_steps", args.warmup_steps, 0)
    rules.at_least("dataloader_num_workers", args.dataloader_num_workers, 0)
    rules.within("eval_delay", args.eval_delay, 0, 1e12)
    if args.dataloader_prefetch_factor is not None:
        rules.at_least("dataloader_prefetch_factor", args.dataloader_prefetch_factor, 1)
    for name in ("save_total_limit", "remote_save_total_limit"):
        if (limit := getattr(args, name)) is not None:
            rules.at_least(name, limit, 1)


def _check_length(args: MinimalTrainingArguments) -> None:
    if args.epoch_train_steps is not None:
        rules.at_least("epoch_train_steps", args.epoch_train_steps, 1)
    if args.num_train_epochs is None:
        return
    rules.within("num_train_epochs", args.num_train_epochs, -1e9, 1e9)
    if args.num_train_epochs < 0 and args.max_steps < 0 and not getattr(args, "max_train_seconds", None):
        raise ConfigurationError(
            "num_train_epochs",
            args.num_train_epochs,
            "sets no limit by epochs, and max_steps=-1 sets none by steps",
            "set num_train_epochs=3, max_steps=1000 or max_train_seconds=3600, for example",
        )


def _check_allowed_changes(args: MinimalTrainingArguments) -> None:
    known = {field.name for field in fields(args)}
    for name in args.allow_changes:
        if name not in known:
            raise ConfigurationError("allow_changes", name, "is not a known setting", suggest(name, known))
        if name in args.unchangeable:
            raise ConfigurationError(
                "allow_changes",
                name,
                f"cannot change while a run continues: {args.unchangeable[name]}",
                "begin a new run in another output_dir",
            )


def _check_optimizer(args: MinimalTrainingArguments) -> None:
    rules.within("learning_rate", args.learning_rate, 0.0, 1e3)
    rules.within("weight_decay", args.weight_decay, 0.0, 1e3)
    rules.within("adam_beta1", args.adam_beta1, 0.0, 1.0 - 1e-9)
    rules.within("adam_beta2", args.adam_beta2, 0.0, 1.0 - 1e-9)
    rules.within("adam_epsilon", args.adam_epsilon, 0.0, 1.0)
    if args.max_grad_norm is not None:
        rules.within("max_grad_norm", args.max_grad_norm, 0.0, 1e9)
    check_optimizer(args.optim, args.optim_kwargs)
    if args.optim != "schedule_free_adamw":
        return
    if not args.adam_beta1:
        raise ConfigurationError(
            "adam_beta1", args.adam_beta1, f"must be above 0 with optim={args.optim!r}", "use 0.9"
        )
    if args.lr_scheduler_type not in SCHEDULE_FREE:
        raise ConfigurationError(
            "lr_scheduler_type",
            args.lr_scheduler_type,
            f"changes the learning rate, and optim={args.optim!r} averages weights instead of that",
            "set lr_scheduler_type='constant_with_warmup' and warmup_steps, or lr_scheduler_type='constant'",
        )


def _check_files(args: MinimalTrainingArguments) -> None:
    if not args.output_dir:
        raise ConfigurationError(
            "output_dir",
            args.output_dir,
            "must not be empty",
            "name a directory, such as output_dir='runs/first'",
        )
    _check_address(args)
    for name in (
        "output_dir",
        "logging_dir",
        "resume_from_checkpoint",
        "remote_dir",
        "torch_compile_cache_dir",
    ):
        value = getattr(args, name)
        if isinstance(value, str) and "\0" in value:
            raise ConfigurationError(
                name, value, "contains a NUL character, which no path may contain", "remove it"
            )
    rules.within("lease_takeover_seconds", args.lease_takeover_seconds, 0.1, 30 * 86400.0)
    rules.within(
        "lease_heartbeat_seconds", args.lease_heartbeat_seconds, 0.01, args.lease_takeover_seconds / 3
    )
    if not args.save_safetensors:
        raise ConfigurationError(
            "save_safetensors",
            False,
            "would save pickled weights, which can run code when they are loaded",
            "leave it at its default, True",
        )


def _check_address(args: MinimalTrainingArguments) -> None:
    address = _address(args, "output_dir")
    _address(args, "resume_from_checkpoint")
    if args.remote_dir is not None:
        _check_tiers(args)
    for name in ("logging_dir", "resume_from_checkpoint", "torch_compile_cache_dir"):
        if getattr(args, name) == "":
            raise ConfigurationError(name, "", "is empty", "leave it out, or name a directory")
    if args.logging_dir is not None and "://" in args.logging_dir:
        raise ConfigurationError(
            "logging_dir",
            args.logging_dir,
            "is an address, and logs are appended to, which stores cannot do",
            "name a directory",
        )
    if args.torch_compile_cache_dir is not None and "://" in args.torch_compile_cache_dir:
        raise ConfigurationError(
            "torch_compile_cache_dir",
            args.torch_compile_cache_dir,
            "is an address, and who may write to a store cannot be checked",
            "name a directory that only you can write to",
        )
    if address is None:
        return
    if not address[1]:
        raise ConfigurationError(
            "output_dir",
            args.output_dir,
            "is a whole bucket",
            f"name a place in it, such as {address[0]}/run",
        )
    if args.save_on_each_node:
        raise ConfigurationError(
            "save_on_each_node",
            True,
            f"does not go with {args.output_dir}, which all nodes share",
            "leave it out",
        )


def _address(args: MinimalTrainingArguments, name: str) -> tuple[str, str] | None:
    text = str(getattr(args, name))
    if _COLLAPSED.match(text):
        raise ConfigurationError(
            name, text, "looks like an address that has lost a slash", "write it as text, s3://bucket/run"
        )
    try:
        address = split_address(text)
        if address is None or name == "resume_from_checkpoint" or not _CHECKPOINT.search(address[1]):
            return address
        raise ConfigurationError(
            name, text, "is the address of a checkpoint", "name the place that holds the checkpoints"
        )
    except StoreSettingsError as error:
        # Without the value, which may hold credentials.
        rule, _, fix = f"cannot be used: {str(error).removesuffix('.')}".partition(". ")
        raise ConfigurationError(name, "an address", rule, fix or "give s3://bucket/run") from None


def _check_tiers(args: MinimalTrainingArguments) -> None:
    remote = _address(args, "remote_dir")
    if remote is None or not remote[1]:
        rule = "does not name a place in an object store"
        raise ConfigurationError("remote_dir", args.remote_dir, rule, "give an address: s3://bucket/run")
    if args.saves_to_store:
        rule = "is an address, from which nothing is uploaded to remote_dir"
        fix = "name a directory on a fast disk, or leave remote_dir out"
        raise ConfigurationError("output_dir", args.output_dir, rule, fix)


def _unused(args: MinimalTrainingArguments) -> Iterator[Dependent]:
    if args.dataloader_num_workers == 0:
        condition = "while dataloader_num_workers is 0"
        for name in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
            yield Dependent(name, condition, "set dataloader_num_workers to 1 or more")
    if not args.torch_compile:
        for name in ("backend", "mode", "dynamic", "full_graph", "cache_dir"):
            yield Dependent(f"torch_compile_{name}", "while torch_compile is off", "set torch_compile=True")
    elif args.torch_compile_backend not in (None, "inductor"):
        condition = f"with torch_compile_backend={args.torch_compile_backend!r}, which keeps nothing"
        yield Dependent("torch_compile_cache_dir", condition, "use inductor, or leave it out")
    if args.lr_scheduler_type in ("", *WITHOUT_WARMUP):
        condition = f"with lr_scheduler_type={args.lr_scheduler_type!r}"
        yield Dependent(
            "warmup_steps", condition, "use a schedule that warms up, such as constant_with_warmup"
        )
    if not args.lr_scheduler_type:
        yield Dependent(
            "lr_scheduler_kwargs", "without lr_scheduler_type", "name a schedule in lr_scheduler_type"
        )
    if args.logging_strategy == "no":
        yield Dependent("logging_first_step", "with logging_strategy='no'", "set logging_strategy='steps'")
    if args.use_cpu:
        yield Dependent("device", "while use_cpu is on", "set use_cpu=False")
