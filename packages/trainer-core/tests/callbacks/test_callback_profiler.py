from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perf_metrics import read_breakdown
from trainer_core import ConfigurationError, Trainer, TrainerControl, TrainerState
from trainer_core.callbacks import ExternalControl, ProfilerCallback


def profiled_steps(trace: Path) -> int:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(str(event.get("name", "")).startswith("ProfilerStep#") for event in events)


def test_each_cycle_gives_a_trace_and_a_table(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    callback = ProfilerCallback(skip_first=1, wait=1, warmup=1, active=2, repeat=2, top=5, record_shapes=True)
    make_trainer(max_steps=12, num_train_epochs=-1, callbacks=[callback]).train()
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000005-rank0.json.gz",
        "step-00000005-rank0.txt",
        "step-00000009-rank0.json.gz",
        "step-00000009-rank0.txt",
    ]
    for step in (5, 9):
        trace = folder / f"step-{step:08d}-rank0.json.gz"
        assert profiled_steps(trace) == 2
        assert b"aten::embedding" in gzip.decompress(trace.read_bytes())
        table = trace.with_name(f"step-{step:08d}-rank0.txt").read_text()
        assert "Self CPU" in table
        assert "Input Shapes" in table
        assert 0 < table.count("aten::") + table.count("ProfilerStep") <= 5


def test_a_run_that_ends_within_a_cycle_writes_what_it_has(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    callback = ProfilerCallback(skip_first=0, wait=0, warmup=1, active=10)
    make_trainer(max_steps=4, num_train_epochs=-1, callbacks=[callback]).train()
    trace = tmp_path / "run" / "profile" / "step-00000004-rank0.json.gz"
    assert profiled_steps(trace) >= 3


def test_a_run_that_ends_before_the_cycle_writes_nothing(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    make_trainer(max_steps=2, num_train_epochs=-1, callbacks=[ProfilerCallback()]).train()
    assert not (tmp_path / "run" / "profile").exists()


def events_of(trace: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return events


class AskAt:
    """Asks for a profile after a step, as a callback of the user may."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step == self.step:
            control.should_profile = True


def test_steps_are_recorded_when_somebody_asks(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    callbacks = [ProfilerCallback(repeat=0, warmup=1, active=2), AskAt(3), ExternalControl(every_seconds=0)]

    class Write:
        def on_step_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
            if state.global_step == 9:
                (tmp_path / "run" / "control").write_text("profile save")

    trainer = make_trainer(max_steps=16, num_train_epochs=-1, callbacks=[*callbacks, Write()])
    trainer.train()
    folder = tmp_path / "run" / "profile"
    # Step 4 warms up after the request in step 3, step 11 after the one in step 10.
    assert sorted(path.name for path in folder.glob("*.gz")) == [
        "step-00000006-rank0.json.gz",
        "step-00000013-rank0.json.gz",
    ]
    for step in (6, 13):
        trace = folder / f"step-{step:08d}-rank0.json.gz"
        assert profiled_steps(trace) == 2
        assert sum(event.get("name") == "data wait" for event in events_of(trace)) >= 2
    assert not trainer.control.should_profile


def test_a_save_is_a_span_of_the_trace(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    callback = ProfilerCallback(skip_first=0, wait=0, warmup=1, active=3)
    make_trainer(
        max_steps=4, num_train_epochs=-1, save_strategy="steps", save_steps=2, callbacks=[callback]
    ).train()
    # The save after step 2 is at the beginning of the profiler's next step.
    (trace,) = (tmp_path / "run" / "profile").glob("*.gz")
    breakdown = read_breakdown(trace)
    assert [step.nanoseconds["checkpoint"] > 0 for step in breakdown.ranks[0].steps] == [False, True, False]


def test_a_request_that_nobody_serves_is_told(
    make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(max_steps=3, num_train_epochs=-1, callbacks=[AskAt(1)]).train()
    assert [record.message for record in caplog.records if "a profile of the next steps" in record.message]
    assert not (tmp_path / "run" / "profile").exists()


def test_a_fall_of_ofu_asks_once(
    make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ofu = {1: 0.5, 2: 0.2, 3: 0.1, 4: None, 5: 0.4, 6: 0.4}

    class Ofu:
        def on_log_step(self, args: object, state: TrainerState, *_: object, logs: Any, **__: object) -> None:
            logs["ofu"] = ofu[state.global_step]

    callbacks = [Ofu(), ProfilerCallback(repeat=0, warmup=0, active=1, below_ofu=0.3)]
    make_trainer(max_steps=6, num_train_epochs=-1, logging_steps=1, callbacks=callbacks).train()
    assert [path.name for path in (tmp_path / "run" / "profile").glob("*.gz")] == [
        "step-00000003-rank0.json.gz"
    ]
    assert "ofu is 20.0%, below below_ofu=0.3" in caplog.text


def test_bad_threshold() -> None:
    with pytest.raises(ConfigurationError, match=r"below_ofu=30 must be a share"):
        ProfilerCallback(below_ofu=30)


@pytest.mark.parametrize("setting", ["wait", "warmup", "active", "repeat", "skip_first", "top"])
def test_bad_settings(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting}=-1 must be [01] or more"):
        ProfilerCallback(**{setting: -1})
