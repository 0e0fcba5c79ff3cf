"""What the ranks of a job are to one another, and which of them gets which batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dataloader_dispatch import DataloaderDispatcher, SynchronizedDataLoader
from dist_env import (
    DistributedEnvInterface,
    DistributedEnvironmentError,
    HostSums,
    Meshes,
    ParallelLayout,
    gather_objects,
    is_alone,
    naming_lost_ranks,
)

from ..arguments import DataParallelArguments, TrainingArguments, rules
from ..arguments.training import UNEVEN, Uneven
from ..errors import ConfigurationError, DataError, stopped
from ..model.offload import check_activation_offload

if TYPE_CHECKING:
    from ..data.loaders import Batch


class Ranks:
    """The ranks of a job: where each stands in the layout, and what they agree on.

    Who reads which data, who counts, and who holds equal weights follows from the layout; nothing here is
    overridden. With one rank nothing is exchanged.

    Args:
        env: Rank, world size and device of this process.
        layout: Sizes of the dimensions; their product is the world size.

    Attributes:
        env: Rank, world size and device of this process.
        layout: Sizes of the dimensions.
        device: Where this rank computes.
        coordinates: Index of this rank in each dimension.
        meshes: The device mesh and its views; None until `connect`, and for one rank without a process group.
    """

    def __init__(self, env: DistributedEnvInterface, layout: ParallelLayout | None = None) -> None:
        self.env = env
        self.layout: ParallelLayout = layout or ParallelLayout(replicate=env.world_size)
        self.device: torch.device = env.device
        self.coordinates: dict[str, int] = self.layout.coordinates(env.rank)
        self.meshes: Meshes | None = None
        self._hosts: HostSums | None = None

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that work on different data."""
        return self.layout.data_count

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether what this rank counts of its data is added up; of ranks with the same data, one does.

        Those that share out sequences count whole rows, and know the loss of whole rows.
        """
        return self.layout.counts_tokens(self.env.rank) and self.coordinates["context"] == 0

    @cached_property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.env.world_size > 1

    def connect(self, *, alone: bool = False) -> None:
        """Make the device mesh and the channel between the hosts; collective.

        Args:
            alone: Make the mesh for a single rank, too: what shards needs one.

        Raises:
            ConfigurationError: If there is no process group.
        """
        if self.meshes is not None or not (self.several or alone):
            return
        # Ranks of unlike meshes would wait for one another while they make their groups.
        self.check_same({"mesh": str(self.layout)})
        with self.lost_rank_errors("connecting the ranks"):
            try:
                self.meshes = Meshes(self.layout, self.env.device_type)
            except DistributedEnvironmentError as error:
                raise ConfigurationError(
                    "world_size",
                    self.env.world_size,
                    "needs a process group of that size",
                    "open a dist_env.DistributedEnvironment first and pass it as distributed_env",
                ) from error
            if self.several and not is_alone(self.env):
                # Flags and counts go between the hosts, beside what the devices are busy with.
                self._hosts = HostSums(self.env)

    @cached_property
    def data_group(self) -> ProcessGroup | None:
        """The ranks of this rank's place in the model, which work on different data; None for one rank."""
        return None if self.meshes is None or not self.several else self.meshes.data.get_group()

    @cached_property
    def loss_group(self) -> ProcessGroup | None:
        """The ranks of `data_group`, and those that share out sequences with one of them."""
        if self.meshes is None or self.layout.context == 1:
            return self.data_group
        return self.meshes.loss.get_group()

    @cached_property
    def pipeline_group(self) -> ProcessGroup | None:
        """The ranks of this rank's pipeline, in the order of their stages; None without stages."""
        if self.meshes is None or self.layout.pipeline == 1:
            return None
        return self.meshes.pipeline.get_group()

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Refuse to start where ranks were given different things; collective.

        Args:
            facts: What has to be the same everywhere, as plain values by name; nested tables are allowed. All
                of it is sent only if something differs.

        Raises:
            ConfigurationError: On every rank, naming the first fact that differs, and who has what.
        """
        if not (self.several and dist.is_available() and dist.is_initialized()):
            return
        with self.lost_rank_errors("comparing what the ranks were given"):
            _compare(dict(_flat(facts, "")), self.env)

    def check_same_model(self, model: nn.Module) -> None:
        """Refuse to start where ranks have built different models; collective.

        Raises:
            ConfigurationError: On every rank, naming the first parameter or buffer that differs.
        """
        parameters = {f"parameter {name}": _described(value) for name, value in model.named_parameters()}
        buffers = {f"buffer {name}": _described(value) for name, value in model.named_buffers()}
        self.check_same({"model": type(model).__name__, **parameters, **buffers})

    def fail_together(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if one of them has failed; collective.

        Args:
            error: What this rank has failed with, if so.
            what: What it could not do, for the message: 'load its train_dataset'.

        Raises:
            DataError: Naming the ranks that failed, and why; the error itself if all failed alike.
        """
        mine = None if error is None else str(error)
        told = gather_objects(mine, self.env) if self.several and self.meshes is not None else [mine]
        if error is not None and len(set(told)) == 1:
            raise error
        failed = [
            f"rank {rank} of {len(told)} cannot {what}: {stopped(text)}"
            for rank, text in enumerate(told)
            if text is not None
        ]
        if failed:
            raise DataError(" ".join(failed)) from error

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """A context of which every rank leaves with an error if one of them does; collective at its end.

        Args:
            what: As in `fail_together`. It must not be collective itself.
        """
        failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  # raised as soon as the other ranks know of it
            failure = error
        self.fail_together(failure, what)

    def lost_rank_errors(self, doing: str) -> AbstractContextManager[None]:
        """A context in which the loss of another rank becomes an error that names it.

        Args:
            doing: What is done in it, for the message.
        """
        return naming_lost_ranks(self.env, doing) if self.several else nullcontext()

    def sum(self, values: Tensor, *, counts: bool | None = None) -> Tensor:
        """Sum a tensor of a few numbers over the ranks that count, without waiting for the device.

        Args:
            values: The same shape on all ranks.
            counts: Whether those of this rank are added; by default `counts_tokens`.

        Returns:
            The sum, on every rank.
        """
        if self._hosts is None:
            return values
        if not (self.counts_tokens if counts is None else counts):
            values = torch.zeros_like(values)
        if values.device.type == "cpu":
            sums = torch.tensor(self._hosts.sum(values.flatten().tolist()), dtype=torch.float64)
            return sums.to(values.dtype).view(values.shape)
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in rank order, on every rank; each rank gives equally many."""
        if self._hosts is None:
            return [list(values)]
        size, ranks = len(values), range(self.env.world_size)
        places = [0.0] * (size * len(ranks))
        places[self.env.rank * size : (self.env.rank + 1) * size] = values
        gathered = self._hosts.sum(places)
        return [gathered[rank * size : (rank + 1) * size] for rank in ranks]

    @contextmanager
    def equal_draws(self, loader: Iterable[Batch] | None) -> Iterator[None]:
        """A context in which ranks that divide tensors draw the same random numbers on the host; collective.

        Only one rank reads the data, so a collator that draws random numbers moves the generator of that rank
        alone, and may do so while a step computes. What the ranks do not divide, such as a mask of dropout,
        each of them computes, and it has to be equal. On an accelerator the model draws from the generator of
        the device, which no data moves.

        Args:
            loader: Of the training data; what reads ahead is paused.
        """
        if self.meshes is None or self.layout.tensor == 1 or self.device.type != "cpu":
            yield
            return
        with loading_paused(loader):
            state = torch.get_rng_state()
            dist.broadcast(state, group=self.meshes.tensor.get_group(), group_src=0)
            torch.set_rng_state(state)
            yield

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has raised it; asked by the hosts, which wait for no device."""
        return list(flags) if self._hosts is None else [total > 0 for total in self._hosts.sum(flags)]


