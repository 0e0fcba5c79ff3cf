"""`plan --config`: the memory of a run as its settings have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from trainer_core import ConfigurationError
from trainer_fsdp2 import FSDP2TrainingArguments, MemoryPlan, Recommendation, plan, recommend
from trainer_fsdp2 import Mesh as Ranks

from .mesh import Mesh
from .model import Llama
from .model_choice import model_config
from .options import PretrainArguments
from .plan_command import PlanArguments, quiet
from .plan_report import Gpus, command
from .program import PROG
from .tokenizer import load_tokenizer
from .train_command_line import resolve
from .trainers import TRAINERS, trainer_arguments

_OF_THE_GPUS = ("gpus_per_node", "gpu_memory", "json")
_GIB = 2**30


def show_plan(given: Mapping[str, object]) -> None:
    """Plan a run as its file or recipe says, tell whether it fits, and if not, what would.

    Args:
        given: The words of the command line by name, `config` among them; those of train beat the file.

    Raises:
        ConfigurationError: If the settings cannot be used, or there is no plan for such a layout.
        OSError: If the file for the figures cannot be written.
    """
    name = str(given["config"])
    if "gpus" in given:
        raise ConfigurationError(
            "gpus", given["gpus"], "contradicts config, whose mesh tells them", "give mesh instead"
        )
    args = resolve({key: value for key, value in given.items() if key not in _OF_THE_GPUS})
    asked = PlanArguments(**{key: given[key] for key in _OF_THE_GPUS if key in given})  # type: ignore[arg-type]
    mesh = Mesh.parse(args.mesh or "dp=1")
    _refuse_unplannable(name, args)
    gpus = Gpus(
        count=mesh.size,
        per_node=asked.gpus_per_node,
        memory=asked.gpu_memory,
        sequence_length=args.sequence_length,
    )
    model_init = partial(Llama, model_config(args, load_tokenizer(args.tokenizer)))
    settings = _settings(args)
    with quiet():
        ranks = Ranks(mesh.shard, mesh.dp)
        planned = plan(model_init, settings, world_size=ranks, sequence_length=args.sequence_length)
        instead = None if _fits(planned, gpus) else _instead(model_init, settings, gpus)
    print(_told(name, args, mesh, gpus, planned, instead))
    if asked.json is not None:
        figures = _as_json(name, args, mesh, gpus, planned, instead)
        Path(asked.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _refuse_unplannable(name: str, args: PretrainArguments) -> None:
    if args.trainer == "pipeline":
        raise ConfigurationError(
            "config",
            name,
            "is valid, but trains in a pipeline, and a plan knows no stages and no microbatches under way",
            f"`{PROG} train --config {name} --dry-run` tells what the first process holds",
        )
    if not args.mesh and args.trainer != "single":
        raise ConfigurationError(
            "config", name, f"has trainer={args.trainer!r}, but no mesh to tell how many GPUs", "give mesh"
        )


def _settings(args: PretrainArguments) -> FSDP2TrainingArguments:
    """What the planner is told; for the trainers that do not shard those settings that all have."""
    chosen = trainer_arguments(TRAINERS["fsdp2"], args)
    if not isinstance(chosen, FSDP2TrainingArguments):
        raise TypeError("the arguments of FSDP2Trainer have another class")
    return chosen


def _fits(planned: MemoryPlan, gpus: Gpus) -> bool:
    return planned.total <= gpus.memory * _GIB


def _instead(model_init: partial[Llama], settings: FSDP2TrainingArguments, gpus: Gpus) -> Recommendation:
    return recommend(
        model_init,
        settings,
        world_size=gpus.count,
        gpu_memory=gpus.memory,
        gpus_per_node=gpus.per_node,
        sequence_length=gpus.sequence_length,
    )


def _told(
    name: str,
    args: PretrainArguments,
    mesh: Mesh,
    gpus: Gpus,
    planned: MemoryPlan,
    instead: Recommendation | None,
) -> str:
    lines = [f"{name}: valid; {args.model} with {args.trainer} on mesh {mesh}, {gpus}", "", str(planned), ""]
    needs = f"{planned.total / _GIB:.1f} GiB of {gpus.memory:g}"
    if instead is None:
        return "\n".join([*lines, f"fits: needs {needs}"])
    lines += [f"does not fit: needs {needs}", "", f"{gpus}, fastest layout first:", str(instead)]
    return "\n".join([*lines, *(["", command(args.model, instead, gpus)] if instead.fits else [])])


def _as_json(
    name: str,
    args: PretrainArguments,
    mesh: Mesh,
    gpus: Gpus,
    planned: MemoryPlan,
    instead: Recommendation | None,
) -> dict[str, object]:
    return {
        "config": name,
        "model": args.model,
        "trainer": args.trainer,
        "mesh": str(mesh),
        **vars(gpus),
        "fits": instead is None,
        "plan": planned.to_json(),
        "instead": None if instead is None else {"layout": instead.layout, "fits": instead.fits},
    }
