"""A loss over any split into microbatches and ranks is that of plain torch over the whole batch.

Seeded random cases; `PROPERTY_EXAMPLES=50` tries 50 times as many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dataloader_dispatch import masked_dummy
from trainer_core import (
    CausalLMLoss,
    ClassificationLoss,
    MeanLoss,
    OutputMeanLoss,
    RegressionLoss,
    TokenLoss,
    ignored_like,
    is_ignored,
)
from trainer_core.loss import loss_denominator

EXAMPLES = 150 * int(os.environ.get("PROPERTY_EXAMPLES", "1"))
CLASS_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Case:
    """A loss of ours, a batch, and the mean that torch gives over all of it."""

    loss: TokenLoss
    logits: Tensor
    labels: Tensor
    whole: Callable[[Tensor], Tensor]
    """Logits to torch's mean over the batch."""
    name: str


def leading(draw: random.Random, least: int = 0) -> list[int]:
    return [draw.randint(1, 6), *(draw.randint(1, 4) for _ in range(draw.randint(least, 2)))]


def mask(draw: random.Random, labels: Tensor) -> Tensor:
    """Let some labels not count, but for one that always does."""
    hidden = torch.rand(labels.shape) < draw.choice((0.0, 0.4))
    hidden.view(-1)[-1] = False
    return torch.where(hidden, ignored_like(labels), labels)


def draw_logits(draw: random.Random, *shape: int) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * draw.choice((0.1, 1.0, 5.0))).to(draw.choice(FLOATS))


def classes(draw: random.Random) -> Case:
    shape, count = leading(draw), draw.randint(2, 7)
    labels = mask(draw, torch.randint(0, count, shape)).to(draw.choice(CLASS_TYPES))
    weight = draw.choice((None, torch.rand(count) * draw.choice((0.01, 1.0)) + 1e-3))
    smoothing, dim = draw.choice((0.0, 0.1)), draw.choice((-1, 1))
    logits = draw_logits(draw, *shape, count)
    logits = logits.movedim(-1, dim)

    def whole(logits: Tensor) -> Tensor:
        flat = logits.movedim(dim, -1).reshape(-1, count).double()
        double = None if weight is None else weight.double()
        return functional.cross_entropy(
            flat, labels.flatten().long(), weight=double, label_smoothing=smoothing
        )

    loss = ClassificationLoss(weight=weight, label_smoothing=smoothing, class_dim=dim)
    return Case(loss, logits, labels, whole, f"classes {labels.dtype} weight={weight is not None} dim={dim}")


NUMBERS = (
    functional.mse_loss,
    functional.l1_loss,
    partial(functional.huber_loss, delta=0.3),
    functional.binary_cross_entropy_with_logits,
)


def numbers(draw: random.Random) -> Case:
    shape, function = leading(draw), draw.choice(NUMBERS)
    labels = mask(draw, torch.rand(shape).to(draw.choice(FLOATS)))
    skips = draw.random() < 0.5
    if skips:  # the mark is lost, as of targets that are missing
        labels = labels.masked_fill(is_ignored(labels), torch.nan)
    logits = draw_logits(draw, *shape, *draw.choice(([], [1])))

    def whole(logits: Tensor) -> Tensor:
        counts = ~labels.isnan()
        return function(logits.view(labels.shape)[counts].double(), labels[counts].double())

    return Case(
        RegressionLoss(function, skip_nan=skips), logits, labels, whole, f"numbers {function} {labels.dtype}"
    )


def next_token(draw: random.Random) -> Case:
    rows, length, vocabulary = draw.randint(1, 6), draw.randint(2, 7), draw.randint(2, 9)
    kind = draw.choice((*CLASS_TYPES, torch.uint8))
    labels = torch.randint(0, vocabulary, (rows, length))
    labels = labels.to(kind) if kind is torch.uint8 else mask(draw, labels).to(kind)
    smoothing = draw.choice((0.0, 0.1))

    def whole(logits: Tensor) -> Tensor:
        flat = logits[:, :-1].reshape(-1, vocabulary).double()
        return functional.cross_entropy(flat, labels[:, 1:].flatten().long(), label_smoothing=smoothing)

    loss = CausalLMLoss(label_smoothing=smoothing)
    return Case(loss, draw_logits(draw, rows, length, vocabulary), labels, whole, f"next token {kind}")


def means(draw: random.Random) -> Case:
    """A mean of the user's, which counts what it leaves out of its own accord, or does not care to."""
    case = draw.choice((classes, numbers))(draw)
    inner = case.loss
    weighted = isinstance(inner, ClassificationLoss) and inner.weight is not None
    careful = weighted or bool((case.labels.isnan() | (case.labels == -100)).any())

    def mean(outputs: object, labels: Tensor) -> Tensor:
        return inner(outputs, labels) / inner.count(labels)

    count = inner.count if careful else (lambda labels: labels.numel())
    kind = draw.choice((MeanLoss, OutputMeanLoss))
    return Case(kind(mean, count), case.logits, case.labels, case.whole, f"{kind.__name__} of {case.name}")


@pytest.mark.parametrize("kind", [classes, numbers, next_token, means], ids=lambda kind: kind.__name__)
def test_any_split_gives_the_mean_of_the_whole(kind: Callable[[random.Random], Case]) -> None:
    for seed in range(EXAMPLES):
        draw = random.Random(f"{kind.__name__} {seed}")
        torch.manual_seed(draw.randrange(2**31))
        case = kind(draw)
        ours, theirs = (case.logits.clone().requires_grad_() for _ in range(2))
        case.whole(theirs).backward()
        rows = len(case.labels)
        cuts = sorted(draw.choices(range(rows + 1), k=draw.randint(0, 4)))  # some parts are empty
        ends = [0, *cuts, rows]
        parts = [(ours[start:end], case.labels[start:end]) for start, end in pairwise(ends)]
        if case.labels.dtype is not torch.uint8:  # what ranks get that have run out of data
            padding = masked_dummy({"labels": case.labels[:1]})["labels"]
            parts += [(ours[:1], padding)] * draw.randint(0, 2)
        draw.shuffle(parts)
        total = torch.stack([case.loss(logits, labels) for logits, labels in parts]).sum()
        count = torch.stack([case.loss.count(labels) for _, labels in parts]).sum()
        mean = total / loss_denominator(count)
        mean.backward()
        told = f"{case.name}, seed {seed}, {len(parts)} parts"
        assert total.dtype is torch.float32, told
        expected = case.whole(case.logits).item()
        assert mean.item() == pytest.approx(expected, rel=2e-5, abs=1e-6), told
        coarse = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(case.logits.dtype, 1e-5)
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=coarse, atol=coarse * 1e-2, msg=lambda text, t=told: f"{t}: {text}"
        )


@pytest.mark.parametrize(("count", "divisor"), [(0, 1), (1, 1), (7, 7), (0.0, 1.0), (0.25, 0.25)])
def test_a_sum_is_divided_by_what_counts_or_by_one_where_nothing_does(count: float, divisor: float) -> None:
    assert loss_denominator(torch.tensor(count)).item() == divisor
