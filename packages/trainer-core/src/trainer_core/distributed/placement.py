"""Which rank gets which batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from dataloader_dispatch import DataloaderDispatcher, SynchronizedDataLoader

from ..arguments import DataParallelArguments, TrainingArguments
from ..batch import Batch
from ..errors import ConfigurationError
from .ranks import Ranks

DATA_DIMENSIONS = ("replicate", "shard")
"""The dimensions of the mesh along which ranks work on different data."""


class BatchPlacement:
    """Gives each rank the batches of its place in the data dimensions of the layout.

    Ranks that differ in another dimension only, such as the stages of a pipeline, get the same batches.

    Args:
        args: dispatch_batches, dispatch_eval_batches and uneven_batches, where there are several ranks.
        ranks: The ranks.

    Raises:
        ConfigurationError: If ranks are to read data of their own, and several of them need the same.
    """

    def __init__(self, args: TrainingArguments, ranks: Ranks) -> None:
        self._ranks = ranks
        self._args = args if isinstance(args, DataParallelArguments) else DataParallelArguments()
        if ranks.env.world_size > ranks.data_parallel_size:
            self._check_same_batches()

    def train_loader(self, loader: object) -> object:
        """Batches that rank 0 reads for all, or batches of this rank's own loader that all ranks end with."""
        return self._shared(loader, self._args.dispatch_batches, self._args.uneven_batches)

    def evaluation_loader(self, loader: object) -> object:
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

    def _shared(self, loader: object, dispatched: bool, uneven: str) -> object:
        ranks = self._ranks
        if not ranks.several or ranks.meshes is None:
            return loader
        batches = cast("Iterable[Batch]", loader)
        if dispatched:
            return DataloaderDispatcher(
                batches,
                ranks.meshes.mesh,
                ranks.device,
                DATA_DIMENSIONS,
                uneven=uneven,  # type: ignore[arg-type]
            )
        return SynchronizedDataLoader(batches, ranks.device, ranks.data_group, uneven)  # type: ignore[arg-type]

    def _check_same_batches(self) -> None:
        args, layout = self._args, self._ranks.layout
        if args.dispatch_batches and args.dispatches_evaluation:
            return
        setting = "dispatch_eval_batches" if args.dispatch_batches else "dispatch_batches"
        raise ConfigurationError(
            setting,
            False,
            f"some ranks of the layout {layout} work on the same batch, which one rank has to read for them",
            f"leave {setting} at its default",
        )
