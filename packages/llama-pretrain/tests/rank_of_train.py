"""One rank of a run, `rank_of_train.py CODES MORE_FOR_RANK_1 STOP_AFTER WORDS...`; writes down its exit code.

A launcher ends the other ranks as soon as it sees one that failed, so each waits here until all have written.
With STOP_AFTER, the progress line that begins with it makes rank 0 send the launcher SIGTERM, and wait until
the launcher has passed it on: without the wait a quick run is over first.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from llama_pretrain.cli import main

PATIENCE = 120.0
"""Seconds that one rank waits for another, or for the launcher."""


class StopsAtLine:
    """Standard output that asks the launcher to end the run once a line begins as told."""

    def __init__(self, stream: TextIO, beginning: str) -> None:
        self._stream = stream
        self._beginning = beginning
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        if self._beginning and text.split()[:1] == [self._beginning]:
            self._beginning = ""
            self._stream.flush()
            os.kill(os.getppid(), signal.SIGTERM)
            if not select.select([self._woken], [], [], PATIENCE)[0]:
                raise TimeoutError("the launcher did not pass SIGTERM on")
        return written

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def wait_for_all(codes: Path) -> None:
    """Wait until each rank has written its exit code."""
    deadline = time.monotonic() + PATIENCE
    while len(list(codes.iterdir())) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.05)


directory, more, stop_after, *words = sys.argv[1:]
rank = os.environ["RANK"]
if stop_after and rank == "0":
    sys.stdout = StopsAtLine(sys.stdout, stop_after)
code = main(["train", *words, *(more.split() if rank == "1" else [])])
(Path(directory) / rank).write_text(str(code))
wait_for_all(Path(directory))
sys.exit(code)
