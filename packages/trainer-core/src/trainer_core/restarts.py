"""Whether a start of the ranks continues a run that an earlier start of the same job has begun.

A launcher that starts ranks again gives them the same command, so that what it says of the beginning would
apply again: a fresh start would move the run itself aside, and a checkpoint of another run would take the
place of its own. So a run leaves a mark in its output directory once that is its own, and a start whose
launcher is named there continues the run.

TORCHELASTIC_RESTART_COUNT does not tell it: it counts losses before a run has begun as well, stays as it was
where ranks begin again because a node came or went, and differs between nodes.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from checkpoint_core import CheckpointError, MemoryDirectory, find_latest_checkpoint
from dist_env import DistributedEnvInterface, gather_objects, get_logger, may_pass

from .arguments import TrainingArguments
from .distributed.ranks import Ranks
from .errors import ConfigurationError
from .memory_tier import RESTARTS_VARIABLE, has_memory_checkpoint, launch_directory

logger = get_logger(__name__)
T = TypeVar("T")

MARK_NAME = ".started-by.json"
"""The mark, beside the checkpoints: who has started the run that is there."""


class EarlierStart(NamedTuple):
    """What an earlier start of the same job has done; equal on all ranks."""

    has_begun: bool
    """Whether one has begun the run: its output directory was the run's own, and cleared for it."""
    resumes: bool
    """Whether the run continues from its own newest checkpoint, if it has any, whatever its arguments say of
    the beginning."""


def may_start_again() -> bool:
    """Whether a launcher that may start its ranks again has started this process."""
    # torchrun does so too when a node comes or goes, also with --max-restarts 0.
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get(RESTARTS_VARIABLE, "0") not in ("", "0")


def find_earlier_start(args: TrainingArguments, env: DistributedEnvInterface) -> EarlierStart:
    """Find out together what an earlier start of this job has done; collective where ranks may start again.

    Nodes may differ: one that has replaced another has nothing of the run in its memory, nor on its disk.

    Args:
        args: The arguments of the run.
        env: The ranks, connected.

    Returns:
        It, equal on all ranks.

    Raises:
        ConfigurationError: On every rank, naming the first that cannot tell, or whose node has checkpoints of
            another run where this one would look for its own.
    """
    if not may_start_again():
        return EarlierStart(False, False)
    leads = env.local_rank == 0
    launchers, start = _launch_of_all(args, env)

    def judge() -> bool:
        mark = _read_mark(args) if leads else None
        # One that these very processes have left is of an earlier call in them.
        return mark is not None and mark[0] != start and not launchers.isdisjoint(mark[1])

    is_marked = _ask_all(args, env, judge)
    has_begun = any(is_marked)
    wanted, saves = args.resume_from_checkpoint, args.save_strategy != "no"
    if not has_begun or wanted is True:
        return EarlierStart(has_begun, False)
    # A run that has saved nothing begins as the first time; unless that would move aside what is its own.
    needs_saved = isinstance(wanted, str) or not saves

    def has_saved() -> bool:
        if not leads:
            return False
        keeps = saves and (env.rank == 0 or args.save_on_each_node)
        if keeps and not is_marked[env.rank]:
            _refuse_other_run(args)
        if not needs_saved:
            return True
        # Only asked where it decides: of a store it is a question over the network.
        return has_memory_checkpoint(args) or (keeps and newest_checkpoint(args) is not None)

    return EarlierStart(has_begun, any(_ask_all(args, env, has_saved)))


def _launch_of_all(args: TrainingArguments, env: DistributedEnvInterface) -> tuple[set[str], str]:
    """The launchers of all nodes, and what tells this start of the ranks from all others; collective."""
    # One rank of each node says it: all of thousands would send megabytes.
    name = (launch_directory(args).path.name, _start_name(args)) if env.local_rank == 0 else None
    told = [each for each in _ask_all(args, env, lambda: name) if each is not None]
    return {launcher for launcher, _ in told}, told[0][1]


def _ask_all(args: TrainingArguments, env: DistributedEnvInterface, ask: Callable[[], T]) -> list[T]:
    """What every rank answers, on every rank; what one fails with, all raise. Collective.

    Raises:
        ConfigurationError: On every rank, with the same words.
    """
    answers: list[T] = []
    failure = None
    try:
        answers.append(ask())
    except Exception as error:  # noqa: BLE001  # raised as soon as the other ranks know of it
        failure = error
    where = f"rank {env.rank} on {platform.node()}"
    text = None if failure is None else f"{where}: {failure}"
    told = gather_objects((text, may_pass(failure), answers), env)
    for text, passes, _ in told:
        if text is not None:
            rule = f"does not tell whether an earlier start of this job has begun the run ({text})"
            fix = "make the run's directory and its checkpoints readable on every node, or choose another"
            refused = ConfigurationError("output_dir", args.output_dir, rule, fix)
            refused.may_pass = passes
            raise refused from failure
    return [answer for *_, answers in told for answer in answers]


