"""What packages choose, report and measure by the device that they find."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakecuda
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import hardware_table
from checkpoint_core import RNGState
from dist_env import DistributedEnvironmentError
from dist_env.device import choose_backend, choose_device
from llama_pretrain.bench import trial
from llama_pretrain.bench.baselines import Work, torch_loop
from llama_pretrain.commands.arguments import LOG_EVERY, BenchArguments
from llama_pretrain.model.config import preset
from perf_metrics import check_process
from perf_metrics.callbacks.device_metrics import PeakMemory, take_memory_figures
from perf_metrics.utilization import wait_for_device
from trainer_core import ConfigurationError
from trainer_core.model import compile_cache
from trainer_core.model.recording.replay import generator_state, set_generator_state
from trainer_core.model.run_settings import attention_context
from trainer_core.precision.fp8 import lacks_fp8
from trainer_core.precision.qat import _untouched_random_state
from trainer_core.run import DeviceCache
from trainer_core.verification.runs import state_bytes
from trainer_fsdp2 import FSDP2Arguments
from trainer_fsdp2.policy import offload_policy
from trainer_pipeline import stage_timer

from .case import Attention, curve, llama, make

CUDA = torch.device("cuda", 0)
NVML = Path(__file__).parents[2] / "packages" / "perf-metrics" / "tests" / "ofu" / "fake_nvml" / "nvml.c"
MIB = 1 << 20


# ---- What the device is


def test_the_device_and_its_peak_are_found() -> None:
    found = hardware_table.detect()
    assert found is not None
    assert (found.name, found.backend, found.compute_capability) == (fakecuda.NAME, "cuda", "9.0")
    assert (found.units, found.total_memory) == (132, 80 << 30)
    assert trial.choose_device(use_cpu=False) == CUDA
    assert trial.device_name(CUDA) == fakecuda.NAME
    assert trial.peak_flops(CUDA, "bf16") == hardware_table.peak_flops(fakecuda.NAME, "bf16", units=132)
    # The table would tell the peak of the GPU beside it.
    assert trial.peak_flops(torch.device("cpu"), "bf16") is None


def test_each_rank_has_a_device_of_its_own() -> None:
    assert choose_device(5, 1) == torch.device("cuda", 1)
    assert choose_device(5, 0, device_map={5: 1}) == torch.device("cuda", 1)
    assert choose_device(5, 1, no_accelerator=True) == torch.device("cpu")


# ---- What is chosen by it


def test_attention_is_restricted_to_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # This build of torch has no flash attention and no cuDNN for the device.
    for name in ("flash", "cudnn"):
        with pytest.raises(ConfigurationError, match="is not available in torch"):
            attention_context(name, False, CUDA)
    with attention_context("math", False, CUDA):
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    with attention_context("flash", False, CUDA):
        assert not torch.backends.cuda.math_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(ConfigurationError, match=r"needs compute capability 8\.0, but cuda:0 has 7\.5"):
        attention_context("flash", False, CUDA)


def test_a_run_with_chosen_attention(tmp_path: Path) -> None:
    free = make(tmp_path / "free", model=Attention, device="cuda:0", max_steps=2)
    chosen = make(tmp_path / "math", model=Attention, device="cuda:0", max_steps=2, sdpa_backend="math")
    free.train()
    chosen.train()
    assert curve(chosen) == curve(free)


def test_fp8_depends_on_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks_fp8(CUDA) is None
    assert lacks_fp8(torch.device("cpu")) == "device 'cpu'"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert lacks_fp8(CUDA) == f"{fakecuda.NAME} with compute capability 8.0"


def test_what_was_compiled_is_of_a_kind_of_device() -> None:
    found = {name: compile_cache._facts(torch.device(name))["accelerator"] for name in ("cuda", "cpu")}
    assert found == {"cuda": torch.cuda.get_device_properties(0).name, "cpu": "none"}


def test_the_backend_must_serve_the_device() -> None:
    assert choose_backend(CUDA, None) == "nccl"
    assert choose_backend(CUDA, "NCCL") == "NCCL"
    with pytest.raises(DistributedEnvironmentError, match="names no backend for the device cuda"):
        choose_backend(CUDA, "cpu:gloo")
    with pytest.raises(DistributedEnvironmentError, match="nccl, which cannot serve the device cpu"):
        choose_backend(torch.device("cpu"), "nccl")


@pytest.mark.parametrize(("device", "pinned"), [("cuda:0", True), ("cpu", False)])
def test_offloaded_weights_are_pinned_where_they_are_copied(device: str, pinned: bool) -> None:
    policy = offload_policy(FSDP2Arguments(cpu_offload=True), torch.device(device))
    assert isinstance(policy, CPUOffloadPolicy)
    assert policy.pin_memory is pinned


def test_an_idle_device_is_not_asked_for_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RNGState().state_dict()["device_type"] == "cuda"
    # Asking would make a context on it, which costs memory and breaks forks.
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    state = RNGState().state_dict()
    assert (state["device_type"], state["device"]) == (None, None)


def test_a_generator_of_the_device_comes_back() -> None:
    state = generator_state(CUDA)
    first = torch.rand(3, device="cuda")
    set_generator_state(CUDA, state)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_preparing_layers_leaves_the_random_numbers_of_the_device() -> None:
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    with _untouched_random_state(CUDA):
        torch.rand(9, device="cuda")
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_a_loader_that_does_not_pin_is_reported() -> None:
    rows = [torch.ones(2)] * 4
    pageable = torch.utils.data.DataLoader(rows, pin_memory=False)  # type: ignore[arg-type]
    pinned = torch.utils.data.DataLoader(rows, pin_memory=True)  # type: ignore[arg-type]
    found = [finding for finding in check_process(pageable) if finding.setting == "DataLoader.pin_memory"]
    assert len(found) == 1
    assert "copies to cuda go through pageable memory" in found[0].effect
    assert not [one for one in check_process(pinned) if one.setting.endswith("pin_memory")]


@pytest.mark.parametrize("settings", [{}, {"model": llama, "mixed_precision": "bf16"}])
def test_a_dry_run_for_the_device_takes_none_of_its_memory(settings: dict[str, Any], tmp_path: Path) -> None:
    on_cpu = make(tmp_path, device="cpu", **settings).dry_run()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = make(tmp_path, device="cuda:0", **settings).dry_run()
    assert torch.cuda.max_memory_allocated() == before
    # Not all of what a step takes on an accelerator is seen, and so none of it is told.
    assert found == replace(on_cpu, memory=None)
    trainer = make(tmp_path / "trained", device="cuda:0", max_steps=1, **settings)
    trainer.train()
    assert found.weights + found.gradients + found.optimizer == state_bytes(trainer)


# ---- Memory and time


def test_the_cache_is_emptied_above_the_threshold_once() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    with fakecuda.memory_limit(held + 64 * MIB):
        cache = DeviceCache(CUDA, (held + 4 * MIB) / (held + 64 * MIB))
        torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        with fakecuda.recorded_waits() as waits:
            cache.relieve()
            assert torch.cuda.memory_reserved() == held
            # A run that needs as much at every step would free and reserve it each time.
            torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
            cache.relieve()
        assert torch.cuda.memory_reserved() > held
    assert [wait.what for wait in waits] == ["empty_cache"]


def test_peak_memory_of_a_trial_counts_from_its_beginning() -> None:
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    peak = trial.PeakMemory(CUDA)
    torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    peak.stop()
    assert peak.bytes == before + 2 * MIB


def test_peaks_are_reset_when_they_are_read() -> None:
    held = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    first, second = take_memory_figures(), take_memory_figures()
    assert first is not None
    assert second is not None
    assert second.allocated == torch.cuda.memory_allocated()
    assert first.allocated == second.allocated + 8 * MIB
    del held


def test_rates_are_measured_when_the_device_is_done() -> None:
    host, device = torch.zeros(256, pin_memory=True), torch.ones(256, device="cuda")
    host.copy_(device, non_blocking=True)
    assert not host.any()
    wait_for_device()
    assert host.all()


def test_windows_of_a_trial_end_when_the_device_is_done() -> None:
    weight, peak = torch.nn.Parameter(torch.ones(256, device="cuda")), trial.PeakMemory(CUDA)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with trial.StepClock(1, 2 * LOG_EVERY, CUDA, peak) as clock, fakecuda.recorded_waits() as waits:
        for _ in range(1 + 2 * LOG_EVERY):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    # At the beginning of the first window and the end of each.
    assert [wait.what for wait in waits] == ["synchronize"] * 3
    assert len(clock.windows()) == 2
    assert peak.bytes is not None


def test_the_timer_of_stages_waits_only_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_timer, "_HELD", 2)
    timer, matrix = stage_timer.StageTimer(CUDA), torch.ones(64, 64, device="cuda")
    host = torch.empty(64, 64, pin_memory=True)
    with fakecuda.recorded_waits() as waits:
        for _ in range(8):
            with timer.step():
                for microbatch in range(2):
                    began = timer.now()
                    host.copy_(matrix @ matrix, non_blocking=True)
                    timer.add(0, "F", microbatch, began)
    assert not waits
    assert len(timer._steps) <= 3
    busy, whole = timer.take()
    assert 0 < busy <= whole
    assert timer.take() == (0.0, 0.0)


def test_reading_the_timer_waits_for_work_under_way() -> None:
    timer, host = stage_timer.StageTimer(CUDA), torch.empty(64, pin_memory=True)
    device = torch.ones(64, device="cuda")
    with timer.step():
        began = timer.now()
        host.copy_(device, non_blocking=True)
        timer.add(0, "F", 0, began)
    with fakecuda.recorded_waits() as waits:
        busy, whole = timer.take()
    assert [wait.what for wait in waits] == ["Event.synchronize"]
    assert 0 < busy <= whole


def test_a_baseline_of_the_bench_trains_on_the_device(tmp_path: Path) -> None:
    args = BenchArguments(steps=10, mixed_precision="bf16", sequence_length=32)
    config = replace(preset("tiny"), hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    work = Work.of(config, args, CUDA, tmp_path)
    model = work.model()
    before = work.loss(model)
    torch_loop()(work, model)
    assert {parameter.device for parameter in model.parameters()} == {CUDA}
    assert work.loss(model) < before


def test_peaks_of_each_interval(tmp_path: Path) -> None:
    trainer = make(tmp_path, PeakMemory(), device="cuda:0", max_steps=3)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["alloc_retries"] for entry in entries] == [[0]] * 3
    assert all(entry["peak_mem_allocated"][0] > 0 for entry in entries)


# ---- Operational FLOP utilization, from a scripted libnvidia-ml

PROGRAM = """
import json
from types import SimpleNamespace
import torch
from perf_metrics.callbacks.device_metrics import OFUMetrics

