"""Loaders of the data that a trainer is given, and their batches in the windows of optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from checkpoint_core import RNGState, Stateful
from dataloader_dispatch import (
    DataloaderDispatcher,
    DocumentStream,
    ResumableDataLoader,
    StreamLoader,
    SynchronizedDataLoader,
    begin_pass,
    build_loader,
    load_loader_state,
    loader_state,
)
from dist_env import tie_loader_workers

from ..arguments import MinimalTrainingArguments, TrainingArguments
from ..distributed.ranks import BatchPlacement, Ranks
from ..errors import ConfigurationError, DataError
from ..loss import IGNORE_INDEX, OnTargets, TokenLoss, ignored_like

Batch = Mapping[str, object]
"""`labels`, for a language model int64 [batch, sequence], and the model's keyword arguments, usually
`input_ids`."""


class IndexedDataset(Protocol):
    """A map-style dataset: it has a length and is indexed by integers, as a list of examples is."""

    def __len__(self) -> int:
        """Number of examples."""

    def __getitem__(self, index: int, /) -> object:
        """One example, of which the data collator makes batches."""


class BatchLoader(Protocol):
    """A ready-made loader, such as torch's `DataLoader`: it yields batches and tells their size.

    One with `state_dict` and `load_state_dict` continues where a checkpoint left it. One with `set_epoch` is
    told each epoch.
    """

    @property
    def batch_size(self) -> int | None:
        """Examples in a batch; None where it does not say."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch."""


TrainData = Dataset[object] | IndexedDataset | BatchLoader | DocumentStream
"""What a trainer trains on: a map-style or iterable dataset, a loader of batches, a stream of documents."""
EvalData = TrainData | Mapping[str, TrainData]
"""Likewise for evaluation; or several sets by name."""


class PaddingCollator:
    """Makes a batch of rows of unequal length: each sequence is padded on the right to the longest one.

    A row maps names to sequences of numbers, or to single numbers, which are stacked. `input_ids` are padded
    by `pad_token_id`, `labels` by -100, all else by 0, and numbers that are
    labels by what no loss counts. The batch has an `attention_mask`, also if the rows have
    none.

    Rows without `labels` are to be continued: their labels are the tokens, not shifted, without those that an
    `attention_mask` of the row hides, as padding of its own. With a `completion_mask` only those where it is
    1, so that a prompt counts nothing in the loss; the mask is not given to the model.

    Args:
        pad_token_id: Stands in `input_ids` where a row has ended; the model does not see it.
    """

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[object]) -> dict[str, Tensor]:
        """Make the batch.

        Args:
            rows: Mappings with the same keys; values are lists, tensors or numbers.

        Returns:
            Tensors [rows, longest], and [rows] of single numbers.

        Raises:
            DataError: If rows are no mappings, differ in their keys, or have sequences that do not belong
                together.
        """
        given = [self._complete(row) for row in rows]
        if len({frozenset(row) for row in given}) > 1:
            kinds = sorted({str(sorted(row)) for row in given})
            raise DataError(
                f"the rows of a batch have different keys: {', '.join(kinds)}. Give all rows the same keys."
            )
        return {name: self._padded(name, [row[name] for row in given]) for name in given[0]}

    def _complete(self, row: object) -> dict[str, Tensor]:
        if not isinstance(row, Mapping):
            raise DataError(
                f"a row is of type {type(row).__name__}, but must map names to sequences. Write "
                "{'input_ids': [...]}, for example."
            )
        made = {name: torch.as_tensor(value) for name, value in row.items()}
        ids, counts = made.get("input_ids"), made.pop("completion_mask", None)
        if ids is None:
            return made
        made.setdefault("attention_mask", torch.ones_like(ids))
        for name, mask in (("attention_mask", made["attention_mask"]), ("completion_mask", counts)):
            if mask is not None and mask.shape != ids.shape:
                raise DataError(
                    f"a row has input_ids of shape {list(ids.shape)} and {name} of shape {list(mask.shape)}. "
                    "Give the mask one number for each token."
                )
        if "labels" not in made:
            made["labels"] = ids.where(made["attention_mask"].bool(), IGNORE_INDEX)
        if counts is not None:
            made["labels"] = made["labels"].where(counts.bool(), IGNORE_INDEX)
        return made

    def _padded(self, name: str, values: list[Tensor]) -> Tensor:
        if any(value.ndim == 0 for value in values):
            return torch.stack(values)
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX}.get(name, 0)
        batch = pad_sequence(values, batch_first=True, padding_value=fill)
        if name != "labels" or not batch.is_floating_point():
            return batch
        given = pad_sequence([torch.ones_like(value, dtype=torch.bool) for value in values], batch_first=True)
        return batch.where(given, ignored_like(batch))


