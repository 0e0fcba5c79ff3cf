"""`verify` on the CPU: a sound machine passes, and each planted fault is named."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint_core import background
from trainer_core import ConfigurationError, Verification, VerificationCheck, verify


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids).tanh())


def rows(count: int = 32) -> list[dict[str, Tensor]]:
    made = [(torch.arange(12) * 5 + number) % 32 for number in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in made]


def run(directory: Path, *parts: str, model: Any = Tiny, **options: Any) -> Verification:
    given = {"precisions": ["fp32"], "steps": 6, "settings": {"use_cpu": True}} | options
    return verify(model, rows(), directory=directory, parts=parts or None, **given)


def named(found: Verification) -> dict[str, VerificationCheck]:
    return {check.part: check for check in found.checks}


def test_a_sound_machine(tmp_path: Path) -> None:
    seen: list[VerificationCheck] = []
    parts = ("curve", "repeat", "resume", "save", "waits", "memory")
    found = run(tmp_path, *parts, on_check=seen.append)
    assert found.passed, found
    assert found.checks == tuple(seen)
    made = named(found)
    assert made["curve"].figures == {"largest_relative_difference": 0.0}
    assert made["memory"].figures["state_bytes"] == made["memory"].figures["planned_state_bytes"]
    # The host waits for everything on a CPU: said, and not counted as passed.
    assert made["waits"].passed is None
    assert "CPU" in made["waits"].found
    assert set(found.curves) == {"CPU, fp32", "one process, fp32"}
    assert len(found.curves["CPU, fp32"]) == 6


def test_a_setting_that_does_not_exist_fails_every_part(tmp_path: Path) -> None:
    found = run(tmp_path, "curve", "repeat", "resume", settings={"use_cpu": True, "learning_rat": 0.1})
    assert not found.passed
    assert all(check.passed is False and "learning_rat" in check.found for check in found.checks), found


def test_the_time_of_a_step_is_told_beside_plain_torch(tmp_path: Path) -> None:
    figures = named(run(tmp_path, "speed"))["speed"].figures
    assert 0 < float(str(figures["plain_seconds"])) < float(str(figures["seconds"])) * 20
    assert figures["mfu"] is None, "the peak of a CPU is not known"


def test_a_run_that_draws_numbers_of_its_own_is_named(tmp_path: Path) -> None:
    drawn = itertools.count()

    class Unrepeatable(Tiny):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) * (1 + 1e-3 * next(drawn))

    found = named(run(tmp_path, "curve", "repeat", "resume", model=Unrepeatable))
    assert [found[part].passed for part in ("curve", "repeat", "resume")] == [False, False, False]
    assert found["curve"].found.startswith("step 1: ")
    assert found["repeat"].rule == "each loss equal to the first run's"


def test_state_that_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    class Forgetful(Tiny):
        """Counts its calls where no checkpoint sees it."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, input_ids: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input_ids) * (1 + 1e-3 * self.calls)

    found = named(run(tmp_path, "curve", "resume", model=Forgetful))
    assert found["curve"].passed
    assert found["resume"].passed is False
    assert found["resume"].found.startswith("step 4: ")


def test_a_save_that_holds_later_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without its copies the buffer keeps the tensors themselves, which the next step changes.
    shared: list[Tensor] = []

    def keep(self: object, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shared[:] = tensors.values()
        return dict(tensors)

    # The thread writes once they have changed: otherwise it could be done before.
    start = background.BackgroundWorker.start

    def start_late(self: Any, what: str, action: Callable[[], None]) -> None:
        def late() -> None:
            until = time.monotonic() + 60
            while not any((tensor == -1).all() for tensor in shared) and time.monotonic() < until:
                time.sleep(0.001)
            action()

        start(self, what, late)

    monkeypatch.setattr(background.StagingBuffer, "copy", keep)
    monkeypatch.setattr(background.BackgroundWorker, "start", start_late)
    found = named(run(tmp_path, "save"))["save"]
    assert found.passed is False
    assert "the save of weights of 2.0 holds -1.0 to -1.0" in found.found


def test_an_error_of_a_run_is_a_failed_check(tmp_path: Path) -> None:
    class Broken(Tiny):
        def forward(self, input_ids: Tensor) -> Tensor:
            raise ValueError("no such kernel")

    found = run(tmp_path, "curve", "save", model=Broken)
    assert not found.passed
    made = named(found)
    assert made["curve"].passed is False
    assert "ValueError: no such kernel" in made["curve"].found
    assert made["save"].passed, "what does not depend on the model is looked at"


def test_an_error_of_pages_is_cut(tmp_path: Path) -> None:
    class Wordy(Tiny):
        def forward(self, input_ids: Tensor) -> Tensor:
            raise ValueError("no such kernel: " + "frame " * 1000)

    found = named(run(tmp_path, "curve", model=Wordy))["curve"].found
    assert found.startswith("rank 0 (")
    assert "ValueError: no such kernel: frame" in found
    assert len(found) < 600


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    found = run(tmp_path, "curve", "utilization", layouts=["dp=2"])
    assert [check.passed for check in found.checks] == [True, None, None]
    assert "mesh='dp=2' cannot be used: replicate=2 needs exactly 2 ranks" in found.checks[1].found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "steps=3 must be at least 4"),
        ({"precisions": ["fp8"]}, "precisions='fp8' must be one of fp32, bf16, fp16"),
        ({"parts": ["curves"]}, "parts='curves' must be one of curve, "),
        ({"steps": 20}, "are fewer than 80"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        verify(Tiny, rows(), directory=tmp_path, **options)
