"""What others have published of their own runs, on their own machines; nothing of it was measured here."""

from __future__ import annotations

from dataclasses import dataclass

_IBM = "IBM and Meta on pretraining with FSDP, 2024"
_IBM_README = "fms-fsdp, README, 2024"
_TITAN_A100 = "torchtitan, docs/performance.md, 2024"
_TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_H200 = "torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan.md, by Trainy"


@dataclass(frozen=True)
class Published:
    """One published figure.

    Attributes:
        size: The preset that is nearest to its model.
        source: Who says so, where.
        model: The model.
        device: The GPUs, and their number.
        how: Parallelism, precision and the like.
        tokens_per_second: Per GPU.
        mfu: As a share, by the source's own count; None if it tells none for this figure.
    """

    size: str
    source: str
    model: str
    device: str
    how: str
    tokens_per_second: float
    mfu: float | None


def _ibm(size: str, how: str, a100: tuple[float, float], h100: tuple[float, float]) -> tuple[Published, ...]:
    model, told = f"Llama 2 {size}, 4096 tokens", f"FSDP, bf16, {how}"
    return (
        Published(size, _IBM, model, "128 A100 80GB", told, *a100),
        Published(size, _IBM, model, "96 H100 80GB", told, *h100),
    )


def _ibm_compiled(size: str, a100: float, h100: float) -> tuple[Published, ...]:
    model, told = f"Llama 2 {size}, 4096 tokens", "FSDP, bf16, compiled"
    return (
        Published(size, _IBM_README, model, "A100 80GB", told, a100, None),
        Published(size, _IBM_README, model, "H100 80GB", told, h100, None),
    )


def _titan_a100(size: str, model: str, how: str, tokens: float, mfu: float) -> Published:
    return Published(size, _TITAN_A100, model, "64 A100 80GB", f"FSDP2, bf16, {how}", tokens, mfu)


def _titan_h100(how: str, tokens: float) -> Published:
    device = "8 H100 96GB HBM2e, 500 W"
    told = f"FSDP2, operators checkpointed, {how}"
    return Published("7b", _TITAN_H100, "Llama 3.1 8B, batch 2", device, told, tokens, None)


_ROWS = (
    *_ibm("7b", "no checkpointing", (3700, 0.57), (7500, 0.37)),
    *_ibm_compiled("7b", 4550, 9600),
    _titan_a100("7b", "Llama 3 8B, batch 1", "layers checkpointed", 2904, 0.568),
    _titan_a100("7b", "Llama 3 8B, batch 1", "operators checkpointed", 2973, 0.582),
    _titan_h100("bf16", 5762),
    _titan_h100("bf16, compiled", 6667),
    _titan_h100("float8, compiled", 8532),
    Published(
        "7b",
        _TITAN_H200,
        "Llama 3.1 8B, batch 2",
        "32 H200",
        "FSDP2, float8, compiled",
        10938,
        None,
    ),
    *_ibm("13b", "selective checkpointing", (1800, 0.51), (3800, 0.35)),
    *_ibm_compiled("13b", 2150, 4850),
    _titan_a100("13b", "Llama 2 13B, batch 2", "no checkpointing", 2162, 0.611),
    _titan_a100("13b", "Llama 2 13B, batch 2", "layers checkpointed", 1914, 0.541),
    *_ibm("34b", "full checkpointing", (700, 0.47), (1550, 0.32)),
    *_ibm_compiled("34b", 820, 1830),
    *_ibm("70b", "full checkpointing", (370, 0.50), (800, 0.34)),
    *_ibm_compiled("70b", 410, 890),
    _titan_a100("70b", "Llama 2 70B, batch 2", "full checkpointing", 353, 0.505),
    _titan_a100("70b", "Llama 3 70B, batch 1", "full checkpointing", 331, 0.517),
)


def published(model: str) -> list[Published]:
    """Return the figures for models of the size of a preset; those for 7b if there are none."""
    sizes = {row.size for row in _ROWS}
    return [row for row in _ROWS if row.size == (model if model in sizes else "7b")]
