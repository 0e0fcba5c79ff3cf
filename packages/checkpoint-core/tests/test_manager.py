"""Saving, loading, damage, deletion and rotation on one process."""

import json
import logging
import random
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    DirectoryLease,
    ModelState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    find_latest_checkpoint,
    load_model_weights,
)
from checkpoint_core.manifest import verify_checkpoint
from dist_env import StaticDistributedEnvironment


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_layout_and_manifest(job, tmp_path: Path) -> None:
    first = job()
    first.train(2)
    path = first.manager.save_checkpoint(
        2, metrics={"eval_loss": 1.5, "eval_tokens": 10, "bad": float("nan")}
    )
    assert path == tmp_path / "run" / "checkpoint-2"
    assert names(path) == [
        "eval_metrics.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "rng.rank0.json",
        "rng.rank0.safetensors",
        "scheduler.json",
        "trainer.json",
    ]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    assert manifest["step"] == 2
    assert manifest["world_size"] == 1
    assert set(manifest["files"]) == set(names(path)) - {"manifest.json"}
    assert all(record["size"] == (path / name).stat().st_size for name, record in manifest["files"].items())
    assert [(c["key"], c["pattern"]) for c in manifest["components"]] == [
        ("model", "replicated"),
        ("optimizer", "replicated"),
        ("scheduler", "replicated"),
        ("trainer", "global"),
        ("rng", "per_rank"),
    ]
    assert set(manifest["versions"]) == {"checkpoint-core", "python", "torch"}
    metrics = json.loads((path / "eval_metrics.json").read_text())
    assert metrics == {"eval_loss": 1.5, "eval_tokens": 10, "bad": "nan", "global_step": 2}
    assert verify_checkpoint(path, checksums=True).metrics["eval_loss"] == 1.5


@pytest.mark.parametrize("interrupted_at", [1, 4, 8])
def test_resume_is_bit_exact(job, interrupted_at: int) -> None:
    whole = job(save_total_limit=None)
    straight = whole.train(10)
    first = job()
    begun = first.train(interrupted_at)
    first.save()
    random.seed(99)
    second = job(seed=12345)
    loaded = second.manager.load_checkpoint()
    assert (loaded.step, loaded.missing) == (interrupted_at, ())
    assert second.counter.value == interrupted_at
    assert begun + second.train(10 - interrupted_at) == straight
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_nothing_to_load(job, tmp_path: Path) -> None:
    assert job().manager.load_checkpoint() is None
    assert find_latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="there is no checkpoint directory"):
        job().manager.load_checkpoint(tmp_path / "nowhere")


def test_newest_is_the_highest_step(job, tmp_path: Path) -> None:
    first = job(save_total_limit=None)
    for step in (5, 100, 20):
        first.manager.save_checkpoint(step)
    (tmp_path / "run" / "checkpoint-best").mkdir()
    (tmp_path / "run" / "checkpoint-7").write_text("a file")
    assert find_latest_checkpoint(tmp_path / "run").name == "checkpoint-100"


