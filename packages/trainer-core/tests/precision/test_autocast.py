"""Autocast contexts and the precision of float32 products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer_core import TrainingArguments
from trainer_core.precision import autocast, matmul_precision

MakeSettings = Callable[..., TrainingArguments]


@pytest.mark.parametrize(
    ("mixed_precision", "dtype"),
    [(None, torch.float32), ("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_products_have_the_dtype_that_was_asked_for(
    settings: MakeSettings, mixed_precision: str | None, dtype: torch.dtype
) -> None:
    matrix = torch.eye(4)
    with autocast(settings(mixed_precision=mixed_precision), "cpu"):
        assert (matrix @ matrix).dtype == dtype
    assert (matrix @ matrix).dtype == torch.float32


def test_matmul_precision_is_put_back_after_an_error(settings: MakeSettings) -> None:
    before = torch.get_float32_matmul_precision()

    def fail_within() -> None:
        with matmul_precision(settings(float32_matmul_precision="medium")):
            assert torch.get_float32_matmul_precision() == "medium"
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert torch.get_float32_matmul_precision() == before


def test_matmul_precision_stays_when_not_set(settings: MakeSettings) -> None:
    before = torch.get_float32_matmul_precision()
    with matmul_precision(settings()):
        assert torch.get_float32_matmul_precision() == before
