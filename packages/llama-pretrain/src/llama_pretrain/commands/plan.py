"""The command `plan`: memory per GPU before a run, and the layout that fits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path

from dist_env import ParallelLayout
from trainer_core import ConfigurationError, Plan
from trainer_fsdp2 import FSDP2TrainingArguments, Recommendation, plan, recommend

from ..console import check_writable, table
from ..mesh import parse_mesh
from ..model.config import preset_or_load
from ..model.llama import Llama
from .arguments import OF_THE_TRAINER, PlanArguments
from .plan_time import FP8, time_plan

_GIB = 2**30
_COLUMNS: Mapping[str, str] = {
    "param.": "parameters",
    "grad.": "gradients",
    "optim.": "optimizer",
    "gathered": "gathered",
    "under way": "reduced",
    "activ.": "activations",
    "margin": "margin",
    "total": "total",
}
_REST = "Add --data and --tokenizer; the plan counts the vocabulary in the shape of the model."


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The job that is asked about."""

    count: int
    per_node: int
    memory: float
    """GiB of one."""
    sequence_length: int
    """Tokens of one row."""

    def __str__(self) -> str:
        nodes = f", {self.per_node} a node" if self.count > self.per_node else ""
        return f"{self.count} GPU{'s' * (self.count > 1)} of {self.memory:g} GiB{nodes}"


@dataclass(frozen=True)
class Planned:
    """One model: what was asked about, and what is recommended."""

    name: str
    asked: Plan | None
    """Of one model only."""
    recommended: Recommendation


def details(planned: Planned, gpus: Gpus) -> str:
    """One model: its memory as asked, the layouts that were tried, and what to type."""
    found = planned.recommended
    asked = [] if planned.asked is None else [f"{planned.name} as given: {planned.asked}", ""]
    parts = [*asked, f"{gpus}, fastest layout first:", str(found)]
    if found.plan != planned.asked:
        parts += ["", f"{found.layout}: {found.plan}"]
    if found.fits:
        parts += ["", command(planned.name, found, gpus), _REST]
    return "\n".join(parts)


def overview(planned: Sequence[Planned], gpus: Gpus) -> str:
    """Several models: a line for each, and what to type."""
    rows = [("model", "layout", "batch", *_COLUMNS)]
    told = []
    for each in planned:
        found = each.recommended
        layout = found.layout if found.fits else f"does not fit: {found.layout}"
        sizes = [f"{getattr(found.plan, part) / _GIB:.1f}" for part in _COLUMNS.values()]
        rows.append((each.name, layout, str(found.plan.batch_size), *sizes))
        if found.fits and found.plan.state_on_host:
            told.append(_told_host(each))
    commands = [command(each.name, each.recommended, gpus) for each in planned if each.recommended.fits]
    head = f"{gpus}, rows of {gpus.sequence_length} tokens; GiB per GPU:"
    right = range(2, len(rows[0]))
    return "\n".join([head, *table(rows, right=right), *told, "", *commands, _REST])


def _told_host(planned: Planned) -> str:
    found = planned.recommended
    instead = "" if found.gpus_needed is None else f"; {found.gpus_needed} GPUs could do without"
    host = found.plan.on_host / _GIB
    return f"{planned.name}: parameters, gradients, optimizer: {host:.1f} GiB of the host per GPU{instead}"


