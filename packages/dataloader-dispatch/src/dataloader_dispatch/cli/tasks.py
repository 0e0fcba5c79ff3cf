"""Tasks: a tokenization that several machines do, each a share of the parts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")
_TASK = re.compile(r"(\d+)/([1-9]\d*)", re.ASCII)
_SLURM = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")


@dataclass(frozen=True, slots=True)
class Task:
    """One of several tasks.

    Attributes:
        index: Its number, counted from 0.
        count: Number of tasks.
    """

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def share(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Its items: every ``count``-th, so that all tasks have as many, but for one."""
        return items[self.index :: self.count]

    def owners(self, numbers: Iterable[int]) -> str:
        """The tasks that have some items, such as ``task 3/8`` or ``tasks 0-2, 5 of 8``."""
        tasks = sorted({number % self.count for number in numbers})
        ranges: list[list[int]] = []
        for task in tasks:
            if ranges and ranges[-1][1] == task - 1:
                ranges[-1][1] = task
            else:
                ranges.append([task, task])
        if len(tasks) == 1:
            return f"task {tasks[0]}/{self.count}"
        named = (str(first) if first == last else f"{first}-{last}" for first, last in ranges)
        return f"tasks {', '.join(named)} of {self.count}"


def parse_task(text: str) -> Task:
    """The value of ``--task``.

    Args:
        text: ``3/64`` for number 3, counted from 0, of 64; or ``slurm`` for the element of a job array.

    Raises:
        argparse.ArgumentTypeError: It is neither; or the array's variables are missing or leave gaps.
    """
    if text == "slurm":
        return slurm_task(os.environ)
    match = _TASK.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a task. Write INDEX/COUNT, such as 0/64, or slurm")
    task = Task(int(match[1]), int(match[2]))
    if task.index >= task.count:
        raise argparse.ArgumentTypeError(
            f"{text!r} names a task that is not there: tasks are counted from 0, so {task.count} tasks are "
            f"0/{task.count} to {task.count - 1}/{task.count}"
        )
    return task


def slurm_task(variables: Mapping[str, str]) -> Task:
    """The task of an element of a Slurm job array, whose indices may begin anywhere and have a step.

    Args:
        variables: The environment.

    Raises:
        argparse.ArgumentTypeError: It is not an element of an array, or the indices leave gaps.
    """
    missing = [name for name in _SLURM if not variables.get(name, "").isdecimal()]
    if missing:
        raise argparse.ArgumentTypeError(
            f"slurm needs {', '.join(missing)}, which a job array sets (sbatch --array=0-63). Elsewhere "
            "write INDEX/COUNT, such as 0/64"
        )
    index, first, last, count = (int(variables[name]) for name in _SLURM)
    step = (last - first) // max(count - 1, 1) or 1
    if first + step * (count - 1) != last or (index - first) % step or not first <= index <= last:
        raise argparse.ArgumentTypeError(
            f"the indices of this job array, {count} from {first} to {last}, leave gaps, so which task is "
            f"number {index} cannot be told. Write it, such as --task $SLURM_ARRAY_TASK_ID/64"
        )
    return Task((index - first) // step, count)
