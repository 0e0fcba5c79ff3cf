from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler

from dataloader_dispatch import connection
from dist_env import HostSums, StaticDistributedEnvironment
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
    assert profiled_steps(trace) == 3  # 2 to 4, and none that the run did not have


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


def test_a_stop_asked_for_within_a_cycle_ends_the_trace_with_the_step(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    class StopAt3:
        def on_step_end(
            self, args: object, state: TrainerState, control: TrainerControl, **_: object
        ) -> None:
            control.should_training_stop = state.global_step == 3

    callbacks = [StopAt3(), ProfilerCallback(skip_first=0, wait=0, warmup=1, active=10)]
    make_trainer(max_steps=9, num_train_epochs=-1, callbacks=callbacks).train()
    assert profiled_steps(tmp_path / "run" / "profile" / "step-00000003-rank0.json.gz") == 2


ALONE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from trainer_core import ProfilerCallback, TrainerControl

place = Path(sys.argv[1])
control = TrainerControl()

def fire(event, step, *callbacks, **extra):
    torch.ones(2).add(1)
    state = SimpleNamespace(global_step=step, max_steps=9)
    for callback in callbacks:
        getattr(callback, event)(SimpleNamespace(log_path=place), state, control, **extra)

def traces():
    return sorted(path.name for path in place.rglob("*.gz"))

options = {"skip_first": 0, "wait": 0, "warmup": 0, "active": 2}
"""


def run_alone(code: str, tmp_path: Path) -> str:
    """Runs code in a process of its own, because two profilers, or one that is left running, crash it."""
    program = ALONE + textwrap.dedent(code)
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_one_of_two_callbacks_records(tmp_path: Path) -> None:
    told = run_alone(
        """
        first, second = ProfilerCallback(**options), ProfilerCallback(**options)
        fire("on_train_begin", 0, first, second)
        for step in range(2):
            fire("on_step_begin", step, first, second)
            fire("on_step_end", step + 1, first, second)
        assert traces() == ["step-00000002-rank0.json.gz"]
        # The place is free again.
        control.should_profile = True
        fire("on_step_begin", 2, second)
        control.should_profile = True
        fire("on_step_begin", 2, first)
        fire("on_step_end", 3, second, first)
        fire("on_step_end", 4, second, first)
        fire("on_train_end", 4, second, first)
        assert traces() == ["step-00000002-rank0.json.gz", "step-00000004-rank0.json.gz"]
        """,
        tmp_path,
    )
    assert "the planned profile is skipped: another ProfilerCallback of this process has a profiler" in told
    assert "the profile that was asked for is dropped: another ProfilerCallback" in told


def test_a_foreign_profiler_is_left_alone(tmp_path: Path) -> None:
    told = run_alone(
        """
        late = ProfilerCallback(**(options | {"wait": 2}))
        fire("on_train_begin", 0, late)
        with torch.profiler.profile() as foreign:
            fire("on_step_end", 1, late)
            fire("on_step_end", 2, late)
            fire("on_train_begin", 2, ProfilerCallback(**options))
        assert any(row.key == "aten::add" for row in foreign.key_averages())
        assert traces() == []
        """,
        tmp_path,
    )
    assert "the planned profile is given up: another profiler is at work in this process" in told
    assert "the planned profile is skipped: another profiler is at work in this process" in told


def test_a_run_that_fails_writes_what_it_has_and_the_process_ends_well(tmp_path: Path) -> None:
    run_alone(
        """
        callback = ProfilerCallback(**(options | {"active": 5}))
        fire("on_train_begin", 0, callback)
        fire("on_step_end", 1, callback)
        fire("on_exception", 1, callback, exception=ValueError())
        assert traces() == ["step-00000001-rank0.json.gz"]
        # The next call may record, also where the one before ended without an event.
        fire("on_train_begin", 1, callback)
        fire("on_step_end", 2, callback)
        fire("on_train_begin", 2, callback)
        fire("on_step_end", 3, callback)
        fire("on_exception", 3, callback, exception=ValueError())
        assert traces() == [f"step-0000000{step}-rank0.json.gz" for step in (1, 2, 3)]
        """,
        tmp_path,
    )


def test_a_cycle_without_a_whole_step_does_not_overwrite_the_one_before(tmp_path: Path) -> None:
    run_alone(
        """
        callback = ProfilerCallback(**(options | {"active": 1, "repeat": 2}))
        fire("on_train_begin", 0, callback)
        fire("on_step_end", 1, callback)
        written = next(place.rglob("*.gz")).read_bytes()
        fire("on_exception", 1, callback, exception=ValueError())
        assert next(place.rglob("*.gz")).read_bytes() == written
        """,
        tmp_path,
    )


def test_an_error_while_stopping_does_not_hide_that_of_the_run(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = torch.profiler.profile.stop

    def fail(self: Any) -> None:
        stop(self)
        raise RuntimeError("no device")

    class Fail:
        def on_step_end(self, *_: object, **__: object) -> None:
            raise ValueError("of the run")

    monkeypatch.setattr(torch.profiler.profile, "stop", fail)
    callbacks = [ProfilerCallback(skip_first=0, wait=0, warmup=0), Fail()]
    with pytest.raises(ValueError, match="of the run"):
        make_trainer(max_steps=4, num_train_epochs=-1, callbacks=callbacks).train()
    assert "the profiler could not be stopped: RuntimeError('no device')" in caplog.text
    assert ProfilerCallback._active is None


@pytest.mark.parametrize("max_steps", [3, 9])
def test_a_trace_that_cannot_be_written_does_not_end_training(
    make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture, max_steps: int
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file")
    callback = ProfilerCallback(skip_first=0, wait=0, warmup=1, active=2, repeat=3)
    trainer = make_trainer(max_steps=max_steps, num_train_epochs=-1, callbacks=[callback])
    assert trainer.train().global_step == max_steps
    told = [record.message for record in caplog.records if "could not be written" in record.message]
    assert len(told) == 1
    assert str(tmp_path / "run" / "profile" / "step-00000003-rank0.json.gz") in told[0]
    assert "exists" in told[0]
    assert ProfilerCallback._active is None


def test_a_torch_without_the_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    monkeypatch.delattr(torch._C._autograd, "_enable_record_function")
    with torch.profiler.profile() as recorded:
        assert HostSums(StaticDistributedEnvironment()).sum([1.0]) == [1.0]
        with connection._left_out_of_traces():
            torch.ones(2).add(1)
    assert {"host:all_reduce", "aten::add"} <= {row.key for row in recorded.key_averages()}


def test_a_request_takes_the_place_of_an_idle_plan(
    make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    callbacks = [ProfilerCallback(skip_first=6, wait=0, warmup=0, active=2), AskAt(2)]
    make_trainer(max_steps=10, num_train_epochs=-1, callbacks=callbacks).train()
    (trace,) = (tmp_path / "run" / "profile").glob("*.gz")
    assert trace.name == "step-00000004-rank0.json.gz"
    assert profiled_steps(trace) == 2
    assert "the planned profile is given up for the one that was asked for" in caplog.text


def test_a_request_while_steps_are_recorded_waits(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    callbacks = [ProfilerCallback(skip_first=0, wait=0, warmup=1, active=3), AskAt(2)]
    make_trainer(max_steps=10, num_train_epochs=-1, callbacks=callbacks).train()
    assert sorted(path.name for path in (tmp_path / "run" / "profile").glob("*.gz")) == [
        "step-00000004-rank0.json.gz",
        "step-00000008-rank0.json.gz",
    ]


def test_a_request_after_the_turn_of_the_callback_is_served_in_the_next_step(
    make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AskAtBegin:
        def on_step_begin(
            self, args: object, state: TrainerState, control: TrainerControl, **_: object
        ) -> None:
            if state.global_step == 2:
                control.should_profile = True

    callbacks = [ProfilerCallback(repeat=0, warmup=0, active=1), AskAtBegin()]
    make_trainer(max_steps=6, num_train_epochs=-1, callbacks=callbacks).train()
    assert [path.name for path in (tmp_path / "run" / "profile").glob("*.gz")] == [
        "step-00000004-rank0.json.gz"
    ]
    assert "has no ProfilerCallback" not in caplog.text


def test_a_request_in_the_last_step_is_told(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = make_trainer(max_steps=3, num_train_epochs=-1, callbacks=[ProfilerCallback(repeat=0), AskAt(3)])
    trainer.train()
    assert "a profile was asked for, and nothing is recorded" in caplog.text
    assert not trainer.control.should_profile
