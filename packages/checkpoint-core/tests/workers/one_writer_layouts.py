"""`layouts.py` with each rank on a host of its own. Usage: one_writer_layouts.py DIRECTORY LAYOUTS

Saves every layout twice: with files that ranks share, and, as decided without a setting, with one writer for
each. Loads all of them under every layout, and prints as `layouts.py` does.
"""

import json
import os
import sys
from pathlib import Path

import layouts
import torch
from layouts import STEPS, Held, run_ranks

from checkpoint_core import CheckpointConfig, CheckpointManager, StaticStatefulProvider
from checkpoint_core.manifest import verify_checkpoint
from dist_env import StaticDistributedEnvironment

opened: dict[str, int] = {}
"""How often this rank has opened each tensor file for writing."""


class HostJob(layouts.Job):
    """One rank of a job, which is alone on its host."""

    def manager(self, held: Held, run: str, one_writer: bool | None = None) -> CheckpointManager:
        provider = StaticStatefulProvider(held.components(self.layout))
        config = CheckpointConfig(
            self.directory / run, timeout_seconds=60, max_shard_size=8000, one_writer_per_file=one_writer
        )
        env = StaticDistributedEnvironment(
            rank=self.rank, world_size=self.layout.world, local_world_size=1, backend="gloo"
        )
        return CheckpointManager(config, dist=env, stateful_provider=provider)

    def save(self) -> dict[str, object]:
        held = Held(self.layout, self.rank, seed=1, train=True)
        with self.manager(held, f"{self.name} shared", one_writer=False) as manager:
            manager.save_checkpoint(STEPS)
        opened.clear()
        with self.manager(held, self.name) as manager:
            path = manager.save_checkpoint(STEPS)
            written = dict(opened)
            exported = manager.save_model(self.directory / f"{self.name} exported")
        return {
            "files": {
                name: record.size for name, record in verify_checkpoint(path, checksums=True).files.items()
            },
            "written": sorted(written),
            "exported": str(exported),
        }


def note_opened() -> None:
    plain = os.open

    def noted(path, flags: int, *arguments: object, **options: object) -> int:
        name = Path(path).name
        if flags & os.O_WRONLY and name.endswith(".safetensors"):
            opened[name] = opened.get(name, 0) + 1
        return plain(path, flags, *arguments, **options)

    os.open = noted  # type: ignore[assignment]


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    note_opened()
    layouts.Job = HostJob  # type: ignore[misc]
    results = {"save": {name: run_ranks(directory, name, "save") for name in names}, "load": {}}
    sources = [source for name in names for source in (name, f"{name} shared")]
    for target in names:
        ranks = run_ranks(directory, target, "load", *sources)
        for number, source in enumerate(sources):
            results["load"][f"{source} -> {target}"] = [seen[number] for seen in ranks]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
