"""The workers have imported transformers when they start, which takes longer than all that they do."""

from __future__ import annotations

import pytest

FAMILIES = ("gemma2", "gpt_neox", "llama", "phi", "phi3", "qwen3")


@pytest.fixture(scope="session")
def imported(imported: list[str]) -> list[str]:
    return [
        *imported,
        "transformers.models.auto.modeling_auto",
        *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
    ]
