"""`plan --config`: the memory of a run as its settings have it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dist_env import ParallelLayout
from trainer_core import ConfigurationError, Plan, arguments_from_dict, longest_sequence, plan
from trainer_fsdp2 import FSDP2TrainingArguments, Recommendation, recommend

from ..arguments import PretrainArguments, settings_of
from ..console import check_writable
from ..experiment import TRAINERS, model_config
from ..mesh import parse_mesh, told_trainer
from ..model.llama import Llama
from ..settings import resolve
from ..tokenizer import load_tokenizer
from .arguments import PlanArguments
from .plan import Gpus, changed_options, launcher, quiet
from .plan_time import FP8, time_plan

_OF_THE_GPUS = (
    "gpus_per_node",
    "gpu_memory",
    "json",
    "longest_sequence",
    "gpu",
    "mfu",
    "tokens",
    "price",
)
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
            "gpus", given["gpus"], "contradicts --config, whose mesh determines it", "give --mesh instead"
        )
    args = resolve({key: value for key, value in given.items() if key not in _OF_THE_GPUS})
    asked = arguments_from_dict(PlanArguments, {key: given[key] for key in _OF_THE_GPUS if key in given})
    mesh = parse_mesh(args.mesh)
    _check_gpus(asked)
    _refuse_unplannable(name, args)
    gpus = Gpus(
        count=mesh.world_size,
        per_node=asked.gpus_per_node,
        memory=asked.gpu_memory,
        sequence_length=args.sequence_length,
    )
    config = model_config(args, load_tokenizer(args.tokenizer))
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * mesh.data_count
    time = time_plan(
        replace(asked, sequence_length=args.sequence_length),
        config,
        count=mesh.world_size,
        dtype=args.matmul_dtype if args.fp8_recipe is None else FP8,
        tokens=args.max_steps * rows * args.sequence_length if args.max_steps > 0 else None,
    )

    def planned_for(length: int) -> Plan:
        # The tables of positions reach as far as rows do.
        positions = max(length, config.max_position_embeddings)
        return plan(
            args,
            model_init=partial(Llama, replace(config, max_position_embeddings=positions)),
            world_size=mesh.world_size,
            sequence_length=length,
            trainer=TRAINERS[args.trainer],
        )

    longest = None
    with quiet():
        planned = planned_for(args.sequence_length)
        verdict = _judge(planned.total, args, mesh, gpus, partial(Llama, config))
        if asked.longest_sequence:

            def needs(length: int) -> int:
                total = planned_for(length).total
                print(f"planned: rows of {length:,} tokens need {total / _GIB:.1f} GiB", file=sys.stderr)
                return total

            longest = longest_sequence(needs, int(gpus.memory * _GIB), begin=args.sequence_length)
    report = _Report(
        name=name,
        args=args,
        mesh=mesh,
        gpus=gpus,
        planned=planned,
        verdict=verdict,
        to_type=_to_type(name, args, verdict.instead, gpus),
    )
    print(_told(report))
    if asked.longest_sequence:
        fitting = f"up to about {longest:,} tokens" if longest else "not even 256 tokens"
        print(f"rows that fit: {fitting}, with the other settings as they are")
    if time is not None:
        print(f"\n{time}")
    if asked.json is not None:
        figures = _as_json(report)
        if time is not None:
            figures["time"] = time.to_json()
        if asked.longest_sequence:
            figures["longest_sequence"] = longest
        Path(asked.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _check_gpus(asked: PlanArguments) -> None:
    if asked.gpus_per_node < 1:
        raise ConfigurationError(
            "gpus_per_node", asked.gpus_per_node, "must be 1 or more", "set it to 1 or more"
        )
    if not asked.gpu_memory > 0:
        raise ConfigurationError(
            "gpu_memory",
            asked.gpu_memory,
            "must be more than 0 GiB",
            "give the memory of one GPU, such as 80",
        )
    check_writable("json", asked.json)


def _refuse_unplannable(name: str, args: PretrainArguments) -> None:
    if not args.mesh and args.trainer != "single":
        raise ConfigurationError(
            "config",
            name,
            f"has trainer={args.trainer!r}, but no mesh to tell how many GPUs there are",
            "give --mesh, such as --mesh shard=8",
        )
    # Each keeps further copies of what is trained, or of its gradients, which no plan counts.
    for setting, value, plain in (
        ("compression.method", args.compression.method, ("no", "bf16", "fp16")),
        ("post_local_sgd.enabled", args.post_local_sgd.enabled, (False,)),
        ("diloco.enabled", args.diloco.enabled, (False,)),
    ):
        if value not in plain:
            raise ConfigurationError(
                setting, value, "keeps copies that a plan does not count", "plan the run without it"
            )


@dataclass(frozen=True)
class _Verdict:
    """Whether a plan fits, and if not, the layout that would; without one, why none was looked for."""

    fits: bool
    instead: Recommendation | None = None
    why_none: str = ""


def _judge(
    needed: int, args: PretrainArguments, mesh: ParallelLayout, gpus: Gpus, model_init: partial[Llama]
) -> _Verdict:
    if needed <= gpus.memory * _GIB:
        return _Verdict(fits=True)
    if gpus.count > gpus.per_node and gpus.count % gpus.per_node:
        return _Verdict(fits=False, why_none=f"the mesh is not a multiple of gpus_per_node={gpus.per_node}")
    rows = args.per_device_train_batch_size
    if mesh.context > 1:
        return _Verdict(fits=False, why_none="others with cp are not looked for")
    if gpus.per_node % mesh.tensor:
        return _Verdict(fits=False, why_none=f"tp={mesh.tensor} does not divide the GPUs of a node")
    if rows % mesh.pipeline:
        return _Verdict(
            fits=False, why_none=f"{rows} rows of a pipeline are not so many for each of its GPUs"
        )
    found = recommend(
        model_init,
        # Each rank of a pipeline works on all of its rows, and each rank of another layout on its own.
        replace(settings_of(FSDP2TrainingArguments, args), per_device_train_batch_size=rows // mesh.pipeline),
        world_size=gpus.count,
        gpu_memory=gpus.memory,
        gpus_per_node=gpus.per_node,
        sequence_length=gpus.sequence_length,
        tensor=mesh.tensor,
    )
    return _Verdict(fits=False, instead=found)


def _to_type(name: str, args: PretrainArguments, found: Recommendation | None, gpus: Gpus) -> str | None:
    """The same run in the layout that fits, its other settings as they are; None if there is none."""
    if found is None or not found.fits:
        return None
    before = settings_of(FSDP2TrainingArguments, args)
    options = [f"--config {name}", f"--mesh {found.plan.layout}", *changed_options(found.args, before)]
    return " ".join([launcher(gpus), *options])


@dataclass(frozen=True, kw_only=True)
class _Report:
    """All that is told of a plan."""

    name: str
    args: PretrainArguments
    mesh: ParallelLayout
    gpus: Gpus
    planned: Plan
    verdict: _Verdict
    to_type: str | None
    """The command for the layout that would fit."""


def _told(report: _Report) -> str:
    args, gpus, planned, verdict = report.args, report.gpus, report.planned, report.verdict
    what = f"{args.model} with {told_trainer(args.trainer, report.mesh)} on mesh {report.mesh}, {gpus}"
    lines = [f"{report.name}: valid; {what}", "", str(planned), ""]
    needs = f"{planned.total / _GIB:.1f} GiB of {gpus.memory:g}"
    if verdict.fits:
        return "\n".join([*lines, f"fits: needs {needs}"])
    lines.append(f"does not fit: needs {needs}")
    if verdict.instead is None:
        return "\n".join([*lines, f"no other layout was looked for: {verdict.why_none}"])
    lines += ["", f"{gpus}, fastest layout first:", str(verdict.instead)]
    return "\n".join([*lines, *(["", report.to_type] if report.to_type else [])])


def _as_json(report: _Report) -> dict[str, object]:
    args, found = report.args, report.verdict.instead
    return {
        "config": report.name,
        "model": args.model,
        "trainer": args.trainer,
        "mesh": str(report.mesh),
        **vars(report.gpus),
        "fits": report.verdict.fits,
        "plan": report.planned.to_json(),
        "instead": None
        if found is None
        else {
            "layout": found.layout,
            "fits": found.fits,
            "rejected": [{"layout": each.layout, "reason": each.reason} for each in found.rejected],
            "command": report.to_type,
        },
    }
