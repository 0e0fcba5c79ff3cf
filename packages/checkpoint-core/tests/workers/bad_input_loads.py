"""Two ranks load parts of one state, and one of them holds something that does not fit."""

import gc
import os
import resource
from pathlib import Path

import torch
from bad_input_group import Ranks, State, address_space, component, fail_with, stage
from torch import nn

from checkpoint_core import ModelState, OptimizerState, SharingPattern, StateComponent

P = SharingPattern


class Objects:
    """What one rank holds: a counter, a stage of a model with its optimizer, and state of everybody.

    Args:
        layers: Layers of the stage by name, and their numbers of outputs.
        train: Whether to give the optimizer state.
    """

    def __init__(self, layers: dict[str, int], *, train: bool) -> None:
        self.counter = State(n=1 if train else 0)
        self.single = State(n=1 if train else 0)
        self.part = State(tensor=torch.full((3,), 1.0 if train else 0.0))
        self.model = stage(**layers)
        self.optimizer: torch.optim.Optimizer | None = None
        if layers:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if train and self.optimizer is not None:
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
        self.before = self.look()

    def components(self) -> list[StateComponent]:
        model: nn.Module | list[nn.Module] = self.model if len(self.model) else []
        own = self.optimizer or torch.optim.SGD([{"params": []}])
        return [
            component("counter", self.counter, P.PER_RANK),
            component("single", self.single, P.GLOBAL),
            component("part", self.part, P.SHARDED),
            component("model", ModelState(model), P.SHARDED),
            component("optimizer", OptimizerState(own, model), P.SHARDED),
        ]

    def look(self) -> list[object]:
        """Everything that a load could change, as plain values."""
        values = [state.values.get("n") for state in (self.counter, self.single)]
        tensors = [*self.model.state_dict().values(), self.part.values["tensor"]]
        settings = None if self.optimizer is None else self.optimizer.state_dict()
        return [values, [tensor.tolist() for tensor in tensors], repr(settings)]

    @property
    def changed(self) -> bool:
        return self.look() != self.before


class Loads(Ranks):
    """The checkpoint holds layer a of rank 0 and layer b of rank 1."""

    def __init__(self, rank: int, directory: Path) -> None:
        super().__init__(rank, directory)
        self.run = directory / "stages"

    def scenarios(self) -> None:
        saved = Objects({"b": 3} if self.rank else {"a": 2}, train=True)
        with self.manager(saved.components(), self.run) as manager:
            manager.save_checkpoint(1)
        for name, mine in {
            "shape differs on rank 1": {"b": 4},
            "rank 1 wants more": {"b": 3, "c": 2},
            "nobody holds b": {},
            "good": {"b": 3},
        }.items():
            self.load(name, {"a": 2} if self.rank == 0 else mine)
        self.optimizer_of_part()
        self.refuses()
        self.no_more_files()
        self.handed_out()
        self.no_memory()

    def load(self, name: str, layers: dict[str, int]) -> None:
        objects = Objects(layers, train=False)
        with self.manager(objects.components(), self.run) as manager:
            self.attempt(name, manager.load_checkpoint, self.run)
        self.seen[name]["changed"] = objects.changed

    def optimizer_of_part(self) -> None:
        """The model fits; nobody holds the optimizer state of b."""
        objects = Objects({"b": 3} if self.rank else {"a": 2}, train=False)
        if self.rank == 1:
            objects.optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
            objects.before = objects.look()
        with self.manager(objects.components(), self.run) as manager:
            self.attempt("nobody optimizes b", manager.load_checkpoint, self.run)
        self.seen["nobody optimizes b"]["changed"] = objects.changed

    def refuses(self) -> None:
        objects = Objects({"b": 3} if self.rank else {"a": 2}, train=False)
        if self.rank == 1:
            objects.part.on_load = fail_with(RuntimeError("not for me"))
        with self.manager(objects.components(), self.run) as manager:
            self.attempt("load_state_dict raises on rank 1", manager.load_checkpoint, self.run)

    def no_more_files(self) -> None:
        """Rank 1 has one file descriptor left: enough to verify, too few to restore several components."""
        objects = Objects({"b": 3} if self.rank else {"a": 2}, train=False)
        gc.collect()
        taken = []
        with self.manager(objects.components(), self.run) as manager:
            highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
            with self.limit_on(1, resource.RLIMIT_NOFILE, highest + 2):
                while self.rank == 1 and (descriptor := _null()) is not None:
                    taken.append(descriptor)
                for descriptor in taken[-1:]:
                    os.close(descriptor)
                self.attempt("rank 1 cannot open files", manager.load_checkpoint, self.run)
        for descriptor in taken[:-1]:
            os.close(descriptor)
        self.seen["rank 1 cannot open files"]["changed"] = objects.changed

    def handed_out(self) -> None:
        """Rank 0 reads a GLOBAL model; it does not fit the one of rank 1."""
        run = self.directory / "global"
        first, second = State(n=1), stage(a=2)
        saved = [component("first", first, P.REPLICATED), component("model", ModelState(second), P.GLOBAL)]
        with self.manager(saved, run) as manager:
            manager.save_checkpoint(1)
        first.values = {"n": 0}
        model = stage(a=2 + self.rank)
        before = repr(model.state_dict())
        held = [component("first", first, P.REPLICATED), component("model", ModelState(model), P.GLOBAL)]
        with self.manager(held, run) as manager:
            self.attempt("global model differs on rank 1", manager.load_checkpoint, run)
        changed = first.values != {"n": 0} or repr(model.state_dict()) != before
        self.seen["global model differs on rank 1"]["changed"] = changed

    def no_memory(self) -> None:
        """Rank 0 hands out 256 MB, for which rank 1 has no room."""
        run = self.directory / "large"
        large = State(tensor=torch.zeros(64_000_000))
        # A rank that fails alone leaves the other waiting, and the test then fails after this time.
        with self.manager([component("large", large, P.GLOBAL)], run, timeout_seconds=25) as manager:
            manager.save_checkpoint(1)
            large.values.clear()
            with self.limit_on(1, resource.RLIMIT_AS, address_space() + 128 * 2**20):
                self.attempt("rank 1 has no memory", manager.load_checkpoint, run)


def _null() -> int | None:
    """A file descriptor, or None when there are no more."""
    try:
        return os.open("/dev/null", os.O_RDONLY)
    except OSError:
        return None
