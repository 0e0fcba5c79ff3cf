"""Rules for the settings of streams and loaders."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from dataloader_dispatch.errors import DataError

_USUAL_STREAMS = 64
_DOCUMENTS_A_STREAM = 16


def below(count: int, limit: int, name: str) -> int:
    """``count`` if it is below ``limit``, else `DataError`."""
    if count >= limit:
        raise DataError(f"data position: {name}={count} is not among {limit}, so the state is damaged.")
    return count


def check_epoch(epoch: int) -> None:
    """Refuse what is not a number of an epoch, with `DataError`."""
    if not is_count(epoch):
        raise DataError(f"epoch={epoch!r} must be an integer of 0 or more, because epochs count from 0.")


def is_count(value: object) -> bool:
    """Whether this is a non-negative int."""
    return type(value) is int and value >= 0


@dataclass(frozen=True, kw_only=True)
class RowSpan:
    """Consecutive rows of one epoch.

    Row number i of an epoch is row ``i // shards`` of shard ``i % shards``. Where the number of
    ranks divides ``shards`` this is, up to the end of the first shard, the order in which rows are delivered,
    over all ranks: update number u of an epoch, from 0, with g rows in a global batch, has the rows u * g to
    (u + 1) * g - 1. Rows that are skipped already make no update.

    Attributes:
        epoch: Epoch number, from 0.
        start: First row.
        stop: Row after the last one. None: to the end of the epoch, of which no more is read.

    Raises:
        DataError: A number is negative or no integer, or the span is empty.
    """

    epoch: int
    start: int
    stop: int | None

    def __post_init__(self) -> None:
        stop = self.start + 1 if self.stop is None and is_count(self.start) else self.stop
        counts = all(is_count(value) for value in (self.epoch, self.start, stop))
        if not counts or stop is None or not self.start < stop:
            raise DataError(
                f"{self} is not a span of rows. All three must be integers, epoch and start count from 0, "
                "and stop is greater than start, or None for the end of the epoch."
            )

    def holds(self, epoch: int, number: int) -> bool:
        """Whether a row lies in the span."""
        return epoch == self.epoch and self.start <= number and (self.stop is None or number < self.stop)


def checked_spans(skip: Sequence[RowSpan]) -> tuple[RowSpan, ...]:
    """The spans of a setting.

    Raises:
        DataError: It is something other than a sequence of spans.
    """
    if not isinstance(skip, list | tuple) or not all(isinstance(span, RowSpan) for span in skip):
        raise DataError(
            f"skip={skip!r} must be a list of RowSpan, such as [RowSpan(epoch=0, start=8, stop=16)]."
        )
    return tuple(skip)


def check_settings(sequence_length: int, eos_token_id: int | None, pad_token_id: int, seed: int) -> None:
    """Refuse numbers that are out of range.

    Raises:
        DataError: Names the setting.
        TypeError: ``seed`` is not an integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} must be an int.")
    if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 2:
        raise DataError(
            f"sequence_length={sequence_length!r} must be an integer of at least 2, one token to predict "
            "the other from."
        )
    if eos_token_id is not None:
        _check_token("eos_token_id", eos_token_id)
    _check_token("pad_token_id", pad_token_id)


def check_source(source: object) -> None:
    """Refuse one text, which would count as a sequence of letters, and what has no numbered documents.

    Raises:
        DataError: The source is a string or bytes, or has no length or no numbers.
    """
    if isinstance(source, str | bytes):
        raise DataError(
            f"source={source!r:.60} is one text, and would be read letter by letter. Give a list of texts, "
            "or open_documents(path) for files."
        )
    if isinstance(source, Mapping) and len(source) and 0 not in source:
        raise DataError(
            f"source is a {type(source).__name__} with the keys {sorted(map(str, source))[:9]}, such as one "
            "of splits. Give one of them, as in source['train']."
        )
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise DataError(
            f"source is a {type(source).__name__}, without a length or without numbered documents. Give a "
            "list of documents, or anything else that has both."
        )


