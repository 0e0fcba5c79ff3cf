"""The trainer of one process on the fake device: the CPU's curve, resume, saves, offload, memory, waits."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fakecuda
import pytest
import torch

from trainer_core import MemorySnapshotCallback

from .case import Attention, Model, Stop, WaitsByStep, curve, llama, losses, make


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", [Model, Attention])
def test_the_curve_of_the_cpu(precision: str, model: type[Model], tmp_path: Path) -> None:
    settings = {} if precision == "fp32" else {"mixed_precision": precision}
    on_cpu, on_device = make(tmp_path / "cpu", model=model, use_cpu=True, **settings), make(
        tmp_path / "cuda", model=model, device="cuda:0", **settings
    )  # fmt: skip
    on_cpu.train()
    on_device.train()
    assert next(on_device.model.parameters()).device == torch.device("cuda:0")
    assert len(curve(on_cpu)) == 6
    tolerance = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}[precision]
    assert losses(curve(on_device)) == pytest.approx(losses(curve(on_cpu)), rel=tolerance)
    for name, value in on_cpu.model.state_dict().items():
        torch.testing.assert_close(
            on_device.model.state_dict()[name].cpu(), value, rtol=10 * tolerance, atol=10 * tolerance
        )


@pytest.mark.parametrize(("fused", "precision"), [("torch", "no"), ("chunked", "bf16")])
def test_fused_losses(fused: str, precision: str, tmp_path: Path) -> None:
    watch, settings = WaitsByStep(), {"fused_loss": fused, "mixed_precision": precision}
    on_cpu = make(tmp_path / "cpu", model=llama, use_cpu=True, **settings)
    on_device = make(tmp_path / "cuda", model=llama, device="cuda:0", **settings)
    quiet = make(tmp_path / "quiet", watch, model=llama, device="cuda:0", logging_steps=100, **settings)
    for trainer in (on_cpu, on_device, quiet):
        trainer.train()
    assert losses(curve(on_device)) == pytest.approx(losses(curve(on_cpu)), rel=2e-2)
    assert not list(watch.late())


def test_muon_on_the_curve_of_the_cpu(tmp_path: Path) -> None:
    on_cpu = make(tmp_path / "cpu", model=llama, use_cpu=True, optim="muon")
    on_device = make(tmp_path / "cuda", model=llama, device="cuda:0", optim="muon")
    for trainer in (on_cpu, on_device):
        trainer.train()
    # It computes in bfloat16, in stacks on the CPU alone.
    assert losses(curve(on_device)) == pytest.approx(losses(curve(on_cpu)), rel=2e-2)


def test_offloaded_activations(tmp_path: Path) -> None:
    curves = []
    for offload in (False, True):
        settings = {"enable_activation_offloading": offload, "per_device_train_batch_size": 64}
        trainer = make(
            tmp_path / str(offload), model=lambda: Model(512), device="cuda:0", max_steps=3, **settings
        )
        trainer.train()
        curves.append(curve(trainer))
    assert curves[0] == curves[1]


def test_the_device_is_chosen_without_being_told(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    assert next(trainer.model.parameters()).device == torch.device("cuda:0")


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "fp16"}])
def test_resume(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", device="cuda:0", **settings)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 3}
    make(tmp_path / "parts", Stop(3), device="cuda:0", **settings, **saving).train()
    second = make(tmp_path / "parts", device="cuda:0", **settings, **saving)
    second.train()
    assert second.state.global_step == 6
    assert curve(second) == curve(whole)


def test_a_resumed_run_draws_the_same_numbers_on_the_device(tmp_path: Path) -> None:
    class Dropped(Model):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(super().forward(input_ids), 0.2, self.training)

    whole = make(tmp_path / "whole", model=Dropped, device="cuda:0")
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 3}
    make(tmp_path / "parts", Stop(3), model=Dropped, device="cuda:0", **saving).train()
    second = make(tmp_path / "parts", model=Dropped, device="cuda:0", **saving)
    second.train()
    assert curve(second) == curve(whole)


def test_memory_is_logged_and_its_peak_reset(tmp_path: Path) -> None:
    trainer = make(tmp_path, device="cuda:0", max_steps=4)
    trainer.train()
    peaks = [entry["peak_mem_allocated"] for entry in trainer.state.log_history if "loss" in entry]
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    # Weights, gradients and two moments; the first entry also saw what came before training.
    assert all(len(peak) == 1 and peak[0] > 4 * weights for peak in peaks), peaks
    assert peaks[2] == peaks[3]


def test_memory_snapshot(tmp_path: Path) -> None:
    trainer = make(tmp_path, MemorySnapshotCallback(2, 3), device="cuda:0", max_steps=4)
    trainer.train()
    (path,) = tmp_path.rglob("steps-*-rank0.pickle")
    snapshot = pickle.loads(path.read_bytes())
    weights = {parameter.data_ptr() for parameter in trainer.model.parameters()}
    live = {part["address"] for part in snapshot["segments"] if part["allocated_size"]}
    assert weights <= live


def test_out_of_memory_leaves_a_report(tmp_path: Path) -> None:
    trainer = make(tmp_path, device="cuda:0")

    class Full:
        def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
            if state.global_step == 2:
                torch.cuda.empty_cache()
                fakecuda.lib.fakecuda_set_limit(0, torch.cuda.memory_reserved())

    trainer.add_callback(Full())
    with fakecuda.memory_limit(80 << 30), pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    (report,) = tmp_path.rglob("oom-rank0.txt")
    assert "CUDA out of memory" in report.read_text()
    assert "PyTorch CUDA memory summary" in report.read_text()
    assert pickle.loads(report.with_suffix(".pickle").read_bytes())["segments"]


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": "bf16"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "skip": {"nonfinite_policy": "skip"},
    "in backward": {"fuse_optim_with_backward": True, "max_grad_norm": 0.0},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_steps_without_a_log_wait_for_nothing(feature: str, tmp_path: Path) -> None:
    watch = WaitsByStep()
    quiet = {"logging_steps": 1000, "max_steps": 8}
    make(tmp_path, watch, device="cuda:0", **{**quiet, **FEATURES[feature]}).train()
    assert len(watch.by_step) == 8
    assert not list(watch.late())


def test_a_long_log_window_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Scalars of many steps are added up at once, and here of two.
    monkeypatch.setattr("trainer_core.metrics.log_window._HELD_STEPS", 2)
    watch = WaitsByStep()
    make(tmp_path, watch, device="cuda:0", logging_steps=1000, max_steps=8).train()
    assert not list(watch.late())


@pytest.mark.parametrize(
    ("waits", "settings"),
    [
        (2, {"logging_steps": 1}),  # whether gradients were finite, and the sums of the entry
        (1, {"logging_steps": 1000, "mixed_precision": "fp16"}),  # whether the scaler skips the step
    ],
)
def test_steps_that_must_wait_do_so_a_fixed_number_of_times(
    waits: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    watch = WaitsByStep()
    make(tmp_path, watch, device="cuda:0", max_steps=6, **settings).train()
    late = list(watch.late())
    assert len(late) == 4 * waits, late


def test_a_wait_in_a_step_is_seen(tmp_path: Path) -> None:
    class Reads(Model):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(input_ids)
            assert logits.sum().item() < 1e9
            return logits

    watch = WaitsByStep()
    make(tmp_path, watch, model=Reads, device="cuda:0", logging_steps=1000, max_steps=4).train()
    late = list(watch.late())
    assert [wait.split(" at ")[0] for wait in late] == ["step 3: item", "step 4: item"]
    assert "test_training.py" in late[0]
