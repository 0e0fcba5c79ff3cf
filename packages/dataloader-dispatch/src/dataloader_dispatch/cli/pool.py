"""Worker processes that make parts, and are missed when they die."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from dataloader_dispatch.cli.output import FinishedPart
from dataloader_dispatch.cli.stopped import StoppedError
from dataloader_dispatch.cli.work import Job, make_part, part_name
from dataloader_dispatch.errors import DataError
from dist_env import die_with_parent_context

_JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Advance:
    documents: int
    size: int


@dataclass(frozen=True, slots=True)
class _Warning:
    text: str


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    unusable: bool


@dataclass(slots=True)
class _Worker:
    number: int
    process: BaseProcess
    connection: Connection
    part: int | None = None

    def death(self) -> StoppedError:
        """The error for a worker that has gone without a word."""
        self.process.join(_JOIN_SECONDS)
        code = self.process.exitcode
        how = f"ended with exit code {code}"
        advice = "what it printed above may tell why"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            advice = "if memory was short, use fewer --workers"
        part = "" if self.part is None else f" while it made {part_name(self.part)}"
        return StoppedError(
            f"worker {self.number} (process {self.process.pid}) {how}{part}; {advice}. Finished parts are "
            "kept: run the same command again to go on"
        )


def make_parts(
    job: Job,
    numbers: Sequence[int],
    workers: int,
    advance: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> Iterator[FinishedPart]:
    """Make parts in several processes, or in this one.

    Args:
        job: What to do.
        numbers: Which parts.
        workers: Number of processes; 0 for none but this.
        advance: Told the documents that are done, and the bytes of their text.
        warn: Told the warnings of the processes.

    Yields:
        The parts, as they are finished.

    Raises:
        DataError: A document cannot be used.
        StoppedError: A process died, or a part cannot be written.
    """
    if workers == 0:
        encoder = job.load_encoder()
        for number in numbers:
            with _no_room_for(number):
                finished = make_part(job, encoder, number, advance)
            yield finished
        return
    pool: list[_Worker] = []
    try:
        for number in range(min(workers, len(numbers))):
            pool.append(_start(job, number))
        yield from _share_out(pool, list(reversed(numbers)), advance, warn)
    finally:
        _end(pool)


def _share_out(
    pool: Sequence[_Worker],
    waiting: list[int],
    advance: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> Iterator[FinishedPart]:
    busy = {worker.connection: worker for worker in pool}
    for worker in pool:
        _give(worker, waiting)
    while busy:
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]  # only connections are waited for
            try:
                message = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise worker.death() from error
            match message:
                case _Advance():
                    advance(message.documents, message.size)
                case _Warning():
                    warn(message.text)
                case _Failure():
                    raise (DataError if message.unusable else StoppedError)(message.text)
                case FinishedPart():
                    yield message
                    if not _give(worker, waiting):
                        del busy[worker.connection]


def _give(worker: _Worker, waiting: list[int]) -> bool:
    """Give a worker its next part; False if none is left."""
    worker.part = waiting.pop() if waiting else None
    try:
        worker.connection.send(worker.part)
    except OSError as error:
        raise worker.death() from error
    return worker.part is not None


def _start(job: Job, number: int) -> _Worker:
    # A worker whose parent is killed must not write on beside a later run.
    context = die_with_parent_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, job), name=f"tokenize-{number}", daemon=True)  # type: ignore[attr-defined]
    # Ctrl-C reaches the processes of a terminal all at once; this one alone is to say so. Workers
    # inherit that they do not hear it, also while they start.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # With the last copy of their end gone, the death of the process ends the connection.
    theirs.close()
    return _Worker(number, process, ours)


def _end(pool: Sequence[_Worker]) -> None:
    for worker in pool:
        if worker.part is not None:
            worker.process.terminate()
    for worker in pool:
        worker.connection.close()
        worker.process.join(_JOIN_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _work(connection: Connection, job: Job) -> None:
    """What a worker process does."""
    # The processes are as many as the user wants processors to be busy.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logger = logging.getLogger("dataloader_dispatch")
    logger.addHandler(_ToConnection(connection))
    logger.propagate = False
    try:
        encoder = job.load_encoder()
        while (number := connection.recv()) is not None:
            with _no_room_for(number):
                finished = make_part(
                    job, encoder, number, lambda documents, size: connection.send(_Advance(documents, size))
                )
            connection.send(finished)
    except EOFError:
        return  # given up before there was a part
    except (DataError, StoppedError) as error:
        connection.send(_Failure(str(error), isinstance(error, DataError)))


class _ToConnection(logging.Handler):
    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.WARNING)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.send(_Warning(record.getMessage()))


@contextmanager
def _no_room_for(number: int) -> Iterator[None]:
    """What the system refuses while a part is written is no fault of the input."""
    try:
        yield
    except MemoryError as error:
        raise StoppedError(
            f"{part_name(number)}: no memory left; run the command again with fewer --workers to go on, or "
            "begin anew with a lower --max-document-bytes and --unreadable skip"
        ) from error
    except OSError as error:
        raise StoppedError(
            f"{part_name(number)} cannot be written: {error.strerror or error}; make room or mend what is "
            "wrong. Finished parts are kept: run the same command again to go on"
        ) from error
