"""One start of the command line: its processes, what they tell, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

OBSERVED = Path(__file__).with_name("observed.py")
PATIENCE = 240.0
"""Seconds that a start may take before it is called hung."""
_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Job:
    """`python -m llama_pretrain`, under torchrun where there are several ranks, with a witness.

    A context manager: at its end no process is left.

    Args:
        folder: A new directory for what the witness writes; see `observed`.
        words: The command line, without the program's name.
        ranks: How many processes train.
        bytecode: Where all starts keep the bytecode of what they import, if the environment names no place.
    """

    def __init__(self, folder: Path, words: Sequence[str], ranks: int, bytecode: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.ranks = folder, ranks
        launcher = [*_LAUNCHER, str(ranks)] if ranks > 1 else []
        variables = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
        # Where bytecode is not kept, each of some sixty processes would compile all of torch anew.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        variables.setdefault("PYTHONPYCACHEPREFIX", str(bytecode))
        variables |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        with (folder / "launcher.output").open("wb") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, *launcher, str(OBSERVED), str(folder), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._deadline = time.monotonic() + PATIENCE

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()

    @property
    def exit_code(self) -> int | None:
        """That of the command as a whole; negative for a signal, None while it runs."""
        return self._launcher.poll()

    def pids(self) -> dict[int, int]:
        """The processes that train, by rank, as far as they have begun."""
        found = {int(path.stem): path.read_text() for path in self.folder.glob("*.pid")}
        return {rank: int(text) for rank, text in sorted(found.items()) if text}

    def exit_codes(self) -> dict[int, int | None]:
        """Exit code of each rank that has ended; None if a signal ended it."""
        found = {rank: self.folder / f"{rank}.exit" for rank in range(self.ranks)}
        return {rank: int(path.read_text()) if path.exists() else None for rank, path in found.items()}

    def steps(self, rank: int) -> list[tuple[int, list[int]]]:
        """Number and targets of each optimizer step that a rank has done in this start."""
        path = self.folder / f"{rank}.steps"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # a kill may cut the last one short
        return [(entry["step"], entry["targets"]) for entry in map(json.loads, lines)]

    def steps_done(self) -> int:
        """How many optimizer steps rank 0 has done in this start."""
        path = self.folder / "0.steps"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def last_step(self) -> int:
        """The number of the last optimizer step that rank 0 has done."""
        return self.steps(0)[-1][0]

    def output(self, rank: int) -> str:
        """What a rank has printed."""
        path = self.folder / f"{rank}.output"
        return path.read_text(errors="replace") if path.exists() else ""

    def launcher_output(self) -> str:
        """What torchrun has printed, if there is one."""
        return (self.folder / "launcher.output").read_text(errors="replace")

    def resumed_at(self) -> int | None:
        """The step that the run continued from, 0 for a new one; None if it did not come that far."""
        told = re.search(r"^begins +(?:at|resumed at) step (\d+)$", self.output(0), re.MULTILINE)
        return None if told is None else int(told[1])

    def terminate(self) -> None:
        """Ask the command to end, as a scheduler does."""
        self._launcher.terminate()

    def kill(self, rank: int) -> None:
        """Kill one process that trains."""
        _kill(self.pids()[rank])

    def kill_all(self) -> None:
        """Kill everything at once, the launcher first."""
        self._launcher.kill()
        for pid in self.pids().values():
            _kill(pid)
        while living := self._living():
            for pid in living:
                _kill(pid)
            time.sleep(0.01)
        self._launcher.wait()

    def wait_for_output(self, rank: int, part: str) -> None:
        """Wait until a rank prints something, or the job is over."""
        while part not in self.output(rank) and not self.is_over():
            self.check_patience()
            time.sleep(0.001)

    def is_over(self) -> bool:
        """Whether no process is left."""
        return self.exit_code is not None and not self._living()

    def check_patience(self) -> None:
        """Look at the clock.

        Raises:
            TimeoutError: If the job has taken too long; with what everybody said last.
        """
        if time.monotonic() > self._deadline:
            told = "\n".join(f"--- rank {rank}\n{self.output(rank)[-2000:]}" for rank in range(self.ranks))
            raise TimeoutError(f"hung: {self.folder} is not over after {PATIENCE:.0f} s\n{told}")

    def wait(self) -> None:
        """Wait until no process is left.

        Raises:
            TimeoutError: If that takes too long.
        """
        while not self.is_over():
            self.check_patience()
            time.sleep(0.02)

    def _living(self) -> list[int]:
        """Processes of this job, the launcher among them: the folder is on the command line of each."""
        mark = str(self.folder).encode()
        running = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        return [pid for pid in running if mark in _command_line(pid).split(b"\0")]


def _command_line(pid: int) -> bytes:
    """Empty for a process that has ended, also if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
