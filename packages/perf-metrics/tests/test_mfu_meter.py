"""`MFUMeter`: tokens per second and MFU of a loop, alone and summed over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

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


def test_the_wrappers_of_a_model_are_seen_through(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    assert MFUMeter(compiled, LENGTH, "fp32")._flops_per_token == model_flops_per_token(model, LENGTH)


def test_what_cannot_be_counted_is_refused_by_name(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = MFUMeter(model, LENGTH, "fp32")
    with pytest.raises(TypeError, match=r"a dict is not a mapping with input_ids .*meter.add\(ids.numel"):
        meter.add({"pixels": torch.zeros(2)})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="all_ranks=True needs a process group for the 2 ranks"):
        meter.read(all_ranks=True)


WORKER = """
import json, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from perf_metrics import MFUMeter

dist.init_process_group("gloo")
rank = dist.get_rank()
seconds = [0.0]
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)))
meter = MFUMeter(model, 16, "fp32", peak_flops=1e6 * (1 + rank), clock=lambda: seconds[0])
meter.add(100 * (1 + rank))
seconds[0] = 2.0 + rank
read = meter.read(all_ranks=True)
with open(f"{sys.argv[1]}/read{rank}.json", "w") as file:
    json.dump(read, file)
dist.destroy_process_group()
"""


def test_all_ranks_sum_tokens_and_peaks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(WORKER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(script), str(tmp_path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((tmp_path / f"read{rank}.json").read_text()) for rank in (0, 1))
    assert one == other
    assert (one["input_tokens"], one["interval_seconds"], one["tok_per_sec"]) == (300, 3.0, 100.0)
    assert one["mfu"] == pytest.approx(300 * 6 * 8 * 32 / (3.0 * 3e6))
