"""FlexAttention computes what masks do: its blocks leave out no pair that is seen, and include no other."""

from __future__ import annotations

import random
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from model_parallel import (
    CausalAttention,
    attention,
    attention_kernel,
)


def blocks(counts: Tensor, order: Tensor) -> Tensor:
    """[rows, blocks of queries, blocks of keys], from what BlockMask has."""
    found = torch.zeros(order.shape, dtype=torch.bool)
    for place in product(*(range(size) for size in counts.shape)):
        found[(*place, order[(*place, slice(int(counts[place])))].long())] = True
    return found[:, 0]


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_those_that_queries_see(seed: int) -> None:
    draw = random.Random(seed)
    length, rows = draw.randint(1, 900), draw.randint(1, 3)
    cuts = sorted(draw.sample(range(length + 1), 2 if length > 1 else 1))
    pieces = [(start, end) for start, end in zip([0, *cuts], [*cuts, length], strict=True) if start < end][
        ::2
    ]
    numbers = [sorted(draw.choices(range(-1, 4), k=length)) for _ in range(rows)]
    documents = torch.tensor(numbers) if seed % 3 else None
    at, keys = attention.positions_of(pieces, None), torch.arange(length)
    mask = attention.block_mask(at, keys, None if documents is None else (documents[:, at], documents))

    seen = (at[:, None] >= keys).expand(rows, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, at, None] == documents[:, None])
    size = 128
    padded = torch.nn.functional.pad(seen, (0, -length % size, 0, -len(at) % size))
    by_block = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    needed, whole = by_block.any(4).any(2), by_block.all(4).all(2)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    full = blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    by_pair = blocks(mask.kv_num_blocks, mask.kv_indices)
    assert not bool((full & by_pair).any())
    assert torch.equal(full.expand_as(whole), whole), "computed without a look at pairs"
    assert not bool((needed & ~(full | by_pair)).any()), "left out"
    if documents is None:
        assert torch.equal((full | by_pair).expand_as(needed), needed), "computed for nothing"
    pairs = [
        mask.mask_mod(
            torch.tensor(row), torch.tensor(0), *torch.meshgrid(torch.arange(len(at)), keys, indexing="ij")
        )
        for row in range(rows)
    ]
    assert torch.equal(torch.stack(pairs), seen)


@pytest.fixture
def with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention with gradients on a CPU, as plain operators: torch has them, but refuses to use them."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


@pytest.mark.usefixtures("with_gradients")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_is_tried_against_masks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.device("cpu"), dtype, 16, 2
    assert attention._far_from_masks(*given) < attention._TOLERANCE / 3
    right = attention.block_mask
    monkeypatch.setattr(attention, "block_mask", lambda at, to, documents: right(at, to, None))
    assert attention._far_from_masks(*given) > 0.3, "documents"
    monkeypatch.setattr(attention, "block_mask", lambda at, to, documents: right(at + 1, to, documents))
    assert attention._far_from_masks(*given) > 0.3, "a later token is seen"


