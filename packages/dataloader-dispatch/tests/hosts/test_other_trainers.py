"""Under the trainers of others each document comes once, and a resumed run reads on where it stopped."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from warm_start import WarmStart

from dataloader_dispatch import (
    DataError,
    DocumentStream,
    FabricLoader,
    LightningLoader,
    StreamLoader,
    build_loader,
    set_train_loader,
)

Launch = Callable[..., str]
WORKERS = Path(__file__).parent / "workers"
DOCUMENTS = 41
OUTSIDE = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
}


ENVIRON = OUTSIDE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKERS)}
"""The workers share a module, which a safe path would not find."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """`launch(2, "fabric_two.py", "argument")`: ranks of a worker, forked where its trainer is imported."""
    modules = ["transformers.trainer", "transformers.models.llama.modeling_llama", "lightning.pytorch"]
    warm = WarmStart([*modules, "torch._dynamo", "dataloader_dispatch.synchronized.loader"], ENVIRON)

    def run(ranks: int, worker: str, *words: object) -> str:
        folder = tmp_path_factory.mktemp("job")
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        # What torchrun tells them, too, as some trainers look for it.
        job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none"}
        told = [(folder / f"out-{rank}", folder / f"err-{rank}") for rank in range(ranks)]
        running = [
            warm.start(
                [str(WORKERS / worker), *map(str, words)],
                ENVIRON | ({**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
                *files,
            )
            for rank, files in enumerate(told)
        ]
        try:
            codes = [process.wait(300) for process in running]
        finally:
            for process in running:
                process.kill()
        assert codes == [0] * ranks, "\n".join(err.read_text() for _, err in told)
        return "".join(out.read_text() for out, _ in told)

    yield run
    warm.close()


def read(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(ranks)]


def test_fabric_reads_each_document_once_and_resumes(launch: Launch, tmp_path: Path) -> None:
    assert launch(2, "fabric_two.py", tmp_path).count("done") == 2


@pytest.fixture
def in_lightning(launch: Launch) -> Callable[..., list[Any]]:
    """Ranks that train to a step, and what each has seen."""

    def run(folder: Path, steps: int, ranks: int, how: str = "begin", *more: object) -> list[Any]:
        folder.mkdir(exist_ok=True)
        launch(ranks, "lightning_two.py", folder, steps, ranks, how, *more)
        return read(folder, ranks)

    return run


def test_lightning_resumes_behind_the_batch_in_training(
    in_lightning: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """From the checkpoint of any step, the last one of an epoch and the one before it among them."""
    (whole,) = in_lightning(tmp_path, 45, 1)
    first = [numbers for _, epoch, numbers in whole if epoch == 0]
    assert Counter(number for step in first for number in step) == Counter(range(1, DOCUMENTS + 1))
    last = len(first)
    assert whole[last][1] == 1
    for step in (last - 1, last):
        (resumed,) = in_lightning(tmp_path / "again", 45, 1, "resume", tmp_path / f"epoch=0-step={step}.ckpt")
        assert resumed == whole[step:], step


def test_lightning_does_not_read_ahead_where_it_knows_the_length(
    in_lightning: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (whole,) = in_lightning(tmp_path, 9, 1, "begin", "", 4)
    assert [epoch for _, epoch, _ in whole] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    every = [number for _, _, numbers in whole for number in numbers]
    assert len(set(every)) == len(every) == 18, "an epoch of 4 batches begins where the one before ended"
    for epoch, step in ((0, 3), (0, 4)):
        saved = tmp_path / f"epoch={epoch}-step={step}.ckpt"
        (resumed,) = in_lightning(tmp_path / "again", 9, 1, "resume", saved, 4)
        assert resumed == whole[step:], step


def test_lightning_reads_each_document_once_on_two_ranks_and_on_fewer_after_a_resume(
    in_lightning: Callable[..., list[Any]], tmp_path: Path
) -> None:
    whole = in_lightning(tmp_path / "whole", 24, 2)
    epoch = Counter(
        number for rank in whole for _, epoch, numbers in rank if epoch == 0 for number in numbers
    )
    assert epoch == Counter(range(1, DOCUMENTS + 1))
    cut = in_lightning(tmp_path / "cut", 5, 2)
    assert in_lightning(tmp_path / "cut", 24, 2, "resume") == [rank[5:] for rank in whole]
    saved = tmp_path / "cut" / "epoch=0-step=5.ckpt"
    (alone,) = in_lightning(tmp_path / "alone", 40, 1, "resume", saved)
    rest = [numbers for _, epoch, numbers in alone if epoch == 0]
    begun = [numbers for rank in cut for _, _, numbers in rank]
    assert Counter(number for step in begun + rest for number in step) == epoch


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_transformers_resumes_without_reading_again(launch: Launch, tmp_path: Path, ranks: int) -> None:
    def run(folder: Path, steps: int, how: str = "begin", *more: object) -> list[Any]:
        folder.mkdir(exist_ok=True)
        launch(ranks, "trainer_two.py", folder, steps, 2, how, *more)
        return read(folder, ranks)

    whole = run(tmp_path / "whole", 12)
    for seen, _ in whole:
        assert len(seen) == 24, "2 batches of each of 12 steps, none of them read ahead"
    # 48 rows a rank: more than an epoch alone, and more than two on two ranks, of 20 or 21 documents each.
    begun = [number for seen, _ in whole for step, numbers in seen if step < 5 for number in numbers]
    assert max(Counter(begun).values()) == 1
    run(tmp_path / "cut", 4)
    if ranks == 1:  # the newest checkpoint of the run, and with two ranks one of another run
        resumed = run(tmp_path / "cut", 12, "resume")
    else:
        resumed = run(tmp_path / "else", 12, "resume", tmp_path / "cut" / "checkpoint-4")
    assert [seen for seen, _ in resumed] == [seen[8:] for seen, _ in whole]
    assert [losses for _, losses in resumed] == [losses for _, losses in whole]


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("stream", "dispatch"),
        ("loader", "shard"),
        pytest.param("stream", "shard", marks=pytest.mark.full),
        pytest.param("loader", "dispatch", marks=pytest.mark.full),
    ],
)
def test_accelerate_does_not_divide_a_second_time(launch: Launch, how: str, what: str) -> None:
    assert launch(2, "accelerate_two.py", how, what).count("refused") == (1 if how == "dispatch" else 2)


def test_accelerate_leaves_a_stream_loader_as_it_is(launch: Launch) -> None:
    launch(2, "accelerate_two.py", "as-it-is")


def stream(**settings: Any) -> StreamLoader:
    documents = [[number] * 7 for number in range(1, 20)]
    return StreamLoader(DocumentStream(documents, sequence_length=8, eos_token_id=0, **settings), 2)


def ordinary(workers: int = 0) -> Any:
    rows = [{"input_ids": torch.full((2,), number)} for number in range(11)]
    return build_loader(rows, batch_size=2, shuffle=True, seed=3, num_workers=workers)


@pytest.mark.parametrize("cls", [FabricLoader, LightningLoader])
@pytest.mark.parametrize(
    "make", [stream, ordinary, lambda: ordinary(2)], ids=["stream", "ordinary", "workers"]
)
def test_the_position_is_behind_the_last_batch(cls: Any, make: Any) -> None:
    def ids(batches: Any) -> list[Any]:
        return [batch["input_ids"].tolist() for batch in batches]

    loader = cls(make())
    whole = [*ids(loader), *ids(loader)]
    length = len(whole) // 2
    for read in (1, 2, length):
        loader = cls(make())
        batches = iter(loader)
        for _ in range(read):
            next(batches)
        saved = json.loads(json.dumps(loader.state_dict()))
        again = cls(make())
        again.load_state_dict(saved)
        rest = [*ids(again), *(ids(again) if read < length else [])]
        assert rest == whole[read:], read
    assert next(batches, None) is None
    again = cls(make())
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert ids(again) == whole[length:], "the end of an epoch is the beginning of the next"


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def torchdata_loader(shuffle: bool) -> FabricLoader:
    if not shuffle:
        return FabricLoader(StatefulDataLoader(Numbers(), batch_size=2))
    generator = torch.Generator().manual_seed(3)
    return FabricLoader(StatefulDataLoader(range(24), batch_size=2, shuffle=True, generator=generator))  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_torchdata_resumes_twice_and_keeps_the_order_of_later_epochs(shuffle: bool) -> None:
    loader = torchdata_loader(shuffle)
    undisturbed = [[batch.tolist() for batch in loader] for _ in range(3)]
    state, read = None, []
    for batches in (4, 3, 5):
        loader = torchdata_loader(shuffle)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        read += [next(iterator).tolist() for _ in range(batches)]
        state = loader.state_dict()
    assert list(iterator) == []
    assert [read, *([batch.tolist() for batch in loader] for _ in range(2))] == undisturbed


@pytest.mark.parametrize("cls", [FabricLoader, LightningLoader])
def test_what_has_no_position_or_another_rank_is_refused_by_name(cls: Any) -> None:
    with pytest.raises(TypeError, match=rf"a DataLoader, which has no state_dict\(\), but {cls.__name__}"):
        cls(DataLoader([1]))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="rank=1 and world_size=2 of the DocumentStream must be those"):
        next(iter(cls(stream(rank=1, world_size=2, shards=4))))
    with pytest.raises(DataError, match=f"the {cls.__name__} was taken apart"):
        next(iter(cls(stream()).dataset))


@pytest.mark.parametrize("cls", [FabricLoader, LightningLoader])
def test_a_loader_that_does_not_count_epochs_is_named_with_one_that_does(cls: Any) -> None:
    class Positioned(list[int]):
        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: dict[str, object]) -> None:
            pass

    with pytest.raises(AttributeError, match=r"Positioned has no attribute epoch.* Use a StreamLoader"):
        _ = cls(Positioned()).epoch


def test_a_trainer_that_would_misread_the_loader_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    def trainer(**settings: Any) -> Any:
        usual = {"output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 2}
        return Trainer(torch.nn.Linear(1, 1), TrainingArguments(**{**usual, "use_cpu": True, **settings}))

    with pytest.raises(DataError, match="max_steps=-1 must be 1 or more"):
        set_train_loader(trainer(max_steps=-1), stream())
    with pytest.raises(DataError, match=r"batch_size=2 of the loader differs from .*_batch_size=8"):
        set_train_loader(trainer(per_device_train_batch_size=8), stream())
    with pytest.raises(DataError, match="rank=0 and world_size=2 of the DocumentStream"):
        set_train_loader(trainer(), stream(world_size=2, shards=4))
    with pytest.raises(TypeError, match="loader is a DataLoader, which has no state_dict"):
        set_train_loader(trainer(), DataLoader([1]))  # type: ignore[arg-type]
