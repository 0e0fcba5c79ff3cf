"""A single process, and the parts that need no other rank."""

from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dataloader_dispatch import DataError, SynchronizedDataLoader, build_loader
from dataloader_dispatch.batches import copy_of, to_device
from dataloader_dispatch.synchronized.digests import digest, same_first_batches

Pair = namedtuple("Pair", ["left", "right"])


def test_a_single_process_passes_everything_through() -> None:
    inner = build_loader(list(range(10)), 3, shuffle=True, seed=5)  # type: ignore[arg-type]
    loader = SynchronizedDataLoader(inner, "cpu")
    assert (len(loader), loader.batch_size, loader.epoch, loader.last_is_dummy) == (4, 3, 0, False)
    assert loader.dataset is inner.dataset
    assert loader.sampler is inner.sampler
    batches = iter(loader)
    next(batches)
    assert loader.state_dict() == inner.state_dict()
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest
    loader.set_epoch(7)
    assert inner.epoch == loader.epoch == 7


def test_a_closed_loader_says_so() -> None:
    loader = SynchronizedDataLoader([1, 2], "cpu")
    batches = iter(loader)
    assert next(batches) == 1
    loader.close()
    for ask in (lambda: iter(loader), lambda: next(batches)):
        with pytest.raises(RuntimeError, match=r"^the data loader was closed. Make a new one.$"):
            ask()


def test_a_single_process_reads_nothing_ahead() -> None:
    taken = []

    def numbers() -> Iterator[int]:
        for number in range(3):
            taken.append(number)
            yield number

    batches = iter(SynchronizedDataLoader(numbers(), "cpu"))
    assert taken == []
    assert next(batches) == 0
    assert taken == [0]


def test_what_the_loader_lacks_is_absent() -> None:
    loader = SynchronizedDataLoader([1], "cpu")
    for name in ("batch_size", "dataset", "sampler", "epoch", "epoch_progress", "state_dict"):
        assert not hasattr(loader, name)
    loader.set_epoch(3)  # nothing to tell it to
    with pytest.raises(TypeError, match="no length"):
        len(SynchronizedDataLoader(iter([1]), "cpu"))


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match="uneven='wait' must be 'stop', 'pad' or 'error'"):
        SynchronizedDataLoader([], "cpu", uneven="wait")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="timeout_seconds=0"):
        SynchronizedDataLoader([], "cpu", timeout_seconds=0)


def test_a_job_without_a_process_group_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    SynchronizedDataLoader([], "cpu")
    assert "WORLD_SIZE=4, but there is no process group" in caplog.text


class Movable:
    """What has a method of its own to be moved by."""

    def __init__(self, device: object = None) -> None:
        self.device = device

    def to(self, device: torch.device) -> "Movable":
        return Movable(device)


def test_tensors_of_nested_batches_are_moved_and_all_else_passes() -> None:
    batch: dict[str, Any] = {
        "ids": torch.ones(2),
        "pair": Pair(torch.ones(1), "text"),
        "list": [torch.ones(1), 3, None],
        "tuple": (torch.ones(1),),
        "own": UserDict(inner=torch.ones(1)),
        "movable": Movable(),
    }
    (moved,) = SynchronizedDataLoader([batch], "meta")
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["own"], UserDict)
    assert moved["list"][1:] == [3, None]
    assert moved["pair"].right == "text"
    assert moved["movable"].device == torch.device("meta")
    for tensor in (
        moved["ids"],
        moved["pair"].left,
        moved["list"][0],
        moved["tuple"][0],
        moved["own"]["inner"],
    ):
        assert tensor.device.type == "meta"
    assert batch["own"]["inner"].device.type == "cpu"


def test_a_tensor_that_is_on_the_device_is_not_copied() -> None:
    batch = {"ids": torch.ones(2)}
    assert to_device(batch, torch.device("cpu"))["ids"] is batch["ids"]


def test_a_copy_shares_nothing() -> None:
    batch = {"ids": torch.ones(2), "names": [["a"]]}
    copied = copy_of(batch)
    copied["ids"].zero_()
    copied["names"][0].append("b")  # type: ignore[union-attr]
    assert batch["ids"].tolist() == [1, 1]
    assert batch["names"] == [["a"]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}),
        ([torch.zeros(1), torch.ones(1)], [torch.ones(1), torch.zeros(1)]),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.5], dtype=torch.bfloat16)),
        ({"a": torch.zeros(1), "text": ["x"]}, {"a": torch.zeros(1), "text": ["y"]}),
    ],
)
def test_fingerprints_tell_batches_apart(one: object, other: object) -> None:
    assert digest(one) == digest(copy_of(one)) is not None
    assert digest(one) != digest(other)


def test_batches_without_elements_or_that_cannot_be_written_down_have_no_fingerprint() -> None:
    assert digest({"ids": torch.zeros(0, 4)}) is None
    assert digest([lambda: None]) is None


def test_groups_of_ranks_with_the_same_batch_are_named_by_their_global_ranks() -> None:
    assert same_first_batches(["a", "b", None, None], [0, 1, 2, 3]) is None
    message = same_first_batches(["a", "b", "a", "b", "a"], [4, 5, 6, 7, 8])
    assert message is not None
    assert "ranks 4, 6 and 8 received the same first batch; ranks 5 and 7 received" in message
