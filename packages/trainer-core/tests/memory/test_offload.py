"""Activation offload: what goes to host memory, that it goes once, and that gradients stay the same.

The copies run on any device; here the device is the CPU, so they are copies from host to host.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer_core import TrainingArguments
from trainer_core.errors import ConfigurationError
from trainer_core.model.offload import (
    ActivationOffload,
    _HostCopy,
    activation_offload,
    check_activation_offload,
    worth_offloading,
)

CPU = torch.device("cpu")


class Gated(nn.Module):
    """Two products of one input, as in a feed-forward with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated() for _ in range(3)))


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(5, 7, 32, requires_grad=True)
    torch.autograd.backward((forward or model)(x).square().sum())
    return [x.grad, *(p.grad for p in model.parameters())]


def copies() -> int:
    """Number of host copies that are alive."""
    return sum(type(thing) is _HostCopy for thing in gc.get_objects())


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same(model: nn.Module, autocast: bool) -> None:
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = gradients(plain)
        with ActivationOffload(CPU, min_bytes=0):
            got = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_what_several_operations_save_is_copied_once(model: nn.Module) -> None:
    x = torch.randn(5, 7, 32, requires_grad=True)
    with ActivationOffload(CPU, min_bytes=1024):
        out = model[0].gate(x) + model[0].gate(x) * model[0].up(x)
    # x as rows of 32 (three products save it), and the two factors of the product.
    assert copies() == 3
    del out
    gc.collect()
    assert copies() == 0


def test_values_of_the_forward_pass_come_back_after_an_in_place_change() -> None:
    x = torch.randn(64, requires_grad=True)
    inner = x * 1
    with ActivationOffload(CPU, min_bytes=0):
        out = inner * inner
        before = inner.detach().clone()
        inner.add_(1.0)
        twice = inner * inner
    torch.autograd.backward((out + 3 * twice).sum())
    torch.testing.assert_close(x.grad, 2 * before + 3 * (2 * (before + 1)))


def test_memory_of_saved_tensors_is_free_between_forward_and_backward() -> None:
    x = torch.randn(64, requires_grad=True)
    with ActivationOffload(CPU, min_bytes=0):
        inner = x * 2
        gone = weakref.ref(inner.untyped_storage())
        out = inner.exp().sin()
        assert out.grad_fn is not None
        del inner
    assert gone() is None


def test_parameters_small_and_spread_tensors_stay() -> None:
    layer = nn.Linear(64, 64)
    assert not worth_offloading(layer.weight, 0)
    assert not worth_offloading(layer.weight.t(), 0)
    assert not worth_offloading(layer.weight[:2].view(-1), 0)
    assert not worth_offloading(torch.ones(10), 41)
    assert worth_offloading(torch.ones(10), 40)
    assert not worth_offloading(torch.ones(1, 10).expand(100, 10), 0)
    assert not worth_offloading(torch.eye(3).to_sparse(), 0)


def test_under_checkpointing_the_inputs_of_blocks_go(model: nn.Module) -> None:
    plain = copy.deepcopy(model)

    def forward(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    expected = gradients(plain)
    offload = ActivationOffload(CPU, min_bytes=1024)
    counted: list[int] = []
    model[2].register_forward_hook(lambda *args: counted.append(copies()))
    with offload:
        got = gradients(model, forward)
    assert counted[0] == 3  # one input of each block
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_compiled_models_offload_too(model: nn.Module) -> None:
    for block in model:
        block.dropout.p = 0.0
    plain = copy.deepcopy(model)
    expected = gradients(plain)
    model.compile(backend="aot_eager")
    gradients(model)
    offload = ActivationOffload(CPU, min_bytes=1024)
    with offload:
        torch.manual_seed(1)
        out = model(torch.randn(5, 7, 32, requires_grad=True))
        assert copies() > 3
        del out
        got = gradients(model)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_the_cpu_is_refused_and_off_is_off() -> None:
    with pytest.raises(
        ConfigurationError, match="enable_activation_offloading=True has no effect on the CPU"
    ):
        check_activation_offload(CPU)
    check_activation_offload(torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match="in host memory anyway"):
        activation_offload(TrainingArguments(enable_activation_offloading=True), CPU)
    with activation_offload(TrainingArguments(), CPU) as context:
        assert context is None