DAMAGE = {
    "flipped weight": ("model.safetensors", flip, True),
    "flipped optimizer": ("optimizer.safetensors", flip, True),
    "flipped json": ("trainer.json", lambda path: flip(path, 3), True),
    "truncated": ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1]), False),
    "emptied": ("optimizer.json", lambda path: path.write_bytes(b""), False),
    "flipped manifest": ("manifest.json", lambda path: flip(path, 90), False),
    "cut manifest": ("manifest.json", lambda path: path.write_bytes(path.read_bytes()[:200]), False),
    "no manifest": ("manifest.json", Path.unlink, False),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_by_name_and_passed_over_otherwise(
    job, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    file, spoil, needs_checksum = DAMAGE[damage]
    first = job()
    for _ in range(2):
        first.train(1)
        first.save()
    spoil(tmp_path / "run" / "checkpoint-2" / file)

    second = job()
    with pytest.raises(CheckpointError, match=file):
        second.manager.load_checkpoint(tmp_path / "run" / "checkpoint-2")
    assert second.counter.value == 0
    with caplog.at_level(logging.WARNING):
        assert find_latest_checkpoint(tmp_path / "run", verify_checksums=True).name == "checkpoint-1"
    assert "passing over checkpoint-2" in caplog.text
    assert file in caplog.text
    expected = "checkpoint-2" if needs_checksum else "checkpoint-1"
    assert find_latest_checkpoint(tmp_path / "run").name == expected
    assert second.manager.load_checkpoint().step == 1
    assert second.counter.value == 1

    # Training continues past the damaged one and can save that step again, unless the directory is foreign
    # now.
    if damage == "no manifest":
        with pytest.raises(CheckpointError, match="Move it away"):
            second.manager.save_checkpoint(2)
    else:
        second.train(1)
        second.save()
        assert find_latest_checkpoint(tmp_path / "run", verify_checksums=True).name == "checkpoint-2"


@pytest.mark.parametrize(
    "file", ["optimizer.json", "optimizer.safetensors", "rng.rank0.json", "scheduler.json"]
)
def test_a_deleted_file_means_fresh_state(
    job, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    first = job()
    first.train(3)
    path = first.save()
    (path / file).unlink()
    assert find_latest_checkpoint(tmp_path / "run", verify_checksums=True) == path
    second = job()
    with caplog.at_level(logging.WARNING):
        loaded = second.manager.load_checkpoint()
    key = file.split(".")[0]
    assert loaded.missing == (key,)
    assert f"{file} was deleted" in caplog.text
    assert torch.equal(second.model[0].weight, first.model[0].weight)
    assert second.counter.value == 3
    if key == "optimizer":
        assert not second.optimizer.state


def test_deleted_weights_are_an_error_before_anything_is_loaded(job, tmp_path: Path) -> None:
    first = job()
    first.train(2)
    (first.save() / "model.safetensors").unlink()
    second = job()
    with pytest.raises(CheckpointError, match=r"required component 'model'.*model\.safetensors was deleted"):
        second.manager.load_checkpoint()
    assert second.counter.value == 0


def test_a_component_added_later_stays_fresh(job, counter, tmp_path: Path) -> None:
    first = job()
    first.train(1)
    first.save()
    second = job()
    extra = counter(7)
    second.components.append(
        StateComponent(key="extra", stateful=extra, sharing_pattern=SharingPattern.GLOBAL)
    )
    assert second.manager.load_checkpoint().missing == ("extra",)
    assert extra.value == 7


def test_a_failed_save_leaves_nothing(job, tmp_path: Path) -> None:
    first = job()
    first.train(1)
    first.save()
    first.counter.value = 2
    first.counter.state_dict = lambda: {"nested": {"where": object()}}
    with pytest.raises(CheckpointError, match=r"component 'trainer': the state at nested\.where is a"):
        first.save()
    first.counter.state_dict = lambda: 1 / 0
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        first.save()
    assert names(tmp_path / "run") == ["checkpoint-1"]


def test_ctrl_c_during_a_save_leaves_nothing(job, tmp_path: Path) -> None:
    class Interrupting:
        def save_pretrained(self, directory: str) -> None:
            (Path(directory) / "tokenizer.json").write_text("{}")
            raise KeyboardInterrupt

    first = job()
    first.manager._preprocessor = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        first.save()
    assert names(tmp_path / "run") == []


def test_same_step_is_replaced(job, tmp_path: Path) -> None:
    first = job()
    first.manager.save_checkpoint(3)
    first.train(2)
    first.manager.save_checkpoint(3)
    assert names(tmp_path / "run") == ["checkpoint-3"]
    second = job()
    second.manager.load_checkpoint()
    assert second.counter.value == 2
    second.train(1)
    second.manager.save_checkpoint(3)  # Resuming made it this run's.
    assert find_latest_checkpoint(tmp_path / "run", verify_checksums=True).name == "checkpoint-3"


def test_a_checkpoint_of_its_own_place_neither_rotates_nor_is_found(job, tmp_path: Path) -> None:
    first = job(save_total_limit=1)
    first.train(2)
    aside = tmp_path / "elsewhere" / "before warm-up ends"
    assert first.manager.save_checkpoint(2, path=aside) == aside
    assert find_latest_checkpoint(tmp_path / "run") is None
    for step in (3, 4):
        first.train(1)
        first.manager.save_checkpoint(step)
    assert names(tmp_path / "run") == ["checkpoint-4"]
    assert names(tmp_path / "elsewhere") == [aside.name]
    assert verify_checkpoint(aside, checksums=True).step == 2
    second = job()
    assert second.manager.load_checkpoint(aside).step == 2
    second.train(2)
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("taken", "exists already. Name a new directory"),
        ("link", "exists already"),
        ("run/checkpoint-2", "is the place of a checkpoint of this run"),
        ("elsewhere/checkpoint-7", "has the name of step 7, but this is step 2"),
    ],
)
def test_a_place_that_is_taken_or_would_be_misread_is_refused(
    job, tmp_path: Path, place: str, rule: str
) -> None:
    first = job()
    (tmp_path / "taken").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=rule):
        first.manager.save_checkpoint(2, path=tmp_path / place)
    assert not list(tmp_path.glob("*/*"))
    assert first.manager.save_checkpoint(2, path=tmp_path / "elsewhere" / "checkpoint-2").is_dir()


