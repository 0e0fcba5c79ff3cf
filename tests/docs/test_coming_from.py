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
from trainer_core.errors import _SHORT_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md").read_text()
SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
OURS = {field.name for field in dataclasses.fields(TrainingArguments)}
HUGGING_FACE = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
OF_THE_COMMAND = {"sequence_length"}


def table(head: str) -> dict[str, str]:
    """{name of theirs: ours} of the table with this head."""
    body = PAGE.split(f"| {head} | here |\n|---|---|\n")[1].split("\n\n")[0]
    found = {}
    for row in body.splitlines():
        theirs, ours = row.strip("|").split("|")
        for name in re.findall(r"`(\w+)`", theirs):
            found[name] = re.findall(r"`(\w+)`", ours)[0]
    return found


RENAMED = {head: table(head) for head in ("Hugging Face", "Lightning", "short")}


@pytest.mark.parametrize("head", RENAMED)
def test_the_hint_for_each_name_is_the_one_of_the_table(head: str) -> None:
    for theirs, ours in RENAMED[head].items():
        with pytest.raises(ConfigurationError) as refused:
            arguments_from_dict(TrainingArguments, {theirs: 1})
        if ours not in OF_THE_COMMAND:
            assert f"Did you mean {ours!r}?" in str(refused.value)


def test_the_tables_have_every_name_that_the_hints_know() -> None:
    assert {name: ours for one in RENAMED.values() for name, ours in one.items()} == dict(_SHORT_NAMES)


def test_the_names_are_those_of_the_others() -> None:
    assert {*RENAMED["Hugging Face"]} <= HUGGING_FACE
    fit = inspect.signature(pl.Trainer.fit).parameters
    assert {*RENAMED["Lightning"]} <= {*inspect.signature(pl.Trainer).parameters, *fit}
    assert not {*RENAMED["Hugging Face"], *RENAMED["Lightning"], *RENAMED["short"]} & OURS


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