def _refuse_other_run(args: TrainingArguments) -> None:
    """Refuse what this node has on its disk, where the run's own mark is missing.

    Raises:
        CheckpointError: If there are checkpoints.
    """
    if args.saves_to_store:
        return
    found = find_latest_checkpoint(args.output_dir, one_node=True)
    if found is not None:
        raise CheckpointError(
            f"{found.absolute()} is of another run, because {MARK_NAME} beside it does not name a launcher "
            "of this job; move it away on that node"
        )


class Beginning(NamedTuple):
    """What a start of the ranks begins from; equal on all ranks."""

    args: TrainingArguments
    """The arguments as they apply to it."""
    otherwise: bool | str
    """`resume_from_checkpoint` as it was given: a path applies again if no checkpoint of the run is good."""
    only_memory: bool
    """Whether the run has its checkpoints in memory alone, so that those on storage are of another one."""


def settle_beginning(args: TrainingArguments, ranks: Ranks) -> Beginning:
    """Find out together what this start of the job begins from; collective."""
    wanted = args.resume_from_checkpoint
    if not find_earlier_start(args, ranks.env).resumes:
        return Beginning(args, wanted, only_memory=False)
    logger.warning(
        "resume_from_checkpoint=%r applied to the first start of this job; this one continues the run in %s",
        wanted,
        args.output_dir,
    )
    args = replace(args, resume_from_checkpoint=True, overwrite_output_dir=False)
    return Beginning(args, wanted, only_memory=args.save_strategy == "no")


def has_checkpoint_to_resume(begins: Beginning, ranks: Ranks) -> bool:
    """Whether training would continue from a checkpoint; it is verified when it is loaded. Collective."""
    args, wanted = begins.args, begins.args.resume_from_checkpoint
    if isinstance(wanted, str):
        return True
    with ranks.failing_together("look for a checkpoint to resume from"):
        found = wanted and (
            has_memory_checkpoint(args) or (not begins.only_memory and newest_checkpoint(args) is not None)
        )
    # One answer for all: the file system may show one rank what another does not see yet.
    return ranks.any([found])[0]


def leave_mark(args: TrainingArguments, ranks: Ranks) -> None:
    """Leave the mark in the output directory: the run has begun, for later starts of this job. Collective.

    Rank 0 must succeed, and nodes that keep checkpoints of their own; elsewhere a failure is a warning.

    Raises:
        ConfigurationError: If it cannot be written, on one rank.
        DataError: The same on every rank of several, naming those that have failed.
    """
    if not may_start_again() or (args.save_strategy == "no" and not args.memory_save_steps):
        return
    env = ranks.env
    launchers, start = _launch_of_all(args, env)
    text = json.dumps({"launchers": sorted(launchers), "start": start}) + "\n"
    failure = _write_mark(args, text, env.rank) if env.rank == 0 else None
    ranks.fail_together(failure, "leave the mark of this start")
    if env.local_rank == 0 and env.rank != 0:  # on each node: it may have a disk of its own
        failure = _write_mark(args, text, env.rank)
        if failure is not None and not (args.save_on_each_node or args.memory_save_steps):
            logger.warning("on this node, rank %d: %s", env.rank, failure)
            failure = None
    ranks.fail_together(failure, "leave the mark of this start")


def _write_mark(args: TrainingArguments, text: str, rank: int) -> ConfigurationError | None:
    """Write the mark unless it is there; what stands in the way."""
    path = args.run_path / MARK_NAME
    partial = path.with_name(f"{MARK_NAME}-{rank}.partial")
    try:
        # On a shared file system rank 0 has written it.
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except (OSError, ValueError) as error:
        rule = f"cannot take the mark of this start ({error})"
        return ConfigurationError("output_dir", args.output_dir, rule, "choose another output_dir")
    return None


def newest_checkpoint(args: TrainingArguments) -> Path | None:
    """The newest checkpoint on storage, by its manifest; it is verified when it is loaded."""
    # Of what nodes keep together each has a part; whether all are there is seen when it is loaded.
    parts = args.save_on_each_node and args.remote_dir is not None
    return find_latest_checkpoint(args.output_dir, remote_dir=args.remote_dir, one_node=parts)


def _start_name(args: TrainingArguments) -> str:
    """What tells a start of the ranks from all others, on rank 0."""
    process = MemoryDirectory(args.run_path, launcher=os.getpid()).path.name
    return f"{process} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _read_mark(args: TrainingArguments) -> tuple[str, list[str]] | None:
    """Start and launchers of the mark; None if there is not any.

    Raises:
        OSError: If it cannot be read, which says nothing of the run.
        CheckpointError: If it is damaged.
    """
    path = args.run_path / MARK_NAME
    try:
        mark = json.loads(path.read_text(encoding="utf-8"))
        return str(mark["start"]), [str(each) for each in mark["launchers"]]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the mark {path.absolute()} is damaged; remove it if no run of this job is there"
        ) from error