def test_another_runs_checkpoint_is_not_replaced(job, tmp_path: Path) -> None:
    first = job()
    first.train(1)
    path = first.save()
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="written by another run"):
        job().manager.save_checkpoint(1)
    assert (path / "manifest.json").read_bytes() == before


def test_rotation_keeps_to_its_own_run(job, tmp_path: Path) -> None:
    run = tmp_path / "run"
    old = job(save_total_limit=None)
    for step in (1, 2, 3):
        old.manager.save_checkpoint(step)
    (run / "checkpoint-4").mkdir()
    (run / "checkpoint-4" / "pytorch_model.bin").write_text("foreign")
    new = job(save_total_limit=1)
    for step in (10, 11):
        new.manager.save_checkpoint(step)
    assert names(run) == [f"checkpoint-{step}" for step in (1, 11, 2, 3, 4)]

    resumed = job(save_total_limit=2)
    resumed.manager.load_checkpoint(run / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"checkpoint-11 was written by another run, .* instead"):
        resumed.manager.save_checkpoint(5)
    resumed.manager.save_checkpoint(12)
    # 11 is another run's, and 2 is where this one continues from.
    assert names(run) == [f"checkpoint-{step}" for step in (11, 12, 2, 3, 4)]


def test_save_model_writes_a_hugging_face_directory(tmp_path: Path) -> None:
    class Configured(nn.Linear):
        config: ClassVar = {"hidden_size": 4, "model_type": "toy"}

    class Tokenizer:
        def save_pretrained(self, directory: str) -> None:
            (Path(directory) / "tokenizer.json").write_text("{}")
            (Path(directory) / "templates").mkdir(exist_ok=True)
            (Path(directory) / "templates" / "chat.jinja").write_text("{{ x }}")

    def manager(model: nn.Module, **config: object) -> CheckpointManager:
        component = StateComponent(
            key="model", stateful=ModelState(model), sharing_pattern=SharingPattern.REPLICATED
        )
        return CheckpointManager(
            CheckpointConfig(output_dir=tmp_path / "run", **config),
            dist=StaticDistributedEnvironment(),
            stateful_provider=StaticStatefulProvider([component]),
            preprocessor=Tokenizer(),
        )

    first, second = Configured(4, 4), Configured(4, 4)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    manager(first, max_shard_size=20).save_model(out)
    assert names(out) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "notes.txt",
        "templates",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text()) == Configured.config
    with pytest.raises(CheckpointError, match="overwrite_output_dir=True"):
        manager(second).save_model(out)
    with DirectoryLease(out), pytest.raises(CheckpointError, match="is in use by process"):
        manager(second).save_model(out, overwrite_output_dir=True)
    load_model_weights(second, out)
    assert torch.equal(first.weight, second.weight)
    torch.nn.init.zeros_(second.weight)
    manager(second).save_model(out, overwrite_output_dir=True)
    assert names(out) == ["config.json", "model.safetensors", "notes.txt", "templates", "tokenizer.json"]
    fresh = Configured(4, 4)
    load_model_weights(fresh, out)
    assert torch.equal(fresh.weight, second.weight)

    path = manager(first).save_checkpoint(1)
    assert {"config.json", "tokenizer.json", "templates"} <= set(names(path))
    verify_checkpoint(path, checksums=True)
    with pytest.raises(CheckpointError, match="is a checkpoint"):
        manager(first).save_model(path, overwrite_output_dir=True)


def test_name_clash_with_a_preprocessor_file(job) -> None:
    class Clashing:
        def save_pretrained(self, directory: str) -> None:
            (Path(directory) / "trainer.json").write_text("{}")

    first = job()
    first.manager._preprocessor = Clashing()
    with pytest.raises(CheckpointError, match=r"two parts .* want to write trainer\.json"):
        first.save()


@pytest.mark.parametrize("key", ["", "../x", "a/b", "a.b", "manifest", "1st", "a\x00"])
def test_keys_cannot_leave_the_directory(counter, key: str) -> None:
    with pytest.raises(CheckpointError, match="StateComponent key"):
        StateComponent(key=key, stateful=counter(), sharing_pattern=SharingPattern.GLOBAL)


