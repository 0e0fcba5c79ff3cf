"""Kills a process that saves in a loop, again and again, and checks after each kill what is on the disk.

Usage: kill_driver.py DIRECTORY KILLS SEED. Prints one JSON object. Every saving process is forked from this
one, so that a kill costs milliseconds instead of an import of torch.
"""

import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import torch

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    find_latest_checkpoint,
)
from checkpoint_core.discovery import verify_checkpoint
from checkpoint_core.ownership import find_leftovers
from dist_env import StaticDistributedEnvironment


class State:
    """A step and tensors that say the same step."""

    def __init__(self, size: int) -> None:
        self.step = 0
        self.tensor = torch.zeros(size)

    def set(self, step: int) -> None:
        self.step = step
        self.tensor.fill_(step)

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.step, self.tensor = state["step"], state["tensor"]


def make(directory: Path) -> tuple[list[State], CheckpointManager]:
    states = [State(10), State(50_000), State(1000)]
    components = [
        StateComponent(
            key=f"part{index}", stateful=state, sharing_pattern=SharingPattern.GLOBAL, required=True
        )
        for index, state in enumerate(states)
    ]
    manager = CheckpointManager(
        CheckpointConfig(output_dir=directory, save_total_limit=2),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider(components),
    )
    return states, manager


def save_forever(directory: Path, pipe: int) -> None:
    """Save step after step, each twice so that replacing happens too, and report every return of a save."""
    states, manager = make(directory)
    loaded = manager.load_checkpoint()
    step = loaded.step if loaded else 0
    os.write(pipe, struct.pack("<q", step))
    while True:
        step += 1
        for state in states:
            state.set(step)
        for _ in range(2):
            manager.save_checkpoint(step)
            os.write(pipe, struct.pack("<q", step))


def run_and_kill(directory: Path, chance: random.Random) -> int:
    """Kills a saving process at a random instant after its first save.

    The instants spread over the next three saves, however long a save takes on this machine at this moment.

    Returns:
        The last step whose save returned before the kill.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            save_forever(directory, writer)
        finally:
            os._exit(1)
    os.close(writer)
    os.read(reader, 8)
    began = time.monotonic()
    reported = os.read(reader, 8)
    time.sleep(chance.uniform(0.0, 3 * (time.monotonic() - began)))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"the saving process ended by itself, status {status}")
    while chunk := os.read(reader, 8):
        reported = chunk
    os.close(reader)
    return int(struct.unpack("<q", reported)[0])


def main() -> None:
    directory, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    chance = random.Random(seed)
    failures: list[str] = []
    interrupted: dict[str, int] = {}
    for kill in range(kills):
        last = run_and_kill(directory, chance)
        for leftover in find_leftovers(directory):
            interrupted[leftover.kind] = interrupted.get(leftover.kind, 0) + 1
        found = find_latest_checkpoint(directory, verify_checksums=True)
        if found is None:
            failures.append(f"kill {kill}: step {last} was committed, nothing is found")
            continue
        manifest = verify_checkpoint(found, checksums=True)
        # The rename may have happened just before the kill, without the save having returned.
        if manifest.step not in (last, last + 1):
            failures.append(f"kill {kill}: step {last} was committed, {manifest.step} is found")
        if absent := [name for name in manifest.files if not (found / name).exists()]:
            failures.append(f"kill {kill}: {found.name} lacks {absent}")
        states, manager = make(directory)
        loaded = manager.load_checkpoint()
        values = {state.step for state in states} | {int(v) for s in states for v in s.tensor.unique()}
        if loaded is None or values != {manifest.step}:
            failures.append(f"kill {kill}: {found.name} holds {values}")
    states, manager = make(directory)
    loaded = manager.load_checkpoint()
    if loaded is None:
        raise SystemExit(f"nothing is left to load: {failures}")
    for state in states:
        state.set(loaded.step + 1)
    manager.save_checkpoint(loaded.step + 1)
    left = sorted(path.name for path in directory.iterdir())
    print(json.dumps({"failures": failures, "interrupted": interrupted, "steps": loaded.step, "left": left}))


if __name__ == "__main__":
    main()
