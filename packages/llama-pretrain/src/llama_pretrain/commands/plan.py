"""The command `plan`: memory per GPU before a run, and the layout that fits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from trainer_core import ConfigurationError, arguments_from_dict
from trainer_fsdp2 import FSDP2Arguments, FSDP2TrainingArguments, plan, recommend

from ..mesh import parse_mesh
from ..model.config import CONFIG_FILE, LlamaConfig
from ..model.llama import Llama
from ..model.presets import preset
from ..program import PROG
from ..targets import check_writable
from .command_line import Parser, add_field_options
from .plan_report import OF_THE_TRAINER, Gpus, Planned, as_json, details, overview

ALL = ("7b", "13b", "34b", "70b")
_GROUPS: Mapping[str, Sequence[str]] = {
    "what on which GPUs": ("model", "gpus", "gpus_per_node", "gpu_memory", "sequence_length", "json"),
    **OF_THE_TRAINER,
}


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

    per_device_train_batch_size: int = 2
    """Examples per device and microbatch; the recommended number is at most this."""
    fsdp2: FSDP2Arguments = field(default_factory=_in_bf16)
    """How the model is spread over the processes."""


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


def resolve(given: Mapping[str, object]) -> PlanArguments:
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


def show_plans(args: PlanArguments) -> None:
    """Plan each model, print tables and what to type, and write the file if one is named.

    Raises:
        ConfigurationError: If there is no such model, or the settings do not fit it or the GPUs.
        OSError: If the file cannot be written.
    """
    if args.mesh and parse_mesh(args.mesh).pipeline > 1:
        raise ConfigurationError(
            "mesh", args.mesh, "has dimensions other than dp and shard", "leave them out, or give --config"
        )
    names = ALL if args.model == "all" else (args.model,)
    check_writable("json", args.json)
    with quiet():
        planned = [_planned(name, args) for name in names]
    gpus = Gpus(
        count=args.gpus,
        per_node=args.gpus_per_node,
        memory=args.gpu_memory,
        sequence_length=args.sequence_length,
    )
    print(overview(planned, gpus) if len(planned) > 1 else details(planned[0], gpus))
    if args.json is not None:
        values = [as_json(each, gpus) for each in planned]
        Path(args.json).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _planned(name: str, args: PlanArguments) -> Planned:
    config = _config(name)
    if args.sequence_length > config.max_position_embeddings:
        raise ConfigurationError(
            "sequence_length",
            args.sequence_length,
            f"is more than the max_position_embeddings of {name}, {config.max_position_embeddings}",
            "lower it",
        )
    model_init = partial(Llama, config)
    asked = None
    if args.model != "all":
        asked = plan(model_init, args, world_size=args.gpus, sequence_length=args.sequence_length)
    recommended = recommend(
        model_init,
        args,
        world_size=args.gpus,
        gpu_memory=args.gpu_memory,
        gpus_per_node=args.gpus_per_node,
        sequence_length=args.sequence_length,
    )
    return Planned(name, asked, recommended)


def _config(name: str) -> LlamaConfig:
    return LlamaConfig.load(name) if (Path(name) / CONFIG_FILE).is_file() else preset(name)


@contextmanager
def quiet() -> Iterator[None]:
    """Every layout that is tried would say what it does, as training does once."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