@pytest.mark.usefixtures("with_gradients")
@pytest.mark.parametrize("wrong", range(3))
def test_gradients_that_are_no_numbers_are_seen(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._by_flex

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.nan

    def spoilt(*given: Any) -> Tensor:
        own = list(given)
        own[wrong] = Spoilt.apply(own[wrong])
        return right(*own)

    monkeypatch.setattr(attention, "_by_flex", spoilt)
    assert not attention._far_from_masks(torch.device("cpu"), torch.float32, 16, 2) < attention._TOLERANCE


@pytest.mark.usefixtures("with_gradients")
def test_flex_attention_may_be_tried_in_a_block_that_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    attention._problem.cache_clear()
    x = torch.randn(3, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        assert attention._problem(torch.device("cpu"), torch.float32, 16, 2) is None
        return x.exp().sin()

    checkpoint(block, x, use_reentrant=False).sum().backward()
    attention._problem.cache_clear()
    assert torch.allclose(x.grad, x.exp() * x.exp().cos())


def test_more_kinds_of_calls_than_torch_compiles_a_function_for() -> None:
    """Sizes of heads, documents and sums: each is a graph of its own."""
    compiled = attention._compiled_flex("eager")
    for length, size in ((300, 16), (300, 32), (300, 48)):
        given = torch.randn(1, 2, length, size), *(torch.randn(1, 1, length, size) for _ in range(2))
        at = torch.arange(length)
        for documents in (None, (at[None] // 70, at[None] // 70)):
            mask = attention.block_mask(at, at, documents)
            for more in ({}, {"return_aux": flex_attention.AuxRequest(lse=True)}):
                with torch.no_grad():
                    compiled(*given, block_mask=mask, enable_gqa=True, **more)


@pytest.mark.full
def test_compiled_kernels_honour_blocks() -> None:
    # What other tests have compiled makes torch compile for any length, which its kernels for CPUs do not.
    torch.compiler.reset()
    torch.manual_seed(0)
    pieces, length = [(70, 200), (310, 440)], 440
    query, key, value = (
        torch.randn(2, 4, 260, 16),
        torch.randn(2, 2, length, 16),
        torch.randn(2, 2, length, 16),
    )
    documents = torch.tensor([[0] * 90 + [1] * 250 + [2] * 100, [5] * length])
    at = attention.positions_of(pieces, None)
    mask = attention.block_mask(at, torch.arange(length), (documents[:, at], documents))
    with torch.no_grad():  # torch 2.13 compiles it for a CPU without gradients only
        compiled = attention._compiled_flex()(query, key, value, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(compiled, attention.attend(query, key, value, pieces, documents))


@pytest.mark.parametrize("documents", [True, False])
def test_flex_attention_is_part_of_a_compiled_graph(documents: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 260, 16), torch.randn(2, 2, 440, 16)
    numbers = (torch.arange(440) // 150).expand(2, -1) if documents else None
    given = query, key, key, [(70, 200), (310, 440)], numbers
    compiled = torch.compile(attention.attend, backend="eager", fullgraph=True)
    with attention_kernel("flex"), torch.no_grad():
        found = compiled(*given)
    torch.testing.assert_close(found, attention.attend(*given))


@pytest.mark.parametrize("kernel", ["masks", "flex"])
def test_numbers_of_documents_may_be_those_of_all_rows(kernel: attention.AttentionKernel) -> None:
    x = torch.randn(3, 2, 200, 16)
    numbers = (torch.arange(200) // 70)[None]
    with attention_kernel(kernel), torch.no_grad():
        found = CausalAttention()(x, x, x, numbers)
        torch.testing.assert_close(found, CausalAttention()(x, x, x, numbers.expand(3, -1)))
        with pytest.raises(ValueError, match="there are 3 rows and 200 keys"):
            CausalAttention()(x, x, x, numbers.expand(2, -1))


def test_autocast_leaves_float64_alone() -> None:
    x = torch.randn(1, 2, 200, 16, dtype=torch.float64)
    with attention_kernel("flex"), torch.no_grad(), torch.autocast("cpu"):
        assert CausalAttention()(x, x, x, (torch.arange(200) // 70)[None]).dtype is torch.float64


def test_the_kernel_can_be_chosen() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 200, 16), torch.randn(1, 2, 200, 16)
    documents = torch.arange(200)[None] // 70
    found = []
    for kernel in get_args(attention.AttentionKernel):
        with attention_kernel(kernel), torch.no_grad(), torch.autocast("cpu"):
            found.append(CausalAttention()(query, key, key, documents))
    assert {each.dtype for each in found} == {torch.bfloat16}
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0.03)  # bfloat16
    assert torch.equal(found[0], found[2]), "a CPU has masks"
    with pytest.raises(ValueError, match="kernel is 'fast', but it must be auto, flex or masks"):
        attention_kernel("fast").__enter__()  # type: ignore[arg-type]
