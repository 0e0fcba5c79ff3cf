"""The settings of the commands beside `train`. They import no torch, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from trainer_core import ConfigurationError, arguments_from_dict
from trainer_fsdp2 import FSDP2Arguments, FSDP2TrainingArguments

from ..console import PROG
from ..mesh import parse_mesh
from ..settings import Parser, add_field_options


@dataclass(frozen=True, kw_only=True)
class RecipesArguments:
    """Settings of `recipes`."""

    name: str | None = None
    """Recipe to print; none: a table of all."""


@dataclass(frozen=True, kw_only=True)
class CompletionArguments:
    """Settings of `completion`."""

    shell: str | None = None
    """bash or zsh; none: the shell that the variable SHELL names."""
    show: bool = False
    """Print the script instead of installing it."""


@dataclass(frozen=True, kw_only=True)
class ResultArguments:
    """Which trained model is meant."""

    output_dir: str = "runs/default"
    """Output directory of a run; its newest checkpoint is taken."""
    checkpoint: str | None = None
    """A checkpoint, an export, or any directory of a Hugging Face Llama, instead."""


@dataclass(frozen=True, kw_only=True)
class EvalArguments(ResultArguments):
    """Settings of `eval`."""

    data: str | None = None
    """Text to score, all of it; none: the documents that the run has held out."""
    sequence_length: int | None = None
    """Tokens of a row; none: as in the run, with --checkpoint the run whose directory it lies in; outside of
    a run the model's max_position_embeddings, but at most 1024."""
    per_device_eval_batch_size: int = 16
    """Rows at once."""
    max_eval_steps: int = -1
    """Most batches; -1: all of them."""


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(ResultArguments):
    """Settings of `generate`."""

    prompt: str = "def "
    """Text to continue."""
    max_new_tokens: int = 120
    """Most tokens to add."""
    temperature: float = 0.8
    """Higher is more varied; 0 takes the most probable token each time."""
    top_k: int | None = None
    """Draw from this many most probable tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens whose probabilities reach this sum."""
    seed: int = 1
    """Another seed gives another text."""


@dataclass(frozen=True, kw_only=True)
class ExportArguments(ResultArguments):
    """Settings of `export`."""

    directory: str
    """Where to write config.json, model.safetensors and the tokenizer; must be new or empty."""
    dtype: str = "float32"
    """Dtype of the weights: float32, bfloat16 or float16."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Settings of `import`."""

    source: str
    """Directory of a Hugging Face Llama: config.json, safetensors in one or several files, a tokenizer."""
    directory: str
    """Where to write it; must be new or empty."""
    dtype: str = "float32"
    """Dtype of the weights: float32, bfloat16 or float16."""


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Settings of `report`."""

    output_dir: str = "runs/default"
    """Output directory of a run."""
    page: str | None = None
    """File to write; none: report.html in the output directory. An existing one is replaced."""
    samples: int = 3
    """Texts that the newest checkpoint writes for the page; 0: none."""
    smooth: float = 0.0
    """Share of the past in the moving average of the loss, from 0 to below 1."""


@dataclass(frozen=True, kw_only=True)
class WatchArguments:
    """Settings of `watch`."""

    runs: tuple[str, ...] = ("runs/default",)
    """Output directories of runs, which need not exist yet."""
    host: str = "127.0.0.1"
    """Address to listen on; with another one, whoever reaches this machine can read the page."""
    port: int = 6007
    """Port to listen on; 0: a free one."""
    open: bool = False
    """Show the page in a browser."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigurationError(
                "port", self.port, "must be from 0 to 65535", "choose another port, or 0 for a free one"
            )


def _in_bf16() -> FSDP2Arguments:
    return FSDP2Arguments(param_dtype="bfloat16")


