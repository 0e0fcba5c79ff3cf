"""One process: what a save leaves in a store, what is chosen of it, and what is passed over or refused."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    DirectoryLease,
    find_latest_checkpoint,
    load_model_weights,
    store_saving,
)
from checkpoint_core.directory import DELETED, STAGING, find_leftovers, temporary_path
from checkpoint_core.manifest import MANIFEST_NAME, read_manifest, verify_checkpoint
from checkpoint_core.store_directory import delete_directory, put_marker
from checkpoint_core.store_path import StorePath
from dist_env import ObjectStore

FILES = [
    "model.safetensors",
    "optimizer.json",
    "rng.rank0.json",
    "rng.rank0.safetensors",
    "scheduler.json",
    "trainer.json",
]
Keys = Callable[[str], list[str]]
Place = Callable[[str], StorePath]


@pytest.fixture
def start(training_job: Callable[..., object], url: str) -> Callable[..., object]:
    """Makes jobs that save to the place of the test."""
    return lambda **options: training_job(url, **options)


def committed(*steps: int) -> list[str]:
    names = [f"checkpoint-{step}/<save>/{file}" for step in steps for file in FILES]
    return sorted([*names, *(f"checkpoint-{step}/{MANIFEST_NAME}" for step in steps)])


def test_a_resume_continues_exactly(start, url: str) -> None:
    whole = start().train(6)
    first = start()
    first.train(3)
    assert str(first.save()) == f"{url}/checkpoint-3"
    second = start(seed=1)
    loaded = second.manager.load_checkpoint()
    assert (str(loaded.path), loaded.step, loaded.missing) == (f"{url}/checkpoint-3", 3, ())
    assert second.train(3) == whole[3:]


def test_what_lies_where_and_rotation(start, url: str, keys: Keys) -> None:
    job = start(save_total_limit=2)
    for step in (1, 2, 3):
        job.manager.save_checkpoint(step)
    assert keys(url) == committed(2, 3)
    assert str(find_latest_checkpoint(url, verify_checksums=True)) == f"{url}/checkpoint-3"


def test_the_best_stay_and_are_ranked_after_a_restart(start, url: str, keys: Keys) -> None:
    options = {"save_total_limit": 1, "best_metric": "eval_loss", "preserve_n_best": 1}
    job = start(**options)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        job.manager.save_checkpoint(step, metrics={"eval_loss": loss})
    again = start(**options)
    again.manager.load_checkpoint()
    assert [(str(best.path), best.value) for best in again.manager.best_checkpoints()] == [
        (f"{url}/checkpoint-2", 1.0)
    ]
    again.manager.save_checkpoint(4, metrics={"eval_loss": 4.0})
    # The best, the one resumed from, and the newest.
    assert {name.partition("/")[0] for name in keys(url)} == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}


def test_saves_in_the_background(start, url: str, keys: Keys) -> None:
    job = start(async_save=True)
    with job.manager as manager:
        for step in (1, 2, 3):
            manager.save_checkpoint(step)
    assert keys(url) == committed(2, 3)


def test_a_directory_of_a_save_is_one_of_hugging_face(start, url: str, tmp_path: Path, place: Place) -> None:
    job = start(max_shard_size=200)
    checkpoint = place(str(job.manager.save_checkpoint(1)))
    save = checkpoint / read_manifest(checkpoint).save_directory
    for file in save.rglob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert (tmp_path / "model.safetensors.index.json").is_file()
    found = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert all(torch.equal(found[name], value) for name, value in job.model.state_dict().items())
    other = start(seed=1)
    load_model_weights(other.model, str(checkpoint))
    assert all(
        torch.equal(value, job.model.state_dict()[name]) for name, value in other.model.state_dict().items()
    )


def test_a_copy_on_the_disk_is_a_checkpoint(start, url: str, tmp_path: Path, place: Place, job) -> None:
    first = start()
    first.train(2)
    checkpoint = place(str(first.save()))
    for file in checkpoint.rglob("*"):
        target = tmp_path / "run" / checkpoint.name / file.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    verify_checkpoint(tmp_path / "run" / checkpoint.name, checksums=True)
    copied = job(seed=1)
    assert copied.manager.load_checkpoint().step == 2
    assert torch.equal(copied.model[0].weight, first.model[0].weight)
    load_model_weights(copied.model, tmp_path / "run" / checkpoint.name)


def test_what_is_torn_foreign_or_corrupt_is_passed_over_by_name(
    start, url: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    job = start(save_total_limit=None)
    for step in (1, 2, 3, 4):
        job.manager.save_checkpoint(step)
    run = place(url)
    torn, foreign = run / "checkpoint-9/0123abcd/model.safetensors", run / "checkpoint-8/model.bin"
    for path in (torn, foreign):
        path.store.put(path.key, b"half of it")
    flipped = _file(run / "checkpoint-4", "model.safetensors")
    content = bytearray(flipped.read_bytes())
    content[-3] ^= 4
    flipped.store.put(flipped.key, bytes(content))
    short = _file(run / "checkpoint-3", "rng.rank0.safetensors")
    short.store.put(short.key, short.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        loaded = start(seed=1).manager.load_checkpoint()
    assert loaded.step == 2
    for passed in (9, 8, 4, 3):
        assert f"passing over checkpoint-{passed}: " in caplog.text
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        start().manager.load_checkpoint(f"{url}/checkpoint-4")
    # What is not ours is never removed.
    job.manager.save_checkpoint(10)
    assert torn.is_file()
    assert foreign.is_file()


def _file(checkpoint: StorePath, name: str) -> StorePath:
    return checkpoint / read_manifest(checkpoint).save_directory / name


def test_a_deleted_component_begins_afresh(start, url: str, place: Place) -> None:
    job = start()
    job.train(1)
    job.save()
    gone = _file(place(url) / "checkpoint-1", "trainer.json")
    gone.store.delete([gone.key])
    assert start().manager.load_checkpoint().missing == ("trainer",)


def test_a_commit_behind_the_cleanup_is_passed_over(
    start, url: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    job = start()
    for step in (1, 2):
        job.manager.save_checkpoint(step)
    save = place(url) / "checkpoint-2" / read_manifest(place(url) / "checkpoint-2").save_directory
    delete_directory(save)
    assert start().manager.load_checkpoint().step == 1
    assert "passing over checkpoint-2" in caplog.text
    assert "none of its files is there" in caplog.text


def of_a_dead_process(marker: StorePath) -> StorePath:
    head, start, token = marker.name.rsplit("-", 2)
    return marker.with_name(f"{head}-{int(start) + 1}-{token}")


def test_leftovers_of_dead_processes_are_removed(start, url: str, place: Place, keys: Keys) -> None:
    job = start()
    job.manager.save_checkpoint(1)
    run = place(url)
    for kind, step, save, dead in (
        (STAGING, 2, "00000001", True),
        (STAGING, 1, "00000002", True),
        (DELETED, 3, "00000003", True),
        (STAGING, 4, "00000004", False),
    ):
        marker = temporary_path(run, kind, step, save)
        directory = run / f"checkpoint-{step}" / save
        put_marker(of_a_dead_process(marker) if dead else marker, directory)
        part = directory / "model.safetensors"
        part.store.put(part.key, b"half of it")
    # Killed right behind the commit: the marker goes, the checkpoint stays.
    saved = read_manifest(run / "checkpoint-1").save_directory
    put_marker(of_a_dead_process(temporary_path(run, STAGING, 1, saved)), run / "checkpoint-1" / saved)
    job.manager.save_checkpoint(5)
    (living,) = find_leftovers(run)
    assert living.path.name.endswith("00000004")
    left = [*committed(1, 5), "checkpoint-4/<save>/model.safetensors", living.path.name]
    assert keys(url) == sorted(left)
    verify_checkpoint(run / "checkpoint-1", checksums=True)


def test_a_marker_cannot_name_anything_else(start, url: str, place: Place, keys: Keys) -> None:
    start().manager.save_checkpoint(1)
    run = place(url)
    for number, named in enumerate((b'{"directory": "checkpoint-1"}', b'{"directory": "../x"}', b"[]", b"{")):
        marker = of_a_dead_process(temporary_path(run, STAGING, 1, f"0000000{number}"))
        marker.store.put(marker.key, named)
    start().manager.load_checkpoint()
    again = start()
    again.manager.load_checkpoint()
    again.manager.save_checkpoint(2)
    assert set(committed(1, 2)) <= set(keys(url))


def test_a_step_is_replaced_in_one_moment(start, url: str, keys: Keys, place: Place) -> None:
    job = start()
    job.manager.save_checkpoint(1)
    before = read_manifest(place(url) / "checkpoint-1").save_id
    if url.startswith("file:"):
        with pytest.raises(CheckpointError, match="file:// cannot replace it safely"):
            job.manager.save_checkpoint(1)
    else:
        job.manager.save_checkpoint(1)
    after = read_manifest(place(url) / "checkpoint-1").save_id
    assert (before == after) == url.startswith("file:")
    assert keys(url) == committed(1)
    verify_checkpoint(place(url) / "checkpoint-1", checksums=True)


def test_a_place_of_its_own(start, url: str, keys: Keys) -> None:
    job = start()
    path = job.manager.save_checkpoint(1, path=f"{url}/before-the-change")
    assert str(path) == f"{url}/before-the-change"
    with pytest.raises(CheckpointError, match="exists already"):
        job.manager.save_checkpoint(1, path=f"{url}/before-the-change")
    assert start().manager.load_checkpoint() is None
    assert start().manager.load_checkpoint(path).step == 1
    assert keys(url) == sorted(name.replace("checkpoint-1", "before-the-change") for name in committed(1))


class TwoAtOnce:
    """A second run commits while the first one uploads."""

    def __init__(self, commit: Callable[[], object]) -> None:
        self.commit = commit

    def save_pretrained(self, directory: str) -> None:
        self.commit()
        (Path(directory) / "tokenizer.json").write_text("{}")


def test_of_two_runs_that_save_one_step_one_is_refused(
    start, training_job, url: str, keys: Keys, place: Place
) -> None:
    second = start(seed=1)
    late = TwoAtOnce(lambda: second.manager.save_checkpoint(1))
    first = start(preprocessor=late)
    with pytest.raises(CheckpointError, match=r"was saved by another run|was committed by another run"):
        first.manager.save_checkpoint(1)
    assert keys(url) == committed(1)
    fresh = start(seed=2)
    fresh.manager.load_checkpoint()
    assert torch.equal(fresh.model[0].weight, second.model[0].weight)


def test_the_condition_decides_at_the_last_moment(
    start, url: str, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start(seed=1)
    put_if = ObjectStore.put_if

    def late(self: ObjectStore, key: str, data: bytes, version: object) -> bool:
        if key.endswith(MANIFEST_NAME) and put_if is not ObjectStore.put_if:
            monkeypatch.setattr(ObjectStore, "put_if", put_if)
            second.manager.save_checkpoint(1)
        return put_if(self, key, data, version)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectStore, "put_if", late)
    with pytest.raises(CheckpointError, match="was committed by another run or process while this one"):
        first.manager.save_checkpoint(1)
    assert keys(url) == committed(1)
    fresh = start(seed=2)
    fresh.manager.load_checkpoint()
    assert torch.equal(fresh.model[0].weight, second.model[0].weight)


@pytest.mark.parametrize("url", ["s3", "memory"], indirect=True)
def test_of_many_that_save_one_step_at_once_one_is_first(
    training_job, url: str, keys: Keys, place: Place
) -> None:
    jobs = [training_job(url, seed=seed) for seed in range(8)]
    gate, errors = threading.Barrier(len(jobs)), {}

    def save(number: int) -> None:
        gate.wait()
        try:
            jobs[number].manager.save_checkpoint(1)
        except CheckpointError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = set(range(len(jobs))) - set(errors)
    assert all("another run" in message for message in errors.values()), errors
    assert keys(url) == committed(1)
    fresh = training_job(url, seed=99)
    fresh.manager.load_checkpoint()
    assert torch.equal(fresh.model[0].weight, jobs[winner].model[0].weight)


def test_a_run_that_commits_while_another_one_looks_is_not_replaced(
    start, url: str, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the second one has seen that the step is free, and before it looks at what it would replace."""
    first, second = start(), start(seed=1)

    look = store_saving.check_other_runs

    def commit_first(*arguments: object) -> None:
        monkeypatch.setattr(store_saving, "check_other_runs", look)
        first.manager.save_checkpoint(1)
        look(*arguments)

    monkeypatch.setattr(store_saving, "check_other_runs", commit_first)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 was written by another run"):
        second.manager.save_checkpoint(1)
    assert keys(url) == committed(1)
    fresh = start(seed=2)
    fresh.manager.load_checkpoint()
    assert torch.equal(fresh.model[0].weight, first.model[0].weight)


