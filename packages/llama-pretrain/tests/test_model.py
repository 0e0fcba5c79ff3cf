"""The model: its names, its arithmetic, its cache, its compilation, and generation with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llama_pretrain import KVCache, Llama, LlamaConfig, generate, preset
from llama_pretrain.model.llama import RMSNorm
from perf_metrics import architecture_of_model, count_flops
from trainer_core import ConfigurationError, Sampling

MakeConfig = Callable[..., LlamaConfig]


def _ids(batch: int = 2, length: int = 60) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def test_parameters_have_the_names_of_hugging_face(small_config: MakeConfig) -> None:
    names = set(Llama(small_config(num_hidden_layers=1)).state_dict())
    layer = "model.layers.0."
    assert names == {
        "model.embed_tokens.weight",
        layer + "self_attn.q_proj.weight",
        layer + "self_attn.k_proj.weight",
        layer + "self_attn.v_proj.weight",
        layer + "self_attn.o_proj.weight",
        layer + "mlp.gate_proj.weight",
        layer + "mlp.up_proj.weight",
        layer + "mlp.down_proj.weight",
        layer + "input_layernorm.weight",
        layer + "post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_tied_embeddings_are_one_parameter(small_config: MakeConfig) -> None:
    tied = Llama(small_config(tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())


def test_a_position_sees_the_past_only(small_model: Llama) -> None:
    ids = _ids()
    changed = ids.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 61
    with torch.no_grad():
        before, after = small_model(ids), small_model(changed)
    assert before.shape == (2, 60, 61)
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-5)
    assert not torch.allclose(before[:, 40:], after[:, 40:], atol=1e-2)


def test_scores_depend_on_distances_alone(small_config: MakeConfig) -> None:
    """Rotary embedding: queries and keys moved by the same number of positions have the same products."""
    model = Llama(small_config())
    rotary = model.model.rotary_emb
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(2, 1, 1, 9, 10, generator=generator)
    from llama_pretrain.model.llama import apply_rotary

    products = []
    for start in (0, 37):
        cos, sin = rotary(start, 9)
        products.append(apply_rotary(query, cos, sin) @ apply_rotary(key, cos, sin).transpose(-1, -2))
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=1e-4)
    assert not torch.allclose(products[0], query @ key.transpose(-1, -2), atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "of_weight", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 0.02),
        (torch.bfloat16, torch.float32, 0.02),
    ],
)
def test_the_norm_has_the_gradients_of_its_formula_and_keeps_its_input_alone(
    dtype: torch.dtype, of_weight: torch.dtype, tolerance: float
) -> None:
    """Values, gradients and second derivatives, beside float64; of a float32 weight as under autocast."""
    generator = torch.Generator().manual_seed(3)
    norm = RMSNorm(24, eps=1e-3).to(of_weight)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0, generator=generator)
    x = torch.randn(3, 5, 24, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(3, 5, 24, generator=generator)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        out = norm(x)
    assert out.dtype == torch.promote_types(dtype, of_weight)
    assert [each.numel() for each in kept if each.numel() > 24] == [x.numel()]
    assert sum(each.nbytes for each in kept) == x.nbytes + norm.weight.nbytes

    exact_x, exact_weight = (each.detach().double().requires_grad_() for each in (x, norm.weight))
    exact = exact_weight * exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-3)
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(out.double(), exact, **close)
    first = torch.autograd.grad(out, (x, norm.weight), grad.to(out.dtype), create_graph=True)
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double(), create_graph=True)
    for mine, right in zip(first, expected, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=tolerance, atol=tolerance * 5)
    second = torch.autograd.grad(first[0].square().sum(), (x, norm.weight))
    right_second = torch.autograd.grad(expected[0].square().sum(), (exact_x, exact_weight))
    for mine, right in zip(second, right_second, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=tolerance, atol=tolerance * 20)


def test_the_norm_is_differentiated_in_every_way_torch_has() -> None:
    norm = RMSNorm(24, eps=1e-3)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(4))

    def formula(x: Tensor) -> Tensor:
        return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)

    x, along = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(5))
    for ways in (
        lambda of: torch.func.grad(lambda x: of(x).sin().sum())(x),
        lambda of: torch.func.vmap(torch.func.grad(lambda x: of(x).sin().sum()))(x),
        lambda of: torch.func.jvp(of, (x,), (along,))[1],
        lambda of: torch.func.hessian(lambda x: of(x).sin().sum())(x[0]),
        lambda of: torch.autograd.grad(of(x.requires_grad_()).sin().sum(), x)[0],
    ):
        torch.testing.assert_close(ways(norm), ways(formula), rtol=1e-5, atol=1e-5)
    norm.weight.requires_grad_(False)
    norm(x[0].detach().requires_grad_()).sum().backward()
    assert norm.weight.grad is None


@pytest.mark.parametrize("pieces", [[60], [1] * 60, [7, 1, 30, 1, 21]])
def test_the_cache_changes_nothing(small_model: Llama, pieces: list[int]) -> None:
    ids = _ids()
    cache = small_model.make_cache(2, 64)
    with torch.no_grad():
        parts = [small_model(part, cache=cache) for part in ids.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), small_model(ids), rtol=0, atol=2e-4)
    assert cache.length == 60


def test_a_cache_has_storage_for_those_layers_that_computed(small_config: MakeConfig) -> None:
    """As on a rank that has some of the layers."""
    cache = KVCache(max_length=64)
    new = torch.rand(2, 2, 5, 10)
    for layer in (2, 0):
        for kept in cache.extend(layer, new, new):
            assert torch.equal(kept, new)
            assert kept.untyped_storage().nbytes() == 2 * 2 * 64 * 10 * 4
    cache.advance(5)
    keys, _ = cache.extend(2, new + 1, new)
    assert torch.equal(keys, torch.cat([new, new + 1], dim=2))


def test_tables_stay_float32_and_survive_the_meta_device(small_config: MakeConfig) -> None:
    config = small_config()
    reference = Llama(config).model.rotary_emb.cos
    lowered = Llama(config).to(torch.bfloat16)
    assert lowered.model.rotary_emb.cos.dtype == torch.float32
    assert lowered(_ids()).dtype == torch.bfloat16
    with torch.device("meta"):
        empty = Llama(config)
    assert torch.equal(empty.to_empty(device="cpu").model.rotary_emb.cos, reference)


def test_fresh_weights_have_the_documented_spread(small_config: MakeConfig) -> None:
    torch.manual_seed(0)
    model = Llama(small_config(hidden_size=240, intermediate_size=480, initializer_range=0.02))
    layer = model.model.layers[1]
    assert float(layer.self_attn.q_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    for narrow in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert float(narrow.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(240))


def test_too_many_positions_are_refused(small_model: Llama) -> None:
    with pytest.raises(ValueError, match=r"129 positions.*max_position_embeddings=128"):
        small_model(torch.zeros(1, 129, dtype=torch.int64))


def test_it_compiles_as_one_graph(small_model: Llama) -> None:
    ids = _ids()
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(small_model, fullgraph=True, backend=count)
    compiled(ids).sum().backward()
    assert len(graphs) == 1
    assert not any("complex" in str(node.target) for node in graphs[0].graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), small_model(ids), rtol=0, atol=1e-5)


PROMPT = torch.tensor([[3, 14, 15, 9], [2, 6, 5, 35]])


def _without_cache(model: Llama, ids: Tensor, new: int, temperature: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(temperature=temperature, top_k=20)
    with torch.no_grad():
        for _ in range(new):
            token = sampling.choose(model(ids)[:, -1], generator=generator)
            ids = torch.cat([ids, token[:, None]], dim=1)
    return ids


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_equals_the_computation_without_cache(small_model: Llama, temperature: float) -> None:
    generator = torch.Generator().manual_seed(5)
    quick = generate(
        small_model, PROMPT, max_new_tokens=40, temperature=temperature, top_k=20, generator=generator
    )
    assert torch.equal(quick, _without_cache(small_model, PROMPT, 40, temperature, seed=5))


def test_the_end_token_is_kept_and_fills_up(small_model: Llama) -> None:
    free = generate(small_model, PROMPT, max_new_tokens=30, temperature=0)
    end = int(free[0, 6])
    first = int((free[0, 4:] == end).nonzero()[0]) + 4
    stopped = generate(small_model, PROMPT, max_new_tokens=30, temperature=0, eos_token_id=end)
    assert torch.equal(stopped[0, : first + 1], free[0, : first + 1])
    assert (stopped[0, first:] == end).all()
    alone = generate(small_model, PROMPT[:1], max_new_tokens=30, temperature=0, eos_token_id=end)
    assert torch.equal(alone[0], free[0, : first + 1])


def test_nothing_new_and_the_mode_is_put_back(small_model: Llama) -> None:
    assert torch.equal(generate(small_model, PROMPT, max_new_tokens=0), PROMPT)
    small_model.train()
    small_model.model.layers[1].eval()
    before = {name: module.training for name, module in small_model.named_modules()}
    generate(small_model, PROMPT, max_new_tokens=2)
    assert {name: module.training for name, module in small_model.named_modules()} == before
    assert set(before.values()) == {True, False}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        (
            {"max_new_tokens": 125},
            "needs 129 positions with a prompt of 4 tokens, but the model has 128. Use at most 124",
        ),
        ({"max_new_tokens": 1, "temperature": -0.1}, "temperature=-0.1"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k=0"),
        ({"max_new_tokens": 1, "top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_bad_settings_are_named(small_model: Llama, settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        generate(small_model, PROMPT, **settings)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused(small_model: Llama) -> None:
    with pytest.raises(ConfigurationError, match="input_ids"):
        generate(small_model, PROMPT[:, :0], max_new_tokens=1)


def test_attention_within_documents_counts_as_much_where_masks_are_made_in_pieces() -> None:
    config = replace(preset("tiny"), max_position_embeddings=4096)
    with torch.device("meta"):
        model = Llama(config)
        ids = torch.zeros(1, 4096, dtype=torch.int64)
    counted = [
        count_flops(model, inputs={"input_ids": ids, **more}).per_token().total
        for more in ({}, {"position_ids": ids, "document_ids": ids})
    ]
    assert counted[0] == pytest.approx(counted[1], rel=1e-9)
    formula = architecture_of_model(model).per_token(4096, "dense")
    assert counted[0] == pytest.approx(formula.total, rel=1e-9)
