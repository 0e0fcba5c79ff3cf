"""Models with experts: routing, products, shapes, counts, and what is refused."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from llama_pretrain import Llama, LlamaConfig, load_pretrained, preset, preset_names, save_pretrained
from llama_pretrain.model import moe
from llama_pretrain.model.moe import ExpertWeights, MoE, Router
from llama_pretrain.model.moe_config import Experts, Glm4MoeConfig, MixtralConfig
from llama_pretrain.model.moe_weights import has_separate_experts
from model_parallel import PlanError, check_plan
from perf_metrics import architecture_of_model, count_flops
from trainer_core import ConfigurationError

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXTRAL = MixtralConfig(**SHAPE, intermediate_size=40, num_local_experts=4)  # type: ignore[arg-type]
GLM = Glm4MoeConfig(
    **SHAPE,  # type: ignore[arg-type]
    intermediate_size=80,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    routed_scaling_factor=2.5,
)


def one_token_at_a_time(layer: MoE, x: Tensor) -> Tensor:
    """What the papers write: the weighted sum over the chosen experts of one token."""
    rows = []
    for token in x:
        logits = layer.gate.weight @ token
        if layer.gate.scores == "softmax":
            scores = logits.exp() / logits.exp().sum()
            ranked = scores
        else:
            scores = 1 / (1 + (-logits).exp())
            ranked = scores + layer.gate.e_score_correction_bias
        chosen = ranked.argsort(descending=True)[: layer.gate.top_k].tolist()
        total = sum(scores[expert] for expert in chosen) if layer.gate.normalized else 1.0
        row = torch.zeros_like(token)
        for expert in chosen:
            gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
            hidden = gate / (1 + (-gate).exp()) * up
            row = row + layer.gate.scale * scores[expert] / total * (layer.experts.down_proj[expert] @ hidden)
        rows.append(row)
    return torch.stack(rows)


CHOICES = {
    "softmax": Experts(count=5, used=2, width=12),
    "softmax, not normalised": Experts(count=5, used=2, width=12, normalized=False),
    "sigmoid": Experts(count=6, used=3, width=12, scores="sigmoid", scale=2.5),
    "sigmoid, not normalised": Experts(count=6, used=3, width=12, scores="sigmoid", normalized=False),
}


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_outputs_and_gradients_are_those_of_one_token_at_a_time(
    name: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert moe.has_grouped_products("cpu", torch.float32)
    if not grouped:
        monkeypatch.setattr(moe, "has_grouped_products", lambda *_: False)
    torch.manual_seed(3)
    layer = MoE(16, CHOICES[name])
    if layer.gate.scores == "sigmoid":
        layer.gate.e_score_correction_bias.normal_()
    x = torch.randn(2, 9, 16, requires_grad=True)
    expected = one_token_at_a_time(layer, x.flatten(0, 1)).view_as(x)
    out = layer(x)
    assert torch.allclose(out, expected, atol=1e-5)
    wanted = [x, *layer.parameters()]
    weights = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad((out * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("grouped", [True, False])
def test_every_token_goes_to_one_expert_and_none_is_dropped(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not grouped:
        monkeypatch.setattr(moe, "has_grouped_products", lambda *_: False)
    torch.manual_seed(0)
    layer = ExpertWeights(16, Experts(count=4, used=1, width=8))
    x = torch.randn(50, 16)
    out = layer(x, torch.full((50, 1), 2), torch.ones(50, 1))
    gate, up = F.linear(x, layer.gate_up_proj[2]).chunk(2, dim=-1)
    assert torch.allclose(out, F.linear(F.silu(gate) * up, layer.down_proj[2]), atol=1e-6)
    out.sum().backward()
    # Experts without a token have a gradient of zeros: where gradients are summed over ranks, all have one.
    assert [bool(part.any()) for part in layer.down_proj.grad] == [False, False, True, False]
    layer.zero_grad()
    layer(x[:0], torch.empty(0, 1, dtype=torch.int64), torch.empty(0, 1)).sum().backward()
    assert [bool(weight.grad.any()) for weight in layer.parameters()] == [False, False]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("keeps_products", [False, True])
def test_a_block_that_is_recomputed_may_be_the_first_to_ask_for_grouped_products(
    keeps_products: bool, compiled: bool
) -> None:
    torch.manual_seed(0)
    layer = MoE(16, Experts(count=4, used=2, width=8))
    x = torch.randn(12, 16, requires_grad=True)
    layer(x).sum().backward()
    expected = [each.grad.clone() for each in (x, *layer.parameters())]
    for each in (x, *layer.parameters()):
        each.grad = None

    def recomputed(x: Tensor) -> Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        options = {"context_fn": contexts} if keeps_products else {}
        return checkpoint(layer, x, use_reentrant=False, **options)

    torch._dynamo.reset()
    moe.has_grouped_products.cache_clear()
    (torch.compile(recomputed, backend="aot_eager") if compiled else recomputed)(x).sum().backward()
    for each, gradient in zip((x, *layer.parameters()), expected, strict=True):
        assert torch.allclose(each.grad, gradient, atol=1e-6)


def test_widths_that_grouped_products_do_not_take_are_computed_one_by_one() -> None:
    layer = ExpertWeights(20, Experts(count=4, used=1, width=6)).bfloat16()
    x = torch.randn(9, 20, dtype=torch.bfloat16)
    chosen = torch.arange(9).remainder(4).unsqueeze(-1)
    out = layer(x, chosen, torch.ones(9, 1))
    for number, expert in enumerate(chosen.flatten().tolist()):
        gate, up = F.linear(x[number], layer.gate_up_proj[expert]).chunk(2)
        expected = F.linear(F.silu(gate) * up, layer.down_proj[expert])
        assert torch.allclose(out[number], expected, atol=3e-2)


def test_the_bias_takes_part_in_the_choice_and_not_in_the_weight() -> None:
    router = Router(8, Experts(count=4, used=1, width=4, scores="sigmoid", normalized=False))
    x = torch.randn(20, 8)
    router.e_score_correction_bias[3] = 10.0
    logits, weights, chosen = router(x)
    assert (chosen == 3).all()
    assert torch.allclose(weights[:, 0], logits[:, 3].sigmoid())


def test_routing_is_computed_in_float32_under_autocast_and_in_a_bfloat16_model() -> None:
    router = Router(16, CHOICES["sigmoid"])
    router.e_score_correction_bias.fill_(1 / 3)
    x = torch.randn(7, 16)
    expected = router(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x)[0], expected)
    router.bfloat16()
    assert router.weight.dtype is torch.bfloat16
    assert torch.equal(router.e_score_correction_bias, torch.full((6,), 1 / 3))
    assert router(x.bfloat16())[0].dtype is torch.float32


def test_experts_follow_autocast() -> None:
    layer = MoE(16, Experts(count=4, used=2, width=16))
    x = torch.randn(3, 5, 16)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer(x)
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, atol=0.05)


@pytest.mark.parametrize("config", [MIXTRAL, GLM], ids=["mixtral", "glm4_moe"])
def test_what_is_written_is_read(config: LlamaConfig, tmp_path: Path) -> None:
    model = Llama(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.normal_()
    save_pretrained(model, tmp_path)
    assert not has_separate_experts(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert loaded.config == config
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_the_first_layers_have_no_experts() -> None:
    layers = Llama(GLM).model.layers
    assert [isinstance(layer.mlp, MoE) for layer in layers] == [False, True, True]
    assert layers[1].mlp.shared_experts.up_proj.weight.shape == (48, 48)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral-8x7b", 46.7e9, 12.9e9), ("moe-nano", 2.364e6, 0.926e6), ("mixtral-nano", 2.512e6, 0.890e6)],
)
def test_parameters_of_presets(name: str, total: float, active: float) -> None:
    with torch.device("meta"):
        model = Llama(preset(name))
    architecture = architecture_of_model(model)
    assert architecture.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert architecture.parameters == pytest.approx(total, rel=1e-3)
    assert architecture.active_parameters == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize("name", [name for name in preset_names() if name.endswith("nano")])
def test_flops_by_formula_and_by_counting_agree(name: str) -> None:
    model = Llama(preset(name))
    formula = architecture_of_model(model).per_token(64, "dense")
    assert count_flops(model, 64).per_token().total == pytest.approx(formula.total, rel=1e-9)


REFUSED = {
    "another kind": ({"model_type": "qwen3_moe"}, "only llama, mixtral, glm4_moe are implemented"),
    "half of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "half, in the scaling": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
    "half by default": ({"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": None}, "is 0.5"),
    "groups": ({"n_group": 4}, "n_group=4"),
    "norms of heads": ({"use_qk_norm": True}, "use_qk_norm=True"),
    "more than there are": ({"num_experts_per_tok": 9}, "between 1 and n_routed_experts=8"),
    "one expert": ({"n_routed_experts": 1, "num_experts_per_tok": 1}, "n_routed_experts=1"),
    "dense": ({"first_k_dense_replace": 3}, "leaves none of num_hidden_layers=3"),
    "no shared ones": ({"n_shared_experts": 0}, "n_shared_experts=0"),
    "negative weight": ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef=-1.0"),
    "negative rate": ({"router_bias_update_rate": -1.0}, "router_bias_update_rate=-1.0"),
    "scale": ({"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0"),
    "scaled positions": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 1.0}},
        "rope_parameters.rope_type='dynamic'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    values = {**GLM.to_dict(), **changes}
    if "rope_parameters" not in changes:
        del values["rope_parameters"]
    with pytest.raises(ConfigurationError, match=message):
        LlamaConfig.from_dict(values)


def test_a_mixtral_with_a_window_or_noise_is_refused() -> None:
    for key, value in {"sliding_window": 4096, "router_jitter_noise": 0.1}.items():
        with pytest.raises(ConfigurationError, match=f"{key}={value}"):
            LlamaConfig.from_dict({**MIXTRAL.to_dict(), key: value})


def test_initial_weights_of_experts_are_as_narrow_as_those_of_a_feed_forward() -> None:
    torch.manual_seed(0)
    layer = Llama(MIXTRAL).model.layers[0].mlp
    assert layer.experts.gate_up_proj.std().item() == pytest.approx(0.2, rel=0.05)
    assert layer.experts.down_proj.std().item() == pytest.approx(0.2 / math.sqrt(6), rel=0.05)
    assert layer.gate.weight.std().item() == pytest.approx(0.2, rel=0.2)


def test_a_damaged_file_is_left_to_the_reader_of_weights(tmp_path: Path) -> None:
    assert not has_separate_experts(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00")
    assert not has_separate_experts(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"model.layers.0.mlp.experts.0.up_proj.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert has_separate_experts(tmp_path)


def test_a_model_without_experts_has_none() -> None:
    model: nn.Module = Llama(preset("tiny"))
    assert not any(isinstance(module, MoE) for module in model.modules())


@pytest.mark.parametrize("config", [MIXTRAL, GLM], ids=["mixtral", "glm4_moe"])
def test_tensor_parallelism_is_refused_where_experts_are_not_divided(config: LlamaConfig) -> None:
    with pytest.raises(PlanError, match="Divide experts first, by divide_experts or ep in a mesh"):
        check_plan(Llama(config), tensor=2)
    assert Llama(preset("tiny")).tp_plan is Llama.tp_plan
    shared = [name for name in Llama(config).tp_plan if "shared_experts" in name]
    assert len(shared) == (3 if config is GLM else 0)
