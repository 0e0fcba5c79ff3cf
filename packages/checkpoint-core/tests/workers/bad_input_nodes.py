"""Two nodes of one rank each, with save_on_each_node: what one of them holds, lacks or cannot write."""

import resource
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from bad_input_group import TIMEOUT, Ranks, State, component
from torch import nn

from checkpoint_core import CheckpointConfig, CheckpointManager, ModelState, SharingPattern
from dist_env import StaticDistributedEnvironment

P = SharingPattern


class Nodes(Ranks):
    """Each node has a disk of its own."""

    def __init__(self, rank: int, directory: Path) -> None:
        super().__init__(rank, directory, nodes=2)
        self.disk = directory / f"node{rank}"
        self.disk.mkdir()
        self.own = State(rank=rank)
        self.single = State(n=0)
        self.shared = State(tensor=torch.zeros(5))
        self.components = [
            component("own", self.own, P.PER_RANK),
            component("single", self.single, P.GLOBAL),
            component("shared", self.shared, P.REPLICATED),
        ]

    def node_manager(self, run: str, components: object = None) -> CheckpointManager:
        chosen = self.components if components is None else components
        return self.manager(chosen, self.disk / run, save_on_each_node=True)  # type: ignore[arg-type]

    def note(self, name: str, manager: CheckpointManager, run: str, *, save: int | None = None) -> None:
        def action() -> object:
            return manager.load_checkpoint() if save is None else manager.save_checkpoint(save)

        self.attempt(name, action, self.disk / run)
        self.seen[name]["n"] = [self.single.values.get("n"), self.own.values.get("n")]

    def save(self, manager: CheckpointManager, *steps: int) -> None:
        for step in steps:
            self.single.values, self.own.values = {"n": step}, {"n": step}
            manager.save_checkpoint(step)

    def scenarios(self) -> None:
        self.uneven()
        self.refusals()
        self.one_behind()
        self.one_damaged()
        self.one_full()
        self.nothing_in_common()
        self.two_runs()

    def uneven(self) -> None:
        """Rank 0 says that its node has two ranks, rank 1 that it is alone on its own."""
        env = StaticDistributedEnvironment(
            rank=self.rank, local_rank=0, world_size=2, local_world_size=2 - self.rank, backend="gloo"
        )
        config = CheckpointConfig(output_dir=self.disk, save_on_each_node=True, timeout_seconds=TIMEOUT)

        def make() -> None:
            CheckpointManager(config, dist=env, stateful_provider=self.components).close()

        self.attempt("uneven nodes", make, self.disk)

    def refusals(self) -> None:
        """State that no node holds all of."""
        model = nn.Linear(2, 2)
        stages = {"b": model} if self.rank else {"a": model}
        for name, stateful in {
            "divided between nodes": State(tensor=self.sharded(10)),
            "stages on nodes": ModelState(nn.ModuleDict(stages)),
        }.items():
            with self.node_manager("refused", [component("part", stateful, P.SHARDED)]) as manager:
                (self.disk / "refused").mkdir(exist_ok=True)
                self.note(name, manager, "refused", save=1)

    def one_behind(self) -> None:
        with self.node_manager("behind") as manager:
            self.save(manager, 1, 2, 3)
        dist.barrier()
        if self.rank == 1:
            shutil.rmtree(self.disk / "behind" / "checkpoint-3")
        with self.node_manager("behind") as manager:
            self.note("one behind", manager, "behind")
            self.note("one behind, continues", manager, "behind", save=3)

    def one_damaged(self) -> None:
        """The bytes of rank 1's copy are wrong, their number is right."""
        with self.node_manager("damaged") as manager:
            self.save(manager, 1, 2)
        if self.rank == 1:
            path = self.disk / "damaged" / "checkpoint-2" / "shared.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        dist.barrier()
        with self.node_manager("damaged") as manager:
            named = self.disk / "damaged" / "checkpoint-2"
            self.attempt("one damaged, named", lambda: manager.load_checkpoint(named), self.disk / "behind")
            # Only node 0's directory is looked through, which is good.
            self.note("one damaged", manager, "damaged")

    def one_full(self) -> None:
        with self.node_manager("full") as manager:
            self.save(manager, 1)
            self.shared.values = {"tensor": torch.zeros(1000)}
            with self.limit_on(1, resource.RLIMIT_FSIZE, 3000):
                self.note("one full", manager, "full", save=2)
            self.note("one full, continues", manager, "full", save=2)

    def nothing_in_common(self) -> None:
        with self.node_manager("apart") as manager:
            self.save(manager, 1, 2)
        dist.barrier()
        shutil.rmtree(self.disk / "apart" / f"checkpoint-{self.rank + 1}")
        with self.node_manager("apart") as manager:
            self.note("nothing in common", manager, "apart")
        dist.barrier()
        if self.rank == 1:
            shutil.rmtree(self.disk / "apart" / "checkpoint-1")
        with self.node_manager("apart") as manager:
            self.note("nothing on one", manager, "apart")

    def two_runs(self) -> None:
        """Both nodes have step 1, of different runs."""
        for run in ("run a", "run b"):
            with self.node_manager(run) as manager:
                self.save(manager, 1)
        dist.barrier()
        if self.rank == 1:
            shutil.rmtree(self.disk / "run a")
            (self.disk / "run b").rename(self.disk / "run a")
        dist.barrier()
        with self.node_manager("run a") as manager:
            self.note("two runs", manager, "run a")
            path = self.disk / "run a" / "checkpoint-1"
            self.attempt("two runs, named", lambda: manager.load_checkpoint(path), self.disk / "run a")