def check_encode(encode: object) -> None:
    """Refuse what is not a function.

    Raises:
        DataError: ``encode`` is neither callable nor None.
    """
    if encode is not None and not callable(encode):
        raise DataError(
            f"encode={encode!r:.60} is not a function. Pass one from text to token ids, such as "
            "tokenizer.encode, or None for documents that are token ids."
        )


def logical_streams(shards: int | None, documents: int, rank: int, world_size: int) -> int:
    """The number of logical shards to use.

    Args:
        shards: The setting; None for a number that suits the documents.
        documents: Documents in an epoch.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        DataError: A number is out of range, there is no document, or a rank would have no shard.
    """
    if documents == 0:
        raise DataError("source has no documents. Give at least one.")
    if not (is_count(rank) and is_count(world_size) and rank < world_size):
        raise DataError(
            f"rank={rank!r} must be an integer of at least 0 and below world_size={world_size!r}."
        )
    if documents < world_size:
        raise DataError(
            f"{documents} document(s) cannot be divided among {world_size} ranks. Give more documents, or "
            "let fewer ranks read (DataloaderDispatcher reads on one rank for all)."
        )
    if shards is None:
        shards = min(_USUAL_STREAMS, max(1, documents // _DOCUMENTS_A_STREAM))
    elif isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise DataError(f"shards={shards!r} must be an integer of at least 1.")
    if shards > documents:
        raise DataError(f"shards={shards} must be at most {documents}, because each shard needs a document.")
    check_takers(shards, world_size, 1)
    return shards


def check_takers(shards: int, world_size: int, workers: int) -> None:
    """Refuse more ranks and workers than shards.

    Raises:
        DataError: A rank or worker would have no shard.
    """
    takers = world_size * workers
    if shards < takers:
        who = f"{world_size} rank(s)" + (f" of {workers} workers each" if workers > 1 else "")
        raise DataError(
            f"shards={shards} cannot be divided among {who}. Set shards to a multiple of {takers}, and at "
            "most to the number of documents."
        )


def check_workers(num_workers: int, prefetch_factor: int | None) -> None:
    """Refuse settings of worker processes that make no sense.

    Raises:
        DataError: Names the setting.
    """
    if not is_count(num_workers):
        raise DataError(f"num_workers={num_workers!r} must be an integer of at least 0.")
    if prefetch_factor is None:
        return
    if not is_count(prefetch_factor) or prefetch_factor == 0:
        raise DataError(f"prefetch_factor={prefetch_factor!r} must be an integer of at least 1, or None.")
    if num_workers == 0:
        raise DataError(
            f"prefetch_factor={prefetch_factor} has no effect with num_workers=0. Leave it out or set "
            "num_workers."
        )


def _check_token(name: str, token: int) -> None:
    if not is_count(token) or token >= 2**63:
        raise DataError(f"{name}={token!r} must be an int64 integer that is not negative, as token ids are.")


def positive_batch_size(batch_size: int) -> int:
    """``batch_size`` if it is a positive integer, else `DataError`."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DataError(f"batch_size={batch_size!r} must be an integer of at least 1.")
    return batch_size


def check_divided_once(world_size: int) -> None:
    """Refuse to read a stream for a loader of `accelerator.prepare`, and so of `transformers.Trainer`.

    It gives the rows of rank 0 to all ranks, or to each a part of its own; the rest would be lost in silence.
    Nothing tells a dataset who reads it, but the reader is on the stack, also in a forked worker.

    Raises:
        DataError: The stream is a part of the data, and its reader divides it once more.
    """
    if world_size == 1 or "accelerate.data_loader" not in sys.modules:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            raise DataError(
                f"world_size={world_size} divides the documents among the ranks, and Accelerate, or "
                "transformers.Trainer, would divide this part once more. Leave rank and world_size out of "
                "the DocumentStream; or use a StreamLoader, in Trainer by set_train_loader(trainer, loader) "
                "and with Accelerate without prepare."
            )
        frame = frame.f_back
