"""`layouts.py` with the checkpoints in a store. Usage: store_layouts.py DIRECTORY ENVIRONMENT ADDRESS LAYOUTS

Prints as `layouts.py` does; the files of a save are the names of its objects, with sizes.
"""

import json
import os
import sys
from pathlib import Path

# Not there by itself where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))

import layouts
import torch
from layouts import STEPS, Held, run_ranks

from checkpoint_core import CheckpointConfig, CheckpointManager, StaticStatefulProvider
from checkpoint_core.store_path import locate

os.environ.update(json.loads(sys.argv[2]))
ADDRESS = sys.argv[3]


class StoreJob(layouts.Job):
    """One rank of a job under one layout, which saves to a store."""

    def manager(self, held: Held, run: str) -> CheckpointManager:
        provider = StaticStatefulProvider(held.components(self.layout))
        place = f"{ADDRESS}/{run.replace(' ', '-')}"
        config = CheckpointConfig(output_dir=place, timeout_seconds=60, max_shard_size=8000)
        return CheckpointManager(config, dist=self.env, stateful_provider=provider)

    def save(self) -> dict[str, object]:
        held = Held(self.layout, self.rank, seed=1, train=True)
        with self.manager(held, self.name) as manager:
            path = manager.save_checkpoint(STEPS)
        sizes = {file.name: file.stat().st_size for file in locate(str(path)).rglob("*")}
        return {"files": sizes, "uploaded": uploaded}


uploaded: dict[str, int] = {}
"""Bytes that this rank has uploaded, by file."""


def count_uploads() -> None:
    from dist_env import ObjectStore

    put_stream = ObjectStore.put_stream

    def counted(self: ObjectStore, key: str, pieces, size: int) -> None:
        uploaded[key.rpartition("/")[2]] = size
        put_stream(self, key, pieces, size)

    ObjectStore.put_stream = counted  # type: ignore[method-assign]


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[4:]
    torch.set_num_threads(1)
    count_uploads()
    layouts.Job = StoreJob  # type: ignore[misc]
    results = {"save": {name: run_ranks(directory, name, "save") for name in names}, "load": {}}
    for target in names:
        ranks = run_ranks(directory, target, "load", *names)
        for number, source in enumerate(names):
            results["load"][f"{source} -> {target}"] = [seen[number] for seen in ranks]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
