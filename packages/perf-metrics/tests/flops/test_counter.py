"""Counting on the meta device: by module, backward and recomputed apart, and where torch counts wrongly."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import Counter
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from perf_metrics import (
    CountedPart,
    FlopsPerToken,
    FlopsUnknownError,
    ModelFlops,
    compare_flops,
    count_flops,
)

WIDTH, HEADS, GROUPS, LENGTH = 24, 4, 2, 16


class Mixer(nn.Module):
    """Attention by torch's own function, with fewer key heads than query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, HEADS, -1).transpose(1, 2)
        key, value = self.kv_proj(x).view(batch, length, 2 * GROUPS, -1).transpose(1, 2).chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.self_attn = Mixer()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 32, bias=False), nn.GELU(), nn.Linear(32, WIDTH, bias=False)
        )
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.self_attn(x))


class Model(nn.Module):
    """Nothing that a formula would know: no config."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 40, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


PROJECTIONS, MLP, HEAD = 3 * 2 * WIDTH**2, 3 * 2 * WIDTH * 32, WIDTH * 40
SCORES = 3 * 4 * WIDTH * LENGTH


def parts(model: nn.Module) -> dict[str, CountedPart]:
    return {part.kind: part for part in count_flops(model, LENGTH).parts}


def test_every_layer_type_by_hand() -> None:
    counted = parts(Model())
    assert counted == {
        "attention projections": CountedPart("attention projections", 2 * PROJECTIONS, 4 * PROJECTIONS, 0),
        "attention scores": CountedPart("attention scores", SCORES, 2 * SCORES, 0),
        "mlp": CountedPart("mlp", 2 * MLP, 4 * MLP, 0),
        "output projection": CountedPart("output projection", 2 * HEAD, 4 * HEAD, 0),
    }


def test_the_sum_is_that_of_torch_counter() -> None:
    model = Model()
    with torch.device("meta"):
        bare = Model()
    with FlopCounterMode(display=False) as counter:
        bare(torch.zeros((1, LENGTH), dtype=torch.int64, device="meta")).sum().backward()
    assert count_flops(model, LENGTH).model * LENGTH == counter.get_total_flops()


def test_checkpointed_blocks_are_recomputed_and_the_head_is_not() -> None:
    plain, again = count_flops(Model(), LENGTH), count_flops(Model(again=True), LENGTH)
    assert again.model == plain.model
    # torch stops once the last value that is needed is there, which spares the block's last product.
    assert again.hardware - again.model == 2 * PROJECTIONS + SCORES + MLP
    assert {part.kind: part.recomputed for part in again.parts}["output projection"] == 0
    assert plain.hardware == plain.model


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_ways_of_checkpointing(reentrant: bool) -> None:
    class Whole(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Model()
    model.blocks[1] = Whole(again=True)
    counted = count_flops(model, LENGTH)
    assert counted.model == count_flops(Model(), LENGTH).model
    again = 2 * PROJECTIONS + SCORES + (2 if reentrant else 1) * MLP
    assert counted.hardware - counted.model == again / 3


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    model = Model().requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    counted = parts(model)
    # Block 0: forward only; block 1: its first layers need no gradient of their input; block 2: inputs only.
    one = PROJECTIONS / 3
    assert counted["attention projections"].backward == 2 * one + 2 * one
    assert counted["mlp"].backward == 4 * MLP / 3 + 2 * MLP / 3
    assert counted["output projection"].backward == 2 * HEAD


def test_attention_of_the_cpu_counts_and_its_second_scores_are_recomputation() -> None:
    # torch 2.13 counts nothing for this kernel. Run for real, under the same watch.
    from perf_metrics.flops.operator_watch import CallStack, OperatorWatch

    model = Model()
    calls = CallStack(model)
    watch = OperatorWatch(calls, None)
    with calls, watch:
        model(torch.randint(40, (1, LENGTH))).sum().backward()
    attention = [record for record in watch.records if record.operator == "attention"]
    assert [record.place.path for record in attention] == [f"blocks.{i}.self_attn" for i in range(3)]
    assert sum(record.forward for record in attention) == SCORES * LENGTH
    assert sum(record.backward for record in attention) == 2 * SCORES * LENGTH
    assert sum(record.recomputed for record in attention) == SCORES * LENGTH / 2


def test_the_groups_of_a_convolution_count_backward_too() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = nn.Conv1d(8, 8, 3, groups=8, padding=1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(x)

    counted = count_flops(Short(), inputs={"x": torch.zeros(2, 8, 5, requires_grad=True)})
    (part,) = counted.parts
    assert part.backward == 2 * part.forward
    assert part.forward * counted.tokens == 2 * 2 * 5 * 8 * 3


def test_the_model_stays_as_it_is() -> None:
    model = Model(again=True)
    calls: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    first = count_flops(model, LENGTH)
    assert calls == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(model.blocks[0]._forward_hooks) == 1
    model.compile(backend="eager")
    assert count_flops(model, LENGTH) == first


def test_inputs_tell_shapes() -> None:
    rows = count_flops(Model(), inputs={"input_ids": torch.zeros((4, LENGTH), dtype=torch.int64)})
    assert rows.tokens == 64
    assert rows.parts == count_flops(Model(), LENGTH).parts


def test_a_model_that_needs_values_is_refused_with_the_reason() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.linear(input_ids[input_ids > 0].float())

    with pytest.raises(FlopsUnknownError, match=r"Looks cannot be counted on the meta device: .*nonzero"):
        count_flops(Looks(), LENGTH)
    with pytest.raises(ValueError, match="either sequence_length or inputs"):
        count_flops(Model())
    with pytest.raises(ValueError, match="sequence_length=0"):
        count_flops(Model(), 0)


def test_a_wrong_formula_is_named_by_layer_type() -> None:
    class Doubled(Model):
        def flops_per_token(self, sequence_length: int) -> float:
            return 2 * count_flops(Model(), sequence_length).model

    comparison = compare_flops(Doubled(), LENGTH)
    assert comparison.ratio == pytest.approx(2)
    assert "2.00 times what torch counts at 16 tokens" in (comparison.warning() or "")
    assert compare_flops(Model(), LENGTH).warning() is None


def test_lengths_beyond_the_first_few_lie_between_counted_ones() -> None:
    asked: list[int] = []

    class Watched(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            asked.append(input_ids.shape[1])
            return super().forward(input_ids)

    flops = ModelFlops(Watched(), LENGTH)
    for length in (5, 6, 7, 300, 301, 302, 303, 1000):
        linear = 6 * (PROJECTIONS + MLP + HEAD)
        assert flops.per_token(length) == FlopsPerToken(linear, pytest.approx(3 * SCORES / LENGTH * length))
        assert next(part.kind for part in flops.per_token(length).parts) == "attention projections"
    # The first four as they are asked for; then both ends of an eighth of an octave.
    assert asked == [16, 5, 6, 7, 288, 320, 960, 1024]


def test_a_model_of_one_length_is_counted_at_it() -> None:
    class Fixed(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids.view(-1, LENGTH))

    flops = ModelFlops(Fixed(), LENGTH)
    assert flops.per_token(LENGTH) == ModelFlops(Model(), LENGTH).per_token(LENGTH)
    with pytest.raises(FlopsUnknownError, match="cannot be counted"):
        flops.per_token(5)


@pytest.mark.parametrize("way", ["closure", "wrapped", "compiled forward", "on meta"])
def test_a_forward_that_holds_the_original_is_refused_before_it_does_harm(way: str) -> None:
    with torch.device("meta" if way == "on meta" else "cpu"):
        model = Model()
    inner = model.forward
    if way == "compiled forward":
        model.forward = torch.compile(inner, backend="eager")  # type: ignore[method-assign]
    else:
        model.forward = functools.wraps(inner)(lambda input_ids: inner(input_ids))  # type: ignore[method-assign]
    with pytest.raises(FlopsUnknownError, match="holds the original"):
        count_flops(model, LENGTH)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compiled_and_replicated_models_are_counted_as_what_they_hold() -> None:
    model = Model()
    assert count_flops(torch.compile(model), LENGTH).parts == count_flops(model, LENGTH).parts


def test_results_of_any_form_have_a_backward_pass() -> None:
    @dataclass
    class Result:
        found: dict[str, tuple[Tensor, ...]]

    class Deep(Model):
        def forward(self, input_ids: Tensor) -> Result:  # type: ignore[override]
            return Result({"deep": (super().forward(input_ids),)})

    with torch.inference_mode():
        assert count_flops(Deep(), LENGTH).parts == count_flops(Model(), LENGTH).parts

    class Silent(Model):
        def forward(self, input_ids: Tensor) -> int:  # type: ignore[override]
            super().forward(input_ids)
            return 3

    with pytest.raises(FlopsUnknownError, match="nothing that it returns depends on its trained parameters"):
        count_flops(Silent(), LENGTH)


def test_what_cannot_be_copied_is_shared() -> None:
    model = Model()
    model.lock = threading.Lock()
    model.places = torch.zeros(3)  # neither a parameter nor a buffer
    assert count_flops(model, LENGTH).parts == count_flops(Model(), LENGTH).parts


def test_generators_stay_where_they_are() -> None:
    class Drawing(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            random.random(), numpy.random.rand(), torch.rand(2)
            return super().forward(input_ids)

    model = Drawing()
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    count_flops(model, LENGTH)
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


def test_layers_that_are_alike_are_asked_once() -> None:
    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    def layers(*widths: int) -> nn.Module:
        pairs = [(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for width in widths]
        return nn.Sequential(*(module for pair in pairs for module in pair))

    def counted(model: nn.Module, calls: Calls) -> float:
        with calls:
            return count_flops(model, inputs={"input": torch.zeros(3, 4, requires_grad=True)}).model

    alike, unlike = Calls(), Calls()
    assert counted(layers(*[8] * 12), alike) == 12 * counted(layers(8), Calls())
    # A product of one width does not stand for that of another.
    assert counted(layers(*range(8, 16)), unlike) == sum(counted(layers(n), Calls()) for n in range(8, 16))
    assert alike.seen["aten.gelu.default"] == alike.seen["aten.gelu_backward.default"] == 1
    assert unlike.seen["aten.gelu.default"] == unlike.seen["aten.gelu_backward.default"] == 8


def test_what_is_recomputed_at_another_length() -> None:
    again = count_flops(Model(again=True), LENGTH)
    for length in (LENGTH, 64):
        there = count_flops(Model(again=True), length)
        assert again.recomputed(there.per_token()) == pytest.approx(there.hardware - there.model)
    # Of one number only, the share of the whole is taken.
    assert again.recomputed(FlopsPerToken(again.model, 0.0)) == pytest.approx(again.hardware - again.model)
