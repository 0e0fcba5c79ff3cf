"""Published tables of MFU and HFU, each in its own convention, from throughput and shapes."""

from __future__ import annotations

import pytest

from perf_metrics import architecture_of_config, convention, model_flops_utilization, palm_flops_per_token

A100, H100 = 312e12, 989e12


def percent(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    mfu = model_flops_utilization(flops_per_token * tokens_per_second, 1.0, peak)
    assert mfu is not None
    return 100 * mfu


def llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocabulary: int) -> dict[str, object]:
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
    }  # fmt: skip


LLAMA_3 = {"8B": llama(32, 4096, 32, 8, 14336, 128256), "70B": llama(80, 8192, 64, 8, 28672, 128256)}


@pytest.mark.parametrize(
    ("model", "tokens_per_second", "published"),
    [("8B", 2904, 56.8), ("8B", 2973, 58.2), ("70B", 331, 51.7)],
)
def test_torchtitan_llama_3_on_a100(model: str, tokens_per_second: float, published: float) -> None:
    # Sequence 8192; all parameters, embeddings included; published with one decimal.
    flops = convention("all parameters").per_token(architecture_of_config(LLAMA_3[model]), 8192)
    assert percent(flops, tokens_per_second, A100) == pytest.approx(published, abs=0.051)


LLM_FOUNDRY = [
    # parameters, layers, width, sequence, GPUs, tokens/s, MFU, HFU
    (64862437376, 80, 8192, 2048, 512, 515636, 41.25, 55.0),
    (64862437376, 80, 8192, 2048, 64, 66523, 42.57, 56.76),
    (30019254272, 48, 7168, 8192, 8, 11072, 29.92, 39.9),
    (29975214080, 48, 7168, 2048, 32, 73860, 43.92, 58.57),
    (13011240960, 40, 5120, 32768, 8, 15812, 31.68, 42.24),
    (12853954560, 40, 5120, 2048, 64, 307209, 39.86, 39.86),
    (6918905856, 32, 4096, 65536, 8, 15654, 28.59, 38.13),
    (6658859008, 32, 4096, 2048, 8, 85144, 46.44, 46.44),
]


@pytest.mark.parametrize(("n", "layers", "width", "length", "gpus", "speed", "mfu", "hfu"), LLM_FOUNDRY)
def test_llm_foundry_on_h100(
    n: int, layers: int, width: int, length: int, gpus: int, speed: float, mfu: float, hfu: float
) -> None:
    # scripts/train/benchmarking/README.md of llm-foundry: N with embeddings, 989.5 TFLOP/s per GPU; HFU is
    # 4/3 of it with activation checkpointing, and equal without.
    flops = palm_flops_per_token(n, layers, width, length)
    assert percent(flops, speed, gpus * 989.5e12) == pytest.approx(mfu, abs=0.01)
    executed = flops * (1 if hfu == mfu else 4 / 3)
    assert percent(executed, speed, gpus * 989.5e12) == pytest.approx(hfu, abs=0.015)


