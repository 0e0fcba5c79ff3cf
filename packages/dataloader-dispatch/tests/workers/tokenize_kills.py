"""Kills `tokenize` with SIGKILL at random instants, and continues with it each time, until it is finished.

Usage: tokenize_kills.py CORPUS OUT SEED

Each run is forked from this process, so that a kill costs milliseconds instead of an import of torch. Prints
one JSON object: how often it was killed, how many parts were found finished, and what went wrong.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import dataloader_dispatch.cli.tokenize  # noqa: F401  (before the forks, as each would import it again)
from dataloader_dispatch import DataError, open_documents
from dataloader_dispatch.cli import main


def command(corpus: str, out: Path) -> list[str]:
    return ["tokenize", corpus, str(out), "--tokenizer", "bytes", "--part-size", "20KB", "--workers", "0"]


def start(corpus: str, out: Path) -> int:
    """A process that runs the command."""
    process = os.fork()
    if process == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os._exit(main(command(corpus, out)))
    return process


def finished_parts(out: Path) -> dict[str, tuple[int, int]]:
    """Parts that are recorded as finished, with what would change if they were made again."""
    found = {}
    for record in (out / ".unfinished").glob("part-*.json"):
        status = (out / f"{record.stem}.bin").stat()
        found[record.stem] = (status.st_ino, status.st_mtime_ns)
    return found


def wait_for_moment(process: int, out: Path, chance: random.Random, kills: int) -> int | None:
    """Wait for a random instant: of the beginning, or behind some more parts.

    Returns:
        The exit status if the process has ended by then.
    """
    if kills % 3 == 0:
        time.sleep(chance.uniform(0, 0.05))
        return None
    goal = len(finished_parts(out)) + chance.randrange(1, 4)
    while len(finished_parts(out)) < goal:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.01))
    return None


def problem(out: Path, before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> str | None:
    """What is wrong with an unfinished directory."""
    if any(now.get(name) != mark for name, mark in before.items()):
        return "a finished part was made again"
    try:
        open_documents(out)
    except DataError as error:
        return None if not now or "Run the same" in str(error) else str(error)
    return "an unfinished directory was opened"


def run() -> dict[str, object]:
    corpus, out, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    torch.set_num_threads(1)
    failures: list[str] = []
    counts: list[int] = []
    before: dict[str, tuple[int, int]] = {}
    for kills in itertools.count():
        process = start(corpus, out)
        status = wait_for_moment(process, out, chance, kills)
        if status is None:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            failures += [f"exit status {status}"] if status else []
            return {"kills": kills, "failures": failures, "finished": counts}
        if (out / "manifest.json").exists():
            continue  # killed while the records were removed
        now = finished_parts(out)
        failures += [f"kill {kills}: {found}"] if (found := problem(out, before, now)) else []
        counts.append(len(now))
        before = now
    raise AssertionError("counting ended")


if __name__ == "__main__":
    print(json.dumps(run()))
