"""Loaders of ordinary datasets: order, epochs and resuming, with and without worker processes."""

import copy
import json
import logging
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import (
    DataError,
    DocumentStream,
    ResumableDataLoader,
    ShuffledIndex,
    build_loader,
    end_workers,
    set_loader_epoch,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Squares(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream(IterableDataset[int]):
    """Numbers from 0, with a position of its own."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Noise(IterableDataset[float]):
    """Random numbers of the process that reads."""

    def __iter__(self) -> Iterator[float]:
        yield from torch.rand(2, dtype=torch.float64).tolist()


def shuffled(workers: int = 0, drop_last: bool = False) -> ResumableDataLoader:
    return build_loader(Squares(23), 4, shuffle=True, seed=6, num_workers=workers, drop_last=drop_last)


def batches_of(loader: ResumableDataLoader, limit: int | None = None) -> list[list[int]]:
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == limit:
            break
    return batches


def test_shuffled_epochs_follow_the_computed_order() -> None:
    loader = shuffled()
    assert isinstance(loader, StatefulDataLoader)
    assert loader.batch_size == 4
    assert len(loader) == 6
    for epoch in range(3):
        flat = [item for batch in batches_of(loader) for item in batch]
        assert flat == [index * index for index in ShuffledIndex(23, 6, epoch)]


def test_unshuffled_order_lists_and_collation() -> None:
    loader = build_loader(["a", "b", "c"], 2, collate_fn="".join)
    assert list(loader) == ["ab", "c"]
    assert list(loader) == ["ab", "c"]
    assert list(build_loader(["a", "b", "c"], 2, collate_fn="".join, drop_last=True)) == ["ab"]


def test_set_epoch_chooses_the_order_of_the_next_pass() -> None:
    loader = shuffled()
    epochs = [batches_of(loader) for _ in range(4)]
    for epoch in (2, 2, 0, 3):
        loader.set_epoch(epoch)
        assert batches_of(loader) == epochs[epoch]
    loader.set_epoch(1)
    assert batches_of(loader, 2) == epochs[1][:2]
    with pytest.raises(DataError, match="epoch=-1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_at_every_batch_and_twice(drop_last: bool) -> None:
    whole = shuffled(drop_last=drop_last)
    reference = [batch for _ in range(4) for batch in batches_of(whole)]
    for stop in range(1, 2 * len(whole) + 1):
        loader = shuffled(drop_last=drop_last)
        stream: list[list[int]] = []
        while len(stream) < stop:
            stream += batches_of(loader, stop - len(stream))
        for _ in range(2):
            state = json.loads(json.dumps(loader.state_dict()))
            loader = shuffled(drop_last=drop_last)
            loader.load_state_dict(state)
            stream += batches_of(loader, 1)
        state = loader.state_dict()
        loader = shuffled(drop_last=drop_last)
        loader.load_state_dict(state)
        stream += batches_of(loader) + batches_of(loader)
        assert stream == reference[: len(stream)], f"interrupted after {stop} batches"


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 0), (0, 1)])
def test_resume_with_any_number_of_workers(before: int, after: int) -> None:
    whole = shuffled()
    reference = [batch for _ in range(3) for batch in batches_of(whole)]
    for stop in (2, 6):
        loader = shuffled(workers=before)
        stream = batches_of(loader, stop)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = shuffled(workers=after)
        loader.load_state_dict(state)
        while len(stream) < len(reference):
            stream += batches_of(loader)
        assert stream[: len(reference)] == reference


def test_resume_with_another_batch_size() -> None:
    loader = shuffled()
    flat = [item for batch in batches_of(loader, 2) for item in batch]
    other = build_loader(Squares(23), 5, shuffle=True, seed=6)
    other.load_state_dict(loader.state_dict())
    flat += [item for batch in batches_of(other) for item in batch]
    assert flat == [index * index for index in ShuffledIndex(23, 6)]


def test_persistent_workers_take_the_next_order() -> None:
    loader = build_loader(
        Squares(23), 4, shuffle=True, seed=6, num_workers=1, persistent_workers=True, prefetch_factor=2
    )
    reference = shuffled()
    for _ in range(2):
        assert batches_of(loader) == batches_of(reference)


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 6), (True, 5)])
def test_epoch_is_that_of_the_next_batch(drop_last: bool, batches: int) -> None:
    loader = shuffled(drop_last=drop_last)
    iterator = iter(loader)
    for _ in range(batches):
        assert loader.epoch == 0
        next(iterator)
    assert loader.epoch == 1
    resumed = shuffled(drop_last=drop_last)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert len(batches_of(resumed)) == batches


def test_a_look_at_the_first_batch_loses_nothing() -> None:
    loader = shuffled()
    first = next(iter(loader)).tolist()
    assert batches_of(loader)[0] == first


def test_set_epoch_and_a_loaded_state() -> None:
    loader = shuffled()
    epochs = [batches_of(loader) for _ in range(3)]
    loader.set_epoch(1)
    batches_of(loader, 2)
    state = loader.state_dict()

    before = shuffled()
    before.set_epoch(1)
    before.load_state_dict(state)
    assert batches_of(before) == epochs[1][2:]
    after = shuffled()
    after.load_state_dict(state)
    after.set_epoch(1)
    assert batches_of(after) == epochs[1][2:]
    elsewhere = shuffled()
    elsewhere.load_state_dict(state)
    elsewhere.set_epoch(2)
    assert batches_of(elsewhere) == epochs[2]


def test_an_old_iterator_does_not_move_the_position() -> None:
    loader = shuffled()
    old = iter(loader)
    next(old)
    loader.set_epoch(3)
    next(old)
    assert (loader.epoch, loader.state_dict()["position"]) == (3, 0)


def test_state_size_and_resume_do_not_depend_on_the_position() -> None:
    sizes = []
    for position in (10, 10**9):
        loader = build_loader(range(2 * 10**9), 1, collate_fn=lambda items: items[0], shuffle=True)
        loader.load_state_dict({**loader.state_dict(), "position": position})
        assert next(iter(loader)) == ShuffledIndex(2 * 10**9, 0)[position]
        sizes.append(len(json.dumps(loader.state_dict())))
    assert sizes[1] - sizes[0] == len(str(10**9)) - len("10")


def test_state_of_another_order_is_refused() -> None:
    loader = shuffled()
    batches_of(loader, 2)
    state = loader.state_dict()
    for other, message in [
        (build_loader(Squares(24), 4, shuffle=True, seed=6), r"items=23.*items=24"),
        (build_loader(Squares(23), 4, shuffle=True, seed=7), r"seed=6.*seed=7"),
        (build_loader(Squares(23), 4, seed=6), r"shuffle=True.*shuffle=False"),
    ]:
        with pytest.raises(DataError, match=message):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="position=23 is not among 23"):
        shuffled().load_state_dict({**state, "position": 23})
    with pytest.raises(DataError, match="version None"):
        shuffled().load_state_dict({})


def test_making_an_iterator_leaves_the_random_numbers_of_the_run_alone() -> None:
    loader = shuffled()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    batches_of(loader)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_an_iterable_dataset_leaves_the_random_numbers_of_the_run_alone(workers: int) -> None:
    """A resumed run makes one more iterator than one that continued; nothing else may differ."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    loader = build_loader(Stream(10), 4, seed=3, num_workers=workers)
    passes = iter(loader)
    next(passes)
    state = loader.state_dict()
    again = build_loader(Stream(10), 4, seed=3, num_workers=workers)
    again.load_state_dict(state)
    assert batches_of(again) == [batch.tolist() for batch in passes]
    batches_of(again)
    assert torch.equal(torch.rand(3), expected)


def test_workers_of_an_iterable_dataset_are_seeded_by_the_loader() -> None:
    def drawn(seed: int, noise: int) -> list[list[float]]:
        torch.manual_seed(noise)
        loader = build_loader(Noise(), 2, seed=seed, num_workers=1)
        return [next(batch.tolist() for batch in loader) for _ in range(2)]

    first = drawn(3, 0)
    assert drawn(3, 1) == first, "whatever the global random numbers are"
    assert first[0] != first[1], "each pass has numbers of its own"
    assert drawn(4, 0) != first
    assert drawn(-1, 0) != first


def test_seed_of_an_iterable_dataset_is_an_integer() -> None:
    with pytest.raises(TypeError, match=r"seed=1\.5 is a float"):
        build_loader(Stream(3), 1, seed=1.5)  # type: ignore[arg-type]


def test_iterable_dataset_keeps_its_own_position() -> None:
    reference = batches_of(build_loader(Stream(10), 4))
    assert reference == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for stop in (1, 2):
        loader = build_loader(Stream(10), 4)
        batches_of(loader, stop)
        state = copy.deepcopy(loader.state_dict())
        resumed = build_loader(Stream(10), 4)
        resumed.load_state_dict(state)
        assert batches_of(resumed) == reference[stop:]


class Plain(IterableDataset[int]):
    """Numbers without a position of their own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


@pytest.mark.parametrize(
    ("kind", "before", "batches", "after"),
    [(Plain, 4, 3, 2), (Plain, 2, 4, 4), (Plain, 4, 3, 3), (Plain, 4, 6, 2), (lambda: Stream(23), 4, 2, 3)],
)
def test_batches_of_another_size_continue_an_iterable_dataset(
    kind: Callable[[], IterableDataset[int]], before: int, batches: int, after: int
) -> None:
    items = [item for batch in build_loader(kind(), before) for item in batch.tolist()]
    loader = build_loader(kind(), before)
    seen = [item for batch in islice(loader, batches) for item in batch.tolist()]
    state = json.loads(json.dumps(loader.state_dict()))
    loader = build_loader(kind(), after)
    loader.load_state_dict(state)
    assert seen + [item for batch in loader for item in batch.tolist()] == items


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        ({"batch_size": 2}, {"batch_size": 4}, "saved with batch_size=2, and the loader has batch_size=4"),
        (
            {"batch_size": 4, "num_workers": 1},
            {"batch_size": 2, "num_workers": 1},
            "saved with batch_size=4, and the loader has batch_size=2",
        ),
        (
            {"batch_size": 2, "num_workers": 1},
            {"batch_size": 2},
            "saved with num_workers=1, and the loader has num_workers=0",
        ),
    ],
    ids=["size", "size in workers", "workers"],
)
def test_a_position_in_batches_of_another_kind_is_refused(
    saved: dict[str, int], resumed: dict[str, int], message: str
) -> None:
    loader = build_loader(Plain(), **saved)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    end_workers(loader, batches)
    with pytest.raises(DataError, match=message):
        build_loader(Plain(), **resumed).load_state_dict(state)


def test_packed_documents_resume_under_the_loader_of_torchdata() -> None:
    def build() -> StatefulDataLoader:
        texts = ["word " * number for number in range(12)]
        rows = DocumentStream(texts, sequence_length=16, encode=str.encode, eos_token_id=0)
        return StatefulDataLoader(rows, batch_size=3)

    reference = [batch["input_ids"].tolist() for batch in build()]
    for stop in range(1, len(reference)):
        loader = build()
        iterator = iter(loader)
        stream = [next(iterator)["input_ids"].tolist() for _ in range(stop)]
        state = copy.deepcopy(loader.state_dict())
        resumed = build()
        resumed.load_state_dict(state)
        assert stream + [batch["input_ids"].tolist() for batch in resumed] == reference


def test_a_stream_is_left_to_its_own_loader() -> None:
    dataset = DocumentStream(["text"], sequence_length=4, encode=str.encode, eos_token_id=0)
    for workers in (0, 2):
        with pytest.raises(DataError, match=rf"Use StreamLoader\(dataset, 1, num_workers={workers}\)"):
            build_loader(dataset, 1, num_workers=workers)


def test_bad_arguments() -> None:
    with pytest.raises(DataError, match="batch_size=0"):
        build_loader([1], 0)
    with pytest.raises(DataError, match="dataset is empty"):
        build_loader([], 1)
    with pytest.raises(
        DataError, match="drop_last=True leaves nothing of a dataset of 3 items with batch_size=4"
    ):
        build_loader([1, 2, 3], 4, drop_last=True)
    with pytest.raises(DataError, match="shuffle=True needs random access"):
        build_loader(Stream(3), 1, shuffle=True)
    with pytest.raises(TypeError, match="generator without length"):
        build_loader((number for number in range(3)), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers"):
        build_loader([1], 1, persistent_workers=True)


@pytest.mark.filterwarnings("error::UserWarning")
def test_no_warning_of_torch_reaches_the_user() -> None:
    assert torch.equal(next(iter(build_loader([1, 2], 2))), torch.tensor([1, 2]))


def test_less_than_a_batch_that_is_left_ends_the_epoch() -> None:
    loader = build_loader(range(10), 3, drop_last=True)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    larger = build_loader(range(10), 8, drop_last=True)
    larger.load_state_dict(state)
    assert (list(larger), larger.epoch) == ([], 1)


@pytest.mark.parametrize("epoch", ["1", 1.0, True, None, -1])
def test_epoch_is_checked(epoch: int) -> None:
    with pytest.raises(DataError, match="epoch="):
        build_loader(range(10), 3).set_epoch(epoch)


class InEpoch:
    """Items that tell the epoch they were asked for in."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return 10 * self.epoch + index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_the_dataset_learns_the_epoch_also_in_persistent_workers(workers: int) -> None:
    loader = build_loader(InEpoch(), 2, num_workers=workers, persistent_workers=workers > 0)
    loader.set_epoch(0)
    # The passes after the first are told too: each that reaches its end makes the next epoch current.
    assert [next(iter(loader)).tolist() for _ in range(2)] == [[0, 1], [10, 11]]


def test_persistent_workers_that_keep_an_old_epoch_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(InEpoch(), 2, num_workers=1, persistent_workers=True)
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        for epoch in range(3):
            set_loader_epoch(loader, epoch)
            assert next(iter(loader)).tolist() == [0, 1]
    [record] = caplog.records
    assert (
        "DataLoader(persistent_workers=True): its workers keep the copies of InEpoch" in record.getMessage()
    )


@pytest.mark.parametrize(
    "options", [{"prefetch_factor": 0}, {"prefetch_factor": 2.0}, {"num_workers": -1}, {"num_workers": True}]
)
@pytest.mark.parametrize("dataset", [range(4), Stream(4)])
def test_worker_options_that_make_no_sense_are_named(dataset: object, options: dict[str, object]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(options))}=.* must be an integer"):
        build_loader(dataset, 2, **{"num_workers": 1, **options})  # type: ignore[arg-type]