KORTHIKANTI = [
    # layers, width, heads, batch, GPUs, seconds an iteration, MFU, HFU
    (48, 6144, 64, 4, 8, 1.10, 41.5, 43.7),
    (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
    (105, 20480, 128, 280, 280, 37.83, 56.0, 57.0),
    (128, 25600, 160, 512, 512, 71.49, 56.3, 57.0),
]


@pytest.mark.parametrize(("layers", "width", "heads", "batch", "gpus", "seconds", "mfu", "hfu"), KORTHIKANTI)
def test_korthikanti_with_selective_recomputation(
    layers: int, width: int, heads: int, batch: int, gpus: int, seconds: float, mfu: float, hfu: float
) -> None:
    # arXiv:2205.05198, 2048 tokens, vocabulary 51200, A100.
    config = {
        "model_type": "gpt2", "vocab_size": 51200, "n_embd": width, "n_layer": layers, "n_head": heads,
        "n_positions": 2048,
    }  # fmt: skip
    architecture = architecture_of_config(config)
    model = convention("model").per_token(architecture, 2048)
    hardware = convention("Korthikanti HFU").per_token(architecture, 2048)
    # Their formulas: 72 B L s h^2 (1 + s/6h + v/12hL) per iteration, and with s/3h.
    closed = 72 * layers * width**2
    head = 51200 / (12 * width * layers)
    assert model == pytest.approx(closed * (1 + 2048 / (6 * width) + head), rel=1e-12)
    assert hardware == pytest.approx(closed * (1 + 2048 / (3 * width) + head), rel=1e-12)
    # The ratio of the two needs no time, so it holds to the rounding of the table.
    assert hardware / model == pytest.approx(hfu / mfu, abs=0.0025)
    speed = batch * 2048 / seconds
    rounding = 0.05 + 0.005 / seconds * hfu
    assert percent(model, speed, gpus * A100) == pytest.approx(mfu, abs=rounding)
    assert percent(hardware, speed, gpus * A100) == pytest.approx(hfu, abs=rounding)


LLAMA_2 = {
    "7b": llama(32, 4096, 32, 32, 11008, 32000),
    "13b": llama(40, 5120, 40, 40, 13824, 32000),
    "34b": llama(48, 8192, 64, 8, 22016, 32000),
    "70b": llama(80, 8192, 64, 8, 28672, 32000),
}


@pytest.mark.parametrize(
    ("model", "peak", "tokens_per_second", "published"),
    [
        ("7b", A100, 3700, 57), ("13b", A100, 1800, 51), ("34b", A100, 700, 47), ("70b", A100, 370, 50),
        ("7b", H100, 7500, 37), ("13b", H100, 3800, 35), ("34b", H100, 1550, 32), ("70b", H100, 800, 34),
    ],
)  # fmt: skip
def test_ibm_llama_2_within_three_points(
    model: str, peak: float, tokens_per_second: float, published: float
) -> None:
    # Sequence 4096, per GPU. No convention reproduces this table; the one it names comes within 3 points.
    flops = convention("all parameters").per_token(architecture_of_config(LLAMA_2[model]), 4096)
    assert percent(flops, tokens_per_second, peak) == pytest.approx(published, abs=3.0)


def test_the_named_worked_figures_of_llama() -> None:
    # What runs over what PaLM counts, and over what Megatron counts: 0.94 and 1.01 for 7B at 4k, and so on.
    for config, length, palm, megatron in [
        (LLAMA_2["7b"], 4096, 0.94, 1.01),
        (LLAMA_3["8B"], 8192, 0.91, 1.02),
        (LLAMA_3["8B"], 131072, 0.66, 1.12),
    ]:
        architecture = architecture_of_config(config)
        executed = convention("executed").per_token(architecture, length)
        assert executed / convention("model").per_token(architecture, length) == pytest.approx(
            palm, abs=0.006
        )
        assert executed / convention("megatron").per_token(architecture, length) == pytest.approx(
            megatron, abs=0.006
        )


MIXTRAL_8X7B = {
    **llama(32, 4096, 32, 8, 14336, 32000),
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "first_k_dense_replace": 3, "moe_layer_freq": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        # arXiv:2401.04088, sections 1 and 2: 47 and 13 billion; the card of the model has 46.7 and 12.9.
        (MIXTRAL_8X7B, 46.7, 12.9),
        # arXiv:2412.19437, section 4.2: 671 and 37 billion; the lookup of 0.93 is not among the active ones.
        (DEEPSEEK_V3, 671.0, 36.6),
    ],
    ids=["Mixtral 8x7B", "DeepSeek-V3"],
)
def test_parameters_of_mixtures_of_experts(config: dict[str, object], total: float, active: float) -> None:
    architecture = architecture_of_config(config)
    lookup = architecture.lookup if config is DEEPSEEK_V3 else 0
    assert architecture.parameters / 1e9 == pytest.approx(total, abs=0.05)
    assert (architecture.active_parameters - lookup) / 1e9 == pytest.approx(active, abs=0.05)


@pytest.mark.parametrize("config", [MIXTRAL_8X7B, DEEPSEEK_V3], ids=["Mixtral 8x7B", "DeepSeek-V3"])
def test_products_of_experts_cost_what_the_active_ones_have(config: dict[str, object]) -> None:
    architecture = architecture_of_config(config)
    used = architecture.active_parameters - architecture.lookup
    assert architecture.per_token(4096).matmul == pytest.approx(6 * used, rel=1e-12)
