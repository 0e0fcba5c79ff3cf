"""The chunked loss with 16-bit weights: its gradient has no error of scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer_core.loss.chunked import ChunkedOptions, chunked_linear_cross_entropy


def scale_error(gradient: Tensor, exact: Tensor) -> float:
    """By what share a gradient is longer or shorter along the exact one."""
    gradient = gradient.double()
    return float((gradient * exact).sum() / exact.square().sum() - 1)


@pytest.mark.parametrize(
    ("dtype", "counted"),
    [(torch.bfloat16, 384), (torch.bfloat16, 391), (torch.bfloat16, 509), (torch.float16, 403)],
)
def test_dividing_by_the_tokens_does_not_change_the_scale(dtype: torch.dtype, counted: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 64, generator=generator).to(dtype)
    weight = (torch.randn(300, 64, generator=generator) / 8).to(dtype)
    targets = torch.randint(0, 300, (512,), generator=generator)
    targets[counted:] = -100

    def gradients(of: torch.dtype) -> tuple[Tensor, ...]:
        parts = [part.to(of).clone().requires_grad_() for part in (hidden, weight)]
        if of is torch.float64:
            logits = functional.linear(*parts)
            loss = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        else:
            loss = chunked_linear_cross_entropy(*parts, None, targets, ChunkedOptions(of))
        torch.autograd.backward(loss / torch.tensor(float(counted)))
        return tuple(part.grad for part in parts if part.grad is not None)

    for made, exact in zip(gradients(dtype), gradients(torch.float64), strict=True):
        # Rounding 1/tokens to bfloat16 errs by up to 2**-9, which is 2e-3; single entries err both ways.
        assert abs(scale_error(made, exact)) < 6e-4
        assert made.dtype is dtype


def test_more_rows_than_are_scaled_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9001, 4, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(11, 4, generator=generator).bfloat16()
    targets = torch.randint(0, 11, (9001,), generator=generator)
    loss = chunked_linear_cross_entropy(hidden, weight, None, targets, ChunkedOptions(torch.bfloat16))
    torch.autograd.backward(loss * 391.0)
    exact = hidden.detach().float().requires_grad_()
    logits = functional.linear(exact, weight.float())
    torch.autograd.backward(functional.cross_entropy(logits, targets, reduction="sum") * 391.0)
    assert hidden.grad is not None
    assert exact.grad is not None
    for rows in (slice(0, 4096), slice(4096, 8192), slice(8192, None)):
        assert abs(scale_error(hidden.grad[rows], exact.grad[rows].double())) < 1e-3
