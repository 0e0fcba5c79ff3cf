"""One curve: whatever is switched on, loss and gradient norm are those of a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from equivalence.case import EXACT, PLAIN, SHORT, SHORT_TIED, TIED, Case
from equivalence.data import IGNORED, STEPS_PER_EPOCH, RaggedLoader
from equivalence.mistakes import mean_of_means
from equivalence.reference import Recipe
from equivalence.table import Result, expected, largest_deviation, measure


def test_row_agrees_with_the_reference(
    case: Case, tmp_path: Path, record_result: Callable[[Result], None]
) -> None:
    result = measure(case, tmp_path)
    record_result(result)
    assert result.loss <= case.tolerance
    assert result.grad_norm <= case.tolerance


def test_reference_learns() -> None:
    for recipe in (PLAIN, TIED):
        points = expected(recipe)
        assert len(points) == 50
        assert points[-1].loss < 0.75 * points[0].loss


def test_reference_clips_some_steps_and_not_others() -> None:
    assert PLAIN.max_grad_norm is not None
    clipped = [point.grad_norm > PLAIN.max_grad_norm for point in expected(PLAIN)]
    assert 10 < sum(clipped) < 40


WRONG = {
    "no weight decay": replace(SHORT, weight_decay=0.0),
    "no clipping": replace(SHORT, max_grad_norm=None),
    "another warm-up": replace(SHORT, warmup=6),
    "another second moment": replace(PLAIN, betas=(0.9, 0.96)),
    "another end of the schedule": replace(SHORT, steps=15),
    "another seed": replace(SHORT, seed=12),
    "tied": SHORT_TIED,
}


@pytest.mark.parametrize("recipe", WRONG.values(), ids=WRONG)
def test_comparison_sees_a_wrong_setting(recipe: Recipe) -> None:
    """Each of these is off by ten times the bound at least, so that the bound catches it."""
    right = PLAIN if recipe.steps == PLAIN.steps else SHORT
    off = largest_deviation(expected(recipe)[: right.steps], expected(right))
    assert off.loss > 10 * EXACT
    assert off.grad_norm > 10 * EXACT


def test_comparison_sees_decay_of_norms_and_biases(tmp_path: Path) -> None:
    everything = {"*norm.weight": {"weight_decay": PLAIN.weight_decay}, "*.bias": {"weight_decay": 0.1}}
    case = Case(name="all decay", options=lambda: {"optimizer_groups": everything}, recipe=SHORT)
    off = measure(case, tmp_path)
    assert not off.agrees
    assert off.loss > 10 * EXACT


def test_comparison_sees_a_mean_of_means(tmp_path: Path) -> None:
    off = measure(Case(name="mean of means", options=mean_of_means, recipe=SHORT, accumulation=4), tmp_path)
    assert off.loss > 1000 * EXACT


def test_data_is_ragged() -> None:
    """Microbatches without a counted token, rows without one, and a short last window."""
    loader = RaggedLoader(2)
    batches = list(loader)
    counts = [(batch["labels"][:, 1:] != IGNORED).sum(dim=1).tolist() for batch in batches]
    assert [0, 0] in counts
    assert sum(0 in rows for rows in counts) >= 3
    assert len({batch["input_ids"].shape for batch in batches}) > 3
    assert len(batches) % 4
    assert -(-len(batches) // 4) == STEPS_PER_EPOCH
    for size in (4, 8):
        tokens = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in RaggedLoader(size))
        assert tokens == sum(map(sum, counts))
