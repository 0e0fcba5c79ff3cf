"""Which setting somebody means who writes a name that does not exist.

The names come from other trainers, from their command lines, and from slips. `docs/guides/coming-from.md` has
both tables; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from typing import ClassVar, Self

_SHORT_NAMES: Mapping[str, str] = {
    # Short
    "b": "per_device_train_batch_size",
    "batch": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "batchsize": "per_device_train_batch_size",
    "bs": "per_device_train_batch_size",
    "mbs": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "ga": "gradient_accumulation_steps",
    "gas": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "accumulate": "gradient_accumulation_steps",
    "e": "num_train_epochs",
    "epochs": "num_train_epochs",
    "n": "max_steps",
    "iters": "max_steps",
    "steps": "max_steps",
    "total_steps": "max_steps",
    "train_steps": "max_steps",
    "max_train_steps": "max_steps",
    "lr": "learning_rate",
    "peak_lr": "learning_rate",
    "wd": "weight_decay",
    "betas": "adam_beta1",
    "eps": "adam_epsilon",
    "min_lr": "lr_scheduler_kwargs",
    "warmup": "warmup_steps",
    "clip": "max_grad_norm",
    "clip_grad": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "amp": "mixed_precision",
    "dtype": "mixed_precision",
    "checkpoint": "resume_from_checkpoint",
    "ckpt": "resume_from_checkpoint",
    "resume": "resume_from_checkpoint",
    "eval_every": "eval_steps",
    "eval_interval": "eval_steps",
    "log_every": "logging_steps",
    "log_interval": "logging_steps",
    "save_every": "save_steps",
    "save_interval": "save_steps",
    "o": "output_dir",
    "out": "output_dir",
    "save_dir": "output_dir",
    "force": "fresh overwrite_output_dir",
    "overwrite": "fresh overwrite_output_dir",
    "cpu": "use_cpu=True",
    "no_cuda": "use_cpu=True",
    "random_seed": "seed",
    "workers": "dataloader_num_workers",
    "tensorboard": "report_to='tensorboard'",
    "wandb": "report_to='wandb'",
    # Of the command line alone
    "c": "config",
    "config_file": "config",
    "overwrite_output_dir": "fresh",
    "d": "data",
    "data_dir": "data",
    "data_path": "data",
    "dataset": "data",
    "dataset_name": "data",
    "train_file": "data",
    "m": "model",
    "model_name": "model",
    "model_name_or_path": "model",
    "block_size": "sequence_length",
    "context_length": "sequence_length",
    "max_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "max_seq_length": "sequence_length",
    "seq_len": "sequence_length",
    "dp": "mesh='dp=2'",
    "gpus": "mesh='dp=2'",
    "nproc_per_node": "mesh='dp=2'",
    "num_gpus": "mesh='dp=2'",
    "num_processes": "mesh='dp=2'",
    "zero_stage": "mesh='shard=2'",
    "pp": "mesh='pp=2'",
    # Hugging Face
    "bf16": "mixed_precision='bf16'",
    "fp16": "mixed_precision='fp16'",
    "data_seed": "seed",
    "deepspeed": "mesh='shard=2'",
    "fsdp": "mesh='shard=2'",
    "label_smoothing_factor": "label_smoothing",
    "optim_args": "optim_kwargs",
    "tf32": "float32_matmul_precision='high'",
    # Lightning
    "accelerator": "device",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "check_val_every_n_epoch": "eval_strategy='epoch'",
    "ckpt_path": "resume_from_checkpoint",
    "default_root_dir": "output_dir",
    "devices": "mesh='dp=2'",
    "enable_checkpointing": "save_strategy",
    "fast_dev_run": "dry_run max_steps=1",
    "gradient_clip_val": "max_grad_norm",
    "limit_val_batches": "max_eval_steps",
    "log_every_n_steps": "logging_steps",
    "logger": "report_to",
    "max_epochs": "num_train_epochs",
    "max_time": "max_train_seconds",
    "precision": "mixed_precision",
    "strategy": "mesh",
    "val_check_interval": "eval_steps",
    # torchtitan; what comes before a dot is left out where the rest says it
    "checkpoint.interval": "save_steps",
    "compile.enable": "torch_compile=True",
    "data_parallel_replicate_degree": "mesh='dp=2'",
    "data_parallel_shard_degree": "mesh='shard=2'",
    "dump_folder": "output_dir",
    "keep_latest_k": "save_total_limit",
    "local_batch_size": "per_device_train_batch_size",
    "log_freq": "logging_steps",
    "max_norm": "max_grad_norm",
    "pipeline_parallel_degree": "mesh='pp=2'",
    "validator.freq": "eval_steps",
}
"""What people and other trainers call a setting, and its name here: of several the first that exists."""

_DATA = "The dataset is an argument of the trainer: Trainer(args, train_dataset=data)."
_MODEL = "The model is an argument of the trainer: Trainer(args, model_init=build)."
_LENGTH = "Rows are as long as the dataset makes them."
_PROCESSES = (
    "Start the processes with torchrun, and choose DDPTrainer, FSDP2Trainer or PipelineTrainer for how they "
    "share the work."
)
_HUB = "Nothing is uploaded. save_model(directory) or `llama-pretrain export` writes what transformers loads."
_STOPPING = "Early stopping is a callback: trainer.add_callback(EarlyStopping())."
_CALL = "Training and evaluation are calls of their own: leave it out."
_RANK = "The launcher says it in the environment: leave it out."

_WITHOUT_SETTING: Mapping[str, str] = {
    **dict.fromkeys(("data_dir", "data_path", "dataset", "dataset_name", "train_file"), _DATA),
    **dict.fromkeys(("model", "model_name", "model_name_or_path"), _MODEL),
    **dict.fromkeys(("context_length", "max_length", "max_seq_len", "max_seq_length", "seq_len"), _LENGTH),
    **dict.fromkeys(
        ("deepspeed", "devices", "fsdp", "fsdp_config", "gpus", "num_gpus", "num_nodes"), _PROCESSES
    ),
    **dict.fromkeys(("nnodes", "nproc_per_node", "num_processes", "strategy", "zero_stage"), _PROCESSES),
    **dict.fromkeys(("hub_model_id", "hub_strategy", "hub_token", "push_to_hub"), _HUB),
    **dict.fromkeys(("early_stopping", "early_stopping_patience", "patience"), _STOPPING),
    **dict.fromkeys(("do_eval", "do_predict", "do_train"), _CALL),
    **dict.fromkeys(("local_rank", "rank"), _RANK),
    "callbacks": "Callbacks are added to the trainer: trainer.add_callback(callback).",
    "compute_metrics": "Metrics are an argument of the trainer: Trainer(args, eval_metrics={...}).",
    "ddp_backend": "The backend is that of the process group: DistributedEnvironment(backend='gloo').",
    "disable_tqdm": "To see no progress: trainer.remove_callback(ProgressCallback).",
    "enable_progress_bar": "To see no progress: trainer.remove_callback(ProgressCallback).",
    "eval_accumulation_steps": "Metrics are sums and counts, so no outputs pile up: leave it out.",
    "eval_on_start": "Call trainer.evaluate() before trainer.train().",
    "global_batch_size": "It is per_device_train_batch_size x gradient_accumulation_steps x processes.",
    "ignore_data_skip": "A resumed run reads nothing again: leave it out.",
    "include_num_input_tokens_seen": "Tokens are always counted: leave it out.",
    "remove_unused_columns": "The model gets what the dataset yields: leave it out.",
    "run_name": "It is an argument of the tracker: trainer.add_callback(WandbCallback(run_name='a')).",
    "save_only_model": "A checkpoint can always be resumed. save_model(directory) writes the weights alone.",
}
"""What others have a setting for and we do not, and what to do instead."""

_INPUTS: Mapping[str, str] = {
    # Hugging Face
    "compute_loss": "compute_loss_func",
    "compute_metrics": "eval_metrics",
    "optimizers": "optimizer_factory",
    "preprocess_logits_for_metrics": "eval_metrics",
    "tokenizer": "processing_class",
    # short
    "collate_fn": "data_collator",
    "criterion": "compute_loss_func",
    "data": "train_dataset",
    "dataset": "train_dataset",
    "loss_fn": "compute_loss_func",
    "lr_scheduler": "lr_scheduler_factory",
    "metrics": "eval_metrics",
    "optimizer": "optimizer_factory",
    "scheduler": "lr_scheduler_factory",
    "train_data": "train_dataset",
    "train_dataloader": "train_dataset",
    "train_loader": "train_dataset",
    "val_dataset": "eval_dataset",
}
"""What people and other trainers call an input of a trainer, and its name here."""


class SignatureOfInit:
    """As `__signature__` of a class with a `__new__` that only checks: `help` and editors show `__init__`."""

    def __get__(self, instance: object, owner: type) -> Signature:
        whole = signature(owner.__init__)  # type: ignore[misc]
        return whole.replace(parameters=[*whole.parameters.values()][1:])


class InputHints:
    """A trainer that answers inputs which it does not have with what was probably meant."""

    arguments_class: ClassVar[type]
    __signature__: ClassVar[SignatureOfInit] = SignatureOfInit()

    def __new__(cls, *unnamed: object, **given: object) -> Self:
        """Refuse what `__init__` does not take.

        Raises:
            TypeError: An input is unknown, or has no name.
        """
        if told := _wrong_inputs(signature(cls.__init__), cls.arguments_class, unnamed, given):
            raise TypeError(f"{cls.__name__}: {told}")
        return super().__new__(cls)


def _wrong_inputs(
    made: Signature, arguments_class: type, unnamed: Sequence[object], given: Iterable[str]
) -> str:
    """Say what is wrong with the inputs that a trainer is made of, and what was probably meant.

    Args:
        made: What its `__init__` takes, which a subclass may have changed.
        arguments_class: Its arguments, a dataclass: others take as inputs what are settings here.
        unnamed: The inputs without a name.
        given: The names of the others.

    Returns:
        Sentences; "" if nothing is wrong.
    """
    inputs = [*made.parameters.values()][1:]
    kinds = {each.kind for each in inputs}
    if inputs and inputs[0].name == "args" and Parameter.VAR_POSITIONAL not in kinds and unnamed:
        settings = is_dataclass(unnamed[0]) or isinstance(unnamed[0], Mapping)
        if not settings or len(unnamed) > sum(each.kind < Parameter.VAR_POSITIONAL for each in inputs):
            return (
                "the arguments come first, and only they have no name. Write "
                f"Trainer({arguments_class.__name__}(output_dir='runs/a'), model=model, train_dataset=data)."
            )
    if Parameter.VAR_KEYWORD in kinds:
        return ""
    names, sentences = [each.name for each in inputs], []
    for name in given:
        if name in names:
            continue
        hint = f"Did you mean {_INPUTS[name]!r}?" if _INPUTS.get(name) in names else ""
        hint = hint or suggest(name, names, otherwise="")
        if not hint:
            hint = suggest(name, [each.name for each in fields(arguments_class)], otherwise="Leave it out.")
            if hint.startswith("Did you mean"):
                hint = f"{hint[:-1]}, a setting of {arguments_class.__name__}?"
        sentences.append(f"{name} is not an input of the trainer. {hint}")
    return " ".join(sentences)


def suggest(
    name: str, known: Iterable[str], *, otherwise: str = "See the list of settings for what exists."
) -> str:
    """Say which known name a mistyped one most likely means.

    Names of other trainers and common short ones go before edit distance, which finds nothing near `lr`,
    `eval_steps` near `epochs`, and `gradient_checkpointing` near `gradient_clipping`.

    Args:
        name: The mistyped name; an option may have its dashes.
        known: The names that exist, written likewise.
        otherwise: What to say where none is near.

    Returns:
        A sentence such as "Did you mean 'max_steps'?", or what to do where no setting is needed.
    """
    plain = {each.lstrip("-").replace("-", "_"): each for each in known}
    short = name.lstrip("-").replace("-", "_").lower()
    # What comes before a dot may be the group of another trainer's settings, as in `optimizer.lr`.
    spellings = list(dict.fromkeys((short, short.rpartition(".")[2])))
    for spelling in spellings:
        for meant in _SHORT_NAMES.get(spelling, "").split():
            setting, _, value = meant.partition("=")
            if setting in plain:
                return f"Did you mean {_spelled(plain[setting], value)}?"
    # The sentences are about settings of a training run, not about commands, presets or schedules.
    if "max_steps" in plain:
        for spelling in spellings:
            if spelling in _WITHOUT_SETTING:
                return _WITHOUT_SETTING[spelling]
    for spelling in spellings:
        if spelling in plain:
            return f"Did you mean {_spelled(plain[spelling])}?"
        if close := get_close_matches(spelling, plain, n=1, cutoff=0.66):
            return f"Did you mean {_spelled(plain[close[0]])}?"
    # Words of one name, as in `accumulation`. Those of several, as in `steps`, or short ones mean none.
    longer = [each for each in plain if len(short) > 4 and f"_{short}_" in f"_{each}_".replace(".", "_")]
    return f"Did you mean {_spelled(plain[longer[0]])}?" if len(longer) == 1 else otherwise


def _spelled(name: str, value: str = "") -> str:
    """A setting as one writes it, on a command line or in Python."""
    if name.startswith("--"):
        return f"{name} {value.strip(chr(39))}" if value not in ("", "True") else name
    return f"{name}={value}" if value else repr(name)