torch.cuda.set_device(1)
metrics, logs = OFUMetrics(interval_s=0.1), {}
state = SimpleNamespace(is_world_process_zero=True)
metrics.on_train_begin(None, state, None)
metrics._sampler.wait(30)
metrics.on_log_step(None, state, None, logs=logs)
metrics.on_train_end(None, state, None)
print(json.dumps(logs))
"""


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    """Runs a program under a scripted libnvidia-ml, and returns the JSON that it prints."""
    compiler = shutil.which("gcc")
    assert compiler is not None, "the scripted libnvidia-ml.so.1 needs gcc"
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", str(library), str(NVML)], check=True)

    def run(program: str, script: str) -> dict[str, Any]:
        (tmp_path / "script.txt").write_text(script)
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(tmp_path),
            "FAKE_NVML_SCRIPT": str(tmp_path / "script.txt"),
            "FAKE_NVML_REPORT": str(tmp_path / "report.json"),
        }
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    return run


def test_ofu_is_that_of_the_current_device(scripted: Callable[[str, str], dict[str, Any]]) -> None:
    told = scripted(PROGRAM, "gpus 2\nactivity 0 10\nclock 0 915\nactivity 1 80\nclock 1 1830\n")
    assert told["ofu"] == pytest.approx(0.8)


MEASURE = """
import contextlib, io, json, torch
from perf_metrics.commands.main import main

