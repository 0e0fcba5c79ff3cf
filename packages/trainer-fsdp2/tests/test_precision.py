"""Masters and gradients stay in float32, whatever layers compute in; the log says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

COMPUTING = {
    "plain": ["input torch.float32", "output torch.float32", "weight torch.float32"],
    "bf16 policy": ["input torch.bfloat16", "output torch.bfloat16", "weight torch.bfloat16"],
    "bf16 autocast": ["input torch.float32", "output torch.bfloat16", "weight torch.float32"],
    "on the host": ["input torch.float32", "output torch.float32", "weight torch.float32"],
}
TABLES = {
    "plain": {
        "weights the optimizer steps": "float32 (1,810)",
        "weights layers compute with": "the same",
        "gradients the optimizer gets": "float32",
    },
    "bf16 policy": {
        "weights the optimizer steps": "float32 (1,810)",
        "weights layers compute with": "bfloat16",
        "gradients travel as": "float32",
        "gradients the optimizer gets": "float32",
    },
    "bf16 autocast": {
        "weights the optimizer steps": "float32 (1,810)",
        "weights layers compute with": "the same",
        "matrix products": "bfloat16 (autocast)",
    },
}


@pytest.mark.parametrize("kind", COMPUTING)
def test_what_rests_is_float32_shards(world: Callable[..., Any], kind: str) -> None:
    for seen in world("few", "2").seen(kind):
        for what in ("weights", "gradients", "optimizer"):
            assert seen[what] == ["shard torch.float32 cpu"], what


@pytest.mark.parametrize("kind", COMPUTING)
def test_what_layers_compute_in(world: Callable[..., Any], kind: str) -> None:
    for seen in world("few", "2").seen(kind):
        assert seen["computing"] == COMPUTING[kind]


@pytest.mark.parametrize("kind", TABLES)
def test_rank_0_prints_the_dtypes(world: Callable[..., Any], kind: str) -> None:
    first, second = (seen["table"] for seen in world("few", "2").seen(kind))
    assert second == []
    assert first[0] == "sharded 2 units and the root over 2 ranks"
    rows = dict(line.split("  ", 1) for line in first[1:])
    rows = {what: dtype.strip() for what, dtype in rows.items()}
    assert rows.items() >= TABLES[kind].items()


def test_curves(world: Callable[..., Any]) -> None:
    curves = {kind: world("few", "2").seen(kind)[0]["losses"] for kind in COMPUTING}
    assert curves["on the host"] == curves["plain"]
    for kind in ("bf16 policy", "bf16 autocast"):
        assert curves[kind] != curves["plain"]
        assert curves[kind] == pytest.approx(curves["plain"], rel=2e-3)
