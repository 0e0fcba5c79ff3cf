"""One episode of a run: steps that sleep, with evaluations and saves, until it is killed or done.

It notes what it does in a file of its own, a line for each thing as soon as it is over.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from perf_metrics import GoodputLogger

SECONDS = {"data": 0.01, "steps": 0.04, "evaluation": 0.15, "saving": 0.1, "start": 0.2}
STEPS, EVALUATE, SAVE = 1000, 7, 5


def main(directory: Path, truth: Path, steps: int, startup: float) -> None:
    time.sleep(startup)  # before training begins, as loading weights
    checkpoint = directory / "checkpoint"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    args = SimpleNamespace(output_dir=str(directory))
    state = SimpleNamespace(global_step=first, max_steps=STEPS, epoch=0.0, is_world_process_zero=True)
    logger = GoodputLogger()
    with truth.open("a", buffering=1) as file:

        def note(kind: str, begun: float) -> None:
            now = time.time()
            file.write(json.dumps({"kind": kind, "step": state.global_step, "from": begun, "to": now}) + "\n")

        def spend(kind: str, event: str, seconds: float) -> None:
            begun = time.time()
            time.sleep(seconds)
            getattr(logger, event)(args, state, None)
            note(kind, begun)

        logger.on_train_begin(args, state, None)
        note("begin", time.time())
        spend("start", "on_step_begin", SECONDS["start"])
        while state.global_step < first + steps:
            begun = time.time()
            time.sleep(SECONDS["steps"])
            state.global_step += 1
            logger.on_step_end(args, state, None)
            note("steps", begun)
            if state.global_step % EVALUATE == 0:
                spend("evaluation", "on_evaluate", SECONDS["evaluation"])
            if state.global_step % SAVE == 0:
                begun = time.time()
                time.sleep(SECONDS["saving"])
                checkpoint.write_text(str(state.global_step))
                logger.on_save(args, state, None)
                note("saving", begun)
            spend("data", "on_step_begin", SECONDS["data"])
        logger.on_train_end(args, state, None)
        note("end", time.time())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
