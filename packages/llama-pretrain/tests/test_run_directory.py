"""The output directory belongs to one run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from checkpoint_core import DirectoryLease
from llama_pretrain import PretrainArguments
from llama_pretrain.launch import refuse_if_in_use
from llama_pretrain.run_directory import RunDirectory
from llama_pretrain.settings import resolve
from trainer_core import ConfigurationError

SUBJECT = {"model": {"hidden_size": 64, "num_hidden_layers": 2}, "data": "abc", "tokenizer": {"name": "byte"}}


def _begun(tmp_path: Path, **settings: object) -> tuple[RunDirectory, PretrainArguments]:
    args = PretrainArguments(output_dir=str(tmp_path / "deep" / "run"), **settings)  # type: ignore[arg-type]
    directory = RunDirectory(args.output_dir)
    assert directory.begin(args, SUBJECT) == {}
    return directory, args


def test_a_new_directory_is_made_and_tells_its_settings(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path, max_steps=9)
    assert sorted(path.name for path in directory.path.iterdir()) == ["config.yaml", "run.json"]
    assert yaml.safe_load((directory.path / "config.yaml").read_text())["max_steps"] == 9
    assert directory.arguments() == args


def test_the_same_run_goes_on_and_changes_are_told(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path, max_steps=9)
    (directory.path / "checkpoint-5").mkdir()
    assert directory.begin(args, SUBJECT) == {}
    longer = replace(args, max_steps=20, eval_steps=7)
    assert directory.begin(longer, SUBJECT) == {"max_steps": (9, 20), "eval_steps": (200, 7)}
    assert directory.arguments() == longer


def test_a_run_that_evaluated_all_rows_is_told_that_it_evaluates_some(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path)
    (directory.path / "checkpoint-5").mkdir()
    path = directory.path / "config.yaml"
    before = yaml.safe_load(path.read_text())
    del before["max_eval_samples"]  # as versions did that did not know it
    path.write_text(yaml.safe_dump(before))
    assert directory.begin(args, SUBJECT) == {"max_eval_samples": (None, 512)}


def test_changes_within_a_group_are_told_one_by_one(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path, trainer="ddp", lr_scheduler_kwargs={"min_lr_rate": 0.2})
    (directory.path / "checkpoint-5").mkdir()
    path = directory.path / "config.yaml"
    before = yaml.safe_load(path.read_text())
    del before["uneven_batches"]
    path.write_text(yaml.safe_dump(before))
    changed = replace(args, ddp=replace(args.ddp, static_graph=True), lr_scheduler_kwargs={})
    assert directory.begin(changed, SUBJECT) == {
        "lr_scheduler_kwargs": ({"min_lr_rate": 0.2}, {}),
        "ddp.static_graph": (False, True),
    }
    assert directory.arguments() == changed


def test_a_run_without_checkpoint_may_become_another(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path)
    (directory.path / "trainer_logs.json").write_text("[]")
    other = replace(args, seed=2, resume_from_checkpoint=False)
    subject = SUBJECT | {"data": "abd"}
    assert directory.check(other, subject) == {}
    assert directory.arguments() == args
    assert directory.begin(other, subject) == {}
    assert directory.arguments() == other
    (directory.path / "checkpoint-5").mkdir()
    directory.check_identity(other, subject)
    with pytest.raises(ConfigurationError, match="begun with 'abd'"):
        directory.begin(args, SUBJECT)


@pytest.mark.parametrize(
    ("changes", "subject", "words"),
    [
        ({"seed": 2}, {}, ["seed=2", "begun with 1"]),
        ({"sequence_length": 64}, {}, ["sequence_length=64", "begun with 128"]),
        (
            {"learning_rate": 0.1, "weight_decay": 0.2, "allow_changes": ("adam_beta1",)},
            {},
            [
                "learning_rate=0.1",
                "begun with 0.002",
                "--allow-changes adam_beta1,learning_rate,weight_decay",
            ],
        ),
        ({"learning_rate": 0.1, "seed": 2}, {}, ["seed=2", "begun with 1. Choose another"]),
        ({}, {"data": "abd"}, ["data='abd'", "begun with 'abc'"]),
        (
            {},
            {"model": {"hidden_size": 64, "num_hidden_layers": 3}},
            ["model={'num_hidden_layers': 3}", "begun with {'num_hidden_layers': 2}"],
        ),
        (
            {"resume_from_checkpoint": False},
            {},
            ["resume_from_checkpoint=False", "contains checkpoints", "--fresh"],
        ),
    ],
)
def test_another_run_is_refused_and_nothing_changes(
    tmp_path: Path, changes: dict[str, object], subject: dict[str, object], words: list[str]
) -> None:
    directory, args = _begun(tmp_path)
    (directory.path / "checkpoint-5").mkdir()
    before = {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()}
    with pytest.raises(ConfigurationError) as caught:
        directory.begin(replace(args, **changes), SUBJECT | subject)  # type: ignore[arg-type]
    for word in [*words, "--output-dir"]:
        assert word in str(caught.value)
    assert {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()} == before


def test_what_may_change_is_told_and_kept(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path)
    (directory.path / "checkpoint-5").mkdir()
    lower = replace(args, learning_rate=5e-4)
    assert directory.begin(replace(lower, allow_changes=("learning_rate",)), SUBJECT) == {
        "learning_rate": (0.002, 5e-4)
    }
    assert directory.arguments() == lower
    assert directory.begin(lower, SUBJECT) == {}
    with pytest.raises(ConfigurationError, match=r"begun with 0\.0005"):
        directory.begin(args, SUBJECT)
    for name, why in {
        "sequence_length": "documents would repeat",
        "model": "its shape",
        "rope_scaling": "positions",
    }.items():
        with pytest.raises(ConfigurationError, match=f"allow_changes='{name}' cannot change .*{why}"):
            replace(args, allow_changes=(name,))


def test_old_files_say_otherwise_that_epochs_do_not_limit_a_run(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path, num_train_epochs=-1)
    (directory.path / "checkpoint-5").mkdir()
    assert directory.begin(replace(args, num_train_epochs=None), SUBJECT) == {}


def test_old_files_have_a_model_without_rotary_scaling(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path)
    (directory.path / "checkpoint-5").mkdir()
    plain = SUBJECT | {"model": {**SUBJECT["model"], "rope_scaling": None}}  # type: ignore[dict-item]
    assert directory.begin(args, plain) == {}
    assert directory.begin(args, SUBJECT) == {}
    scaled = SUBJECT | {"model": {**SUBJECT["model"], "rope_scaling": {"factor": 2.0}}}  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"model=\{'rope_scaling': \{'factor': 2.0\}\} differs"):
        directory.begin(args, scaled)


def test_a_fresh_start_moves_another_run_aside(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path)
    (directory.path / "checkpoint-5").mkdir()
    (directory.path / "trainer_logs.json").write_text("[]")
    before = {path.name for path in directory.path.iterdir()}
    fresh = resolve({"output_dir": args.output_dir, "seed": 2, "fresh": True})
    assert directory.check(fresh, SUBJECT) == {}
    assert {path.name for path in directory.path.iterdir()} == before
    directory.begin(fresh, SUBJECT, {"started": "now"})
    (folder,) = directory.path.glob("previous-*")
    assert {path.name for path in folder.iterdir()} == before
    assert (directory.arguments().seed, directory.arguments().starts_fresh) == (2, False)
    (directory.path / "checkpoint-3").mkdir()
    with pytest.raises(ConfigurationError, match="seed=1"):
        directory.check(args, SUBJECT)
    with pytest.raises(
        ConfigurationError, match="fresh=True cannot be combined with resume_from_checkpoint='a'"
    ):
        resolve({"fresh": True, "resume_from_checkpoint": "a"})


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    args = PretrainArguments(output_dir=str(tmp_path))
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(ConfigurationError, match=r"not a run of llama-pretrain \(such as 'thesis.tex'\)"):
        RunDirectory(tmp_path).begin(args, SUBJECT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigurationError, match="is not a directory"):
        RunDirectory(tmp_path / "thesis.tex").begin(args, SUBJECT)


def test_a_start_that_was_killed_half_way_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / ".run.json.partial").write_text("{")
    args = PretrainArguments(output_dir=str(tmp_path))
    assert RunDirectory(tmp_path).begin(args, SUBJECT) == {}
    (tmp_path / "config.yaml").unlink()
    assert RunDirectory(tmp_path).begin(args, SUBJECT) == {}
    assert RunDirectory(tmp_path).arguments() == args


def test_damage_is_named(tmp_path: Path) -> None:
    directory, args = _begun(tmp_path)
    (directory.path / "checkpoint-5").mkdir()
    (directory.path / "run.json").write_text(json.dumps(SUBJECT)[:20])
    with pytest.raises(ConfigurationError, match=r"damaged run\.json"):
        directory.begin(args, SUBJECT)
    with pytest.raises(ConfigurationError, match="contains no run"):
        RunDirectory(tmp_path / "other").arguments()


def test_a_directory_is_in_use_for_all_but_the_processes_of_its_own_run(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    refuse_if_in_use(directory)
    with DirectoryLease(directory).acquire():
        refuse_if_in_use(directory, {1, os.getpid()})
        with pytest.raises(ConfigurationError, match=f"is in use by process {os.getpid()} on"):
            refuse_if_in_use(directory, {1})
    refuse_if_in_use(directory)
