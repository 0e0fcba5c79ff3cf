"""Activation checkpointing: which blocks, the same numbers, fewer bytes."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_core import TrainingArguments
from trainer_core.errors import ConfigurationError
from trainer_core.model import blocks_to_checkpoint, checkpoint_activations

Arguments = Callable[..., TrainingArguments]
Backward = Callable[[nn.Module], tuple[Tensor, dict[str, Tensor]]]

MODES: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "alias": {"gradient_checkpointing": True},
    "every": {"activation_checkpointing": "every_n", "activation_checkpointing_every": 3},
    "half": {"activation_checkpointing": "share", "activation_checkpointing_share": 0.5},
    "operators": {"activation_checkpointing": "operators"},
    "named": {
        "activation_checkpointing": "operators",
        "activation_checkpointing_operators": ("mm", "aten.gelu"),
    },
}
RECOMPUTED = {
    "full": {0, 1, 2, 3},
    "alias": {0, 1, 2, 3},
    "every": {2},
    "half": {0, 2},
    "operators": {0, 1, 2, 3},
    "named": {0, 1, 2, 3},
}


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1 / 2, {0, 2, 4, 6, 8}),  # every second
        (1 / 3, {1, 4, 7}),  # the middle one of each three
        (2 / 3, {0, 2, 3, 5, 6, 8}),  # two of three
        (0.333333, {1, 4, 7}),
        (1.0, set(range(9))),
    ],
)
def test_share_spaces_blocks_evenly(share: float, expected: set[int]) -> None:
    assert blocks_to_checkpoint(9, "share", share=share) == expected


@pytest.mark.parametrize("count", [1, 7, 32, 80])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.6, 0.9, 1.0])
def test_share_of_blocks_is_the_share_asked_for(count: int, share: float) -> None:
    wanted = int(count * share + 0.5)
    if wanted == 0:
        with pytest.raises(ConfigurationError, match="none of the"):
            blocks_to_checkpoint(count, "share", share=share)
        return
    chosen = sorted(blocks_to_checkpoint(count, "share", share=share))
    assert len(chosen) == wanted
    gaps = {later - earlier for earlier, later in itertools.pairwise(chosen)}
    assert len(gaps) <= 2  # evenly: two neighbouring distances at most
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_every_nth_and_full() -> None:
    assert blocks_to_checkpoint(7, "every_n", every=3) == {2, 5}
    assert blocks_to_checkpoint(3, "every_n", every=1) == {0, 1, 2}
    assert blocks_to_checkpoint(3, "full") == {0, 1, 2}
    with pytest.raises(ConfigurationError, match="activation_checkpointing_every=4 recomputes none of the 3"):
        blocks_to_checkpoint(3, "every_n", every=4)
    with pytest.raises(ConfigurationError, match="activation_checkpointing='half'"):
        blocks_to_checkpoint(3, "half")


def count_forwards(model: nn.Module) -> Counter[int]:
    """Counts how often the first layer of each block runs."""
    runs: Counter[int] = Counter()
    for index, block in enumerate(model.layers):
        block.norm.register_forward_pre_hook(lambda module, args, index=index: runs.update([index]))
    return runs


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_same_loss_and_gradients_and_only_chosen_blocks_run_again(
    mode: str, dropout: float, decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    plain = decoder(dropout=dropout)
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    names = checkpoint_activations(model, arguments(**MODES[mode]))
    assert names == [f"layers.{k}" for k in sorted(RECOMPUTED[mode])]
    runs = count_forwards(model)
    loss, gradients = backward(model)
    plain_loss, plain_gradients = backward(plain)
    assert torch.equal(loss, plain_loss)
    for name, gradient in plain_gradients.items():
        assert torch.equal(gradients[name], gradient), name
    assert runs == {k: 2 if k in RECOMPUTED[mode] else 1 for k in range(4)}
    assert list(model.state_dict()) == keys
    assert type(model.layers[0]) is type(plain.layers[0])


def test_a_function_names_what_is_recomputed(
    decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    plain = decoder(dropout=0.3)
    model = copy.deepcopy(plain)
    args = arguments(activation_checkpointing="custom")
    names = checkpoint_activations(model, args, lambda model: [model.layers[3], model.layers[0]])
    assert names == ["layers.3", "layers.0"]
    runs = count_forwards(model)
    loss, gradients = backward(model)
    plain_loss, plain_gradients = backward(plain)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())
    assert runs == {0: 2, 1: 1, 2: 1, 3: 2}


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (None, "activation_checkpointing='custom' needs activation_checkpointing_fn"),
        (lambda model: [], "names no module of Decoder"),
        (lambda model: None, "names NoneType, which is not a module inside Decoder"),
        (lambda model: [model], "names Decoder, which is not a module inside Decoder"),
        (lambda model: [nn.Linear(1, 1)], "names Linear, which is not a module inside Decoder"),
        (lambda model: [model.layers[0], model.layers], r"names both layers\.0 and layers around it"),
    ],
)
def test_functions_that_name_nothing_useful_are_refused(
    function: Any, rule: str, decoder: type[nn.Module], arguments: Arguments
) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        checkpoint_activations(decoder(), arguments(activation_checkpointing="custom"), function)


@pytest.mark.parametrize("mode", ["full", "operators"])
def test_same_gradients_under_autocast(
    mode: str, decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    plain = decoder(dropout=0.1)
    model = copy.deepcopy(plain)
    checkpoint_activations(model, arguments(**MODES[mode]))
    for each in (plain, model):
        each.forward = torch.autocast("cpu", dtype=torch.bfloat16)(each.forward)
    loss, gradients = backward(model)
    plain_loss, plain_gradients = backward(plain)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())


def test_nothing_runs_again_in_evaluation_or_without_gradients(
    decoder: type[nn.Module], arguments: Arguments, backward: Backward, ids: Tensor
) -> None:
    model = decoder()
    checkpoint_activations(model, arguments(activation_checkpointing="full"))
    runs = count_forwards(model)
    backward(model.eval())
    assert set(runs.values()) == {1}
    with torch.no_grad():
        model.train()(ids)
    assert set(runs.values()) == {2}


def test_a_copy_computes_with_its_own_weights(
    decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    model = decoder()
    checkpoint_activations(model, arguments(activation_checkpointing="full"))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    plain = decoder()
    plain.load_state_dict(copied.state_dict())
    assert torch.equal(backward(copied)[0], backward(plain)[0])
    assert not torch.equal(backward(copied)[0], backward(model)[0])


def test_a_forward_of_the_block_itself_is_kept(
    decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    """Other libraries exchange forward too; ours calls theirs."""
    model, plain = decoder(), decoder()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        block = each.layers[1]
        block.forward = lambda x, position, block=block: 2 * type(block).forward(block, x, position=position)
    checkpoint_activations(model, arguments(activation_checkpointing="full"))
    assert torch.equal(backward(model)[0], backward(plain)[0])


def saved_bytes(model: nn.Module, backward: Backward) -> int:
    """Bytes that stay alive between forward and backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backward(model)
    return sum(held.values())


