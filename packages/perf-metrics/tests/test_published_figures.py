"""MFU of published tables, each in its own convention, from throughput and shapes."""

import pytest

from perf_metrics import model_flops_utilization, palm_flops_per_token


def mfu_percent(n: int, layers: int, width: int, length: int, tokens_per_second: float, peak: float) -> float:
    flops = palm_flops_per_token(n, layers, width, length) * tokens_per_second
    mfu = model_flops_utilization(flops, 1.0, peak)
    assert mfu is not None
    return 100 * mfu


@pytest.mark.parametrize(
    ("n", "layers", "width", "tokens_per_second", "published"),
    [
        (8030261248, 32, 4096, 2904, 56.8),
        (8030261248, 32, 4096, 2973, 58.2),
        (70553706496, 80, 8192, 331, 51.7),
    ],
)
def test_torchtitan_llama_3_on_a100(
    n: int, layers: int, width: int, tokens_per_second: float, published: float
) -> None:
    # Sequence 8192, 312 TFLOP/s, N with embeddings; published with one decimal.
    assert mfu_percent(n, layers, width, 8192, tokens_per_second, 312e12) == pytest.approx(
        published, abs=0.051
    )


@pytest.mark.parametrize(
    ("n", "layers", "width", "length", "gpus", "tokens_per_second", "published"),
    [
        (64862437376, 80, 8192, 2048, 512, 515636, 41.25),
        (64862437376, 80, 8192, 2048, 64, 66523, 42.57),
        (30019254272, 48, 7168, 8192, 8, 11072, 29.92),
        (13011240960, 40, 5120, 32768, 8, 15812, 31.68),
        (6918905856, 32, 4096, 65536, 8, 15654, 28.59),
    ],
)
def test_llm_foundry_on_h100(
    n: int, layers: int, width: int, length: int, gpus: int, tokens_per_second: float, published: float
) -> None:
    # scripts/train/benchmarking/README.md of llm-foundry: N with embeddings, 989.5 TFLOP/s per GPU.
    mfu = mfu_percent(n, layers, width, length, tokens_per_second, gpus * 989.5e12)
    assert mfu == pytest.approx(published, abs=0.01)
