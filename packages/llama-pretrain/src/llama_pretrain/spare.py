"""Hot spares: processes that have imported what a rank needs, and wait to become one.

`python -m llama_pretrain.spare DESCRIPTOR` imports, then reads from the descriptor which rank it is to be. It
has started no thread by then, opened no device and no connection, and waits without using a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "llama_pretrain.train",
    "llama_pretrain.settings",
    "llama_pretrain.model.llama",
)
"""What takes the most time of a start. A module that a run does not need, such as a tracker, is not here."""


class Spares:
    """Processes that wait to become ranks.

    Args:
        variables: Environment variables that they begin with; torch reads some of them when it is imported.
        report_fd: The pipe to the launcher, which they inherit.
    """

    def __init__(self, variables: Mapping[str, str], report_fd: int) -> None:
        self._variables = dict(variables)
        self._report_fd = report_fd
        self._waiting: list[tuple[subprocess.Popen[bytes], int]] = []

    def start(self, number: int) -> None:
        """Start as many as are missing; they are killed when this process ends."""
        from dist_env import die_with_parent_command

        for process, writing in [each for each in self._waiting if each[0].poll() is not None]:
            os.close(writing)
            self._waiting.remove((process, writing))
        while len(self._waiting) < number:
            reading, writing = os.pipe()
            command = die_with_parent_command([sys.executable, "-m", "llama_pretrain.spare", str(reading)])
            process = subprocess.Popen(
                command,
                env=self._variables,
                pass_fds=(self._report_fd, reading),
                start_new_session=True,
            )
            os.close(reading)
            self._waiting.append((process, writing))

    def take(self, variables: Mapping[str, str], words: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Let a spare become a rank, also one that is not through with importing.

        Args:
            variables: What the environment of the rank has beside that of the spare.
            words: Its command line.

        Returns:
            The process; None if none is left.
        """
        while self._waiting:
            process, writing = self._waiting.pop(0)
            try:
                with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                    pipe.write(json.dumps({"variables": dict(variables), "words": list(words)}))
            except BrokenPipeError:
                process.wait()
                continue
            return process
        return None

    def close(self) -> None:
        """Kill those that wait."""
        for process, writing in self._waiting:
            process.kill()
            process.wait()
            os.close(writing)
        self._waiting.clear()


def _become_rank(descriptor: int) -> NoReturn:
    for name in _PRELOADED:
        import_module(name)
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        told = pipe.read()
    if not told:
        os._exit(0)  # The launcher has ended.
    order = json.loads(told)
    os.environ.update(order["variables"])
    sys.argv = ["llama-pretrain", *order["words"]]
    with suppress(OSError):
        # /proc/PID/environ keeps what the process was started with: ps -o comm tells which rank it is.
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}", encoding="ascii")
    from .cli import run

    run()


if __name__ == "__main__":
    # Imported under its own name, so that there is one module, and not this one and another.
    import_module("llama_pretrain.spare")._become_rank(int(sys.argv[1]))
