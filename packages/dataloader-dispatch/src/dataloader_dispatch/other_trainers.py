"""Our loaders in the trainers of others: Lightning, Fabric, and transformers' `Trainer`.

Each of these would divide the data of an ordinary loader among the ranks itself, some read ahead, and some
resume by reading what was read before. Loaders of this package know their rank and their position. What is
here hands them over so that nothing is divided twice, read twice or left out.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from dataloader_dispatch.batches import Uneven
from dataloader_dispatch.document_stream import DocumentStream
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.synchronized.loader import SynchronizedDataLoader
from dataloader_dispatch.torchdata_loaders import begin_pass, load_loader_state, loader_state
from dist_env import StaticDistributedEnvironment, gather_objects


class ResumableLoader(Protocol):
    """A loader with a position, such as a `StreamLoader`."""

    def __iter__(self) -> Iterator[Any]:
        """The batches that remain of the epoch."""

    def state_dict(self) -> dict[str, object]:
        """The position behind the last batch delivered."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go to a position."""


class _CountsEpochs(Protocol):
    epoch: int


def _counts_epochs(loader: object) -> TypeGuard[_CountsEpochs]:
    return hasattr(loader, "epoch")


class _Batches(IterableDataset[Any]):
    """What tells other trainers that there is nothing to sample; only its loader has the batches."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        raise DataError(
            f"the {self._owner} was taken apart, as accelerator.prepare does to divide the data among ranks, "
            "which this data is already. Leave it out of prepare, and iterate it as it is."
        )


class FabricLoader(DataLoader[Any]):
    """A loader of this package for ``fabric.setup_dataloaders``, as a torch ``DataLoader``.

    Each rank keeps its own part of the data: no sampler is added. With several ranks the epoch ends on all of
    them together, see `SynchronizedDataLoader`. Its ``state_dict()`` has the positions of all ranks, so
    Fabric's own checkpoints, which rank 0 writes, resume every rank, on any number of ranks where the loader
    has ``load_resharded``. With several ranks it is collective.

    Args:
        loader: A `StreamLoader`, or a `SynchronizedDataLoader` around one; with a single rank any loader with
            ``state_dict`` and ``load_state_dict``.
        uneven: With several ranks, what to do when some run out before others.

    Raises:
        TypeError: The loader has no position.
        DataError: At the first use: the loader is for another rank or another number of ranks.
    """

    def __init__(self, loader: ResumableLoader, *, uneven: Uneven = "stop") -> None:
        name = type(self).__name__
        _check_position(name, loader)
        super().__init__(_Batches(name), batch_size=getattr(loader, "batch_size", None) or 1)
        self._given = loader
        self._uneven: Uneven = uneven
        self._source: ResumableLoader | None = None
        self._places: deque[dict[str, object]] = deque()
        self._fetcher: Any = None
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # of torch's private iterator class
        """The batches that remain of the epoch for this rank, on the CPU."""
        source = self._of_this_rank()
        self._places.clear()
        self._places.append(loader_state(source))
        self._is_over, self._fetcher = False, _reader_in_lightning()
        for batch in begin_pass(source):
            self._places.append(loader_state(source))
            while len(self._places) > 2 + self._read_ahead:
                self._places.popleft()
            yield batch
        self._is_over = True

    @property
    def epoch(self) -> int:
        """Epoch of the next batch to be read, if the loader has ``epoch``."""
        source = self._of_this_rank()
        if not _counts_epochs(source):
            raise AttributeError(
                f"The {type(source).__name__} has no attribute epoch for {type(self).__name__} to read. "
                "Use a StreamLoader, which has it, or count the passes where you iterate."
            )
        return source.epoch

    def state_dict(self) -> dict[str, object]:
        """The positions of all ranks behind the batch in use; collective with several ranks."""
        source = self._of_this_rank()
        at_end = not self._places or (self._is_over and not self._read_ahead)
        own = loader_state(source) if at_end else self._places[-1 - self._read_ahead]
        env = StaticDistributedEnvironment(rank=_rank(), world_size=_world_size())
        return {"positions": gather_objects(own, env)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of this rank, or to its part where another number of ranks saved.

        Raises:
            DataError: The state was saved with other data or settings.
        """
        source, positions = self._of_this_rank(), state["positions"]
        self._places.clear()
        _restore(source, positions, _rank(), _world_size())

    def close(self) -> None:
        """Close the connections between the ranks; the loader cannot be iterated again."""
        if isinstance(self._source, SynchronizedDataLoader):
            self._source.close()

    @property
    def _read_ahead(self) -> int:
        """Batches that Lightning has read, but not used."""
        return len(getattr(self._fetcher, "batches", ()))

    def _of_this_rank(self) -> ResumableLoader:
        # Not at the beginning: these trainers open the process group after the loader was made.
        if self._source is None:
            check_rank(type(self).__name__, self._given, _rank(), _world_size())
            source = self._given
            if _world_size() > 1 and not isinstance(source, SynchronizedDataLoader):
                source = SynchronizedDataLoader(source, torch.device("cpu"), uneven=self._uneven)
            self._source = source
        return self._source