def loading_paused(loader: Iterable[Batch] | None) -> AbstractContextManager[object]:
    """A context in which no thread of this process loads training data, which may draw random numbers."""
    return loader.paused() if isinstance(loader, DataloaderDispatcher) else nullcontext()


def check_device_settings(args: TrainingArguments, device: torch.device) -> None:
    """Refuse settings that the device of this process cannot honour.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if args.enable_activation_offloading:
        check_activation_offload(device)


def check_several(args: TrainingArguments, layout: ParallelLayout) -> None:
    """Refuse settings that a layout cannot honour, whatever the transforms are.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if args.fuse_optim_with_backward and layout.world_size > 1:
        raise ConfigurationError(
            "fuse_optim_with_backward",
            True,
            f"steps each parameter before its gradient is summed over the ranks of the layout {layout}",
            "leave it out",
        )
    if args.mixed_precision == "fp16" and layout.tensor > 1:
        raise ConfigurationError(
            "mixed_precision",
            "fp16",
            f"needs torch's gradient scaler, which cannot handle a mix of tensors that the layout {layout} "
            "shards and others",
            "set mixed_precision='bf16'",
        )


class _Absent:
    def __repr__(self) -> str:
        return "nothing of that name"


_ABSENT = _Absent()


def _compare(flat: Mapping[str, object], env: DistributedEnvInterface) -> None:
    digest = hashlib.sha256(repr(sorted(flat.items())).encode()).hexdigest()
    if len(set(gather_objects(digest, env))) == 1:
        return
    ranks = gather_objects({name: repr(value) for name, value in flat.items()}, env)
    for name in dict.fromkeys(name for each in ranks for name in each):
        values = [each.get(name, repr(_ABSENT)) for each in ranks]
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise ConfigurationError(
                name,
                flat.get(name, _ABSENT),
                f"differs between ranks: {told}",
                "give all ranks the same value",
            )


