"""Four ranks compare replicas. Usage: replicas.py DIRECTORY. Each writes DIRECTORY/rank<k>.json.

The ranks are forked from one process, before any process group exists, so that torch is imported once.
"""

import json
import os
import resource
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from checkpoint_core import CheckpointError
from checkpoint_core.agreement import RankAgreement
from checkpoint_core.encoding import EncodedState, encode_state
from checkpoint_core.replication import PIECE_BYTES, Replica, find_mismatches
from dist_env import StaticDistributedEnvironment

WORLD = 4
ALL = [0, 1, 2, 3]
_T = TypeVar("_T")


class CountingAgreement(RankAgreement):
    """Counts the exchanges and the bytes that are sent."""

    exchanges = 0
    broadcast_bytes = 0

    def run(self, phase: str, action: Callable[[], _T]) -> list[_T]:
        self.exchanges += 1
        return super().run(phase, action)

    def broadcast(self, phase: str, tensor: torch.Tensor, source: int) -> None:
        self.broadcast_bytes += tensor.numel() * tensor.element_size()
        super().broadcast(phase, tensor, source)


def model() -> dict[str, object]:
    """A state that is equal on all ranks, though its memory is laid out differently on some."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    if dist.get_rank() == 2:
        weight = weight.t().contiguous().t()
    pairs = [(3, "three"), ("3", None), ((1, "a"), b"bytes")]
    return {
        "weight": weight,
        "half": torch.randn(5, generator=generator).bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([float("nan"), 1.0]),
        "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "flags": torch.tensor([True, False]),
        "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "eps": float("inf")}],
        # The order of insertion is not part of a dictionary's value.
        "mixed": dict(pairs if dist.get_rank() % 2 else reversed(pairs)),
        "ordered": OrderedDict(a=1, b=2),
    }


def flip(tensor: torch.Tensor, byte: int, bit: int = 0) -> None:
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


class Ranks:
    """The scenarios of one rank, run in the same order on all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        env = StaticDistributedEnvironment(
            rank=rank, local_rank=rank, world_size=WORLD, local_world_size=WORLD, backend="gloo"
        )
        self.agreement = CountingAgreement(env, 60.0)
        self.seen: dict[str, object] = {}

    def compare(self, name: str, *replicas: Replica) -> None:
        before = self.agreement.exchanges, self.agreement.broadcast_bytes
        try:
            found: object = find_mismatches(self.agreement, "saving checkpoint-7", replicas)
        except CheckpointError as error:
            found = str(error)
        after = self.agreement.exchanges, self.agreement.broadcast_bytes
        self.seen[name] = {"found": found, "cost": [after[0] - before[0], after[1] - before[1]]}

    def replica(
        self, state: object, level: str = "exact", key: str = "model", ranks: list[int] = ALL
    ) -> Replica:
        encoded = state if isinstance(state, EncodedState) else encode_state(state)
        return Replica(key=key, level=level, ranks=ranks, state=encoded)

    def each_level(self, name: str, state: object) -> None:
        for level in ("structure", "tensor", "exact"):
            self.compare(f"{name}, {level}", self.replica(state, level))

    def scenarios(self) -> None:
        self.each_level("equal", model())
        self.values()
        self.documents()
        self.layouts()
        self.groups()
        self.failures()
        self.memory()

    def values(self) -> None:
        state = model()
        if self.rank == 1:
            flip(state["weight"], byte=4 * 9)
        self.each_level("flipped bit", state)

        state = model()
        if self.rank == 0:
            flip(state["half"], byte=2 * 4 + 1, bit=7)
        self.compare("bf16", self.replica(state))

        zeros = {"zero": torch.tensor([[0.0, -0.0 if self.rank == 3 else 0.0]])}
        zeros["nan"] = torch.tensor([float("nan")])
        zeros["number"] = torch.tensor(7 + self.rank // 3)
        if self.rank == 3:
            flip(zeros["nan"], byte=0)
        for name, tensor in zeros.items():
            self.compare(f"bits of {name}", self.replica({name: tensor}))

        odd = {"flags": torch.tensor([True, True]), "fp8": torch.ones(3).to(torch.float8_e5m2)}
        odd["wide"] = torch.tensor([2**64 - 1 - self.rank // 3], dtype=torch.uint64)
        odd["complex"] = torch.tensor([1 + 2j, 3 + (1 + self.rank // 3) * 1j]).conj()
        if self.rank == 3:
            odd["flags"].view(torch.uint8)[1] = 2
            odd["fp8"][2] = 2.0
        self.compare("other dtypes", self.replica(odd))

        long = torch.zeros(2, PIECE_BYTES // 4 + 10, dtype=torch.int32)
        if self.rank == 2:
            long[1, 5] = 1
            long[1, 100] = 1
        self.compare("beyond the first piece", self.replica({"long": long}))

        every = {"x": torch.arange(4) * (self.rank == 0) + torch.tensor([0, 0, self.rank, 0])}
        self.compare("all differ", self.replica(every))

        many = {f"t{number:02d}": torch.full((2,), float(self.rank == 3)) for number in range(12)}
        self.compare("many tensors", self.replica(many))

        self.compare("changes meanwhile", self.replica(EncodedState(None, Changing(self.rank))))

    def documents(self) -> None:
        state = model()
        if self.rank == 3:
            state["param_groups"][0]["lr"] = 0.2
        self.each_level("scalar differs", state)
        odd = self.rank == 1
        nan = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0] if odd else float("nan")
        pairs: dict[str, tuple[object, object]] = {
            "negative zero": ({"x": 0.0}, {"x": -0.0}),
            "number type": ({"x": 1}, {"x": 1.0}),
            "truth": ({"x": [1]}, {"x": [True]}),
            "NaN bits": ({"x": nan}, {"x": nan}),
            "key type": ({"x": {3: "a"}}, {"x": {"3": "a"}}),
            "container": ({"x": []}, {"x": {}}),
            "tuple": ({"x": [1, 2]}, {"x": (1, 2)}),
            "length": ({"x": [1, 2]}, {"x": [1, 2, 3]}),
            "order": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
            "missing place": ({"x": {"a": 1}}, {"x": {"a": 1, "b": None}}),
            "several places": ({"x": 1, "y": 1, "z": 1}, {"x": 2, "y": 2, "z": 1}),
            "long text": ({"x": "a" * 900 + "b" + "c" * 900}, {"x": "a" * 900 + "d" + "c" * 900}),
        }
        for name, pair in pairs.items():
            self.compare(name, self.replica(pair[odd], "structure"))

    def layouts(self) -> None:
        state = model()
        if self.rank == 2:
            del state["half"]
        self.each_level("missing key", state)

        state = model()
        if self.rank == 1:
            state["weight"] = state["weight"].double()
        if self.rank == 3:
            state["half"] = state["half"][:4]
        self.each_level("dtype and shape differ", state)

    def groups(self) -> None:
        ranks = [0, 1] if self.rank < 2 else [2, 3]
        state = {"own": torch.full((3,), self.rank // 2), "number": self.rank // 2}
        self.compare("groups differ", self.replica(state, ranks=ranks))
        if self.rank == 3:
            state["own"][1] = 9
        self.compare("one group has a flip", self.replica(state, ranks=ranks))

        some = [self.replica({"x": self.rank // 3}, key="some", ranks=[1, 3])] if self.rank in (1, 3) else []
        every = self.replica({"x": 1}, key="all", level="tensor")
        alone = self.replica({"x": self.rank}, key="alone", ranks=[self.rank])
        self.compare("only some hold it", every, alone, *some)
        self.compare("nobody holds any")

    def failures(self) -> None:
        dtype = torch.complex128 if self.rank == 1 else torch.complex64
        self.compare("dtype that cannot be stored", self.replica({"x": torch.zeros(2, dtype=dtype)}))
        level = "exact" if self.rank == 1 else "tensor"
        self.compare("levels differ", self.replica({"x": 1}, level))
        self.compare("a holder is missing", *([self.replica({"x": 1})] if self.rank != 2 else []))
        self.compare("holders differ", self.replica({"x": 1}, ranks=ALL if self.rank else [0, 1]))
        self.compare("good again", self.replica(model()))

    def memory(self) -> None:
        state = {
            "big": torch.ones(48 * 1024 * 1024, dtype=torch.uint8),
            "differs": torch.tensor(self.rank == 3),
        }
        if self.rank == 3:
            flip(state["big"], byte=PIECE_BYTES * 7 + 5)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.compare("memory", self.replica(state))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.seen["extra memory"] = (after - before) * 1024


class Changing(dict[str, torch.Tensor]):
    """Tensors of a careless loop: rank 1 looks different once, and equal when it is asked again."""

    def __init__(self, rank: int) -> None:
        super().__init__(x=torch.zeros(3))
        self.rank = rank

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return [("x", torch.full((3,), float(self.rank == 1)))]


def run_rank(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store, timeout=timedelta(seconds=90))
    ranks = Ranks(rank)
    ranks.scenarios()
    (directory / f"rank{rank}.json").write_text(json.dumps(ranks.seen))
    ranks.agreement.close()
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    children = []
    for rank in range(1, WORLD):
        child = os.fork()
        if not child:
            run_rank(rank, directory)
            return
        children.append(child)
    run_rank(0, directory)
    for rank, child in enumerate(children, start=1):
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"rank {rank} ended with status {status}")


if __name__ == "__main__":
    main()
