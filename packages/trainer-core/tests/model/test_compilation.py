"""Compiling a model whole or by blocks, counting recompilations, and what it does not change."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_core import TrainingArguments
from trainer_core.errors import ConfigurationError
from trainer_core.model import RecompileCounter, checkpoint_activations, compile_model
from trainer_core.model.run_settings import memory_budget, recompile_limit

Arguments = Callable[..., TrainingArguments]
Backward = Callable[[nn.Module], tuple[Tensor, dict[str, Tensor]]]

EAGER = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("mode", ["no", "full", "operators"])
def test_same_numbers_and_names_when_compiled(
    scope: str, mode: str, decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    plain = decoder(blocks=2)
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    args = arguments(**EAGER, torch_compile_scope=scope, activation_checkpointing=mode)
    checkpoint_activations(model, args)
    assert compile_model(model, args) == ([""] if scope == "model" else ["layers.0", "layers.1"])
    with RecompileCounter(args) as recompiles:
        loss, gradients = backward(model)
        loss, gradients = backward(model)
    plain_loss, plain_gradients = backward(plain)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
    assert list(model.state_dict()) == keys
    assert recompiles.count() == 0


@pytest.mark.usefixtures("fresh_compiler")
def test_recompilations_are_counted_by_interval(decoder: type[nn.Module], arguments: Arguments) -> None:
    args = arguments(**EAGER, torch_compile_dynamic=False)
    model = decoder(blocks=1)
    compile_model(model, args)
    with RecompileCounter(args) as recompiles:
        for length, expected in ((4, 0), (4, 0), (5, 1), (6, 1), (4, 0)):
            model(torch.zeros(1, length, dtype=torch.int64))
            assert recompiles.count() == expected
        model(torch.zeros(1, 7, dtype=torch.int64))
        model(torch.zeros(1, 8, dtype=torch.int64))
        assert recompiles.count() == 2
    model(torch.zeros(1, 9, dtype=torch.int64))
    assert recompiles.count() == 0


def test_without_compilation_there_is_no_count(arguments: Arguments) -> None:
    with RecompileCounter(arguments()) as recompiles:
        assert recompiles.count() is None


@pytest.mark.usefixtures("fresh_compiler")
def test_recompile_limit_holds_and_is_set_back(decoder: type[nn.Module], arguments: Arguments) -> None:
    args = arguments(**EAGER, torch_compile_dynamic=False)
    model = decoder(blocks=1)
    compile_model(model, args)
    before = torch._dynamo.config.recompile_limit
    with RecompileCounter(args) as recompiles, recompile_limit(2):
        for length in range(4, 9):
            model(torch.zeros(1, length, dtype=torch.int64))
    assert recompiles.count() == 1
    assert torch._dynamo.config.recompile_limit == before
    with pytest.raises(RuntimeError, match="stop"), recompile_limit(2):
        raise RuntimeError("stop")
    assert torch._dynamo.config.recompile_limit == before


def saved_by_compiled(budget: float | None, model: nn.Module, args: Any, ids: Tensor) -> int:
    """Bytes of activations that a compiled model keeps for its backward pass."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    compile_model(model, args)
    with memory_budget(budget):
        model(ids)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(ids)
    del out
    return sum(held.values())


@pytest.mark.usefixtures("fresh_compiler")
def test_memory_budget_is_kept_and_zero_is_a_budget(
    decoder: type[nn.Module], arguments: Arguments, ids: Tensor
) -> None:
    args = arguments(torch_compile=True, torch_compile_backend="aot_eager_decomp_partition")
    model = decoder(blocks=2)
    figures = {b: saved_by_compiled(b, model, args, ids) for b in (None, 1.0, 0.5, 0.0)}
    assert figures[None] == figures[1.0] > figures[0.5] > figures[0.0] > 0
    assert torch._functorch.config.activation_memory_budget == 1.0


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"torch_compile_backend": "inductr"}, "Did you mean 'inductor'"),
        (
            {"torch_compile_backend": "aot_eager", "torch_compile_mode": "max-autotune"},
            "is a mode of inductor",
        ),
    ],
)
def test_wrong_backend_or_mode_is_refused(
    settings: dict[str, Any], rule: str, decoder: type[nn.Module], arguments: Arguments
) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        compile_model(decoder(), arguments(torch_compile=True, **settings))


def test_blocks_that_are_not_found_name_the_scope(arguments: Arguments) -> None:
    args = arguments(**EAGER, torch_compile_scope="blocks")
    with pytest.raises(
        ConfigurationError, match="does not name the blocks of the model, which torch_compile_scope needs"
    ):
        compile_model(nn.Linear(2, 2), args)


def test_the_compiler_is_imported_only_to_compile() -> None:
    program = """
import sys, torch, trainer_core
from torch import nn
for name in trainer_core.__all__:
    getattr(trainer_core, name)
from trainer_core import TrainingArguments
from trainer_core.run import GarbagePolicy
from trainer_core.model import RecompileCounter, compile_model, prepare_model, run_settings
cpu = torch.device("cpu")
args = TrainingArguments(activation_checkpointing="full", gc_steps=5)
make = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
model = prepare_model(make, args, cpu, weights_follow=False)
compile_model(model, args)
with run_settings(args, cpu), RecompileCounter(args), GarbagePolicy(args, cpu):
    with torch.no_grad():
        model(torch.ones(2))
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "transformers", "torchao")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
