"""`train --dry-run`: what the first process of a job would build, hold and do."""

from __future__ import annotations

from dataclasses import replace

from dist_env import fake_job
from trainer_core import ConfigurationError, DryRun

from ..arguments import PretrainArguments, launch_command
from ..console import PROG, table
from ..experiment import build_trainer, prepare
from ..mesh import parse_mesh, told_trainer
from ..run_directory import RunDirectory

_MIB = 2**20
_GPUS_OF_A_NODE = 8


def dry_run(args: PretrainArguments) -> None:
    """Build everything that rank 0 of the job would build, make a step without values, and tell about it.

    All of it is on the CPU and takes no memory to speak of, so that a job of hundreds of GPUs fits a laptop.

    Args:
        args: The settings as resolved.

    Raises:
        ConfigurationError: If a setting cannot be used, as in `train`; or if none says how many processes.
        DataError: If the data cannot be used.
    """
    args = replace(args, use_cpu=True, device=None)
    processes = _processes(args)
    with fake_job(processes, local_world_size=_on_a_node(processes)) as env:
        experiment = prepare(args)
        RunDirectory(args.run_path).check(args, experiment.subject)
        found = build_trainer(experiment, env).dry_run()
    print(_told(args, processes, found))


def _processes(args: PretrainArguments) -> int:
    if args.mesh:
        return parse_mesh(args.mesh).world_size
    if args.trainer == "single":
        return 1
    raise ConfigurationError(
        "trainer",
        args.trainer,
        "does not say how many processes to show, because a dry run has no launcher",
        f"give mesh instead, as in `{launch_command(2, args.trainer)} --dry-run`",
    )


def _on_a_node(processes: int) -> int:
    return _GPUS_OF_A_NODE if processes % _GPUS_OF_A_NODE == 0 else processes


def _told(args: PretrainArguments, processes: int, found: DryRun) -> str:
    several = f"{processes} processes ({args.mesh}), of which this is rank 0"
    way = told_trainer(args.trainer, parse_mesh(args.mesh))
    lines = [
        f"model      {args.model}, {found.parameters:,} parameters, {found.row_length} tokens a row",
        f"trainer    {way}, {several if processes > 1 else 'one process'}",
        f"step       {found.tokens:,} tokens in {found.rows:,} rows",
        f"compute    {_compute(processes, found)}",
        "",
        *table(_memory(found), right=(1,)),
    ]
    if processes > 1:
        lines += ["", *table(_sent(found), right=(1, 2, 3))]
    lines += ["", "done: checks, data, model, optimizer, schedule, and a step: forward, backward, optimizer"]
    lines += [f"left out: {item}" for item in found.left_out]
    return "\n".join([*lines, f"nothing was written; `{PROG} plan --config` plans the rest of the memory"])


def _compute(processes: int, found: DryRun) -> str:
    if found.flops is None:
        return "FLOPs unknown"
    share = found.flops / processes
    told = f"{found.flops:.4g} model FLOPs a step, {share:.4g} for each process on average"
    if found.executed_flops is not None and found.executed_flops > found.flops:
        told += f"; {found.executed_flops / found.flops:.2f} times as many with what is recomputed"
    return told


def _memory(found: DryRun) -> list[tuple[str, str, str]]:
    rows = [
        ("parameters", found.weights, ""),
        ("gradients", found.gradients, ""),
        ("optimizer state", found.optimizer, found.optimizer_name),
    ]
    total = found.weights + found.gradients + found.optimizer
    rows.append(("together", total, "without activations, and what is gathered for a moment"))
    sizes = [(name, f"{size / _MIB:,.1f}", text) for name, size, text in rows]
    return [("this rank holds", "MiB", ""), *sizes]


def _sent(found: DryRun) -> list[tuple[str, str, str, str]]:
    head = ("in a step it asks for", "calls", "among ranks", "MiB in all")
    rows = [
        (each.kind, f"{each.calls:,}", f"{each.ranks:,}", f"{each.bytes / _MIB:,.1f}")
        for each in found.collectives
    ]
    return [head, *rows]
