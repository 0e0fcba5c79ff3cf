"""The parts of a directory of token ids, made as tasks of a Ray cluster (extra ``ray``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dataloader_dispatch.cli.output import FinishedPart
from dataloader_dispatch.cli.parts import (
    Encoder,
    Job,
    StoppedError,
    collected_warnings,
    make_part,
    no_room_for,
    part_name,
)
from dataloader_dispatch.errors import DataError

_PENDING = 1000
"""Tasks that Ray is given at a time, so that it does not have to keep a hundred thousand."""


@contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """The module ``ray``, connected to a cluster for a while.

    Args:
        address: As for ``ray.init``: "auto" for the cluster that this machine belongs to, "local" for one on
            this machine alone, which ends with it, or the address of one.

    Raises:
        DataError: Ray is not installed, or the cluster cannot be reached.
    """
    # One that this command starts reports nothing to anybody, unless the user has said so.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise DataError(
            "--ray needs Ray, which is not installed. Install it with `pip install "
            "'dataloader-dispatch[ray]'`, here and on the machines of the cluster."
        ) from error
    ours = not ray.is_initialized()
    if ours:
        dashboard = False if address == "local" else None
        try:
            ray.init(
                address=address,
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise DataError(
                f"--ray {address}: the cluster cannot be used ({error}). Name the address of one that runs, "
                "'auto' on a machine of one, or 'local' to start one here."
            ) from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def make_parts_on_ray(
    ray: Any,
    job: Job,
    encoder: Encoder,
    numbers: Sequence[int],
    most: int | None,
    advance: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> Iterator[FinishedPart]:
    """Make parts in tasks of Ray, one processor and one part each.

    A task whose process or machine dies is run again, as is one that could not write, three times each.

    Args:
        ray: The module, connected to a cluster.
        job: What to do. Its paths are there on all machines.
        encoder: The tokenizer, which is sent to them.
        numbers: Which parts.
        most: Tasks that may run at a time; None for as many as the cluster has processors.
        advance: Told the documents of a part, and the bytes of their text, when it is made.
        warn: Told the warnings of the tasks.

    Yields:
        The parts, as they are finished.

    Raises:
        DataError: A document cannot be used.
        StoppedError: A task failed again and again.
    """
    options = {"num_cpus": 1, "max_retries": 3, "retry_exceptions": [StoppedError]}
    make = ray.remote(**options)(_make_part)
    sent = ray.put((job, encoder))
    waiting = list(reversed(numbers))
    running: dict[Any, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (most or _PENDING):
                number = waiting.pop()
                running[make.remote(sent, number)] = number
            (done,), _ = ray.wait(list(running))
            finished, warnings = _result(ray, done, running.pop(done))
            for text in warnings:
                warn(text)
            advance(finished.part.documents, finished.text_bytes)
            yield finished
    finally:
        for task in running:
            ray.cancel(task, force=True)


def _result(ray: Any, task: Any, number: int) -> tuple[FinishedPart, list[str]]:
    try:
        result: tuple[FinishedPart, list[str]] = ray.get(task)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, DataError | StoppedError):
            raise type(cause)(str(cause)) from None
        raise StoppedError(
            f"{part_name(number)} was not made: {type(cause).__name__}: {cause}. Finished parts are kept. "
            "Run the same command again to continue."
        ) from error
    return result


def _make_part(sent: tuple[Job, Encoder], number: int) -> tuple[FinishedPart, list[str]]:
    """What a task does: make a part, and return it with the warnings that were given."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the task has one processor
    job, encoder = sent
    with (
        collected_warnings() as warnings,
        no_room_for(number),
        job.output.for_one_part(part_name(number)) as output,
    ):
        finished = make_part(job.writing_to(output), encoder, number, lambda documents, size: None)
    return finished, warnings