@dataclass(frozen=True, kw_only=True)
class PlanArguments(FSDP2TrainingArguments):
    """What `plan` is told: those settings of `train` that decide about memory, and the GPUs."""

    model: str = "all"
    """A preset, a directory with a config.json, or all: 7b, 13b, 34b and 70b."""
    gpus: int = 8
    """GPUs of the job; those of mesh, if it is given."""
    gpus_per_node: int = 8
    """GPUs of one node."""
    gpu_memory: float = 80
    """Memory of one GPU in GiB."""
    sequence_length: int = 4096
    """Tokens of one training row."""
    json: str | None = None
    """File for all figures, in bytes."""
    longest_sequence: bool = False
    """With --config: also say how long rows could be, planning a few lengths."""
    gpu: str = ""
    """GPU as torch names it, such as "NVIDIA H100 80GB HBM3": also say how long the run takes."""
    mfu: str = ""
    """With --gpu: MFU to expect, such as 0.4 or 35%-45%, or a run whose log has it; none: 30 to 50 %."""
    tokens: float | None = None
    """With --gpu: tokens to train on, such as 1e12; none: those of the run of --config."""
    price: float | None = None
    """With --gpu: what one GPU hour costs."""

    per_device_train_batch_size: int = 2
    """Examples per device and microbatch; the recommended number is at most this."""
    fsdp2: FSDP2Arguments = field(default_factory=_in_bf16)
    """How the model is spread over the processes."""


OF_THE_TRAINER: Mapping[str, Sequence[str]] = {
    "how much at once": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "precision and loss": ("mixed_precision", "default_dtype", "fused_loss", "torch_compile"),
    "memory": (
        "activation_checkpointing",
        "activation_checkpointing_every",
        "activation_checkpointing_share",
        "activation_checkpointing_operators",
        "enable_activation_offloading",
    ),
    "several processes": ("fsdp2",),
}
"""Settings of the trainer that decide about memory, by heading."""
_GROUPS: Mapping[str, Sequence[str]] = {
    "what on which GPUs": (
        "model",
        "gpus",
        "gpus_per_node",
        "gpu_memory",
        "sequence_length",
        "json",
        "longest_sequence",
    ),
    "how long it takes": ("gpu", "mfu", "tokens", "price"),
    **OF_THE_TRAINER,
}


def plan_parser() -> Parser:
    """Return the parser of the options of `plan`."""
    parser = Parser(
        prog=f"{PROG} plan",
        description="Say what memory a run needs on each GPU, before any of it is allocated, "
        "and which layout fits.",
        epilog="With --config: says whether that very layout fits, and if not, which would. "
        "Without: the recommendation chooses mesh, activation checkpointing, a smaller batch and "
        "fsdp2.cpu_offload by itself; all other options are taken as they are given.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="plan the layout of a configuration file of train, or of a recipe; its mesh tells the GPUs",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help="ranks in each dimension, such as dp=2,shard=8; with --config: instead of its mesh",
    )
    shown = {name for names in _GROUPS.values() for name in names}
    hidden = [each.name for each in fields(PlanArguments) if each.name not in shown]
    add_field_options(parser, PlanArguments, _GROUPS, leave_out=hidden)
    return parser


