"""The callbacks under `transformers.Trainer`: the same objects, with a run of its own."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from perf_metrics import DefaultMetrics, JsonLogger, ProgressCallback, model_flops_per_token
from perf_metrics.callbacks.device_metrics import PeakMemory
from perf_metrics.callbacks.metrics import IntervalCounts

PEAK = 1e12


def arguments(folder: Path, **settings: object) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "logging_steps": 5,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "non_padding",
        "disable_tqdm": True,
        "report_to": [],
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**chosen, **settings})


def entries(folder: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads((folder / "trainer_logs.json").read_text())
    return read


def train(
    folder: Path, model: nn.Module, rows: Dataset[Any], callbacks: list[object], **settings: object
) -> list[dict[str, Any]]:
    """Train, and return the records of the intervals."""
    evaluation = {"eval_dataset": rows} if "eval_strategy" in settings else {}
    trainer = Trainer(
        model,
        arguments(folder, **settings),
        train_dataset=rows,
        callbacks=[*callbacks, JsonLogger()],
        **evaluation,
    )  # type: ignore[arg-type]
    trainer.train()
    return [entry for entry in entries(folder) if "loss" in entry]


def test_counts_are_exact_and_the_derived_entries_follow_from_them(tmp_path: Path, llama, rows) -> None:
    flops = model_flops_per_token(llama, 16)
    callbacks = [IntervalCounts(flops), PeakMemory(), DefaultMetrics(PEAK)]
    records = train(tmp_path, llama, rows(80), callbacks, gradient_accumulation_steps=2)
    assert [record["global_step"] for record in records] == [5, 10]
    # Half of the rows are padded; which of them are in which interval, the sampler decides.
    assert sum(record["input_tokens"] for record in records) == 40 * (16 + 12)
    for record in records:
        assert record["compute_tokens"] == 40 * 16
        assert record["flos"] == flops * record["compute_tokens"]
        seconds = record["interval_seconds"]
        assert record["tok_per_sec"] == record["input_tokens"] / seconds
        assert record["mfu"] == record["flos"] / (seconds * PEAK)
        assert 0 < record["data_wait_share"] < 1
        assert not [key for key in record if "mem" in key or "alloc" in key]


def test_the_trainers_own_display_sees_the_added_entries(
    tmp_path: Path, llama, rows, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, llama, rows(80), [IntervalCounts(), DefaultMetrics(PEAK)])
    printed = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(printed) == 2
    assert all("'tok_per_sec'" in line for line in printed)


class Timed(Trainer):
    """Every training batch takes a second on the clock, evaluating one 10, and a checkpoint 100."""

    ticks: Any

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        self.ticks.now += 1
        return super().training_step(*arguments, **keywords)

    def prediction_step(self, *arguments: Any, **keywords: Any) -> Any:
        self.ticks.now += 10
        return super().prediction_step(*arguments, **keywords)

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        self.ticks.now += 100
        super().save_model(*arguments, **keywords)


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "eval_on_start": True},
    ],
    ids=["between records", "at records", "at epochs"],
)
def test_evaluating_and_saving_are_left_out_exactly(
    tmp_path: Path, llama, rows, clock, settings: dict[str, Any]
) -> None:
    class Slow(TrainerCallback):
        """Another callback that takes its time at the end of an evaluation."""

        def on_evaluate(self, *arguments: object, **keywords: object) -> None:
            clock.now += 1000

    # 4 epochs of 3 steps; fetching a row takes an eighth of a second.
    data = {"train_dataset": rows(24, clock, 0.125), "eval_dataset": {"a": rows(8), "b": rows(4)}}
    made = arguments(tmp_path, max_steps=12, logging_steps=4, gradient_accumulation_steps=2, **settings)
    callbacks = [Slow(), IntervalCounts(clock=clock), JsonLogger()]
    trainer = Timed(llama, made, callbacks=callbacks, **data)  # type: ignore[arg-type]
    trainer.ticks = clock
    # Evaluation rows cost time too: each one 1000 seconds, before its first prediction step as well.
    data["eval_dataset"]["a"]._clock, data["eval_dataset"]["a"]._seconds = clock, 1000.0
    trainer.train()
    assert clock.now > 10_000
    records = [entry for entry in entries(tmp_path) if "loss" in entry]
    # 4 steps of 2 batches each. Within an epoch of 6 batches the loader is one batch of 4 rows ahead.
    fetching = [batches * 4 * 0.125 for batches in (6 + 3, 3 + 5, 1 + 6)]
    assert [record["interval_seconds"] for record in records] == [8 + seconds for seconds in fetching]
    shares = [seconds / (8 + seconds) for seconds in fetching]
    assert [record["data_wait_share"] for record in records] == pytest.approx(shares)


def test_what_the_trainer_does_not_count_is_left_away_and_said_once(
    tmp_path: Path, llama, rows, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [IntervalCounts(1000.0), DefaultMetrics(PEAK)]
    with caplog.at_level(logging.WARNING, logger="perf_metrics"):
        records = train(tmp_path, llama, rows(80), callbacks, include_num_input_tokens_seen="no")
    (warning,) = [record.message for record in caplog.records if record.name == "perf_metrics"]
    assert "include_num_input_tokens_seen='non_padding'" in warning
    for record in records:
        assert "input_tokens" not in record
        assert "tok_per_sec" not in record
        assert record["compute_tokens"] == 20 * 16
        assert record["mfu"] == 1000.0 * 20 * 16 / (record["interval_seconds"] * PEAK)


class Plain(nn.Module):
    """A model that is not a `PreTrainedModel`."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("setting", ["all", "non_padding"])