def launcher(gpus: Gpus) -> str:
    """The words that start `train` in as many processes as there are GPUs."""
    nodes = max(1, gpus.count // gpus.per_node)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    where = "--standalone" if nodes == 1 else several
    return f"torchrun {where} --nproc-per-node {gpus.count // nodes} -m llama_pretrain train"


def command(model: str, found: Recommendation, gpus: Gpus) -> str:
    """What to type to train with a recommendation.

    Args:
        model: Name of the model.
        found: The recommendation.
        gpus: The job.
    """
    layout = found.plan.layout
    if layout.tensor > 1 or (layout.replicate > 1 and layout.shard > 1):
        how = f"--mesh {layout}"
    else:
        how = f"--trainer {'ddp' if found.uses_ddp else 'fsdp2'}"
    batch = found.args.per_device_train_batch_size
    fixed = f"{how} --model {model} --sequence-length {gpus.sequence_length}"
    size = f"--per-device-train-batch-size {batch}"
    others = changed_options(found.args, FSDP2TrainingArguments(per_device_train_batch_size=batch))
    return " ".join([launcher(gpus), fixed, size, *others])


def changed_options(args: FSDP2TrainingArguments, before: FSDP2TrainingArguments) -> Iterator[str]:
    """Options that lead from some settings of the trainer to others, as far as they decide about memory."""
    for name in (name for names in OF_THE_TRAINER.values() for name in names):
        yield from _changed(name, getattr(args, name), getattr(before, name))


def _changed(name: str, value: object, default: object) -> Iterator[str]:
    if value == default:
        return
    if is_dataclass(value):
        for each in fields(value):
            yield from _changed(f"{name}.{each.name}", getattr(value, each.name), getattr(default, each.name))
        return
    flag = name.replace("_", "-")
    if isinstance(value, bool) and name != "fsdp2.reshard_after_forward":
        yield f"--{flag}" if value else f"--no-{flag}"
    else:
        yield f"--{flag} {_word(value)}"


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def as_json(planned: Planned, gpus: Gpus) -> dict[str, object]:
    """All figures of one model as plain values, in bytes."""
    found = planned.recommended
    return {
        "model": planned.name,
        **vars(gpus),
        "as_given": None if planned.asked is None else planned.asked.to_json(),
        "recommended": {
            "layout": found.layout,
            "fits": found.fits,
            "gpus_needed": found.gpus_needed,
            "rejected": [{"layout": each.layout, "reason": each.reason} for each in found.rejected],
            "plan": found.plan.to_json(),
            "command": command(planned.name, found, gpus) if found.fits else None,
        },
    }


ALL = ("7b", "13b", "34b", "70b")


def show_plans(args: PlanArguments) -> None:
    """Plan each model, print tables and what to type, and write the file if one is named.

    Raises:
        ConfigurationError: If there is no such model, or the settings do not fit it or the GPUs.
        OSError: If the file cannot be written.
    """
    if args.longest_sequence:
        raise ConfigurationError(
            "longest_sequence",
            True,
            "is planned for the layout of a run",
            "give --config, and --mesh beside it",
        )
    layout = parse_mesh(args.mesh or "")
    if layout.pipeline * layout.context * layout.expert > 1:
        raise ConfigurationError(
            "mesh",
            args.mesh,
            "has dimensions other than dp, shard and tp",
            "leave pp, cp and ep out, or give --config, which plans the layout of a run",
        )
    if args.mesh and layout.world_size != args.gpus:
        raise ConfigurationError(
            "mesh",
            args.mesh,
            f"is for {layout.world_size} GPUs, but gpus={args.gpus}",
            "leave --gpus out, for it follows from the mesh, or change the mesh",
        )
    names = ALL if args.model == "all" else (args.model,)
    check_writable("json", args.json)
    dtype = args.matmul_dtype if args.fp8_recipe is None else FP8
    times = [
        time_plan(args, preset_or_load(name, args.sequence_length), count=args.gpus, dtype=dtype)
        for name in names
    ]
    with quiet():
        planned = [_planned(name, args, layout) for name in names]
    gpus = Gpus(
        count=args.gpus,
        per_node=args.gpus_per_node,
        memory=args.gpu_memory,
        sequence_length=args.sequence_length,
    )
    print(overview(planned, gpus) if len(planned) > 1 else details(planned[0], gpus))
    for name, time in zip(names, times, strict=True):
        if time is not None:
            print(f"\n{name}: {time}")
    if args.json is not None:
        values = [
            as_json(each, gpus) | ({} if time is None else {"time": time.to_json()})
            for each, time in zip(planned, times, strict=True)
        ]
        Path(args.json).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _planned(name: str, args: PlanArguments, layout: ParallelLayout) -> Planned:
    model_init = partial(Llama, preset_or_load(name, args.sequence_length))
    ask = partial(plan, model_init, args, sequence_length=args.sequence_length)
    asked = None
    if layout.tensor > 1 and args.model != "all":
        # Before others are tried: its errors name the mesh. Without shards it is the business of `Trainer`.
        asked = ask(world_size=layout)
    recommended = recommend(
        model_init,
        args,
        world_size=args.gpus,
        gpu_memory=args.gpu_memory,
        gpus_per_node=args.gpus_per_node,
        sequence_length=args.sequence_length,
        tensor=layout.tensor,
    )
    if asked is None and args.model != "all":
        is_recommended = recommended.args == args and not recommended.uses_ddp
        asked = recommended.plan if is_recommended else ask(world_size=args.gpus)  # which takes seconds
    return Planned(name, asked, recommended)


@contextmanager
def quiet() -> Iterator[None]:
    """Every layout that is tried would say what it does, as training does once."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
