"""Batches of the rows of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.stream.chunks import Delivery, chunks_of_workers, deliveries_here, deliveries_of
from dataloader_dispatch.stream.document_stream import DocumentStream
from dataloader_dispatch.stream.settings import check_takers, check_workers


class StreamLoader:
    """Batches of the rows of a `DocumentStream`, on the CPU.

    Iterating yields the batches that remain of the current epoch for this rank: the entries of a row, each
    int64 of shape [B, S] with B = ``batch_size``, fewer in the last batch of an epoch, and S =
    ``sequence_length``. There is no length: how many rows an epoch has is known when its documents have been
    read.

    The rows come in the same order whatever ``num_workers`` is. The state counts what the caller received,
    not what workers prepared: saved after batch k, it resumes at batch k + 1. It holds neither batch size nor
    number of workers, so others may continue it.

    Args:
        dataset: The rows. Its position is the loader's position.
        batch_size: Rows in a batch, at least 1.
        num_workers: Worker processes, which divide the shards of this rank; 0 to read in this process.
        prefetch_factor: Chunks of rows (16, or one of each shard if these are more) that each worker prepares
            ahead; only with workers.
        pin_memory: Put batches into page-locked memory, for accelerators.

    Raises:
        DataError: A number is out of range, or there are more workers than shards.
    """

    def __init__(
        self,
        dataset: DocumentStream,
        batch_size: int,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = positive_batch_size(batch_size)
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        if not isinstance(dataset, DocumentStream):
            raise TypeError(
                f"StreamLoader: dataset is a {type(dataset).__name__}, it must be a DocumentStream; "
                "build_loader loads other datasets"
            )
        check_workers(num_workers, prefetch_factor)
        if num_workers:
            check_takers(dataset.shards, dataset.world_size, num_workers)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches that remain of the current epoch.

        Raises:
            DataError: A document cannot be read or encoded. The position stays behind the last batch
                delivered.
            RuntimeError: A newer iterator was made, or a worker process died.
        """
        return self._deliver(self.dataset.position.begin())

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self.dataset.epoch

    @property
    def epoch_progress(self) -> float:
        """Share of this rank's documents of the epoch that were delivered whole, from 0 to 1."""
        return self.dataset.epoch_progress

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or do nothing when the position is in that epoch already."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """The position behind the last batch delivered, as numbers and strings; see `DocumentStream`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position that this rank saved, or a single rank for all.

        Raises:
            DataError: The state was saved with other data or settings, by another rank, or is damaged.
        """
        self.dataset.load_state_dict(state)

    def load_resharded(
        self, states: Sequence[Mapping[str, object]], /, *, rank: int, world_size: int
    ) -> None:
        """Go to the position that another number of ranks saved together; see `DocumentStream`."""
        self.dataset.load_resharded(states, rank=rank, world_size=world_size)

    def _deliver(self, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
        position = self.dataset.position
        rows = self._deliveries()
        taken = list(islice(rows, self.batch_size))
        if not taken:
            self.dataset.say_empty(position)
        over = False
        while taken:
            following = list(islice(rows, 1))
            batch = self._batch(taken)  # before the position moves: what fails here comes again
            places = [(row.shard, row.behind) for row in taken]
            over = position.advance(iteration, places, ended=not following)
            yield batch
            taken = following + list(islice(rows, self.batch_size - 1)) if following else []
        if not over:
            position.finish(iteration)

    def _deliveries(self) -> Iterator[Delivery]:
        if self.num_workers == 0:
            return deliveries_here(self.dataset, self.dataset.position)
        chunks = chunks_of_workers(self.dataset, self.num_workers, self.prefetch_factor)
        return deliveries_of(chunks)

    def _batch(self, rows: Sequence[Delivery]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([row.example[name] for row in rows]) for name in rows[0].example}
        return {name: values.pin_memory() for name, values in batch.items()} if self.pin_memory else batch


def positive_batch_size(batch_size: int) -> int:
    """``batch_size`` if it is a positive integer, else `DataError`."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DataError(f"batch_size={batch_size!r} is out of range; it must be an integer of at least 1")
    return batch_size