class LightningLoader(FabricLoader):
    """A loader of this package for Lightning's ``Trainer``: ``trainer.fit(module, LightningLoader(loader))``.

    As `FabricLoader`. Lightning saves its position with the loops, in each checkpoint. It reads one batch
    ahead of a loader without a length, to see whether it was the last; the position is that behind the batch
    in training.
    """


def set_train_loader(trainer: Any, loader: ResumableLoader) -> None:
    """Let a `transformers.Trainer` train on a loader of this package, and resume where it stopped.

    The trainer counts steps, so ``max_steps`` must be set, and passes follow one another without end; each
    rank begins its next pass by itself. Each rank writes its position to ``data.rank<k>.json`` in each
    checkpoint, and ``train(resume_from_checkpoint=...)`` continues from there without reading what was read
    before: this sets ``args.ignore_data_skip``.

    Args:
        trainer: The trainer, made without ``train_dataset``.
        loader: A `StreamLoader` of this rank with ``per_device_train_batch_size`` rows a batch; with a single
            rank any loader with ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: The loader has no position.
        DataError: ``max_steps`` is not set, the batch sizes differ, or the loader is for another rank or
            another number of ranks.
    """
    from transformers import TrainerCallback

    args = trainer.args
    _check_position("set_train_loader", loader)
    if args.max_steps <= 0:
        raise DataError(
            f"max_steps={args.max_steps} must be 1 or more, because passes follow one another without "
            "end. Set TrainingArguments(max_steps=...)."
        )
    rows = getattr(loader, "batch_size", args.per_device_train_batch_size)
    if rows != args.per_device_train_batch_size:
        raise DataError(
            f"batch_size={rows} of the loader differs from per_device_train_batch_size="
            f"{args.per_device_train_batch_size}, which the trainer reports. Set them to one value."
        )
    check_rank("set_train_loader", loader, args.process_index, args.world_size)
    begin, resume_from = trainer.train, None

    def train(resume_from_checkpoint: Any = None, *rest: Any, **more: Any) -> Any:
        nonlocal resume_from
        resume_from = resume_from_checkpoint or getattr(args, "resume_from_checkpoint", None)
        return begin(resume_from_checkpoint, *rest, **more)

    def checkpoint(step: int) -> Path:
        return Path(args.output_dir, f"checkpoint-{step}")

    class Position(TrainerCallback):
        """Saves and restores the position in the data."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Go to the position of the checkpoint that the trainer has loaded."""
            if state.global_step > 0:
                given = resume_from if isinstance(resume_from, str | Path) else checkpoint(state.global_step)
                positions = _read_positions(Path(given), args.process_index, args.world_size)
                _restore(loader, positions, args.process_index, args.world_size)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Write the position to the checkpoint: the trainer reads the batches of one step and no more."""
            saved = {"world_size": args.world_size, "position": loader_state(loader)}
            path = _position_file(checkpoint(state.global_step), args.process_index)
            path.write_text(json.dumps(saved))

    args.ignore_data_skip = True
    trainer.train = train
    trainer.get_train_dataloader = lambda: _Endless(loader)
    trainer.add_callback(Position())


def _reader_in_lightning() -> object:
    """The fetcher of Lightning's loop that is about to read, whose `batches` are not used yet; else None.

    It reads ahead, or does not, as `limit_train_batches` and the lengths of other loaders have it, and keeps
    this to itself: `loops.fetchers` is private to Lightning, here of 2.6.

    Raises:
        RuntimeError: A loop of Lightning reads, but by other means.
    """
    frame: FrameType | None = sys._getframe()
    loops = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.endswith(".loops.fetchers") and "self" in frame.f_locals:
            return frame.f_locals["self"]
        loops = loops or module.startswith(("lightning.pytorch.loops.", "pytorch_lightning.loops."))
        frame = frame.f_back
    if loops:
        raise RuntimeError(
            "this version of Lightning reads its loaders in a way that LightningLoader does not know, so it "
            "cannot tell which batch is in use. Use Lightning 2.6."
        )
    return None


class _Endless:
    """Pass after pass over a loader, of which nothing can be skipped or set back."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from begin_pass(self._loader)