class Window(NamedTuple):
    """The microbatches of one optimizer step on this rank, with their token counts.

    Counts that depend on the data are int64 scalars where the data is, so that nothing waits for the device.
    """

    batches: list[Batch]
    """As `with_targets` has them."""
    positions: list[Tensor]
    """What the model works on, position by position: of each microbatch `input_ids`, or else the labels."""
    target_tokens: Tensor
    """Positions that count in the loss."""
    input_tokens: list[Tensor | int]
    """Positions that are not padding, for each microbatch."""


def next_window(
    batches: Iterator[Batch], size: int, loss: TokenLoss, loader: Iterable[Batch] | None = None
) -> Window | None:
    """Take up to `size` microbatches; the last window of an epoch may be shorter.

    Args:
        batches: A pass over the loader.
        size: Microbatches of a step.
        loss: Counts targets.
        loader: Its `last_is_dummy`, if it has that, tells which batches are padding, also to the last token.

    Returns:
        The window, or None when the epoch has no more data.

    Raises:
        DataError: If a batch is not a mapping with a `labels` tensor.
    """
    taken: list[Batch] = []
    is_dummy: list[bool] = []
    for batch in islice(batches, size):
        taken.append(batch)
        is_dummy.append(bool(getattr(loader, "last_is_dummy", False)))
    if not taken:
        return None
    labels = [labels_of(batch) for batch in taken]
    counts = [loss.count(part) for part in labels]
    positions = [_positions(batch, part) for batch, part in zip(taken, labels, strict=True)]
    return Window(
        batches=[with_targets(batch, loss) for batch in taken],
        positions=positions,
        target_tokens=counts[0] if len(counts) == 1 else torch.stack(counts).sum(),
        input_tokens=[
            0 if dummy else _input_tokens(batch, part)
            for batch, part, dummy in zip(taken, positions, is_dummy, strict=True)
        ],
    )


def with_targets(batch: Batch, loss: TokenLoss) -> Batch:
    """A batch for the executor: with targets in the place of labels, if the loss is one of targets.

    Raises:
        ConfigurationError: If targets cannot be made from these labels.
        DataError: If the batch is not a mapping with a `labels` tensor.
    """
    if not isinstance(loss, OnTargets):
        return batch
    labels = labels_of(batch)
    targets = loss.loss.make_targets(labels)
    if targets.shape != labels.shape:
        raise ConfigurationError(
            "compute_loss_func",
            type(loss.loss).__name__,
            f"made targets of shape {list(targets.shape)} from labels of shape {list(labels.shape)}, but "
            "targets must have the shape of the labels, because they are cut like them",
            "return targets in the shape of the labels from make_targets",
        )
    if labels.is_pinned() and not targets.is_pinned():
        # The loader pinned the labels; from pageable memory every copy to the device might wait for it.
        targets = targets.pin_memory()
    return {**batch, "labels": targets}


def row_length(positions: Tensor) -> int:
    """Length of the rows; 1 where each has a single position, as the examples of a classifier."""
    return positions.shape[-1] if positions.ndim > 1 else 1


