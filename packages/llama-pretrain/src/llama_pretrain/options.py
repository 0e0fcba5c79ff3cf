"""What the commands can be told, and how defaults, file and command line combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from trainer_core import ConfigurationError, TrainingArguments, arguments_from_dict, load_config_file

from .command_line import Parser, add_field_options


@dataclass(frozen=True, kw_only=True)
class PretrainArguments(TrainingArguments):
    """Settings of one pretraining run: those of the trainer, with other defaults, and the application's own.

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
    sequence_length: int = 128
    """Tokens of one training row."""
    held_out: float = 0.02
    """Share of the documents kept for evaluation; 0: none, and no evaluation."""
    prompt: str = "def "
    """Text that the sample at the end of the run continues."""
    sample_tokens: int = 120
    """Tokens of that sample; 0: none."""

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

    def _check_unused(self) -> None:
        for name in _WITHOUT_EFFECT:
            default = next(f.default for f in fields(TrainingArguments) if f.name == name)
            if getattr(self, name) != default:
                raise ConfigurationError(
                    name,
                    getattr(self, name),
                    "has no effect: this application makes its own loader and never overwrites files",
                    "leave it out",
                )


GROUPS: Mapping[str, Sequence[str]] = {
    "what to train, on what": (
        "model",
        "data",
        "text_column",
        "undecodable",
        "shards",
        "tokenizer",
        "sequence_length",
        "held_out",
        "seed",
    ),
    "where": ("output_dir", "logging_dir", "resume_from_checkpoint"),
    "how long, how much at once": (
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
    ),
    "optimizer": (
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
    ),
    "when to log, evaluate and save": (
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "eval_strategy",
        "eval_steps",
        "max_eval_steps",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "prompt",
        "sample_tokens",
    ),
    "precision and compilation": (
        "mixed_precision",
        "float32_matmul_precision",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_compile_dynamic",
        "torch_compile_full_graph",
    ),
}

# This application builds its own loader of packed rows and never overwrites: these have no effect on it.
_WITHOUT_EFFECT = (
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_drop_last",
    "dataloader_shuffle",
    "overwrite_output_dir",
)


def train_parser(prog: str = "llama-pretrain") -> Parser:
    """Return the parser of the options of `train`."""
    parser = Parser(
        prog=f"{prog} train",
        usage=f"{prog} [train] [options]",
        description="Train a Llama, or go on with a run that was stopped: the same command continues it.",
        epilog="Values in [brackets] are defaults. A --config file beats them, an option beats the file.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML or YAML file with the names below, written with underscores"
    )
    add_field_options(parser, PretrainArguments, GROUPS, leave_out=_WITHOUT_EFFECT)
    return parser


def resolve(given: Mapping[str, object]) -> PretrainArguments:
    """Combine defaults, the file named by `config`, and given options, in rising order of weight.

    The default of `warmup_steps` is left out where it could have no effect: with the schedule `constant`.

    Raises:
        ConfigurationError: For an unknown name, a wrong type or a broken rule.
    """
    options = dict(given)
    path = options.pop("config", None)
    settings: dict[str, object] = {}
    if path is not None:
        settings = _with_underscores(load_config_file(Path(str(path))))
    settings |= options
    if settings.get("lr_scheduler_type") == "constant":
        settings.setdefault("warmup_steps", 0)
    return arguments_from_dict(PretrainArguments, settings)


def _with_underscores(settings: Mapping[str, object]) -> dict[str, object]:
    """Let a file say `max-steps` as the command line does."""
    renamed: dict[str, object] = {}
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name in renamed:
            raise ConfigurationError(name, value, "is given twice in the file", "leave one of them out")
        renamed[name] = value
    return renamed
