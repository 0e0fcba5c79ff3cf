"""A small training job of one rank, with the calls that a trainer makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    OptimizerState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
)
from dist_env import StaticDistributedEnvironment
from trainer_core import CommBytes, Multiopt
from trainer_ddp import DiLoCoArguments, PostLocalSGDArguments
from trainer_ddp.local_updates import LocalUpdates

Settings = PostLocalSGDArguments | DiLoCoArguments


def post_local(start_step: int, period: int, *, node: bool = False) -> PostLocalSGDArguments:
    return PostLocalSGDArguments(
        enabled=True, start_step=start_step, period=period, post_local_gradient_allreduce=node
    )


def diloco(start_step: int, inner_steps: int, rate: float = 0.7, momentum: float = 0.9) -> DiLoCoArguments:
    return DiLoCoArguments(
        enabled=True,
        start_step=start_step,
        inner_steps=inner_steps,
        outer_learning_rate=rate,
        outer_momentum=momentum,
    )


class Net(nn.Module):
    """Matrices, a tied weight, batch normalisation, and an expert that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.head.weight
        self.expert = nn.Linear(6, 2)
        self.frozen = nn.Linear(6, 2).requires_grad_(False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, *, expert: bool = False) -> Tensor:
        hidden = self.tied(torch.tanh(self.head(self.norm(self.inner(x)))))
        last = self.expert(hidden) if expert else hidden[:, :2]
        return last + self.frozen(hidden)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model).values(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model).values(), lr=0.02)


def mixed(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(trained(model).values())
    matrices = torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.05, momentum=0.8)
    return Multiopt([matrices, torch.optim.AdamW([p for p in parameters if p.ndim < 2], lr=0.02, fused=True)])


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "mixed": mixed}


class Job:
    """One rank's model, optimizer and local updates; `seed` decides the first weights."""

    def __init__(
        self,
        settings: Settings,
        optimizer: str = "adamw",
        *,
        group: ProcessGroup | None = None,
        node: ProcessGroup | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(seed)
        self.group, self.node = group, node
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.model = Net().to(dtype)
        self.dtype = dtype
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.wrapped: nn.Module = self.model
        if group is not None:
            self.wrapped = DistributedDataParallel(
                self.model, process_group=group, find_unused_parameters=True
            )
        self.traffic = CommBytes()
        self.local = LocalUpdates(
            settings,
            model=self.model,
            optimizer=self.optimizer,
            process_group=group,
            node_group=node,
            traffic=self.traffic,
        )
        self.step = 0

    def batch(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(8, 4, generator=generator).to(self.dtype)

    def train(self, steps: int, *, expert_on: int | None = None) -> None:
        """Continue for some steps; the batches of rank `expert_on` use the expert."""
        for _ in range(steps):
            scope = self.local.gradient_scope
            module = self.wrapped if scope == "all" else self.model
            self.optimizer.zero_grad()
            output = module(self.batch(self.step + 1, self.rank), expert=expert_on == self.rank)
            (output - 1).square().mean().backward()
            if scope == "node":
                self._average_in_node()
            self.optimizer.step()
            self.step += 1
            self.local.after_step(self.step)

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters and buffers."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the trained parameters."""
        return {name: value.detach().clone() for name, value in trained(self.model).items()}

    def moments(self) -> dict[str, object]:
        """Copies of the optimizer's state, by name of the parameter."""
        state = OptimizerState(self.optimizer, self.model).state_dict()["state"]
        return {
            f"{name}/{key}": value.clone() if isinstance(value, Tensor) else value
            for name, values in state.items()
            for key, value in values.items()
        }

    def manager(self, output_dir: Path) -> CheckpointManager:
        shared = SharingPattern.REPLICATED
        stateful = {"model": ModelState(self.model), "optimizer": OptimizerState(self.optimizer, self.model)}
        components = [
            StateComponent(key=key, stateful=state, sharing_pattern=shared, validate_replication=True)
            for key, state in stateful.items()
        ]
        env = StaticDistributedEnvironment(
            rank=self.rank,
            local_rank=self.rank,
            world_size=self.world_size,
            local_world_size=self.world_size,
            backend=None if self.group is None else "gloo",
        )
        return CheckpointManager(
            CheckpointConfig(output_dir=output_dir, timeout_seconds=60.0),
            dist=env,
            stateful_provider=StaticStatefulProvider([*components, *self.local.state_components()]),
        )

    def save(self, output_dir: Path) -> None:
        means = self.local.synced_weights(optimizer=True)
        with self.manager(output_dir) as manager, means, self._buffers_of_rank_0():
            manager.save_checkpoint(self.step)

    def load(self, output_dir: Path) -> None:
        with self.manager(output_dir) as manager:
            loaded = manager.load_checkpoint()
        assert loaded is not None
        assert loaded.missing == ()
        self.step = loaded.step
        self.local.begin(self.step)

    def _average_in_node(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.node)
                parameter.grad /= dist.get_world_size(self.node)

    @contextmanager
    def _buffers_of_rank_0(self) -> Iterator[None]:
        # Between two forward passes the batch statistics of data-parallel ranks differ, too.
        own = [buffer.clone() for buffer in self.model.buffers()]
        if self.group is not None:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0, group=self.group)
        yield
        for buffer, before in zip(self.model.buffers(), own, strict=True):
            buffer.copy_(before)


def same(left: dict[str, object], right: dict[str, object]) -> bool:
    """Whether two dicts hold the same bits."""
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def gathered(values: dict[str, Tensor], group: ProcessGroup) -> list[dict[str, Tensor]]:
    """The tensors of every rank."""
    everybody: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybody, values, group=group)
    return everybody


def mean_of(everybody: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of floating-point tensors, by hand; the others are those of rank 0."""
    return {
        name: (sum(other[name].double() for other in everybody) / len(everybody)).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in everybody[0].items()
    }


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference between two dicts of tensors."""
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def _same(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right
