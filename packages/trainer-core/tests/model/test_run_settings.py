"""Process-wide switches are set for a run and set back, errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from trainer_core import TrainingArguments
from trainer_core.errors import ConfigurationError
from trainer_core.model import run_settings
from trainer_core.model.run_settings import attention_context

Arguments = Callable[..., TrainingArguments]
CPU = torch.device("cpu")

SETTINGS: dict[str, Any] = {
    "detect_anomaly": True,
    "float32_matmul_precision": "high",
    "sdpa_backend": ("math",),
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
    "dynamo_recompile_limit": 3,
    "activation_memory_budget": 0.0,
}


def switches() -> dict[str, object]:
    import torch._dynamo.config
    import torch._functorch.config

    return {
        "anomaly": torch.is_anomaly_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "attention": _cur_sdpa_kernel_backends(),
        "limit": torch._dynamo.config.recompile_limit,
        "budget": torch._functorch.config.activation_memory_budget,
    }


def test_every_switch_is_set_and_set_back(arguments: Arguments) -> None:
    before = switches()
    with run_settings(arguments(**SETTINGS), CPU):
        assert switches() == {
            "anomaly": True,
            "matmul": "high",
            "attention": [SDPBackend.MATH],
            "limit": 3,
            "budget": 0.0,
        }
    assert switches() == before


def test_switches_are_set_back_after_an_error(arguments: Arguments) -> None:
    before = switches()
    with pytest.raises(RuntimeError, match="stop"), run_settings(arguments(**SETTINGS), CPU):
        raise RuntimeError("stop")
    assert switches() == before


def test_nothing_changes_by_default(arguments: Arguments) -> None:
    before = switches()
    with run_settings(arguments(), CPU):
        assert switches() == before


def test_activation_offload_is_refused_on_the_cpu_in_training_only(arguments: Arguments) -> None:
    args = arguments(enable_activation_offloading=True)
    before = switches()
    with (
        pytest.raises(ConfigurationError, match="enable_activation_offloading=True has no effect on the CPU"),
        run_settings(args, CPU),
    ):
        pass
    assert switches() == before
    with run_settings(args, CPU, training=False):
        pass


def test_attention_runs_only_with_what_was_allowed() -> None:
    query = torch.randn(1, 2, 8, 4, requires_grad=True)

    def kernel() -> str:
        return type(torch.nn.functional.scaled_dot_product_attention(query, query, query).grad_fn).__name__

    with attention_context("flash", False, CPU):
        assert "Flash" in kernel()
    with attention_context(SDPBackend.MATH, False, CPU):
        assert "Flash" not in kernel()
    with attention_context(None, False, CPU):
        assert "Flash" in kernel()


def test_order_of_attention_is_its_priority() -> None:
    before = _cur_sdpa_kernel_backends(with_priority=True)
    for order in (["flash", "math"], ["math", "flash"]):
        with attention_context(order, True, CPU):
            members = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
            assert _cur_sdpa_kernel_backends(with_priority=True) == [members[name] for name in order]
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.mark.parametrize(
    ("backend", "rule"),
    [
        ("flesh", "must be one or several of math, flash, efficient, cudnn"),
        (7, "must be one or several"),
        ([], "must be one or several"),
        (["math", None], "must be one or several"),
        (SDPBackend.ERROR, "must be one or several"),
        ("cudnn", "is not available on the CPU. Use math or flash"),
        (("math", "efficient"), "is not available on the CPU"),
    ],
)
def test_wrong_attention_is_refused(backend: Any, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule) as caught:
        attention_context(backend, False, CPU)
    assert caught.value.setting == "sdpa_backend"
