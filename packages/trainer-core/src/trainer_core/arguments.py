"""What a run can be told: the tree of argument classes, frozen and checked when made.

The string below a field is its documentation and the help text of command lines built from it
(see `field_docs`). Values that are resolved at run time never change an argument object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from . import rules
from .errors import ConfigurationError

STRATEGIES = ("no", "steps", "epoch")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": (),
    "cosine_with_min_lr": ("min_lr_rate",),
    "constant": (),
    "constant_with_warmup": (),
}
"""Names of the learning-rate schedules, with the options of each."""


@dataclass(frozen=True, kw_only=True)
class MinimalTrainingArguments:
    """The subset that users of the Hugging Face Trainer know, under the same names."""

    output_dir: str = "output"
    """Directory of checkpoints, weights and logs."""
    logging_dir: str | None = None
    """Directory of logs; the output directory when not given."""
    overwrite_output_dir: bool = False
    """Let save_model replace weights that are already there."""
    seed: int = -1
    """Seed of python, numpy and torch generators; -1 leaves them alone."""

    per_device_train_batch_size: int = 16
    """Examples per device and microbatch."""
    per_device_eval_batch_size: int = 16
    """Examples per device and evaluation batch."""
    gradient_accumulation_steps: int = 1
    """Microbatches per optimizer step."""
    num_train_epochs: float = 1
    """Passes over the training data; fractions allowed; negative: epochs do not limit the run."""
    max_steps: int = -1
    """Most optimizer steps; -1: no cap; 0 trains nothing."""

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
    logging_strategy: str = "steps"
    """When to log: no, steps or epoch."""
    logging_steps: int = 50
    """Optimizer steps between log entries."""
    logging_first_step: bool = False
    """Log the first optimizer step too."""
    save_strategy: str = "steps"
    """When to save checkpoints: no, steps or epoch; 'no' leaves out the one at the end as well."""
    save_steps: int = 1000
    """Optimizer steps between checkpoints."""
    save_total_limit: int | None = 2
    """Checkpoints to keep, oldest removed first; none: keep all."""
    resume_from_checkpoint: bool | str = True
    """True: go on from the newest checkpoint in the output directory, if any; a path: from that one;
    false: start anew."""

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
    """Learning-rate schedule: linear, cosine, cosine_with_min_lr, constant or constant_with_warmup."""
    lr_scheduler_kwargs: dict[str, float] = field(default_factory=dict)
    """Options of the schedule, such as min_lr_rate for cosine_with_min_lr."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm; none: measure only."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check every rule of this class; subclasses extend it.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ):
            rules.at_least(name, getattr(self, name), 1)
        for name in ("eval_steps", "logging_steps", "save_steps"):
            rules.at_least(name, getattr(self, name), 1)
        for name in ("eval_strategy", "logging_strategy", "save_strategy"):
            rules.one_of(name, getattr(self, name), STRATEGIES)
        rules.at_least_or("max_steps", self.max_steps, 0, off=-1)
        rules.at_least_or("seed", self.seed, 0, off=-1)
        rules.at_least("warmup_steps", self.warmup_steps, 0)
        if self.save_total_limit is not None:
            rules.at_least("save_total_limit", self.save_total_limit, 1)
        self._check_length()
        self._check_loader()
        self._check_optimizer()
        self._check_compile()

    def _check_length(self) -> None:
        rules.within("num_train_epochs", self.num_train_epochs, -1e9, 1e9)
        if self.num_train_epochs < 0 and self.max_steps < 0:
            raise ConfigurationError(
                "num_train_epochs",
                self.num_train_epochs,
                "a negative number means no limit by epochs, and max_steps=-1 means no limit by steps",
                "set max_steps, or an epoch count of 0 or more",
            )

    def _check_loader(self) -> None:
        rules.at_least("dataloader_num_workers", self.dataloader_num_workers, 0)
        if self.dataloader_num_workers > 0:
            return
        for name, unset in (("dataloader_persistent_workers", False), ("dataloader_prefetch_factor", None)):
            if getattr(self, name) != unset:
                raise ConfigurationError(
                    name,
                    getattr(self, name),
                    "has no effect while dataloader_num_workers is 0",
                    f"set dataloader_num_workers, or leave {name} out",
                )

    def _check_optimizer(self) -> None:
        rules.within("learning_rate", self.learning_rate, 0.0, 1e3)
        rules.within("weight_decay", self.weight_decay, 0.0, 1e3)
        rules.within("adam_beta1", self.adam_beta1, 0.0, 1.0 - 1e-9)
        rules.within("adam_beta2", self.adam_beta2, 0.0, 1.0 - 1e-9)
        rules.within("adam_epsilon", self.adam_epsilon, 0.0, 1.0)
        rules.one_of("lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        unknown = sorted(set(self.lr_scheduler_kwargs) - set(SCHEDULES[self.lr_scheduler_type]))
        if unknown:
            raise ConfigurationError(
                "lr_scheduler_kwargs",
                self.lr_scheduler_kwargs,
                f"holds {', '.join(unknown)}, which {self.lr_scheduler_type!r} does not have",
                "take it out",
            )
        if self.max_grad_norm is not None:
            rules.within("max_grad_norm", self.max_grad_norm, 0.0, 1e9)
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            raise ConfigurationError(
                "warmup_steps",
                self.warmup_steps,
                "has no effect with lr_scheduler_type='constant'",
                "use lr_scheduler_type='constant_with_warmup'",
            )

    def _check_compile(self) -> None:
        if self.torch_compile:
            return
        unset = {
            "torch_compile_backend": None,
            "torch_compile_mode": None,
            "torch_compile_dynamic": None,
            "torch_compile_full_graph": False,
        }
        for name, default in unset.items():
            if getattr(self, name) != default:
                raise ConfigurationError(
                    name,
                    getattr(self, name),
                    "has no effect while torch_compile is off",
                    f"set torch_compile=True, or leave {name} out",
                )

    @property
    def log_path(self) -> Path:
        """Directory of logs, resolved."""
        return Path(self.logging_dir if self.logging_dir is not None else self.output_dir)


@dataclass(frozen=True, kw_only=True)
class BaseTrainingArguments(MinimalTrainingArguments):
    """Adds precision and the limits of an evaluation."""

    max_eval_steps: int = -1
    """Most batches per evaluation; -1: the whole evaluation set."""
    mixed_precision: str | None = None
    """bf16 runs matrix products in bfloat16 under autocast; weights stay as they are."""
    float32_matmul_precision: str | None = None
    """Precision of float32 matrix products during the run: highest, high (TF32) or medium."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        rules.at_least_or("max_eval_steps", self.max_eval_steps, 1, off=-1)
        rules.one_of("mixed_precision", self.mixed_precision, (None, "no", "bf16"))
        rules.one_of(
            "float32_matmul_precision", self.float32_matmul_precision, (None, "highest", "high", "medium")
        )

    @property
    def matmul_dtype(self) -> str:
        """Name of the dtype in which matrix products run, as the peak tables name it."""
        if self.mixed_precision == "bf16":
            return "bf16"
        return "tf32" if self.float32_matmul_precision in ("high", "medium") else "fp32"


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """What `Trainer` takes: adds bookkeeping of speed."""

    speed_metrics_start_step: int = 1
    """Optimizer step after which the speed of the whole run is timed, so that start-up does not count."""
    peak_hardware_flops: float | None = None
    """Peak FLOP/s of one device, for MFU; none: the user's hardware.yaml, then the table by device name."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        rules.at_least("speed_metrics_start_step", self.speed_metrics_start_step, 0)
        if self.peak_hardware_flops is not None and not self.peak_hardware_flops > 0:
            raise ConfigurationError(
                "peak_hardware_flops",
                self.peak_hardware_flops,
                "must be above 0",
                "give FLOP/s, such as 989.4e12",
            )
