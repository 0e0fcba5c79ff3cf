"""Gradient norm and clipping: torch's values, for any mix of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_core import clip_grad_norm_


def parameters(dtypes=(torch.float32,), count=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        shape = (number + 1, 7) if number % 3 else (5,)
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtypes[number % len(dtypes)]))
        if number != 4:
            parameter.grad = torch.randn(shape, generator=generator).to(parameter.dtype)
        made.append(parameter)
    return made


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [None, 0.0, 0.5, 1e6])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float64,), (torch.float32, torch.float64)], ids=["32", "64", "mixed"]
)
def test_values_of_torch(foreach, max_norm, dtypes):
    ours, theirs = parameters(dtypes), parameters(dtypes)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm or float("inf"), foreach=False)
    norm = clip_grad_norm_(ours, max_norm, foreach=foreach)
    torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-6, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-9)
    assert not norm.requires_grad


def test_repeats_to_the_last_bit():
    norms = {clip_grad_norm_(parameters(), 0.1).item() for _ in range(5)}
    assert len(norms) == 1


def test_sixteen_bit_gradients_are_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.full((4096,), 1.0078125, dtype=torch.bfloat16)
    norm = clip_grad_norm_([parameter], 1.0)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(64 * 1.0078125, rel=1e-6)
    assert parameter.grad.dtype is torch.bfloat16
    assert parameter.grad.float().norm().item() == pytest.approx(1.0, rel=1e-2)


def test_no_gradients_have_no_length():
    assert clip_grad_norm_([nn.Parameter(torch.zeros(3))], 1.0).item() == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(value):
    made = parameters()
    made[0].grad[0] = value
    assert not clip_grad_norm_(made, 1.0).isfinite()
