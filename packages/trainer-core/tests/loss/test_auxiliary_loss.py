"""A model that returns a loss of its routers beside the logits: said once that it is left out."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from trainer_core.loss import CausalLMLoss, predict, token_loss


class Router(nn.Module):
    def __init__(self, inner: nn.Module, aux_loss: object) -> None:
        super().__init__()
        self.inner, self.aux_loss = inner, aux_loss

    def forward(self, input_ids: Tensor) -> object:
        logits = self.inner(input_ids)
        return SimpleNamespace(logits=logits, aux_loss=None if self.aux_loss is None else logits.sum())


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once per process, and the usual logger leaves out a warning that repeats."""
    token_loss._say_what_is_left_out.cache_clear()
    monkeypatch.setattr(token_loss, "logger", logging.getLogger("test_auxiliary_loss"))


def warnings_of(model: nn.Module, batch: dict[str, Tensor], caplog: pytest.LogCaptureFixture) -> list[str]:
    for _ in range(3):
        predict(CausalLMLoss(), model, {"input_ids": batch["input_ids"]}, batch["labels"])
    return [record.message for record in caplog.records if "aux_loss" in record.message]


def test_said_once(tiny_lm: type, batch: dict[str, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warnings_of(Router(tiny_lm(), 1.0), batch, caplog)
    assert "compute_loss_func" in message


def test_silent_without_one(
    tiny_lm: type, batch: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(Router(tiny_lm(), None), batch, caplog) == []
    assert warnings_of(tiny_lm(), batch, caplog) == []
