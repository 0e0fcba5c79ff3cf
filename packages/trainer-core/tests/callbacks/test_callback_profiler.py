from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_core import ConfigurationError, Trainer
from trainer_core.callbacks import ProfilerCallback


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


@pytest.mark.parametrize("setting", ["wait", "warmup", "active", "repeat", "skip_first", "top"])
def test_bad_settings(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting}=-1 must be [01] or more"):
        ProfilerCallback(**{setting: -1})
