"""Worlds of ranks that stay and are given one task after another, so worlds of several sizes can take turns.

A world that has nothing to do waits on a pipe, which takes no processor time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, cast

import torch

from dist_env import DistributedEnvironment

Task = Callable[..., Any]
"""Called on every rank as `task(env, **options)`; a function of a module, returns what can be pickled."""
SECONDS = 300
"""That a rank waits for another one."""
_ANSWERS, _FAILED, _HANDS_OVER = "answers", "failed", "hands over"
_pipe: Connection | None = None
"""From a rank to the process that gives it tasks."""


def hand_over() -> None:
    """In a task of rank 0: wait until it is the turn of this world again; see `take_turns`.

    The others wait for rank 0 by themselves, as soon as they need something of it.
    """
    if _pipe is None:
        raise RuntimeError("only the ranks of a world can hand over.")
    _pipe.send((_HANDS_OVER, None))
    _pipe.recv()


class World:
    """Ranks over gloo on this machine, one thread each.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("localhost", 0)) as probe:
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(size):
            here, there = context.Pipe()
            # As daemons they end with this process, however it ends.
            process = context.Process(target=_serve, args=(rank, size, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._ranks.append(process)

    def run(self, task: Task, **options: Any) -> list[Any]:
        """Run a task on all ranks.

        Returns:
            What each rank returned.

        Raises:
            SystemExit: A rank failed. The others would wait for it.
        """
        (told,) = take_turns({"": self}, task, {"": options}).values()
        return told

    def begin(self, task: Task, options: Mapping[str, Any]) -> None:
        """Give a task to all ranks."""
        self._answers: dict[int, Any] = {}
        for pipe in self._pipes:
            pipe.send((task, options))

    def go(self) -> None:
        """Let rank 0 continue, which has handed over."""
        self._pipes[0].send(None)

    def hands_over(self) -> bool:
        """Wait until rank 0 hands over; False if the task has ended on all ranks.

        Raises:
            SystemExit: A rank failed.
        """
        while len(self._answers) < self.size:
            for ready in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in self._answers]):
                rank = self._pipes.index(cast("Connection", ready))
                kind, said = self._hear(rank)
                if kind == _HANDS_OVER:
                    return True
                self._answers[rank] = said
        return False

    def answers(self) -> list[Any]:
        """What the ranks returned."""
        return [self._answers[rank] for rank in range(self.size)]

    def _hear(self, rank: int) -> tuple[str, Any]:
        try:
            kind, said = self._pipes[rank].recv()
        except EOFError:
            raise SystemExit(f"rank {rank} of {self.size} ended in the middle of its work") from None
        if kind == _FAILED:
            raise SystemExit(f"rank {rank} of {self.size} failed:\n{said}")
        return kind, said

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._ranks:
            process.join(timeout=10)
            process.kill()
            process.join()

    def __enter__(self) -> World:
        """The world."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the ranks."""
        if error is not None:
            for process in self._ranks:
                process.kill()
        self.close()


def take_turns(
    worlds: Mapping[str, World], task: Task, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Run a task in several worlds, of which one works at a time, until its rank 0 hands over.

    On a shared machine a step costs some tenths more or less from one second to the next; worlds that take
    turns within seconds see the same machine.

    Args:
        worlds: By name, in the order of their turns.
        task: The task.
        options: What each world is given for it.

    Returns:
        What the ranks of each returned.

    Raises:
        SystemExit: A rank failed.
    """
    working = []
    for name, world in worlds.items():
        world.begin(task, options[name])
        if world.hands_over():
            working.append(world)
    while working:
        for world in list(working):
            world.go()
            if not world.hands_over():
                working.remove(world)
    return {name: world.answers() for name, world in worlds.items()}


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    global _pipe
    _pipe = pipe
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # How stages are cut, and that FLOPs of the models are not known.
    logging.disable(logging.WARNING)
    with ExitStack() as stack:
        env = stack.enter_context(
            DistributedEnvironment(
                rank=rank,
                local_rank=rank,
                world_size=size,
                local_world_size=size,
                master_addr="localhost",
                master_port=port,
                no_accelerator=True,
                training_timeout=SECONDS,
            )
        )
        while True:
            try:
                task, options = pipe.recv()
            except EOFError:
                return
            try:
                answer = (_ANSWERS, task(env, **options))
            except BaseException:
                pipe.send((_FAILED, traceback.format_exc()))
                raise
            pipe.send(answer)
