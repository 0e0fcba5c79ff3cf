"""The formula against a count by hand and against torch's own counter."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from perf_metrics import (
    FlopsPerToken,
    FlopsUnknownError,
    ModelFlops,
    architecture_of_model,
    flops_per_token_breakdown,
    model_flops_per_token,
    palm_flops_per_token,
)
from perf_metrics.flops.per_token import warn_once


class Attention(nn.Module):
    """Grouped-query attention in plain matrix products, which the counter sees on any device."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        heads, kv_heads, size = self.shape
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads, kv_heads, size = self.shape
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, heads, size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, kv_heads, size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, kv_heads, size).transpose(1, 2)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        mask = torch.full((length, length), float("-inf")).triu(1)
        scores = (q @ k.transpose(-1, -2) * size**-0.5 + mask).softmax(-1)
        return self.o_proj((scores @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self, config: SimpleNamespace, *, tied: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def tiny_config(**changes: object) -> SimpleNamespace:
    # Heads times head size is 32, not the hidden size: the attention term must use the former.
    values = {
        "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def llama3_config(layers: int, hidden: int, heads: int, ffn: int) -> SimpleNamespace:
    return SimpleNamespace(
        vocab_size=128256, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip


# By hand: q 24x32, k and v 24x16, o 32x24, three of 24x40; two layers; the head 24x50.
HAND_WEIGHTS = 2 * (768 + 384 + 384 + 768 + 3 * 960) + 1200
SEQUENCE = 16
HAND_ATTENTION = 12 * 2 * 32 * SEQUENCE


def counted(model: nn.Module, *, backward: bool = True) -> float:
    """FLOPs per token that torch's counter sees in one step of batch 3."""
    tokens = torch.randint(50, (3, SEQUENCE))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() / tokens.numel()


def test_counted_by_hand() -> None:
    model = Llama(tiny_config())
    assert HAND_WEIGHTS == 11568
    assert flops_per_token_breakdown(model, SEQUENCE) == FlopsPerToken(6 * HAND_WEIGHTS, HAND_ATTENTION)
    assert model_flops_per_token(model, SEQUENCE) == 81696
    assert model_flops_per_token(model, SEQUENCE, causal="half") == 75552
    assert palm_flops_per_token(11568, 2, 32, SEQUENCE) == 81696
    assert palm_flops_per_token(11568, 2, 32, SEQUENCE, causal="half") == 75552


@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_counter_of_torch(tied: bool) -> None:
    # With attention in plain products the counter's backward is twice the forward, as in the formula.
    # It counts all of the score matrix: "full".
    model = Llama(tiny_config(), tied=tied)
    assert counted(model) == model_flops_per_token(model, SEQUENCE) == 81696


def test_frozen_layers_below_equal_the_counter() -> None:
    model = Llama(tiny_config())
    model.embed_tokens.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    per_layer = 5184
    expected = FlopsPerToken(2 * per_layer + 6 * (per_layer + 1200), HAND_ATTENTION * (1 / 6 + 1 / 2))
    assert flops_per_token_breakdown(model, SEQUENCE) == expected
    assert counted(model) == expected.total


def test_frozen_weights_above_a_trained_one_pass_gradients_through() -> None:
    model = Llama(tiny_config()).requires_grad_(False)
    model.embed_tokens.requires_grad_(True)
    assert counted(model) == model_flops_per_token(model, SEQUENCE) == 4 * HAND_WEIGHTS + HAND_ATTENTION


def test_only_the_head_trained_equals_the_counter() -> None:
    model = Llama(tiny_config()).requires_grad_(False)
    model.norm.requires_grad_(True)
    model.lm_head.requires_grad_(True)
    assert counted(model) == model_flops_per_token(model, SEQUENCE)
    assert flops_per_token_breakdown(model, SEQUENCE).attention == HAND_ATTENTION / 3


def test_nothing_trained_is_the_forward_alone() -> None:
    model = Llama(tiny_config()).requires_grad_(False)
    assert counted(model, backward=False) == model_flops_per_token(model, SEQUENCE) == 81696 / 3


def test_meta_device_and_hidden_size_as_attention_width() -> None:
    with torch.device("meta"):
        model = Llama(tiny_config(head_dim=6))
    model.config.head_dim = None
    assert flops_per_token_breakdown(model, SEQUENCE).attention == 12 * 2 * 24 * SEQUENCE


@pytest.mark.parametrize(
    ("config", "n_total"),
    [(llama3_config(32, 4096, 32, 14336), 8030261248), (llama3_config(80, 8192, 64, 28672), 70553706496)],
)
def test_llama_3_shapes(config: SimpleNamespace, n_total: int) -> None:
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == n_total
    embedding = config.vocab_size * config.hidden_size
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    breakdown = flops_per_token_breakdown(model, 8192)
    assert breakdown.matmul == 6 * (n_total - embedding - norms)
    assert breakdown.attention == 12 * config.num_hidden_layers * config.hidden_size * 8192


def test_modules_with_a_matrix_as_weight_count_like_linear_ones() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(24, 72))
            self.bias = nn.Parameter(torch.zeros(72))

    model = Llama(tiny_config())
    before = flops_per_token_breakdown(model, SEQUENCE)
    model.qkv = Conv1D()
    assert flops_per_token_breakdown(model, SEQUENCE).matmul - before.matmul == 6 * 24 * 72


def test_a_model_may_answer_for_itself() -> None:
    class Own(nn.Module):
        answer: object = None

        def flops_per_token(self, sequence_length: int) -> object:
            return FlopsPerToken(100.0, 2.0 * sequence_length) if self.answer is None else self.answer

    model = Own()
    assert model_flops_per_token(model, 10) == 120
    assert model_flops_per_token(model, 10, causal="half") == 110
    model.answer = 77
    assert model_flops_per_token(model, 10) == 77
    with pytest.raises(FlopsUnknownError, match="cannot be halved"):
        flops_per_token_breakdown(model, 10, causal="half")
    model.answer = -1.0
    with pytest.raises(ValueError, match=r"returned -1\.0, but must return a positive number"):
        model_flops_per_token(model, 10)


class Repeated(nn.ModuleList):
    def __iter__(self) -> Iterator[nn.Module]:
        yield from (self[0], self[0])


def wrapped(kind: str) -> nn.Module:
    model = Llama(tiny_config())
    if kind == "convolution":
        model.patches = nn.Conv2d(3, 8, 4)
    if kind == "free matrix":
        model.positions = nn.Parameter(torch.zeros(16, 24))
    if kind == "odd config":
        model.config.num_attention_heads = "4"
    if kind == "no config":
        del model.config
    if kind == "shared layer":
        model.layers[1] = model.layers[0]
    if kind == "layer run twice":
        model.layers = Repeated(model.layers[:1])
    return model


def cannot_run() -> nn.Module:
    model = Llama(tiny_config())
    model.positions = nn.Parameter(torch.zeros(16, 24))
    model.forward = lambda tokens: tokens.item()  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (cannot_run(), r"parameter positions \(16x24, in Llama\)"),
        (cannot_run(), r"cannot be counted on the meta device: .*Scalar"),
    ],
)
def test_what_cannot_be_told_is_none_with_the_reason_logged_once(
    model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="perf_metrics"):
        assert model_flops_per_token(model, SEQUENCE) is None
        assert model_flops_per_token(model, SEQUENCE) is None
    assert len(caplog.records) == 1
    with pytest.raises(FlopsUnknownError, match=reason):
        flops_per_token_breakdown(model, SEQUENCE)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (wrapped("convolution"), r"patches.weight \(8x3x4x4, in Conv2d\)"),
        (wrapped("free matrix"), r"parameter positions \(16x24, in Llama\)"),
        (wrapped("no config"), "no config with num_hidden_layers"),
        (wrapped("shared layer"), r"layers.0.self_attn.q_proj and layers.1.self_attn.q_proj are one module"),
        (wrapped("layer run twice"), "config has 2 layers, and no list of modules in it has so many"),
        (Llama(tiny_config(model_type="longformer")), "longformer compute otherwise than its config tells"),
        (Llama(tiny_config(is_encoder_decoder=True)), "decoder-only"),
        (Llama(tiny_config(layer_types=["full_attention", "linear_attention"])), "linear_attention"),
        (wrapped("odd config"), "num_attention_heads='4' is not a positive integer"),
    ],
)
def test_what_the_formula_does_not_cover_is_counted(model: nn.Module, reason: str) -> None:
    with pytest.raises(FlopsUnknownError, match=reason):
        architecture_of_model(model)
    flops = ModelFlops(model, 12)
    assert flops.source == "counter"
    assert re.search(reason, flops.reason)
    # Weights and attention apart, at lengths at which it was not counted as well.
    for length in (SEQUENCE, 64, 1000):
        assert flops.per_token(length) == FlopsPerToken(6 * HAND_WEIGHTS, 12 * 2 * 32 * length)
    assert flops.per_token(SEQUENCE, causal="half").attention == HAND_ATTENTION / 2
    assert model_flops_per_token(model, SEQUENCE) == 81696


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 16},
        {"sliding_window": 8, "use_sliding_window": False},
        {"sliding_window": 8, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_window_that_does_not_cut_is_full_attention(changes: dict[str, object]) -> None:
    assert model_flops_per_token(Llama(tiny_config(**changes)), SEQUENCE) == 81696


def test_bad_input() -> None:
    model = Llama(tiny_config())
    with pytest.raises(ValueError, match="sequence_length=0"):
        model_flops_per_token(model, 0)
    with pytest.raises(ValueError, match='causal=\'quarter\' must be "full", "half" or "dense"'):
        model_flops_per_token(model, 8, causal="quarter")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_layers=-1"):
        palm_flops_per_token(1e9, -1, 128, 1024)


def test_a_sliding_window_counts_the_keys_within_it() -> None:
    def attention(causal: str, **changes: object) -> float:
        model = Llama(tiny_config(**changes))
        return flops_per_token_breakdown(model, SEQUENCE, causal=causal).attention  # type: ignore[arg-type]

    per_key = HAND_ATTENTION / SEQUENCE
    assert attention("full", sliding_window=4) == 4 * per_key
    # Query i sees min(i, 4) keys: (1 + 2 + 3 + 13 x 4) / 16.
    assert attention("half", sliding_window=4) == pytest.approx(58 / 16 * per_key)
    assert attention("dense", sliding_window=4) == HAND_ATTENTION
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    assert attention("full", **mixed) == (4 + 16) / 2 * per_key
    assert attention("half", **mixed) == pytest.approx((58 / 16 + 8) / 2 * per_key)
    chunks = {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}
    assert attention("half", **chunks) == 4 * per_key


def test_the_pieces_of_a_breakdown() -> None:
    parts = {part.kind: part for part in flops_per_token_breakdown(Llama(tiny_config()), SEQUENCE).parts}
    assert list(parts) == ["attention projections", "attention scores", "mlp", "output projection"]
    assert parts["attention projections"].forward == 2 * 2 * (768 + 384 + 384 + 768)
    assert parts["mlp"].total == 6 * 2 * 3 * 960
    assert parts["output projection"].backward == 4 * 1200
