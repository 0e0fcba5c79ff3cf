"""`MFUMeter`: tokens per second and MFU of a loop, alone and summed over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perf_metrics import MFUMeter, model_flops_per_token

LENGTH = 16


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))


def test_each_batch_of_an_accumulated_step_counts_once(model: nn.Module, clock: Clock) -> None:
    meter = MFUMeter(model, LENGTH, "fp32", peak_flops=1e6, clock=clock)
    ids = torch.zeros(4, LENGTH, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0
    for batch in (ids, {"input_ids": ids, "attention_mask": mask}, (ids, "label"), 10):
        meter.add(batch)
    clock.now = 2.0
    with meter.measure("data"):
        clock.now = 3.0
    with meter.exclude("evaluate"):
        clock.now = 9.0
    read = meter.read()
    flops = model_flops_per_token(model, LENGTH)
    assert flops == 6 * 8 * 32
    assert (read["input_tokens"], read["interval_seconds"]) == (64 + 48 + 64 + 10, 3.0)
    assert read["tok_per_sec"] == 186 / 3
    assert read["flos"] == flops * (3 * 64 + 10), "padding is computed too"
    assert read["mfu"] == pytest.approx(read["flos"] / (3.0 * 1e6))
    assert read["data_share"] == pytest.approx(1 / 3)
    assert "evaluate_share" not in read
    clock.now = 10.0
    assert meter.read()["input_tokens"] == 0, "a new window"


def test_an_unknown_peak_is_none_and_never_zero(model: nn.Module, clock: Clock) -> None:
    meter = MFUMeter(model, LENGTH, "fp32", clock=clock)
    meter.add(64)
    clock.now = 1.0
    assert meter.read()["mfu"] is None


def test_the_wrappers_of_a_model_are_seen_through(model: nn.Module, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
        assert MFUMeter(wrapped, LENGTH, "fp32")._flops_per_token == model_flops_per_token(model, LENGTH)
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_counted_is_refused_by_name(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = MFUMeter(model, LENGTH, "fp32")
    with pytest.raises(TypeError, match=r"a dict is not a mapping with input_ids .*meter.add\(ids.numel"):
        meter.add({"pixels": torch.zeros(2)})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="all_ranks=True needs a process group for the 2 ranks"):
        meter.read(all_ranks=True)
