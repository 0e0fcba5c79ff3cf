from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trainer_core import CausalLMLoss, MeanLoss

LOGITS = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, 3, -100, 4], [-100, -100, 5, 6, 7]])


def test_counts_and_sums_shifted_positions() -> None:
    loss = CausalLMLoss()
    # First row predicts 2, 3 and 4, second 5, 6 and 7: the first label of a row is never predicted.
    assert loss.count(LABELS).item() == 6
    by_hand = sum(
        -functional.log_softmax(LOGITS[row, column - 1], dim=-1)[LABELS[row, column]]
        for row, column in [(0, 1), (0, 2), (0, 4), (1, 2), (1, 3), (1, 4)]
    )
    torch.testing.assert_close(loss(LOGITS, LABELS), by_hand)


def test_label_smoothing_and_z_loss_follow_their_definitions() -> None:
    targets, predictions = LABELS[:, 1:].flatten(), LOGITS[:, :-1].flatten(0, 1)
    kept = targets != -100
    smooth = functional.cross_entropy(predictions[kept], targets[kept], reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(CausalLMLoss(label_smoothing=0.1)(LOGITS, LABELS), smooth)
    extra = 1e-2 * torch.logsumexp(predictions[kept], dim=-1).square().sum()
    torch.testing.assert_close(
        CausalLMLoss(z_loss=1e-2)(LOGITS, LABELS) - CausalLMLoss()(LOGITS, LABELS), extra
    )


def test_nothing_counted_is_zero_with_zero_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    nothing = torch.full_like(LABELS, -100)
    for loss in (
        CausalLMLoss(),
        MeanLoss(lambda x, y: (x.sum(-1) * (y >= 0)).sum() / (y >= 0).sum(), lambda y: (y >= 0).sum()),
    ):
        assert loss.count(nothing).item() == 0
        assert loss(logits, nothing).item() == 0.0
        logits.grad = None
        loss(logits, nothing).backward()
        assert logits.grad is not None
        assert logits.grad.abs().max() == 0


def test_mean_loss_gives_back_the_sum() -> None:
    def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    wrapped = MeanLoss(mean, CausalLMLoss().count)
    assert wrapped(LOGITS, LABELS).item() == pytest.approx(CausalLMLoss()(LOGITS, LABELS).item(), rel=1e-6)
