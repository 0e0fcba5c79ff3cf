"""Batches of packed rows: the position is that of the caller, whatever the batch size."""

import json
import random

import pytest
import torch

from dataloader_dispatch import DataError, DocumentStream, StreamLoader

DOCUMENTS = ["".join(random.Random(number).choices("abcdef", k=number * 7 % 40)) for number in range(30)]


def encode(text: str) -> bytes:
    return text.encode()


def loader_of(batch_size: int, state: dict[str, object] | None = None) -> StreamLoader:
    dataset = DocumentStream(DOCUMENTS, sequence_length=10, encode=encode, eos_token_id=0, seed=5)
    loader = StreamLoader(dataset, batch_size)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def rows_of(loader: StreamLoader, batches: int | None = None) -> list[list[list[int]]]:
    """Rows as [input_ids, labels], from the next batches or the rest of the epoch."""
    rows: list[list[list[int]]] = []
    for number, batch in enumerate(loader, start=1):
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert batch["input_ids"].device.type == "cpu"
        assert batch["input_ids"].shape == batch["labels"].shape
        rows += torch.stack((batch["input_ids"], batch["labels"]), dim=1).tolist()
        if number == batches:
            break
    return rows


def two_epochs() -> list[list[list[int]]]:
    loader = loader_of(1)
    return rows_of(loader) + rows_of(loader)


def test_only_the_last_batch_of_an_epoch_is_smaller() -> None:
    total = len(rows_of(loader_of(1)))
    sizes = [len(batch["input_ids"]) for batch in loader_of(7)]
    assert total % 7
    assert sizes == [7] * (total // 7) + [total % 7]


def test_progress_is_the_share_of_documents_behind_the_cursor() -> None:
    loader = loader_of(1)
    finished = []
    for batch in loader:
        finished.append(loader.epoch_progress)
        assert batch
    assert finished == [*sorted(finished[:-1]), 0.0]  # the last batch turns to the next epoch
    assert 0.9 < finished[-2] < 1
    assert all((share * len(DOCUMENTS)) % 1 == pytest.approx(0, abs=1e-9) for share in finished)


@pytest.mark.parametrize("batch_size", [2, 3, 7, 1000])
def test_rows_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    loader = loader_of(batch_size)
    assert rows_of(loader) + rows_of(loader) == two_epochs()


def test_stream_is_equal_at_every_interrupt_under_changing_batch_sizes() -> None:
    reference = two_epochs()
    chance = random.Random(0)
    one_epoch = len(rows_of(loader_of(1)))
    for stop in range(one_epoch + 5):
        loader = loader_of(1)
        stream: list[list[list[int]]] = []
        while len(stream) < stop:
            stream += rows_of(loader, stop - len(stream))
        for _ in range(3):
            loader = loader_of(chance.randrange(1, 6), loader.state_dict())
            stream += rows_of(loader, 1)
        while len(stream) < len(reference):
            stream += rows_of(loader)
        assert stream[: len(reference)] == reference


def test_state_after_batch_k_resumes_at_batch_k_plus_1_while_iteration_goes_on() -> None:
    reference = rows_of(loader_of(3))
    loader = loader_of(3)
    for number, _ in enumerate(loader, start=1):
        rest = reference[3 * number :] or two_epochs()[len(reference) :]
        assert rows_of(loader_of(3, loader.state_dict())) == rest
    assert loader.epoch == 1


def test_epoch_is_shared_with_the_dataset() -> None:
    loader = loader_of(4)
    first = rows_of(loader)
    assert loader.epoch == loader.dataset.epoch == 1
    loader.set_epoch(0)
    assert rows_of(loader, 1) == first[:4]
    loader.set_epoch(0)
    assert rows_of(loader) == first[4:]


def test_an_interrupt_anywhere_within_a_batch_gives_its_rows_again() -> None:
    reference = rows_of(loader_of(4))
    for survivors in range(len(DOCUMENTS) - 1):
        calls = -1000  # first it is tried on some of the texts

        def interrupted(text: str, survivors: int = survivors) -> bytes:
            nonlocal calls
            calls += 1
            if calls == survivors + 1:
                raise KeyboardInterrupt
            return text.encode()

        dataset = DocumentStream(DOCUMENTS, sequence_length=10, encode=interrupted, eos_token_id=0, seed=5)
        loader = StreamLoader(dataset, 4)
        calls = 0
        received: list[list[list[int]]] = []
        positions = [loader.state_dict()]

        def receive(
            loader: StreamLoader = loader,
            received: list[list[list[int]]] = received,
            positions: list[dict[str, object]] = positions,
        ) -> None:
            for batch in loader:
                received += torch.stack(list(batch.values()), dim=1).tolist()
                positions.append(loader.state_dict())

        with pytest.raises(KeyboardInterrupt):
            receive()
        assert loader.state_dict() == positions[-1]
        receive()
        assert received == reference


def test_a_superseded_iterator_does_not_move_the_position() -> None:
    loader = loader_of(3)
    old, new = iter(loader), iter(loader)
    next(new)
    position = loader.state_dict()
    with pytest.raises(RuntimeError, match="out of date"):
        next(old)
    assert loader.state_dict() == position
    next(new)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True])
def test_batch_size_is_checked(batch_size: int) -> None:
    with pytest.raises(DataError, match=f"batch_size={batch_size}"):
        loader_of(batch_size)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": -1},
        {"num_workers": True},
        {"num_workers": "2"},
        {"prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": 0},
    ],
)
def test_settings_of_workers_are_checked(settings: dict[str, object]) -> None:
    name, value = list(settings.items())[-1]
    with pytest.raises(DataError, match=f"{name}={value!r}"):
        StreamLoader(loader_of(1).dataset, 1, **settings)  # type: ignore[arg-type]


def test_only_a_document_stream_is_loaded() -> None:
    with pytest.raises(TypeError, match=r"dataset is a list.*build_loader"):
        StreamLoader([1, 2], 1)  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_made_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = rows_of(loader_of(4))
    loader = loader_of(4)
    first = rows_of(loader, 1)

    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    assert first + rows_of(loader) == reference


def test_a_length_is_not_claimed() -> None:
    with pytest.raises(TypeError):
        len(loader_of(2))  # type: ignore[arg-type]