def labels_of(batch: Batch) -> Tensor:
    """The labels of a batch.

    Raises:
        DataError: If the batch is not a mapping, or has no tensor named `labels`.
    """
    # A dict is asked for first: the check for any other mapping takes longer.
    if not isinstance(batch, dict) and not isinstance(batch, Mapping):
        raise DataError(
            f"a batch is of type {type(batch).__name__}, but must map names to tensors. Give a "
            "data_collator that returns a dict with 'labels'."
        )
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise DataError(
            f"a batch has the keys {sorted(batch)} but no tensor 'labels'. Add it in the dataset or the "
            "data_collator."
        )
    return labels


def to_device(batch: Batch, device: torch.device) -> dict[str, object]:
    """Copy the tensors of a batch to a device without waiting; other values pass through."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _positions(batch: Batch, labels: Tensor) -> Tensor:
    ids = batch.get("input_ids")
    return ids if isinstance(ids, Tensor) else labels


def _input_tokens(batch: Batch, positions: Tensor) -> Tensor | int:
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        return mask.sum(dtype=torch.int64)
    return positions.numel()


EvalMetric = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""`(predictions, labels) -> (sum, count)`, both scalars; the metric is sum over count, over all batches.
Sums are kept and predictions dropped, so memory does not grow with the evaluation set."""


def prefix_of(name: str) -> str:
    """What the metrics of an evaluation set begin with; the only set of a run has the name ''."""
    return f"eval_{name}_" if name else "eval_"


def names_of_sets(data: EvalData | None) -> list[str]:
    """The names of evaluation sets given in a mapping; one empty name for a set that is given alone.

    Raises:
        ConfigurationError: If the mapping is empty, or a name is not a text that metrics can begin with.
    """
    if not isinstance(data, Mapping):
        return [""]
    for name in data:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                "eval_dataset",
                name,
                "is not a name for an evaluation set, which must be a string",
                "call it 'held_out', for example",
            )
    if not data:
        raise ConfigurationError(
            "eval_dataset", data, "contains no evaluation set", "give one, or set eval_dataset=None"
        )
    return list(data)


def result_names(data: EvalData | None, metrics: Iterable[str]) -> list[str]:
    """The keys of an evaluation's result.

    Raises:
        ConfigurationError: If two sets would give the same one.
    """
    kinds = ("loss", "tokens", "seconds", *metrics)
    keys = [f"{prefix_of(name)}{kind}" for name in names_of_sets(data) for kind in kinds]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            "eval_dataset",
            sorted(names_of_sets(data)),
            f"gives the result {twice} twice",
            "rename a set or a metric",
        )
    return keys


class EvaluationData:
    """Gives the evaluation set from its beginning, as often as asked.

    Args:
        make: Gives the loader at the beginning of the set, the same one each time or a new one.
    """

    def __init__(self, make: Callable[[], Iterable[Batch]]) -> None:
        self._make = make
        self.last: Iterable[Batch] | None = None
        """The loader that was given last."""

    def fresh(self) -> Iterable[Batch]:
        """A loader at the beginning of the set."""
        self.last = self._make()
        return self.last


EvaluationSets = Mapping[str, EvaluationData]
"""The evaluation sets of a run by name; a set that is given alone has the name ''."""


def loaders_of(sets: EvaluationSets | None) -> Iterable[Batch] | Mapping[str, Iterable[Batch]] | None:
    """What callbacks are given: the loader of the evaluation data, or those of several sets by name."""
    loaders = {name: data.fresh() for name, data in (sets or {}).items()}
    return loaders.get("", loaders or None)


Collator = Callable[[list[Any]], Batch]


