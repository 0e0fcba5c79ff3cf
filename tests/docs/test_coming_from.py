"""What `coming-from.md` says of names is what the hints say, and the names of others exist there."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import accelerate
import lightning.pytorch as pl
import pytest
import transformers
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from trainer_core import ConfigurationError, Trainer, TrainingArguments, arguments_from_dict
from trainer_core.hints import _INPUTS, _SHORT_NAMES, _WITHOUT_SETTING

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md").read_text()
SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
OURS = {field.name for field in dataclasses.fields(TrainingArguments)}
HUGGING_FACE = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
HEADS = ("Hugging Face", "Lightning", "torchtitan", "short", "of `llama-pretrain` alone")


def table(head: str, second: str = "here") -> dict[str, str]:
    """{name of theirs: what the table says} of the table with this head."""
    body = PAGE.split(f"| {head} | {second} |\n|---|---|\n")[1].split("\n\n")[0]
    found = {}
    for row in body.splitlines():
        theirs, ours = row.strip("|").split("|")
        for name in re.findall(r"`([\w.]+)`", theirs):
            found[name] = ours.strip()
    return found


RENAMED = {head: table(head) for head in HEADS}
INSTEAD = table("theirs", "the hint")


def refusal(name: str) -> str:
    """What is said of a setting that does not exist."""
    with pytest.raises(ConfigurationError) as refused:
        arguments_from_dict(TrainingArguments, {name: 1})
    return str(refused.value).partition("is not a known setting. ")[2]


@pytest.mark.parametrize("head", HEADS[:4])
def test_the_hint_for_each_name_is_the_one_of_the_table(head: str) -> None:
    for theirs, ours in RENAMED[head].items():
        meant = [name for name in re.findall(r"`([^`]*)`", ours) if name.partition("=")[0] in OURS]
        told = refusal(theirs)
        if meant:
            assert told == f"Did you mean {meant[0] if '=' in meant[0] else repr(meant[0])}?"
        else:
            assert told == INSTEAD.get(theirs, "See the list of settings for what exists.")


def test_the_hint_where_no_setting_is_needed_is_the_one_of_the_table() -> None:
    assert {name: refusal(name) for name in INSTEAD} == INSTEAD == dict(_WITHOUT_SETTING)


def test_the_tables_have_every_name_that_the_hints_know() -> None:
    listed = {name: ours for one in RENAMED.values() for name, ours in one.items()}
    assert {name: " ".join(re.findall(r"`([^`]*)`", ours)) for name, ours in listed.items()} == dict(
        _SHORT_NAMES
    )


def test_the_table_of_inputs_is_what_the_hints_know() -> None:
    listed = {name: ours.strip("`") for name, ours in table("given to the trainer").items()}
    assert listed == dict(_INPUTS)
    for theirs, ours in listed.items():
        with pytest.raises(
            TypeError, match=f"{theirs} is not an input of the trainer. Did you mean '{ours}'"
        ):
            Trainer(TrainingArguments(), **{theirs: None})


def test_the_names_are_those_of_the_others() -> None:
    assert {*RENAMED["Hugging Face"]} <= HUGGING_FACE
    fit = inspect.signature(pl.Trainer.fit).parameters
    assert {*RENAMED["Lightning"]} <= {*inspect.signature(pl.Trainer).parameters, *fit}
    assert not {name for head in HEADS[:4] for name in RENAMED[head]} & OURS


def test_the_list_of_equal_names_is_complete() -> None:
    listed = PAGE.split("but for the tables below:\n\n")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == OURS & HUGGING_FACE


def defaults(cls: type) -> dict[str, object]:
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(cls)
    }


def test_the_table_of_defaults_is_true_and_complete() -> None:
    body = PAGE.split("| default of | Hugging Face | here |\n|---|---|---|\n")[1].split("\n\n")[0]
    theirs, ours = defaults(transformers.TrainingArguments), defaults(TrainingArguments)
    told = set()
    for row in body.splitlines():
        names, one, other = (re.findall(r"`([^`]*)`", cell) for cell in row.strip("|").split("|"))
        for name in names:
            told.add(name)
            assert repr(theirs[name]) == one[0], name
            assert repr(ours[name]) == other[0], name
    differing = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    same = {"gradient_checkpointing", "lr_scheduler_kwargs", "output_dir"}
    in_the_other_table = {"optim", "activation_checkpointing"}
    assert told == differing - same - in_the_other_table


@pytest.mark.parametrize("name", ["save_steps", "eval_steps", "logging_steps", "warmup_steps"])
def test_a_share_of_the_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        arguments_from_dict(TrainingArguments, {name: 0.5})


def cells(task: int, column: int, part: int) -> list[str]:
    """The code in a cell of the tables of the fifteen tasks."""
    rows = re.findall(rf"^\| {task}\. (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 2
    return re.findall(r"`([^`]*)`", rows[part].split(" | ")[column])


def test_what_the_tasks_name_exists_in_the_others() -> None:
    for task in range(1, 16):
        assert cells(task, 1, 0) == cells(task, 1, 1), "the column of ours is the same in both tables"
        for name in re.findall(r"(\w+)=", " ".join(cells(task, 1, 0))):
            assert name in OURS | {*inspect.signature(Trainer).parameters}, (task, name)
            assert f"{name}=" in SCRIPT or name in ("max_steps", "activation_checkpointing"), (task, name)
        for name in re.findall(r"(\w+)=", " ".join(cells(task, 2, 0))):
            known = HUGGING_FACE | {"train_dataset", "compute_metrics", "resume_from_checkpoint"}
            assert name in known, (task, name)
        for name in re.findall(r"(\w+)=", " ".join(cells(task, 3, 0))):
            known = {*inspect.signature(pl.Trainer).parameters, "ckpt_path", "every_n_train_steps", "monitor"}
            assert name in known, (task, name)
        for code in cells(task, 2, 1):
            for name in re.findall(r"(\w+)=", code):
                known = {*inspect.signature(Accelerator).parameters}
                known |= {*inspect.signature(ProjectConfiguration).parameters}
                assert name in known, (task, name)
            method = re.match(r"(?:with )?(\w+)\(", code)
            if method and method[1] not in ("ProjectConfiguration", "skip_first_batches"):
                assert hasattr(Accelerator, method[1]), (task, code)
    saving = inspect.signature(pl.callbacks.ModelCheckpoint).parameters
    assert {"every_n_train_steps", "monitor"} <= {*saving}
    assert callable(accelerate.skip_first_batches)
    assert callable(transformers.EarlyStoppingCallback)