def test_a_run_that_joins_later_ends_the_other(start, url: str, keys: Keys) -> None:
    first, second = start(), start(seed=1)
    first.manager.save_checkpoint(1)
    second.manager.save_checkpoint(2)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2 was saved by another run .* since this one began"
    ):
        first.manager.save_checkpoint(3)
    second.manager.save_checkpoint(4)
    assert keys(url) == committed(1, 2, 4)


def test_a_commit_whose_answer_was_lost_is_found(url: str, place: Place) -> None:
    store, key = place(url).store, place(url).key + "/object"
    assert store.put_if(key, b"mine", None)
    assert store.put_if(key, b"mine", None)
    assert not store.put_if(key, b"another", None)


def _save_and_wait(job, step: int) -> None:
    job.manager.save_checkpoint(step)
    job.manager.wait()


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_leaves_nothing(start, url: str, keys: Keys, async_save: bool) -> None:
    job = start(async_save=async_save, preprocessor=TwoAtOnce(lambda: None))
    job.manager.save_checkpoint(1)
    job.manager.wait()
    before = keys(url)

    def fail() -> None:
        raise RuntimeError("no vocabulary")

    broken = start(async_save=async_save, preprocessor=TwoAtOnce(fail))
    broken.manager.load_checkpoint()
    with pytest.raises(CheckpointError, match="no vocabulary"):
        _save_and_wait(broken, 2)
    assert keys(url) == before


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_is_not_supported_is_refused_by_name(start, url: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save_on_each_node=True does not go with memory://"):
        start(save_on_each_node=True)
    with pytest.raises(CheckpointError, match=r"save_model\(\) writes to a directory"):
        start().manager.save_model(f"{url}/exported")
    with pytest.raises(CheckpointError, match="a DirectoryLease needs a directory, but memory://"):
        DirectoryLease(url)
    lease = DirectoryLease(tmp_path / "leased")
    with pytest.raises(CheckpointError, match="Leave lease out"):
        CheckpointManager(CheckpointConfig(url), stateful_provider=[], lease=lease)


def test_a_store_that_ignores_conditions_is_refused(rclone, use, training_job, keys: Keys) -> None:
    use(rclone.environment())
    url = "s3://tests/ignores/run"
    job = training_job(url)
    with pytest.raises(CheckpointError, match="ignores the condition of a conditional put"):
        job.manager.save_checkpoint(1)
    assert keys(url) == []
    assert os.environ["AWS_ENDPOINT_URL"] == rclone.endpoint