def _described(tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{trained}"


def _flat(facts: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


DATA_DIMENSIONS = ("replicate", "shard")
"""The dimensions of the mesh along which ranks work on different data."""


class BatchPlacement:
    """Gives each rank the batches of its place in the data dimensions of the layout.

    Ranks that differ in another dimension only, such as the stages of a pipeline, get the same batches. Those
    of the dimension `tensor` may read them by themselves: each batch is compared, and another one refused.

    Args:
        args: dispatch_batches, dispatch_eval_batches and uneven_batches, where there are several ranks.
        ranks: The ranks.

    Raises:
        ConfigurationError: If ranks are to read data of their own, and several of them need the same.
    """

    def __init__(self, args: TrainingArguments, ranks: Ranks) -> None:
        self._ranks = ranks
        self._args = args if isinstance(args, DataParallelArguments) else DataParallelArguments()
        if ranks.layout.pipeline * ranks.layout.context > 1:
            self._check_same_batches()

    def train_loader(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Batches that rank 0 reads for all, or batches of this rank's own loader that all ranks end with."""
        uneven = rules.one_of("uneven_batches", self._args.uneven_batches, UNEVEN)
        return self._shared(loader, self._args.dispatch_batches, uneven)

    def evaluation_loader(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Likewise for evaluation data, of which every rank gets equally many.

        `last_is_dummy` of what is returned, if it has that, tells that the last batch is padding for a rank
        whose data ran out.
        """
        return self._shared(loader, self._args.dispatches_evaluation, "pad")

    @property
    def is_dispatched(self) -> bool:
        """Whether one rank reads the training data for all."""
        return self._args.dispatch_batches or not self._ranks.several

    def settings(self) -> str:
        """The settings that decide which rank scores what, for a message: 'name=value, name=value'."""
        if not self._ranks.several:
            return ""
        args = self._args
        return (
            f"dispatch_batches={args.dispatch_batches}, "
            f"dispatch_eval_batches={args.dispatch_eval_batches} (in effect: {args.dispatches_evaluation})"
        )

    def _shared(self, loader: Iterable[Batch], dispatched: bool, uneven: Uneven) -> Iterable[Batch]:
        ranks = self._ranks
        if not ranks.several or ranks.meshes is None:
            return loader
        if dispatched:
            return DataloaderDispatcher(
                loader, ranks.meshes.mesh, ranks.device, DATA_DIMENSIONS, uneven=uneven
            )
        layout, group = ranks.layout, ranks.data_group
        readers: list[tuple[int, ...]] = []
        if layout.tensor > 1:
            # All ranks agree on the end: of those with the same batches none may run on alone.
            group, readers = None, [layout.data_readers(part) for part in range(layout.data_count)]
        return SynchronizedDataLoader(loader, ranks.device, group, uneven, equal_batches=readers)

    def _check_same_batches(self) -> None:
        args, layout = self._args, self._ranks.layout
        if args.dispatch_batches and args.dispatches_evaluation:
            return
        setting = "dispatch_eval_batches" if args.dispatch_batches else "dispatch_batches"
        raise ConfigurationError(
            setting,
            False,
            f"lets every rank read its own batches, but some ranks of the layout {layout} work on the same "
            "batch, which one rank has to read for them",
            f"leave {setting} at its default",
        )
