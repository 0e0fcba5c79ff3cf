"""`verify` on the fake device: it passes there, and names what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core import VerificationCheck, verify

from .case import Model, rows


def checks(directory: Path, *parts: str, model: Any = Model) -> dict[str, VerificationCheck]:
    found = verify(model, rows(), directory=directory, precisions=["fp32"], parts=parts)
    return {check.part: check for check in found.checks}


def test_everything_holds(tmp_path: Path) -> None:
    found = checks(tmp_path, "curve", "repeat", "resume", "save", "waits", "memory", "utilization")
    assert {part: check.passed for part, check in found.items()} == {
        **dict.fromkeys(["curve", "repeat", "resume", "save", "waits", "memory"], True),
        "utilization": None,
    }, found
    assert found["memory"].figures["peak_bytes"] >= found["memory"].figures["state_bytes"]  # type: ignore[operator]
    assert "driver" in found["utilization"].found


def test_a_step_is_timed_beside_plain_torch(tmp_path: Path) -> None:
    figures = checks(tmp_path, "speed")["speed"].figures
    assert float(str(figures["plain_seconds"])) > 0
    assert float(str(figures["seconds"])) > 0


def test_what_needs_a_gpu_is_not_a_failure(tmp_path: Path) -> None:
    found = verify(Model, rows(), directory=tmp_path, precisions=["fp32"], parts=["feature"]).checks
    compiled = next(check for check in found if check.name == "torch_compile")
    assert compiled.passed is None
    assert compiled.found.endswith("by Triton, which is not installed")


def test_the_command_takes_every_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llama_pretrain", "verify", "--parts", "curve", "--steps", "4"]
    more = ["--layouts", "shard=2", "--precisions", "fp32", "--output-dir", str(tmp_path)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "verify.json").read_text())
    assert written["facts"]["ranks"] == "2"
    assert "cuda:1" in written["facts"]["devices"]
    assert [check["name"] for check in written["checks"]] == ["one device, fp32", "shard=2, fp32"]


def test_a_missing_synchronize_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    found = checks(tmp_path, "save")["save"]
    assert found.passed is False
    assert "the save of weights of 2.0 holds" in found.found


def test_a_wait_in_a_step_is_named(tmp_path: Path) -> None:
    class Reads(Model):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(input_ids)
            assert logits.sum().item() < 1e9
            return logits

    found = checks(tmp_path, "waits", model=Reads)["waits"]
    assert found.passed is False
    assert "test_verify.py:" in found.found
