"""Two ranks. Usage: two_ranks.py DIRECTORY. Each writes what it saw to DIRECTORY/rank<k>.json.

The second rank is forked from the first, before any process group exists, so that torch is imported once.
"""

import errno
import gc
import json
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    OptimizerState,
    RNGState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    find_latest_checkpoint,
    selection,
)
from dist_env import StaticDistributedEnvironment

TIMEOUT = 60.0
SHORT_TIMEOUT = 5.0
P = SharingPattern


class Holder:
    """State that a scenario can make fail."""

    def __init__(self, **values: object) -> None:
        self.values: dict[str, object] = values
        self.wait_for: Path | None = None

    def state_dict(self) -> dict[str, object]:
        while self.wait_for is not None and not self.wait_for.exists():
            time.sleep(0.05)
        if isinstance(error := self.values.get("raise"), Exception):
            raise error
        return dict(self.values)

    def load_state_dict(self, state: dict[str, object]) -> None:
        if "refuse_on" in state and state["refuse_on"] == self.values.get("rank"):
            raise RuntimeError("this rank does not like the state")
        self.values = dict(state)


class Ranks:
    """The objects of one rank and the scenarios, run in the same order on both."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        self.directory = directory
        self.run = directory / "run"
        self.seen: dict[str, object] = {}
        self.groups = {"own": [dist.new_group([r]) for r in range(2)][rank]}
        self.env = StaticDistributedEnvironment(
            rank=rank, local_rank=rank, world_size=2, local_world_size=2, backend="gloo"
        )
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        torch.manual_seed(100 + rank)
        self.train()
        tensors = {
            "bf16": torch.tensor([1.5]).bfloat16(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7),
        }
        self.shared = Holder(rank=rank, tensors=tensors if rank == 0 else {}, number=float("inf"))
        self.own = Holder(rank=rank)
        self.grouped = Holder(rank=rank)
        self.manager = self.make_manager()

    def make_manager(self, timeout_seconds: float = TIMEOUT) -> CheckpointManager:
        return CheckpointManager(
            CheckpointConfig(output_dir=self.run, timeout_seconds=timeout_seconds, save_total_limit=None),
            dist=self.env,
            stateful_provider=StaticStatefulProvider(self.components(), self.groups),
        )

    def components(self) -> list[StateComponent]:
        model, optimizer = ModelState(self.model), OptimizerState(self.optimizer, self.model)
        return [
            StateComponent(key="model", stateful=model, sharing_pattern=P.REPLICATED, required=True),
            StateComponent(key="optimizer", stateful=optimizer, sharing_pattern=P.REPLICATED),
            StateComponent(key="shared", stateful=self.shared, sharing_pattern=P.GLOBAL),
            StateComponent(key="own", stateful=self.own, sharing_pattern=P.PER_RANK),
            StateComponent(key="rng", stateful=RNGState(), sharing_pattern=P.PER_RANK),
            StateComponent(
                key="grouped", stateful=self.grouped, sharing_pattern=P.PER_GROUP, process_group_name="own"
            ),
        ]

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 4)).square().sum().backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return [value for parameter in self.model.parameters() for value in parameter.flatten().tolist()]

    def error(self, action: object) -> dict[str, object]:
        """What an action raises, how long it took, and what the run directory holds afterwards."""
        began = time.monotonic()
        try:
            action()
            message = None
        except CheckpointError as error:
            message = str(error)
        seconds = time.monotonic() - began
        dist.barrier()
        return {
            "message": message,
            "seconds": seconds,
            "left": sorted(path.name for path in self.run.iterdir()),
        }

    def scenarios(self) -> None:
        save = self.manager.save_checkpoint
        path = save(1, metrics={"eval_loss": 0.5} if self.rank == 0 else None)
        self.seen["files"] = sorted(item.name for item in path.iterdir())
        expected = (self.weights(), torch.rand(3).tolist())
        self.train()
        for holder in (self.shared, self.own, self.grouped):
            holder.values = {"rank": "changed"}
        loaded = self.manager.load_checkpoint()
        self.seen["step"], self.seen["missing"] = loaded.step, loaded.missing
        self.seen["restored"] = (self.weights(), torch.rand(3).tolist()) == expected
        self.seen["shared_rank"] = self.shared.values["rank"]
        self.seen["shared_infinite"] = self.shared.values["number"] == float("inf")
        tensors = self.shared.values["tensors"]
        self.seen["shared_tensors"] = {
            name: [str(tensor.dtype), list(tensor.shape), tensor.tolist()] for name, tensor in tensors.items()
        }
        self.seen["own"], self.seen["grouped"] = self.own.values["rank"], self.grouped.values["rank"]
        self.train()
        self.seen["after_resume"] = self.weights()

        self.own.values["raise"] = OSError(28, "No space left on device") if self.rank == 1 else None
        self.seen["rank 1 raises"] = self.error(lambda: save(2))
        self.own.values["raise"] = None

        self.own.values["big"] = torch.zeros(100_000)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        self.seen["rank 1 cannot write"] = self.error(lambda: save(2))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        del self.own.values["big"]

        self.seen["steps differ"] = self.error(lambda: save(2 + self.rank))
        self.seen["bad step on one"] = self.error(lambda: save(2 if self.rank else -2))

        self.shared.values["refuse_on"] = 1
        save(2)
        self.own.values["rank"] = self.rank
        self.shared.values["rank"] = self.rank
        self.seen["rank 1 refuses the state"] = self.error(self.manager.load_checkpoint)
        self.shared.values = {}

        self.seen["good again"] = self.error(lambda: save(3))
        self.seen["declarations differ"] = self.error(self.save_with_different_declarations)
        self.seen["names collide"] = self.error(self.save_different_tensors_under_one_name)
        self.seen["groups joined"] = self.error(self.load_as_one_group)
        self.damage()
        self.late_rank()

    def save_with_different_declarations(self) -> None:
        pattern = P.GLOBAL if self.rank else P.REPLICATED
        components = [StateComponent(key="x", stateful=Holder(), sharing_pattern=pattern)]
        manager = CheckpointManager(
            CheckpointConfig(output_dir=self.run, timeout_seconds=TIMEOUT),
            dist=self.env,
            stateful_provider=StaticStatefulProvider(components),
        )
        with manager:
            manager.save_checkpoint(9)

    def save_different_tensors_under_one_name(self) -> None:
        parts = Holder(weight=torch.full((5, 3), float(self.rank)))
        component = StateComponent(key="x", stateful=parts, sharing_pattern=P.SHARDED)
        config = CheckpointConfig(output_dir=self.run, timeout_seconds=TIMEOUT)
        with CheckpointManager(config, dist=self.env, stateful_provider=[component]) as manager:
            manager.save_checkpoint(9)

    def load_as_one_group(self) -> None:
        component = StateComponent(
            key="grouped", stateful=self.grouped, sharing_pattern=P.PER_GROUP, process_group_name="all"
        )
        provider = StaticStatefulProvider([component], {"all": dist.group.WORLD})
        with CheckpointManager(self.run, dist=self.env, stateful_provider=provider) as manager:
            manager.load_checkpoint()

    def damage(self) -> None:
        newest = find_latest_checkpoint(self.run)
        spoiled = newest / "own.rank1.json"
        content = spoiled.read_bytes()
        dist.barrier()
        if self.rank == 1:
            spoiled.write_bytes(content.replace(b"rank", b"tank"))
        dist.barrier()
        self.seen["damage named"] = self.error(lambda: self.manager.load_checkpoint(newest))
        if self.rank == 1:
            spoiled.write_bytes(content)
            reads = selection.range_share
            selection.range_share = self.refuse_to_read
        self.seen["rank 1 cannot read"] = self.error(lambda: self.manager.load_checkpoint(newest))
        if self.rank == 1:
            selection.range_share = reads
            spoiled.write_bytes(content.replace(b"rank", b"tank"))
        dist.barrier()
        loaded: list[object] = []
        self.shared.values = {}
        self.seen["damage passed over"] = self.error(
            lambda: loaded.append(self.manager.load_checkpoint(self.run / "checkpoint-1").step)
        )
        self.seen["loaded instead"] = loaded
        if self.rank == 1:
            spoiled.unlink()
        dist.barrier()
        self.seen["one rank's file deleted"] = self.manager.load_checkpoint().missing

    def refuse_to_read(self, path: Path, *_: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def late_rank(self) -> None:
        gave_up = self.directory / "gave_up"
        if self.rank == 1:
            self.own.wait_for = gave_up
        with self.make_manager(SHORT_TIMEOUT) as manager:
            began = time.monotonic()
            for name in ("late message", "afterwards"):
                try:
                    manager.save_checkpoint(4)
                except CheckpointError as error:
                    self.seen[name] = str(error)
                self.seen.setdefault("late seconds", time.monotonic() - began)
                gave_up.touch()
            self.seen["late left"] = sorted(path.name for path in self.run.iterdir())


def run_rank(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=90))
    ranks = Ranks(rank, directory)
    ranks.scenarios()
    (directory / f"rank{rank}.json").write_text(json.dumps(ranks.seen))
    ranks.manager.close()
    del ranks
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    child = os.fork()
    run_rank(0 if child else 1, directory)
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"rank 1 ended with status {status}")


if __name__ == "__main__":
    main()