def _check_position(user: str, loader: object) -> None:
    if not callable(getattr(loader, "state_dict", None)):
        raise TypeError(
            f"loader is a {type(loader).__name__}, which has no state_dict(), but {user} keeps its position. "
            "Use a StreamLoader, or build_loader for other datasets."
        )


def check_rank(user: str, loader: object, rank: int, world_size: int) -> None:
    """Refuse a loader that is not for this rank of this job.

    Raises:
        DataError: It is for another one, or several ranks would read the same samples.
    """
    inner = loader.loader if isinstance(loader, SynchronizedDataLoader) else loader
    stream = getattr(inner, "dataset", None)
    if isinstance(stream, DocumentStream):
        if (stream.rank, stream.world_size) != (rank, world_size):
            raise DataError(
                f"rank={stream.rank} and world_size={stream.world_size} of the DocumentStream must be those "
                f"of this process, {rank} and {world_size}, for each document to come once. Set "
                f"DocumentStream(..., rank={rank}, world_size={world_size}) on this rank."
            )
    elif world_size > 1:
        raise DataError(
            f"{user} got a {type(inner).__name__}, of which each of the {world_size} ranks would read the "
            "same samples. Use a StreamLoader, or let the trainer divide a torch DataLoader."
        )


def _restore(
    loader: ResumableLoader, positions: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> None:
    if len(positions) == world_size:
        load_loader_state(loader, positions[rank])
        return
    reshard = getattr(loader, "load_resharded", None)
    if reshard is None:
        raise DataError(
            f"the position was saved by {len(positions)} ranks, and a {type(loader).__name__} cannot divide "
            f"it among {world_size}. Resume with {len(positions)} ranks."
        )
    reshard(positions, rank=rank, world_size=world_size)


def _position_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"data.rank{rank}.json"


def _read_positions(checkpoint: Path, rank: int, world_size: int) -> list[Mapping[str, Any]]:
    """The positions in a checkpoint by rank; only this rank's own is read where their number fits."""
    first = _position_file(checkpoint, rank)
    if not first.is_file():
        first = _position_file(checkpoint, 0)
    if not first.is_file():
        raise DataError(
            f"{first} is not there: the checkpoint was saved without set_train_loader, so the position in "
            "the data is not known. Begin anew, or resume the trainer that saved it."
        )
    saved = json.loads(first.read_text())["world_size"]
    if saved == world_size:
        own = json.loads(_position_file(checkpoint, rank).read_text())["position"]
        return [own] * world_size
    files = [_position_file(checkpoint, other) for other in range(saved)]
    return [json.loads(file.read_text())["position"] for file in files]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
