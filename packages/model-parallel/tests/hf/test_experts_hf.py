"""Unmodified models of transformers whose experts are divided give the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CASES = [
    *(("mixtral", each, "alone") for each in ("eager", "grouped_mm", "batched_mm")),
    *((family, each, "alone") for family in ("qwen3_moe", "qwen2_moe") for each in ("eager", "grouped_mm")),
    *((family, "eager", kind) for family in ("mixtral", "qwen2_moe") for kind in ("tensor", "sequence")),
    ("qwen3_moe", "grouped_mm", "tensor"),
]


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> list[Any]:
    return launch("experts_hf.py", 2, *CASES)


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_logits_loss_and_gradients_are_those_of_one_process(
    notes: list[Any], case: tuple[str, str, str]
) -> None:
    """Beside `shard_tensors` by the model's own plan, whose styles for experts are skipped, too."""
    for rank in notes:
        found = rank[CASES.index(case)]
        assert all(deviation < 1e-5 for name, deviation in found.items() if name != "seconds"), found


def test_a_plan_for_experts_that_are_not_divided_is_refused(notes: list[Any]) -> None:
    for rank in notes:
        kind, text, _ = rank[-1]
        assert kind == "PlanError"
        assert "Divide experts first, by divide_experts" in text
