"""An address as output directory: what of a run goes where, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_core import ConfigurationError, TrainingArguments, run_path

PLACES = [
    ("runs/a", None, "runs/a", "runs/a"),
    ("runs/a", "logs", "runs/a", "logs"),
    ("s3://bucket/team/a", None, "runs/a", "runs/a"),
    ("S3://bucket/team/a/", "logs/a", "logs/a", "logs/a"),
]


@pytest.mark.parametrize(("output_dir", "logging_dir", "run", "logs"), PLACES)
def test_where_a_run_lies(output_dir: str, logging_dir: str | None, run: str, logs: str) -> None:
    args = TrainingArguments(output_dir=output_dir, logging_dir=logging_dir)
    assert (args.run_path, args.log_path) == (Path(run), Path(logs))
    assert run_path(output_dir, logging_dir) == Path(run)
    assert args.saves_to_store == (output_dir != "runs/a")


REFUSED = {
    "http://host/a": "begin with http:// are not supported",
    "s3://bucket": "is a whole bucket",
    "s3://key:secret@bucket/a": "Leave out credentials",
    "s3:///a": "does not name a bucket",
}


@pytest.mark.parametrize("output_dir", REFUSED)
def test_addresses_that_are_refused(output_dir: str) -> None:
    with pytest.raises(ConfigurationError, match=REFUSED[output_dir]) as refused:
        TrainingArguments(output_dir=output_dir)
    assert "secret" not in str(refused.value)


def test_settings_that_do_not_go_with_a_store() -> None:
    with pytest.raises(ConfigurationError, match="which all nodes share"):
        TrainingArguments(output_dir="s3://bucket/a", save_on_each_node=True)
    with pytest.raises(ConfigurationError, match="which stores cannot do"):
        TrainingArguments(output_dir="runs/a", logging_dir="s3://bucket/logs")
    with pytest.raises(ConfigurationError, match="Leave out credentials"):
        TrainingArguments(output_dir="runs/a", resume_from_checkpoint="s3://key:secret@bucket/a/checkpoint-1")