def test_components_are_checked(counter, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    pattern = SharingPattern.GLOBAL
    with pytest.raises(TypeError, match=r"is a Linear\. Wrap it as ModelState\(model\)"):
        StateComponent(key="model", stateful=model, sharing_pattern=pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(TypeError, match=r"OptimizerState\(optimizer, model\)"):
        StateComponent(key="optimizer", stateful=optimizer, sharing_pattern=pattern)
    with pytest.raises(TypeError, match="a dict has no state_dict"):
        StateComponent(key="x", stateful={}, sharing_pattern=pattern)
    with pytest.raises(CheckpointError, match="process_group_name goes with"):
        StateComponent(key="x", stateful=counter(), sharing_pattern=SharingPattern.PER_GROUP)
    with pytest.raises(CheckpointError, match="validation_level"):
        StateComponent(key="x", stateful=counter(), sharing_pattern=pattern, validation_level="deep")
    twice = [StateComponent(key="x", stateful=counter(), sharing_pattern=pattern) for _ in range(2)]
    manager = CheckpointManager(
        CheckpointConfig(output_dir=tmp_path),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider(twice),
    )
    with pytest.raises(CheckpointError, match="two components have the key 'x'"):
        manager.save_checkpoint(1)


@pytest.mark.parametrize("step", [-1, True, 1.0, "7"])
def test_steps_are_checked(job, step: object) -> None:
    with pytest.raises(CheckpointError, match="must be an integer of 0 or more"):
        job().manager.save_checkpoint(step)


@pytest.mark.parametrize("setting", [{"save_total_limit": 0}, {"max_shard_size": 0}, {"timeout_seconds": 0}])
def test_settings_are_checked(tmp_path: Path, setting: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(setting))):
        CheckpointConfig(output_dir=tmp_path, **setting)


def test_metrics_are_checked(job, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"metrics\['eval_loss'\] is a Tensor"):
        job().manager.save_checkpoint(1, metrics={"eval_loss": torch.tensor(1.0)})
    assert not (tmp_path / "run").exists()


def test_newer_schema_and_escaping_manifest(job, tmp_path: Path) -> None:
    from checkpoint_core.manifest import _digest

    path = job().manager.save_checkpoint(1)
    original = json.loads((path / "manifest.json").read_text())

    def rewrite(**changes: object) -> None:
        document = {**original, **changes}
        document.pop("checksum")
        (path / "manifest.json").write_text(json.dumps({**document, "checksum": _digest(document)}))

    rewrite(schema_version=3)
    with pytest.raises(CheckpointError, match="schema version 3, but this version reads up to 2"):
        job().manager.load_checkpoint(path)
    for name in ("../../secret", "/etc/passwd", "a\\b"):
        rewrite(files={**original["files"], name: {"size": 1, "checksum": "0"}})
        with pytest.raises(CheckpointError, match="points outside the checkpoint"):
            job().manager.load_checkpoint(path)


def test_pointing_at_the_run_directory_names_a_checkpoint(job, tmp_path: Path) -> None:
    job().manager.save_checkpoint(1)
    with pytest.raises(CheckpointError, match=r"Pass one of them, such as .*checkpoint-1"):
        job().manager.load_checkpoint(tmp_path / "run")


def test_going_back_warns_about_later_checkpoints(job, caplog: pytest.LogCaptureFixture) -> None:
    first = job()
    early = first.manager.save_checkpoint(1)
    first.manager.save_checkpoint(2)
    with caplog.at_level(logging.WARNING):
        job().manager.load_checkpoint(early)
    assert "later checkpoints (checkpoint-2)" in caplog.text


def test_a_planted_pickle_is_never_executed(job, tmp_path: Path) -> None:
    path = job().manager.save_checkpoint(1)
    bomb = b"cbuiltins\nexec\n(S'raise SystemExit(3)'\ntR."
    for name in ("optimizer.pt", "pytorch_model.bin", "rng.pkl"):
        (path / name).write_bytes(bomb)
    assert job().manager.load_checkpoint().missing == ()


def test_a_relative_directory_stays_where_it_was(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    counter = StateComponent(key="c", stateful=job().counter, sharing_pattern=SharingPattern.GLOBAL)
    manager = CheckpointManager(CheckpointConfig(output_dir="run"), stateful_provider=[counter])
    manager.save_checkpoint(1)
    monkeypatch.chdir(tmp_path / "there")
    assert manager.save_checkpoint(2).parent == tmp_path / "here" / "run"
    assert manager.load_checkpoint().step == 2
    manager.close()
    with pytest.raises(CheckpointError, match="the manager was closed"):
        manager.save_checkpoint(3)


def test_a_branch_that_was_left_goes_first(job, tmp_path: Path) -> None:
    first = job(save_total_limit=None)
    for step in (10, 20, 30):
        first.manager.save_checkpoint(step)
    second = job(save_total_limit=2)
    second.manager.load_checkpoint(tmp_path / "run" / "checkpoint-10")
    for step in (11, 12):
        second.manager.save_checkpoint(step)
    assert names(tmp_path / "run") == ["checkpoint-10", "checkpoint-11", "checkpoint-12"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_shard_size", "5GB"), ("timeout_seconds", "x"), ("timeout_seconds", float("inf"))],
)
def test_settings_of_the_wrong_kind_are_named(tmp_path: Path, setting: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{setting}={value!r} must be"):
        CheckpointConfig(output_dir=tmp_path, **{setting: value})