def test_saved_bytes_fall_with_the_blocks_that_are_recomputed(
    decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    figures = {}
    for key, settings in {"no": {}, **MODES}.items():
        model = decoder(blocks=8)
        checkpoint_activations(model, arguments(**settings))
        figures[key] = saved_bytes(model, backward)
    activation = 3 * 8 * 16 * 4  # batch, positions, width, bytes
    # Recomputed blocks keep their input and nothing else; the head keeps its own.
    per_block = (figures["no"] - figures["full"]) / 8
    assert per_block > 10 * activation
    assert figures["half"] == pytest.approx(figures["no"] - 4 * per_block, abs=2 * activation)
    assert figures["every"] == pytest.approx(figures["no"] - 2 * per_block, abs=2 * activation)
    assert figures["full"] < 15 * activation


def test_second_switch_is_refused(decoder: type[nn.Module], arguments: Arguments) -> None:
    model = decoder()
    model.gradient_checkpointing = True
    with pytest.raises(
        ConfigurationError, match="model's own switch, gradient_checkpointing, which is on at"
    ):
        checkpoint_activations(model, arguments(activation_checkpointing="full"))
    model.gradient_checkpointing = False
    checkpoint_activations(model, arguments(activation_checkpointing="full"))
    with pytest.raises(ConfigurationError, match=r"checkpoints activations already, at layers\.0 \(Block\)"):
        checkpoint_activations(model, arguments(activation_checkpointing="full"))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("aten.scaled_mn", "is not an operator of torch. Did you mean"),
        ("gelo", r"Did you mean aten\.gelu"),
        ("linear", "decomposed into other operators"),
        ("aten.scaled_dot_product_attention", "decomposed into other operators"),
        ("no such thing", "is not an operator of torch"),
    ],
)
def test_unknown_operator_is_refused_with_a_suggestion(
    name: str, rule: str, decoder: type[nn.Module], arguments: Arguments
) -> None:
    settings = {"activation_checkpointing": "operators", "activation_checkpointing_operators": (name,)}
    with pytest.raises(ConfigurationError, match=rule):
        checkpoint_activations(decoder(), arguments(**settings))


class Carried(TorchDispatchMode):
    """Counts the operators that are carried out, below whatever keeps results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_operators_are_not_recomputed_but_the_rest_is(
    decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    """Counts what is carried out; the default keeps products and attention."""
    done = {}
    for key in ("no", "full", "operators"):
        model = decoder()
        checkpoint_activations(model, arguments(activation_checkpointing=key))
        with Carried() as carried:
            backward(model)
        done[key] = carried.counts
    for name in ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert done["operators"][name] == done["no"][name] > 0, name
        assert done["full"][name] > done["no"][name], name
    assert done["operators"]["native_layer_norm"] == 2 * done["no"]["native_layer_norm"]


def test_spans_of_a_profiler_may_differ_in_the_recomputation(
    decoder: type[nn.Module], arguments: Arguments, backward: Backward
) -> None:
    """As with experts that are sharded inside of a block, whose weights may be there in one of the passes."""
    runs: Counter[nn.Module] = Counter()

    def open_span(module: nn.Module, args: object) -> None:
        runs[module] += 1
        if runs[module] == 2:
            with torch.profiler.record_function("late"):
                pass

    model = decoder()
    loss, gradients = backward(model)
    checkpoint_activations(model, arguments(activation_checkpointing="operators"))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_pre_hook(open_span)
    found, again = backward(model)
    assert found == loss
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
    assert 2 in runs.values()
