"""The chunked cross-entropy against plain torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer_core.loss.chunked import ChunkedOptions, chunked_linear_cross_entropy
from trainer_core.loss.fused import BACKENDS, torch_has_it

ROWS, FEATURES, CLASSES = 17, 6, 11


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    weight = torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64)
    bias = torch.randn(CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    targets[[2, 7, 8, 16]] = -100
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    return leaves[0], leaves[1], leaves[2], targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, o: ChunkedOptions) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    total = functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=o.label_smoothing)
    partition = torch.logsumexp(logits, dim=-1).square().masked_fill(targets == -100, 0.0)
    return total + o.z_loss * partition.sum()


@pytest.mark.parametrize(
    ("smoothing", "z_loss", "rows"), list(product((0.0, 0.1), (0.0, 1e-2), (1, 5, 17, None)))
)
def test_equals_plain_cross_entropy(smoothing: float, z_loss: float, rows: int | None) -> None:
    options = ChunkedOptions(torch.float32, smoothing, z_loss, rows)
    results = []
    for function in (plain, chunked_linear_cross_entropy):
        hidden, weight, bias, targets = inputs()
        total = function(hidden, weight, bias, targets, options)
        (total * 0.3).backward()
        results.append([total.detach(), hidden.grad, weight.grad, bias.grad])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_gradients_are_those_of_finite_differences(smoothing: float, z_loss: float) -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    options = ChunkedOptions(torch.float64, smoothing, z_loss, rows=4)

    def function(*leaves: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(*leaves, targets, options)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda h, w: function(h, w, None), (hidden, weight))


def test_second_backward_gives_the_same_gradients() -> None:
    hidden, weight, bias, targets = inputs()
    total = chunked_linear_cross_entropy(hidden, weight, bias, targets, ChunkedOptions(torch.float32, rows=4))
    first = torch.autograd.grad(total, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(total * 2, (hidden, weight, bias))
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(two, one * 2)


def test_only_the_wanted_gradients_are_computed() -> None:
    hidden, weight, _, targets = inputs()
    frozen = weight.detach()
    options = ChunkedOptions(torch.float32)
    chunked_linear_cross_entropy(hidden, frozen, None, targets, options).backward()
    plain_hidden, plain_weight, _, _ = inputs()
    plain(plain_hidden, plain_weight, None, targets, options).backward()
    torch.testing.assert_close(hidden.grad, plain_hidden.grad)
    chunked_linear_cross_entropy(hidden.detach(), weight, None, targets, options).backward()
    torch.testing.assert_close(weight.grad, plain_weight.grad)


@pytest.mark.parametrize("backend", ["chunked", "torch"] if torch_has_it() else ["chunked"])
def test_nothing_counted_gives_zeros(backend: str) -> None:
    hidden, weight, bias, targets = inputs()
    nothing = torch.full_like(targets, -100)
    total = BACKENDS[backend](hidden, weight, bias, nothing, ChunkedOptions(torch.float32))
    total.backward()
    assert total.item() == 0.0
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert leaf.grad.count_nonzero() == 0


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_does_not_exist_is_refused(label: int) -> None:
    hidden, weight, _, targets = inputs()
    targets[0] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_linear_cross_entropy(hidden, weight, None, targets, ChunkedOptions(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_autocast(dtype: torch.dtype) -> None:
    options = ChunkedOptions(dtype, label_smoothing=0.1, z_loss=1e-3, rows=5)
    exact = inputs(torch.float64)
    plain(*exact, options).backward()
    with_autocast, chunked = inputs(), inputs()
    with torch.autocast("cpu", dtype=dtype):
        plain(*with_autocast, options).backward()
    total = chunked_linear_cross_entropy(*chunked, options)
    assert total.dtype == torch.float32
    total.backward()
    for true, auto, ours in zip(exact[:3], with_autocast[:3], chunked[:3], strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.float32
        allowed = (auto.grad - true.grad).norm() * 1.5  # type: ignore[operator]
        assert (ours.grad - true.grad).norm() <= allowed


def test_float16_keeps_small_gradients_that_the_scale_holds_up() -> None:
    """Probabilities of about 1e-8 are below float16; times a loss scale of 2**16 they are not."""
    hidden = torch.full((1, 1), 1.0, requires_grad=True)
    weight = torch.tensor([[0.0], [-17.0]], requires_grad=True)
    targets = torch.tensor([0])
    total = chunked_linear_cross_entropy(hidden, weight, None, targets, ChunkedOptions(torch.float16))
    (total * 2**16).backward()
    assert weight.grad is not None
    assert weight.grad[1].item() / 2**16 == pytest.approx(4.14e-8, rel=0.02)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any tensor had which an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_logits_of_32k_classes_never_exist_whole() -> None:
    tokens, features, classes = 2048, 8, 32_000
    hidden = torch.randn(tokens, features, requires_grad=True)
    weight = torch.randn(classes, features, requires_grad=True)
    targets = torch.randint(0, classes, (tokens,))
    with LargestTensor() as seen:
        total = chunked_linear_cross_entropy(hidden, weight, None, targets, ChunkedOptions(torch.float32))
        total.backward()
    assert seen.elements <= 2**24 < tokens * classes // 3
    with LargestTensor() as seen:
        plain(hidden, weight, None, targets, ChunkedOptions(torch.float32))
    assert seen.elements == tokens * classes