def test_a_model_whose_positions_the_trainer_does_not_count(
    tmp_path: Path, rows, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="perf_metrics"):
        records = train(
            tmp_path, Plain(), rows(80), [IntervalCounts(1000.0)], include_num_input_tokens_seen=setting
        )
    warnings = [record.message for record in caplog.records if record.name == "perf_metrics"]
    for record in records:
        counted = {key: record.get(key) for key in ("input_tokens", "compute_tokens", "flos")}
        if setting == "all":
            assert counted == {"input_tokens": 320, "compute_tokens": 320, "flos": 320_000.0}
        else:
            assert counted["input_tokens"] < 320
            assert (counted["compute_tokens"], counted["flos"]) == (None, None)
    assert [("num_parameters()" in warning) for warning in warnings] == [True] * (setting != "all")


def test_a_resumed_run_counts_from_where_it_goes_on(tmp_path: Path, llama, rows) -> None:
    trainer = Trainer(
        llama, arguments(tmp_path, max_steps=5, save_strategy="steps", save_steps=5), train_dataset=rows(80)
    )
    trainer.train()
    again = Trainer(
        llama,
        arguments(tmp_path),
        train_dataset=rows(80),
        callbacks=[IntervalCounts(), JsonLogger()],  # type: ignore[list-item]
    )
    again.train(resume_from_checkpoint=True)
    (record,) = [entry for entry in entries(tmp_path) if "loss" in entry]
    assert (record["global_step"], record["compute_tokens"]) == (10, 20 * 16)


@pytest.mark.parametrize("bars", [True, False])
def test_the_table_with_and_without_the_bars_of_both(
    tmp_path: Path, llama, rows, bars: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    progress = ProgressCallback(use_tqdm=bars, output_stream=stream)
    trainer = Trainer(
        llama,
        arguments(tmp_path, eval_strategy="steps", eval_steps=5, disable_tqdm=not bars),
        train_dataset=rows(80),
        eval_dataset=rows(8),
        callbacks=[IntervalCounts(), DefaultMetrics(), progress],  # type: ignore[list-item]
    )
    trainer.train()
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["step", "epoch", "loss", "learning_rate", "grad_norm", "tok_per_sec"]
    assert [line.split()[0] for line in lines[1:6]] == ["5/10", "5/10", "10/10", "10/10", "this"]
    assert [" eval  loss " in line for line in lines[1:5]] == [False, True] * 2
    assert "num_input_tokens_seen" not in stream.getvalue()
    assert [line.split()[0] for line in lines[6:]] == ["runtime", "mean", "samples/s", "steps/s", "epoch"]
    err = capsys.readouterr().err
    assert (err.count("10/10") >= 2) == bars


def test_an_evaluation_by_itself(tmp_path: Path, llama, rows) -> None:
    stream = io.StringIO()
    callbacks = [IntervalCounts(), PeakMemory(), DefaultMetrics(), ProgressCallback(False, stream)]
    trainer = Trainer(llama, arguments(tmp_path), eval_dataset=rows(8), callbacks=callbacks)  # type: ignore[arg-type]
    trainer.remove_callback(PrinterCallback)
    trainer.evaluate()
    trainer.predict(rows(8))
    (line,) = stream.getvalue().splitlines()
    assert " eval  loss " in line


@pytest.mark.parametrize("make", [IntervalCounts, PeakMemory, DefaultMetrics, ProgressCallback, JsonLogger])
def test_there_is_a_handler_for_each_event_of_the_trainer(make: Callable[[], object]) -> None:
    events = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    assert {name for name in events if not callable(getattr(make(), name, None))} == set()


def test_flops_per_token_is_a_positive_number() -> None:
    with pytest.raises(ValueError, match=r"flops_per_token=0 must be a positive number"):
        IntervalCounts(0)


def test_default_metrics_alone_says_what_is_missing(
    tmp_path: Path, llama, rows, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(*callbacks: object) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="perf_metrics"):
            train(tmp_path, llama, rows(80), [*callbacks])
        return [record.message for record in caplog.records if record.name == "perf_metrics"]

    (warning,) = warnings(DefaultMetrics(PEAK))
    assert "DefaultMetrics adds nothing to the log" in warning
    assert "Put IntervalCounts() before it" in warning
    assert warnings(IntervalCounts(), DefaultMetrics(PEAK)) == []
