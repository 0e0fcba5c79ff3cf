"""What every parallelism does whose ranks work on different data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from checkpoint_core import SharingPattern
from dataloader_dispatch import DataloaderDispatcher, SynchronizedDataLoader
from dist_env import DistributedEnvInterface, HostSums, gather_objects, is_alone, naming_lost_ranks

from .agreement import compare_facts, model_facts
from .arguments import DataParallelArguments, TrainingArguments
from .arguments.changes import plain_arguments
from .batch import Batch
from .errors import ConfigurationError, DataError
from .parallelism import Parallelism, check_device_settings
from .replicas import buffers_of_rank_0, copy_weights_of_rank_0

DATA_PARALLEL = "data_parallel"
"""The dimension of a mesh along which ranks work on different data."""
_OF_ONE_RANK = ("device", "logging_dir")
"""Arguments that may differ between ranks."""


class DataParallel(Parallelism):
    """Ranks that work on different data and agree on everything else.

    Subclasses say how the model is built, wrapped and saved. With one rank nothing is exchanged.

    Args:
        env: Rank, world size and device of this process.
    """

    def __init__(self, env: DistributedEnvInterface) -> None:
        super().__init__(env)
        self.mesh: DeviceMesh | None = None
        """All ranks; none with one rank."""
        self._hosts: HostSums | None = None
        self._data = DataParallelArguments()

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks."""
        return self.env.world_size

    @cached_property
    def group(self) -> ProcessGroup | None:
        """The ranks that work on different data, for collectives on the device; none with one rank."""
        return None if self.mesh is None else self.mesh.get_group(DATA_PARALLEL)

    def check(self, args: TrainingArguments) -> None:
        """Form the groups and compare the arguments; collective.

        Raises:
            ConfigurationError: If there is no process group, or ranks have different arguments.
        """
        check_device_settings(args, self.device)
        if not isinstance(args, DataParallelArguments):
            raise ConfigurationError(
                "args", type(args).__name__, "says nothing about several ranks", "use the trainer's own class"
            )
        self._data = args
        if self.env.world_size > 1:
            self._form_groups()
        arguments = plain_arguments(args)
        self.agree({"class of args": type(args).__name__})
        self.agree({name: value for name, value in arguments.items() if name not in _OF_ONE_RANK})

    def make_mesh(self) -> DeviceMesh:
        """Arrange all ranks, of which there are several; one dimension is `DATA_PARALLEL`; collective."""
        return init_device_mesh(self.env.device_type, (self.env.world_size,), mesh_dim_names=(DATA_PARALLEL,))

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to start where ranks were given different things; collective."""
        if self.mesh is not None:
            with self.guarded("comparing what the ranks were given"):
                compare_facts(facts, self.env)

    def agree_on_model(self) -> None:
        """Refuse to start where ranks have built different models; collective.

        Raises:
            ConfigurationError: On every rank, naming the first parameter or buffer that differs.
        """
        self.agree({"model": type(self.model).__name__, **model_facts(self.model)})

    def copy_weights_of_rank_0(self, model: nn.Module) -> None:
        """Overwrite parameters and saved buffers of all ranks by those of the first; collective."""
        copy_weights_of_rank_0(model, self.group)

    def buffers_of_rank_0(self) -> AbstractContextManager[None]:
        """A context in which every rank has the saved buffers of the first; collective at entry."""
        return buffers_of_rank_0(self.unwrapped_model(), self.group)

    def fail_together(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if one of them has failed; collective."""
        mine = None if error is None else str(error)
        told = [mine] if self.mesh is None else gather_objects(mine, self.env)
        if error is not None and len(set(told)) == 1:
            raise error
        failed = [f"rank {rank} cannot {what}: {text}" for rank, text in enumerate(told) if text is not None]
        if failed:
            raise DataError(f"of {len(told)} ranks {'; '.join(failed)}") from error

    def guarded(self, doing: str) -> AbstractContextManager[None]:
        """A context in which the loss of another rank becomes an error that names it."""
        return nullcontext() if self.mesh is None else naming_lost_ranks(self.env, doing)

    def wrap_loader(self, loader: object) -> object:
        """Batches that rank 0 reads for all, or batches of this rank's own loader that all ranks end with."""
        return self._shared(loader, self._data.dispatch_batches, self._data.uneven_batches)

    def wrap_evaluation_loader(self, loader: object) -> object:
        """As for training data; ranks that run out first get dummies."""
        return self._shared(loader, self._data.dispatches_evaluation, "pad")

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor of a few numbers over the ranks that count; waits for no accelerator."""
        if self._hosts is None:
            return values
        return self.sum_over_all(values if self.counts_data else torch.zeros_like(values))

    def sum_over_all(self, values: Tensor) -> Tensor:
        """Sum a tensor of a few numbers over all ranks, also those that work on the same data."""
        if self._hosts is None:
            return values
        if values.device.type == "cpu":
            sums = torch.tensor(self._hosts.sum(values.flatten().tolist()), dtype=torch.float64)
            return sums.to(values.dtype).view(values.shape)
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank."""
        if self._hosts is None:
            return [list(values)]
        size, ranks = len(values), range(self.env.world_size)
        places = [0.0] * (size * len(ranks))
        places[self.env.rank * size : (self.env.rank + 1) * size] = values
        gathered = self._hosts.sum(places)
        return [gathered[rank * size : (rank + 1) * size] for rank in ranks]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has raised it; asked by the hosts, which wait for no device."""
        return list(flags) if self._hosts is None else [total > 0 for total in self._hosts.sum(flags)]

    def sharing(self) -> Mapping[str, SharingPattern]:
        """Equal on all ranks, but for the random generators and for data that each rank reads itself."""
        keys = ("model", "optimizer", "scheduler", "grad_scaler", "callbacks", "trainer")
        dispatched = self._data.dispatch_batches or self.mesh is None
        return {
            **dict.fromkeys(keys, SharingPattern.REPLICATED),
            "dataset": SharingPattern.GLOBAL if dispatched else SharingPattern.PER_RANK,
            "rng": SharingPattern.PER_RANK,
        }

    def evaluation_settings(self) -> str:
        """The settings that decide which rank scores what."""
        data = self._data
        return (
            f", dispatch_batches={data.dispatch_batches}, "
            f"dispatch_eval_batches={data.dispatch_eval_batches} (in effect: {data.dispatches_evaluation})"
        )

    def _shared(self, loader: object, dispatched: bool, uneven: str) -> object:
        if self.mesh is None:
            return loader
        batches = cast("Iterable[Batch]", loader)
        if dispatched:
            return DataloaderDispatcher(
                batches,
                self.mesh,
                self.device,
                DATA_PARALLEL,
                uneven=uneven,  # type: ignore[arg-type]
            )
        return SynchronizedDataLoader(batches, self.device, self.group, uneven)  # type: ignore[arg-type]

    def _form_groups(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigurationError(
                "world_size",
                self.env.world_size,
                "several ranks need a process group, and there is none",
                "open a dist_env.DistributedEnvironment first and give it as distributed_env",
            )
        self.mesh = self.make_mesh()
        if is_alone(self.env):
            return
        # Flags and counts go between the hosts, beside what the devices are busy with.
        with self.guarded("connecting the ranks"):
            self._hosts = HostSums(self.env)
