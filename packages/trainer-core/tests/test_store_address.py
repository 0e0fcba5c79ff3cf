"""An address as output directory: what of a run goes where, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_core import ConfigurationError, TrainingArguments, run_path

PLACES = [
    ("runs/a", None, "runs/a", "runs/a"),
    ("runs/a", "logs", "runs/a", "logs"),
    ("s3://bucket/team/a", None, "runs/bucket/team/a", "runs/bucket/team/a"),
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
    "s3://bucket/a/checkpoint-10": "is the address of a checkpoint",
    "s3:/bucket/a": "has lost a slash",
    " s3://bucket/a": "white space around it",
    "s3://bucket/a\n": "white space around it",
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
    for name in ("logging_dir", "resume_from_checkpoint"):
        with pytest.raises(ConfigurationError, match="is empty"):
            TrainingArguments(output_dir="s3://bucket/a", **{name: ""})  # type: ignore[arg-type]


TIERS = {
    "runs/b": "does not name a place in an object store",
    "s3://bucket": "does not name a place in an object store",
    "s3://key:secret@bucket/a": "Leave out credentials",
}


@pytest.mark.parametrize("remote_dir", TIERS)
def test_second_tiers_that_are_refused(remote_dir: str) -> None:
    with pytest.raises(ConfigurationError, match=TIERS[remote_dir]) as refused:
        TrainingArguments(output_dir="runs/a", remote_dir=remote_dir)
    assert "secret" not in str(refused.value)


def test_settings_that_do_not_go_with_a_second_tier() -> None:
    with pytest.raises(ConfigurationError, match="from which nothing is uploaded"):
        TrainingArguments(output_dir="s3://bucket/a", remote_dir="s3://bucket/b")