def train_loader(
    data: TrainData,
    args: TrainingArguments,
    ranks: Ranks,
    placement: BatchPlacement,
    collator: Collator | None,
) -> Iterable[Batch]:
    """This rank's batches of the training data."""
    if isinstance(data, DocumentStream):
        data = _stream_loader(data, args.per_device_train_batch_size, args, ranks)
    if is_loader(data):
        return placement.train_loader(tie_loader_workers(data))

    def build() -> Iterable[Batch]:
        loader: Iterable[Batch] = build_loader(
            _dataset(data),
            args.per_device_train_batch_size,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            drop_last=args.dataloader_drop_last,
            pin_memory=_pin(args, ranks),
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            shuffle=args.dataloader_shuffle and not isinstance(data, IterableDataset),
            seed=max(0, args.seed),
        )
        return loader

    return placement.train_loader(_on_all_ranks(build, ranks, placement, "train_dataset"))


def evaluation_sets(
    data: EvalData,
    args: TrainingArguments,
    ranks: Ranks,
    placement: BatchPlacement,
    collator: Collator | None,
) -> EvaluationSets:
    """This rank's batches of each evaluation set."""
    names = names_of_sets(data)
    given = data if isinstance(data, Mapping) else {"": data}
    return {name: evaluation_data(given[name], args, ranks, placement, collator) for name in names}


def evaluation_data(
    data: TrainData,
    args: TrainingArguments,
    ranks: Ranks,
    placement: BatchPlacement,
    collator: Collator | None,
) -> EvaluationData:
    """This rank's batches of the evaluation data, in order."""
    packed = data.dataset if isinstance(data, StreamLoader) else data
    if isinstance(packed, DocumentStream):
        size = data.batch_size if isinstance(data, StreamLoader) else args.per_device_eval_batch_size
        data = _stream_loader(packed.reader(), size, args, ranks)

    def build() -> Iterable[Batch]:
        loader: Iterable[Batch] = build_loader(
            _dataset(data),
            args.per_device_eval_batch_size,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=_pin(args, ranks),
        )
        return loader

    if isinstance(data, IterableDataset):
        # Asking such a loader for its state would start its workers.
        return EvaluationData(lambda: placement.evaluation_loader(build()))
    given: Iterable[Batch]
    if is_loader(data):
        given = tie_loader_workers(data)
    else:
        given = _on_all_ranks(build, ranks, placement, "eval_dataset")
    return EvaluationData(_rewinding(placement.evaluation_loader(given)))


def _rewinding(loader: Iterable[Batch]) -> Callable[[], Iterable[Batch]]:
    """Gives the loader each time, at the place where it is now, if it keeps one."""
    batches = loader
    if not keeps_position(loader):
        return lambda: batches
    keeper: Stateful = loader
    beginning = copy.deepcopy(keeper.state_dict())
    if beginning is None:
        return lambda: batches

    def rewound() -> Iterable[Batch]:
        keeper.load_state_dict(copy.deepcopy(beginning))
        return batches

    return rewound


def _on_all_ranks(
    build: Callable[[], Iterable[Batch]], ranks: Ranks, placement: BatchPlacement, setting: str
) -> Iterable[Batch]:
    """What `build` gives, once it has given something on every rank; collective.

    A rank that raised alone, as for a shard without an example, would leave the others waiting for it.
    """
    with ranks.failing_together(f"load its {setting} ({placement.settings()})"):
        return build()


def _dataset(data: TrainData) -> Dataset[object] | IndexedDataset:
    """The data, if a loader can be made of them."""
    if isinstance(data, Dataset) or _is_indexed(data):
        return data
    raise TypeError(
        f"a dataset is a {type(data).__name__} without length and index. Give a map-style dataset, or derive "
        "it from torch.utils.data.IterableDataset."
    )


def _is_indexed(data: object) -> TypeGuard[IndexedDataset]:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def is_loader(data: object) -> TypeGuard[BatchLoader]:
    """Whether this yields batches already: it is iterable and tells its `batch_size`."""
    return hasattr(data, "__iter__") and hasattr(data, "batch_size")


