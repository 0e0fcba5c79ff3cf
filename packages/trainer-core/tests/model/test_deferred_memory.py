"""Deferred construction: what is freed meanwhile, what comes back, and how much memory that takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainer_core.errors import ConfigurationError
from trainer_core.model import construct_deferred


class Tied(nn.Module):
    """Default initialisation, then normal for all matrices, a zero padding row, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16, padding_idx=3)
        self.layer = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.embed.weight.data[3].zero_()


def test_what_is_overwritten_is_neither_kept_nor_computed() -> None:
    """A value costs the operators that it comes from, not those of the default initialisation before."""

    _, values = construct_deferred(Tied)
    all_of_them = {f"aten::{name}_" for name in ("normal", "uniform", "zero", "fill", "copy", "mul")}
    operators = {}
    for name in ("layer.weight", "embed.weight", "norm.weight"):
        with torch.profiler.profile() as profile:
            assert values[name].numel() > 0
        operators[name] = {event.key for event in profile.key_averages()} & all_of_them
    assert operators == {
        "layer.weight": {"aten::normal_"},
        "embed.weight": {"aten::normal_", "aten::zero_"},
        "norm.weight": {"aten::fill_"},
    }


def test_what_is_still_used_elsewhere_gets_its_values_back() -> None:
    outside: list[Tensor] = []

    def build() -> nn.Module:
        model = Tied()
        outside[:] = [model.layer.weight, model.head.weight.detach()[2:5]]
        return model

    torch.manual_seed(17)
    expected = Tied()
    torch.manual_seed(17)
    construct_deferred(build)
    assert torch.equal(outside[0], expected.layer.weight)
    assert torch.equal(outside[1], expected.head.weight[2:5])


def test_errors_of_the_model_pass_and_leave_nothing_behind() -> None:
    made: list[nn.Parameter] = []

    def build() -> nn.Module:
        made.extend(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).parameters())
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        construct_deferred(build)
    assert [parameter.untyped_storage().nbytes() for parameter in made] == [6400, 160, 6400, 160]
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert all(torch.isfinite(layer.weight).all() for layer in layers)
    with pytest.raises(ConfigurationError, match=r"model_init='dict' must return a torch\.nn\.Module"):
        construct_deferred(dict)  # type: ignore[arg-type]


def test_parameters_that_have_no_values_stay_as_they_are() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.LazyLinear(2))

    model, values = construct_deferred(build)
    assert sorted(values) == ["0.bias", "0.weight"]
    assert model[1].weight.is_meta
    model[2](torch.ones(1, 3))
    assert model[2].weight.shape == (2, 3)


LAYERS, WIDTH = 24, 2048  # 24 x 16 MiB
PEAKS = rf"""
import re, resource, sys, torch
from torch import nn
from trainer_core.model import construct_deferred

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
        self.embed = nn.Embedding(100, 8, padding_idx=0)
        for layer in self.layers:
            layer.weight.data[0].zero_()

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux ru_maxrss begins with that of the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])

construct_deferred(lambda: nn.Linear(2, 2))
before = peak()
torch.manual_seed(0)
model, values = construct_deferred(Model)
sums = [values[name].sum().item() for name in values]
deferred = peak() - before
torch.manual_seed(0)
built = Model()
assert sums == [value.sum().item() for value in built.parameters()]
print(deferred, peak() - before)
"""


def test_memory_stays_that_of_a_few_parameters(tmp_path: Path) -> None:
    """Peak resident memory of a 384 MiB model, built deferred and then at once."""
    script = tmp_path / "peaks.py"
    script.write_text(PEAKS)
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    deferred, built = map(int, run.stdout.split())
    one = 4 * WIDTH * WIDTH
    assert built > 0.9 * LAYERS * one
    assert deferred < 6 * one