def measure(device, seconds, *options):
    torch.cuda.set_device(device)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(["gemm", "64", "64", "64", "--measure", "--seconds", seconds, "--json", *options]) == 0
    return json.loads(text.getvalue())

kernel = ["--kernel", "nvjet_tst_144x128_64x6_2x1_TNN"]
print(json.dumps({
    "tf32": measure(1, "2", "--dtype", "tf32"), "bf16": measure(1, "0.6", *kernel),
    "fp32": measure(1, "0.6", "--dtype", "fp32", *kernel),
    "fp16": measure(0, "0.1", "--dtype", "fp16", *kernel),
}))
"""


def test_products_are_measured_beside_the_counters(scripted: Callable[[str, str], dict[str, Any]]) -> None:
    """The counters of the current device over the time of the products; nothing of it is of a real GPU."""
    script = "gpus 2\ngpm 0 0\nactivity 1 50\nclock 1 1464\nrates 1 193248e6 193248e6 96624e6\n"
    measured = scripted(MEASURE, script)
    told = measured["tf32"]
    assert told["problem"] is None
    assert told["device_name"] == "NVIDIA H100 80GB HBM3"
    assert (told["units"], told["peak_flops"]) == (132, 494.7e12)
    assert told["ofu"] == pytest.approx(0.4)
    # 132 x 1464 MHz: the counters of this device add up its SMs.
    assert told["cycle_scale"]["counts_per_cycle"] == 132
    assert told["ofu_of_cycles"] == pytest.approx(0.4, rel=0.05)
    assert told["seconds"] >= 2
    assert told["window"]["samples"] >= 2
    assert told["flops_per_second"] == pytest.approx(2 * 64**3 * told["products"] / told["seconds"])
    assert told["flops_per_cycle"] == pytest.approx(told["flops_per_second"] / (132 * 1464e6))
    assert told["adjusted_ofu"] is None
    assert told["tiles"]["inexact"] == "the profile of a product has no kernels of a GPU"
    # 64 x 64 x 64 in one cluster of 288 x 128.
    assert (measured["bf16"]["tiles"]["overhead"], measured["bf16"]["tiles"]["inexact"]) == (8.0, None)
    assert measured["bf16"]["adjusted_ofu"] == pytest.approx(0.4 / 9)
    alone = measured["fp32"]
    assert alone["problem"] == "fp32 products do not run on tensor cores, so OFU says nothing of them"
    assert (alone["ofu"], alone["window"]["ofu"]) == (None, pytest.approx(0.4))
    without = measured["fp16"]
    assert without["flops_per_second"] > 0
    assert without["problem"] == (
        "the rate only: unavailable: no tensor activity: the device has no GPM, which needs Hopper or newer"
    )
