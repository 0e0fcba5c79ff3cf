"""powerSGD over a restart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint_core import CheckpointConfig, CheckpointManager, StaticStatefulProvider
from dist_env import StaticDistributedEnvironment
from trainer_core import CommBytes
from trainer_ddp import CompressionArguments
from trainer_ddp.compression import GradientCompression, build_compression

pytestmark = pytest.mark.xdist_group("two ranks")

SETTINGS = CompressionArguments(method="powerSGD", matrix_rank=2, start_step=0)


def build(model: nn.Module, settings: CompressionArguments = SETTINGS) -> GradientCompression:
    compression = build_compression(settings, model, None, CommBytes())
    assert compression is not None
    return compression


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10))


def state(owed: float = 1.0, rank: int = 2) -> dict[str, object]:
    shapes = {"0.weight": (30, 20), "1.weight": (10, 30)}
    return {
        "errors": {name: torch.full(shape, owed) for name, shape in shapes.items()},
        "factors": {name: torch.full((columns, rank), 0.5) for name, (_, columns) in shapes.items()},
    }


@pytest.mark.parametrize("start", ["from 2, 0.002", "from 3, 0.002", "from 6, 0.002", "from 6, 0.01"])
def test_restarted_training_goes_on_bit_for_bit(two_ranks: Any, start: str) -> None:
    for found in two_ranks.of("restart"):
        assert found["same"]
        assert found[f"{start} MiB"]["equal"]
        assert found[f"{start} MiB"]["missing"] == []


def test_buckets_were_indeed_others_after_the_restart(two_ranks: Any) -> None:
    for found in two_ranks.of("restart"):
        initial, rebuilt = found["buckets"]
        # A restarted run has the initial bucket in its first step, where the other run has rebuilt ones.
        assert len(initial.split(", ")) == 1
        assert len(rebuilt.split(", ")) == 4
        assert found["from 6, 0.01 MiB"]["buckets"][1] != rebuilt


def test_from_two_ranks_to_one(two_ranks: Any) -> None:
    for found in two_ranks.of("fewer"):
        assert found["difference"] < 1e-10
        assert found["without the errors"] > 1e-3
        assert found["moved"] > 1e-2


def test_from_one_rank_to_two(two_ranks: Any) -> None:
    for found in two_ranks.of("more"):
        assert found["difference"] < 1e-10


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_of_two_ranks_is_read_by_one(two_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "workers"))
    from model import Model

    compression = build(Model())
    manager = CheckpointManager(
        CheckpointConfig(output_dir=two_ranks.folder / "checkpoints"),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider(compression.state_components()),
    )
    loaded = manager.load_checkpoint(two_ranks.folder / "checkpoints" / "checkpoint-6")
    assert loaded is not None
    assert loaded.missing == ()
    errors = compression.state_dict()["errors"]
    owed = [float(each["errors at 6"]) for each in two_ranks.of("restart")]
    assert float(sum(error.double().sum() for error in errors.values())) == pytest.approx(sum(owed) / 2)
    sys.modules.pop("model", None)


@pytest.mark.usefixtures("one_rank")
def test_every_new_rank_owes_the_mean() -> None:
    compression = build(model())
    compression.load_resharded([state(1.0), state(2.0), state(6.0)], rank=0, world_size=1)
    found = compression.state_dict()
    assert all(bool((error == 3.0).all()) for error in found["errors"].values())
    assert all(bool((factor == 0.5).all()) for factor in found["factors"].values())


@pytest.mark.usefixtures("one_rank")
def test_another_rank_of_the_factors_keeps_what_is_owed() -> None:
    compression = build(model(), CompressionArguments(method="powerSGD", matrix_rank=3, start_step=0))
    compression.load_state_dict(state())
    found = compression.state_dict()
    assert all(bool((error == 1.0).all()) for error in found["errors"].values())
    assert [factor.shape[1] for factor in found["factors"].values()] == [3, 3]


@pytest.mark.usefixtures("one_rank")
def test_what_is_owed_of_a_tensor_that_is_no_longer_compressed_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = CompressionArguments(method="powerSGD", matrix_rank=2, min_compression_rate=5)
    compression = build(model(), settings)
    compression.load_state_dict(state())
    assert list(compression.state_dict()["errors"]) == ["0.weight"]
    assert "1.weight" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_state_of_another_model_is_refused() -> None:
    other = nn.Sequential(nn.Linear(20, 31), nn.Linear(31, 10))
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(30, 20\).*\(31, 20\)"):
        build(other).load_state_dict(state())


def test_wrapper_around_another_model_is_refused(two_ranks: Any) -> None:
    for message in two_ranks.of("strange_wrapper"):
        assert "without the parameter 'last.weight'" in message