def plan_arguments(given: Mapping[str, object]) -> PlanArguments:
    """Make settings of the words that were given.

    Layers compute in bfloat16 unless fsdp2.param_dtype or mixed_precision says something else.

    Args:
        given: Values by name; those of fsdp2 as `fsdp2.name`.

    Raises:
        ConfigurationError: If a rule is broken.
    """
    own = {name: value for name, value in given.items() if "." not in name}
    inner = {name.partition(".")[2]: value for name, value in given.items() if "." in name}
    if "mesh" in own:
        own.setdefault("gpus", parse_mesh(str(own["mesh"])).world_size)
    if "mixed_precision" not in own:
        inner.setdefault("param_dtype", "bfloat16")
    return arguments_from_dict(PlanArguments, {**own, "fsdp2": inner})


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Settings of `verify`."""

    output_dir: str = "runs/verify"
    """Where verify.json, verify.html and the runs go; those of an earlier verification are replaced."""
    processes: int | None = None
    """Processes of this machine; none: one for each accelerator, or one on the CPU."""
    layouts: str = ""
    """Meshes of all processes, with spaces between, as in 'dp=4 shard=2,tp=2'; empty: every way that fits."""
    precisions: tuple[str, ...] = ("fp32", "bf16")
    """In which each layout trains: fp32, bf16, fp16."""
    parts: tuple[str, ...] = ()
    """Of devices, curve, repeat, resume, save, waits, feature, speed, memory, utilization, kill;
    none: all."""
    steps: int = 8
    """Optimizer steps of each run."""
    use_cpu: bool = False
    """Run on the CPU although there is an accelerator."""


LOG_EVERY = 5
"""Steps between two log entries of a baseline of `bench`; also the length of a window that is timed."""
LEAST_WARM_UP = LOG_EVERY + 1
"""The first log entry takes longer than the others, and belongs to the warm-up."""
MOST_STEPS = 3000
"""Steps after which a trial of `bench` that is to reach a loss gives up."""
_LOSS_OF_NOTHING = 5.5
"""Nats per byte, just below those of a model that holds all 256 bytes for equally likely."""
_LEAST: dict[str, tuple[int, str]] = {
    "sequence_length": (2, "to predict a token from one"),
    "per_device_train_batch_size": (1, "to train on something"),
    "steps": (1, "to time something"),
    "warm_up_steps": (LEAST_WARM_UP, f"because the first log entry, after step {LOG_EVERY}, is not typical"),
    "rounds": (1, "to time something"),
}


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    """What `bench` is told."""

    model: str = "tiny"
    """A preset (tiny, 160m, 1b, 7b, 13b, 34b, 70b) or a directory with a config.json; weights are drawn."""
    sequence_length: int = 128
    """Tokens of one row."""
    per_device_train_batch_size: int = 8
    """Rows of one step."""
    steps: int = 20
    """Steps of a trial that are timed, in windows of 5."""
    warm_up_steps: int = 10
    """Steps of a trial before those; what is compiled is compiled in them."""
    rounds: int = 3
    """Trials of each contender; they take turns."""
    mixed_precision: str = "no"
    """bf16: matrix products in it under autocast; no: everything in float32."""
    torch_compile: bool = False
    """Compile the model with torch.compile."""
    contenders: tuple[str, ...] = ()
    """Of ours, torch, accelerate, hf and lightning; none: all that are installed."""
    use_cpu: bool = False
    """Run on the CPU although there is an accelerator."""
    to_loss: float | None = None
    """Train on bytes of the Python standard library until the loss on held-out files is this one (nats per
    byte), and tell the seconds since each process began."""
    json: str | None = None
    """File for all figures, with machine, versions and command."""

    def __post_init__(self) -> None:
        if self.to_loss is not None:
            self._check_to_loss(self.to_loss)
        for name, (least, why) in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigurationError(
                    name, value, f"must be at least {least}, {why}", f"set it to {least} or more"
                )
        if self.steps % LOG_EVERY:
            rule = f"must be a multiple of {LOG_EVERY}, the length of a window"
            raise ConfigurationError("steps", self.steps, rule, f"choose one, such as {4 * LOG_EVERY}")
        if self.mixed_precision not in ("no", "bf16"):
            raise ConfigurationError(
                "mixed_precision", self.mixed_precision, "must be 'no' or 'bf16'", "choose one of these"
            )

    def _check_to_loss(self, loss: float) -> None:
        if not 0 < loss < _LOSS_OF_NOTHING:
            rule = (
                f"must be above 0 and below {_LOSS_OF_NOTHING}, near which a model begins that knows nothing"
            )
            raise ConfigurationError("to_loss", loss, rule, "choose what it can learn, such as 1.8")
        for name in ("steps", "warm_up_steps"):
            value = getattr(self, name)
            if value != BenchArguments.__dataclass_fields__[name].default:
                rule = "has no effect with to_loss, which ends a trial when the loss is reached"
                raise ConfigurationError(name, value, rule, "leave it out")