def keeps_position(loader: object) -> TypeGuard[Stateful]:
    """Whether a loader has a state that can be saved."""
    if isinstance(loader, SynchronizedDataLoader):
        return keeps_position(loader.loader)
    if isinstance(loader, DataloaderDispatcher):
        return loader.has_state
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def is_torchdata(loader: object) -> TypeGuard[Any]:
    """Whether this is a `StatefulDataLoader` as it is, whose state is that of its iterator."""
    # By the attribute that holds a loaded state (torchdata 0.11), as this package does not import torchdata.
    is_stateful = isinstance(loader, DataLoader) and hasattr(loader, "next_iter_state")
    return is_stateful and not isinstance(loader, ResumableDataLoader)


def leave_epoch(loader: object) -> None:
    """Let a torchdata loader, which counts no epochs, begin anew where one was left before its end.

    A checkpoint would hold the place at which it was left, and a resume take the rest for the next epoch. The
    next pass is begun here, because that decides its order, and is taken up again by its state.
    """
    inner = loader
    if isinstance(loader, SynchronizedDataLoader | DataloaderDispatcher):
        inner = loader.loader
        if is_torchdata(inner):
            loader.load_state_dict({})  # nothing is left of what was read ahead
    if not is_torchdata(inner):
        return
    generators = RNGState()
    before = generators.state_dict()
    begin_pass(inner)
    load_loader_state(inner, loader_state(inner))
    generators.load_state_dict(before)


def epoch_of(loader: object) -> int | None:
    """The epoch that a loader says it stands in, if it keeps count."""
    epoch = getattr(loader, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def epoch_progress_of(loader: object) -> float:
    """The share of its epoch that a loader says is done; 0 if it does not say."""
    return float(getattr(loader, "epoch_progress", 0.0))


def _stream_loader(
    stream: DocumentStream, batch_size: int, args: TrainingArguments, ranks: Ranks
) -> StreamLoader:
    return StreamLoader(
        stream,
        batch_size,
        num_workers=args.dataloader_num_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        pin_memory=_pin(args, ranks),
    )


def _pin(args: TrainingArguments, ranks: Ranks) -> bool:
    return args.dataloader_pin_memory and ranks.device.type != "cpu"


# What the loader of a DocumentStream takes from the settings.
_OF_STREAMS = ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory")


def check_data(
    args: MinimalTrainingArguments,
    train_data: TrainData | None,
    eval_data: EvalData | None,
    collator: Collator | None,
) -> None:
    """Refuse settings that contradict the data, or that no loader would see.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if args.eval_strategy != "no" and eval_data is None:
        raise ConfigurationError(
            "eval_strategy",
            args.eval_strategy,
            "needs an eval_dataset",
            "give one, or set eval_strategy='no'",
        )
    size = getattr(train_data, "batch_size", None) if is_loader(train_data) else None
    if size is not None and size != args.per_device_train_batch_size:
        raise ConfigurationError(
            "per_device_train_batch_size",
            args.per_device_train_batch_size,
            f"differs from the batch size of the given loader, {size}",
            "set both to the same number",
        )
    sets = eval_data.values() if isinstance(eval_data, Mapping) else [eval_data]
    given = [data for data in (train_data, *sets) if data is not None]
    if given and all(is_loader(data) or isinstance(data, DocumentStream) for data in given):
        streamed = any(isinstance(data, DocumentStream) for data in given)
        _refuse_loader_settings(args, collator, _OF_STREAMS if streamed else ())


def _refuse_loader_settings(
    args: MinimalTrainingArguments, collator: Collator | None, used: Collection[str]
) -> None:
    rule, fix = (
        "has no effect on data that comes from a ready-made loader or stream",
        "leave it out, or give a plain dataset",
    )
    if collator is not None:
        raise ConfigurationError("data_collator", collator, rule, fix)
    for field in fields(MinimalTrainingArguments):
        value = getattr(args, field.name)
        if field.name.startswith("dataloader_") and field.name not in used and value != field.default:
            raise ConfigurationError(field.name, value, rule, fix)
