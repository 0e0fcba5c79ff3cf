"""A model with tensors of many shapes, its data, and the usual steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer_core import CommBytes
from trainer_ddp import CompressionArguments
from trainer_ddp.compression import GradientCompression, build_compression

BATCH = 8


class Model(nn.Module):
    """Matrices, biases and a convolution; defined in another order than they are used in."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Linear(24, 1)
        self.second = nn.Linear(32, 24)
        self.seldom = nn.Linear(32, 32, bias=False)
        self.convolution = nn.Conv1d(2, 16, 4, bias=False)
        self.first = nn.Linear(16 * 9, 32)

    def forward(self, inputs: Tensor, *, seldom: bool = True) -> Tensor:
        hidden = self.first(torch.tanh(self.convolution(inputs)).flatten(1)).tanh()
        if seldom:
            hidden = hidden + self.seldom(hidden)
        return self.last(self.second(hidden).tanh())


class Job:
    """A wrapped model with its compression and a count of what it sends."""

    def __init__(
        self,
        settings: CompressionArguments,
        *,
        model: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        **options: object,
    ) -> None:
        self.model = model or Model()
        self.traffic = CommBytes()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.ddp = DistributedDataParallel(
            self.model, process_group=group, **{"bucket_cap_mb": 0.002, **options}
        )
        self.compression = build_compression(settings, self.model, group, self.traffic)
        if self.compression:
            self.compression.register(self.ddp)
            self.compression.begin(0)

    @property
    def active(self) -> GradientCompression:
        assert self.compression is not None
        return self.compression

    def gradients(self, batch: Tensor, **options: bool) -> dict[str, Tensor]:
        """The gradients that one backward pass leaves, averaged."""
        self.model.zero_grad()
        self.ddp(batch, **options).square().mean().backward()
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def step(self, batch: Tensor, done: int) -> None:
        """Optimizer step number `done`."""
        self.gradients(batch)
        self.optimizer.step()
        self.active.begin(done)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """A copy of the compression's state."""
        state = self.active.state_dict()
        return {part: {n: t.clone() for n, t in tensors.items()} for part, tensors in state.items()}


def batches(steps: int, seed: int = 1) -> Iterator[Tensor]:
    """The same global batches in every process, [2 * BATCH, 2, 12]."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(2 * BATCH, 2, 12, generator=generator)


def shard(batch: Tensor) -> Tensor:
    """This rank's half of a global batch."""
    return batch.chunk(2)[dist.get_rank()]


def own_gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Gradients without any averaging."""
    parameters = dict(model.named_parameters())
    loss = model(batch).square().mean()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def mean(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over both ranks, in float64."""
    means = {}
    for name, tensor in tensors.items():
        means[name] = tensor.double()
        dist.all_reduce(means[name])
        means[name] /= 2
    return means


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two sets of tensors, relative to the largest element of each tensor."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name, tensor in a.items():
        other = b[name].double()
        worst = max(worst, float((tensor.double() - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return worst


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def same_on_both(tensors: dict[str, Tensor]) -> bool:
    """Whether both ranks hold the same bits."""
    flat = torch.cat([tensor.detach().reshape(-1).double() for _, tensor in sorted(tensors.items())])
    lowest, highest = flat.clone(), flat.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)
