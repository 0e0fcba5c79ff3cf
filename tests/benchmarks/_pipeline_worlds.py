"""Worlds of ranks that stay and are given one task after another, so worlds of several sizes can take turns.

A world that has nothing to do waits on a pipe, which takes no processor time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
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
        for pipe in self._pipes:
            pipe.send((task, options))
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            for ready in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]):
                rank = self._pipes.index(cast("Connection", ready))
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(self.size)]

    def _answer(self, rank: int) -> Any:
        try:
            failure, answer = self._pipes[rank].recv()
        except EOFError:
            raise SystemExit(f"rank {rank} of {self.size} ended in the middle of its work") from None
        if failure is not None:
            raise SystemExit(f"rank {rank} of {self.size} failed:\n{failure}")
        return answer

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


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
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
                answer = (None, task(env, **options))
            except BaseException:
                pipe.send((traceback.format_exc(), None))
                raise
            pipe.send(answer)
