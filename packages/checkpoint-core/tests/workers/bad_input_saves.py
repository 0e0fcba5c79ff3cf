"""Two ranks save to one directory, and something is wrong on one of them, in every phase of a save."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bad_input_group import Broken, Ranks, State, address_space, component, fail_with
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from checkpoint_core import CheckpointManager, ModelState, SharingPattern, Stateful

P = SharingPattern
SMALL_FILE = 50_000
"""Bytes; less than the first byte of rank 1's half."""


class Saves(Ranks):
    """Every scenario fails to save step 2, and leaves step 1 as it is."""

    def __init__(self, rank: int, directory: Path) -> None:
        super().__init__(rank, directory)
        self.run = directory / "run"
        self.part = State(tensor=self.sharded())
        self.own = State(rank=rank)
        self.components = [component("own", self.own, P.PER_RANK), component("part", self.part, P.SHARDED)]

    def scenarios(self) -> None:
        with self.manager(self.components, self.run) as manager:
            manager.save_checkpoint(1)
            self.capture(manager)
            self.write(manager)
        self.staging()
        self.background()
        self.contradictions()
        self.replicas()
        self.separate_directories()
        self.settings()
        self.older_one()

    def save(self, name: str, manager: CheckpointManager, **options: object) -> None:
        self.attempt(name, lambda: manager.save_checkpoint(2, **options), self.run)  # type: ignore[arg-type]

    def capture(self, manager: CheckpointManager) -> None:
        for rank in range(2):
            if self.rank == rank:
                self.part.on_save = fail_with(RuntimeError("no state today"))
            self.save(f"state_dict raises on rank {rank}", manager)
            self.part.on_save = lambda: None
        if self.rank == 1:
            self.part.values["extra"] = {"tags": {1, 2}}
        self.save("unsupported object on rank 1", manager)
        self.part.values.pop("extra", None)
        self.save("bad metrics on rank 1", manager, metrics={"eval_loss": "low" if self.rank else 1.0})

    def write(self, manager: CheckpointManager) -> None:
        for rank in range(2):
            with self.limit_on(rank, resource.RLIMIT_FSIZE, SMALL_FILE):
                self.save(f"rank {rank} cannot write its part", manager)
        preprocessor = Broken() if self.rank == 0 else None
        with self.manager(self.components, self.run, preprocessor=preprocessor) as broken:
            self.save("preprocessor raises on rank 0", broken)

    def staging(self) -> None:
        # It occupies 4 bytes here; its copy would have 4 GB.
        tensor = torch.zeros(1).expand(10**9 if self.rank == 1 else 1)
        components = [component("own", State(tensor=tensor), P.PER_RANK)]
        with (
            self.manager(components, self.run, async_save=True) as manager,
            self.limit_on(1, resource.RLIMIT_AS, address_space() + 2**30),
        ):
            self.save("rank 1 cannot stage", manager)

    def background(self) -> None:
        run = self.directory / "background"
        calls: dict[str, Callable[[CheckpointManager], object]] = {
            "wait": lambda manager: manager.wait(),
            "load": lambda manager: manager.load_checkpoint(),
            "close": lambda manager: manager.close(),
        }
        with self.manager(self.components, run, async_save=True) as manager:
            manager.save_checkpoint(1)
            manager.wait()
            for name, call in calls.items():
                with self.limit_on(1, resource.RLIMIT_FSIZE, SMALL_FILE):
                    path = manager.save_checkpoint(2)
                    self.part.values["trained"] = path.name
                    self.attempt(f"background, {name}", lambda call=call: call(manager), run)  # type: ignore[misc]
                if name == "load":
                    # The failure was raised once, and the state is that of step 2 and later, not of step 1.
                    self.attempt("background, continues", lambda: self.save_both(manager), run)
                    self.save_after_a_failure(manager, run)

    def save_after_a_failure(self, manager: CheckpointManager, run: Path) -> None:
        with self.limit_on(1, resource.RLIMIT_FSIZE, SMALL_FILE):
            manager.save_checkpoint(4)
            while manager._worker.pending:
                time.sleep(0.01)
        self.attempt("background, save", lambda: manager.save_checkpoint(5), run)
        self.attempt("background, saved", manager.wait, run)

    def save_both(self, manager: CheckpointManager) -> None:
        for step in (2, 3):
            manager.save_checkpoint(step)
        manager.wait()

    def contradictions(self) -> None:
        rank = self.rank
        cases: dict[str, Stateful] = {
            "dtypes differ": State(x=torch.zeros(3, dtype=torch.int64 if rank else torch.float32)),
            "shapes differ": State(x=torch.zeros(3 + rank)),
            "values differ": State(group={"lr": 0.1 + rank, "same": 1}),
            "kinds differ": State(x=[1, 2] if rank else {"a": 1}),
            "tied to nothing": ModelState(nn.Linear(2, 2) if rank else [], tied={"head": "embed"}),
            "partial sums": State(x=DTensor.from_local(torch.ones(3), self.mesh, [Partial()])),
            "no such dtype": State(x=torch.zeros(2, dtype=torch.complex128)) if rank else State(),
        }
        for name, stateful in cases.items():
            with self.manager([component("part", stateful, P.SHARDED)], self.run) as manager:
                self.save(name, manager)

    def replicas(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        if self.rank == 1:
            model.weight.data.view(-1).view(torch.uint8)[4] ^= 1
        components = [component("model", ModelState(model), P.REPLICATED, validate_replication=True)]
        with self.manager(components, self.run) as manager:
            self.save("replicas differ", manager)
        run = self.directory / "warn"
        with self.manager(components, run, on_replica_mismatch="warn") as manager:
            self.attempt("replicas differ, warn", lambda: manager.save_checkpoint(2), run)
            before = model.weight.detach().clone()
            manager.load_checkpoint()
            self.seen["replicas differ, warn"]["changed"] = not torch.equal(before, model.weight)

    def separate_directories(self) -> None:
        """What should be shared storage is not."""
        run = self.directory / f"of rank {self.rank}"
        with self.manager(self.components, run) as manager:
            run.mkdir()
            self.attempt("separate directories, save", lambda: manager.save_checkpoint(2), run)
        run = self.run if self.rank == 0 else run
        with self.manager(self.components, run) as manager:
            self.attempt("separate directories, load", manager.load_checkpoint, run)

    def settings(self) -> None:
        """What one rank has set differently is told before anything is written."""
        for name, of_rank in {
            "settings differ": [{"async_save": False}, {"async_save": True}],
            "max_shard_size differs": [{}, {"max_shard_size": 1000}],
        }.items():

            def make(mine: dict[str, object] = of_rank[self.rank]) -> None:
                self.manager(self.components, self.run, **mine).close()

            self.attempt(name, make, self.run)

    def older_one(self) -> None:
        """After all of that, the first checkpoint is there and can be gone on from."""
        own, part = State(), State(tensor=self.sharded() * 0)
        components = [component("own", own, P.PER_RANK), component("part", part, P.SHARDED)]
        with self.manager(components, self.run) as manager:
            self.attempt("older one, load", manager.load_checkpoint, self.run)
            tensor = part.values["tensor"]
            same = isinstance(tensor, torch.Tensor) and torch.equal(tensor, self.whole())
            self.seen["older one, load"]["restored"] = same and own.values == {"rank": self.rank}
            self.attempt("older one, save", lambda: manager.save_checkpoint(2), self.run)

    def whole(self) -> torch.Tensor:
        return self.sharded().full_tensor()
