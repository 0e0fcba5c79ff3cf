"""`verify` on the fake device: it passes there, and names what is planted."""

from __future__ import annotations

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
    assert "peak_bytes" in found["memory"].figures
    assert "driver" in found["utilization"].found


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
