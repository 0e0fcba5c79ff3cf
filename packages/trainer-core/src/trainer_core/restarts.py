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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from checkpoint_core import MemoryDirectory, find_latest_checkpoint
from dist_env import DistributedEnvInterface, gather_objects, get_logger

from .arguments import TrainingArguments
from .distributed.ranks import Ranks
from .errors import ConfigurationError
from .memory_tier import RESTARTS_VARIABLE, has_memory_checkpoint

logger = get_logger(__name__)

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
    """
    if not may_start_again():
        return EarlierStart(False, False)
    own = MemoryDirectory(args.run_path).path.name
    in_memory = has_memory_checkpoint(args)
    mine = (own, _start_name(args), _read_mark(args), in_memory, in_memory or _has_own_on_storage(args))
    told = gather_objects(mine, env)
    launchers, start = {each[0] for each in told}, told[0][1]
    marks = [each[2] for each in told]
    # One that these very processes have left is of an earlier call in them.
    has_begun = any(mark[0] != start and not launchers.isdisjoint(mark[1]) for mark in marks if mark)
    wanted, saves = args.resume_from_checkpoint, args.save_strategy != "no"
    # A run that has saved nothing begins as the first time; unless that would move aside what is its own.
    needs_saved = isinstance(wanted, str) or not saves
    has_saved = any(each[4] if saves else each[3] for each in told)
    return EarlierStart(has_begun, has_begun and wanted is not True and (has_saved or not needs_saved))


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
    found, failure = False, None
    try:
        found = wanted and (
            has_memory_checkpoint(args) or (not begins.only_memory and newest_checkpoint(args) is not None)
        )
    except Exception as error:  # noqa: BLE001  # raised as soon as the other ranks know of it
        failure = error
    ranks.fail_together(failure, "look for a checkpoint to resume from")
    # One answer for all: the file system may show one rank what another does not see yet.
    return ranks.any([found])[0]


def leave_mark(args: TrainingArguments, ranks: Ranks) -> None:
    """Note in the output directory that the run has begun, for later starts of this job; collective.

    Raises:
        ConfigurationError: On every rank, if it cannot be written.
    """
    if not may_start_again() or (args.save_strategy == "no" and not args.memory_save_steps):
        return
    told = gather_objects((MemoryDirectory(args.run_path).path.name, _start_name(args)), ranks.env)
    failure = None
    if ranks.env.local_rank == 0:  # on each node: it may have a disk of its own
        mark = {"launchers": sorted({each[0] for each in told}), "start": told[0][1]}
        path = args.run_path / MARK_NAME
        partial = path.with_name(f"{MARK_NAME}-{ranks.env.rank}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(mark) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            rule = f"cannot take a note of this start ({error})"
            failure = ConfigurationError("output_dir", args.output_dir, rule, "choose another output_dir")
    ranks.fail_together(failure, "note that the run has begun")


def newest_checkpoint(args: TrainingArguments) -> Path | None:
    """The newest checkpoint on storage, by its manifest; it is verified when it is loaded."""
    # Of what nodes keep together each has a part; whether all are there is seen when it is loaded.
    parts = args.save_on_each_node and args.remote_dir is not None
    return find_latest_checkpoint(args.output_dir, remote_dir=args.remote_dir, one_node=parts)


def _has_own_on_storage(args: TrainingArguments) -> bool:
    # Only asked where it decides: of a store it is a question over the network.
    return isinstance(args.resume_from_checkpoint, str) and newest_checkpoint(args) is not None


def _start_name(args: TrainingArguments) -> str:
    """What tells a start of the ranks from all others, on rank 0."""
    process = MemoryDirectory(args.run_path, launcher=os.getpid()).path.name
    return f"{process} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _read_mark(args: TrainingArguments) -> tuple[str, list[str]] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        mark = json.loads((args.run_path / MARK_NAME).read_text(encoding="utf-8"))
        return str(mark["start"]), [str(each) for each in mark["launchers"]]
    return None
