"""What a run logs of its utilization: model and hardware FLOPs, the peak, and no time of the compiler."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from perf_metrics import DefaultMetrics
from trainer_core import Trainer, TrainerState, TrainingArguments

PEAK = 1e12
BATCH, LENGTH = 4, 16


class Blocks(nn.Module):
    """Four equal blocks, an embedding and a head: all FLOPs can be told by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))
        self.lm_head = nn.Linear(8, 23)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


LAYER, HEAD = 8 * 8, 8 * 23
MODEL_FLOPS = 6 * (4 * 2 * LAYER + HEAD) * BATCH * LENGTH


class Tripled(Blocks):
    def flops_per_token(self, sequence_length: int) -> float:
        return 3 * 6.0 * (4 * 2 * LAYER + HEAD)


def records(
    path: Path, model: type[Blocks] = Blocks, callback: object = None, **settings: object
) -> list[dict[str, float]]:
    """What a short run logs."""
    rows = torch.randint(0, 23, (32, LENGTH), generator=torch.Generator().manual_seed(0))
    given = {
        "output_dir": str(path), "max_steps": 3, "num_train_epochs": -1, "logging_steps": 1,
        "per_device_train_batch_size": BATCH, "save_strategy": "no", "peak_hardware_flops": PEAK,
        "use_cpu": True,
    } | settings  # fmt: skip
    keep = Keep()
    Trainer(
        TrainingArguments(**given),  # type: ignore[arg-type]
        model_init=model,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[DefaultMetrics(), keep] if callback is None else [callback, DefaultMetrics(), keep],
    ).train()
    return keep.records


class Keep:
    """The records as the displays see them."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        self.records.append(dict(logs))


def test_every_interval_and_the_whole_run(tmp_path: Path) -> None:
    *steps, whole = records(tmp_path)
    assert len(steps) == 3
    for record in steps:
        assert record["flos"] == record["hardware_flos"] == MODEL_FLOPS
        assert record["peak_flops"] == PEAK
        assert record["mfu"] == pytest.approx(MODEL_FLOPS / record["interval_seconds"] / PEAK)
        assert record["hfu"] == record["mfu"]
    assert whole["mfu"] == whole["hfu"] == whole["flops_per_second"] / PEAK


@pytest.mark.parametrize(
    ("settings", "recomputed"),
    [
        # torch stops before the last product of a block, whose result nothing needs.
        ({"gradient_checkpointing": True}, 4 * 2 * LAYER),
        ({"activation_checkpointing": "every_n", "activation_checkpointing_every": 2}, 2 * 2 * LAYER),
    ],
)
def test_what_is_recomputed_counts_for_hfu_only(
    tmp_path: Path, settings: dict[str, object], recomputed: int
) -> None:
    for record in records(tmp_path, transformer_layers_path="layers", **settings)[:3]:
        assert record["flos"] == MODEL_FLOPS
        assert record["hardware_flos"] == pytest.approx(MODEL_FLOPS + recomputed * BATCH * LENGTH)
        assert record["hfu"] > record["mfu"]


def test_a_wrong_count_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="perf_metrics"):
        found = records(tmp_path, Tripled)
    assert "model FLOPs of Tripled are 3.00 times what torch counts" in caplog.text
    assert found[0]["flos"] == 3 * MODEL_FLOPS


def test_counting_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="perf_metrics"):
        found = records(tmp_path, Tripled, check_flops=False)
    assert "Tripled" not in caplog.text
    assert found[0]["hardware_flos"] is None
    assert "hfu" not in found[0]


class Frozen(Blocks):
    """Of which only the last two blocks and the head are trained."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embed, *self.layers[:2]):
            module.requires_grad_(False)


class FreezeAtFirst:
    """Freezes for one step what `Frozen` freezes for all."""

    def on_step_begin(
        self, args: object, state: TrainerState, control: object, *, model: Blocks, **_: object
    ) -> None:
        for module in (model.embed, *model.layers[:2]):
            module.requires_grad_(state.global_step > 0)


@pytest.mark.parametrize("construct", ["device", "meta"])
def test_what_a_callback_freezes_counts_as_frozen(tmp_path: Path, construct: str) -> None:
    partly = records(tmp_path / "frozen", Frozen)[0]
    first, second, third, _ = records(
        tmp_path / "at_first", callback=FreezeAtFirst(), construct_model_on=construct
    )
    assert first["flos"] == first["hardware_flos"] == partly["flos"] < MODEL_FLOPS
    assert second["flos"] == third["flos"] == third["hardware_flos"] == MODEL_FLOPS


def test_compilation_is_no_training_time(tmp_path: Path) -> None:
    def slow(graph: torch.fx.GraphModule, _: object) -> object:
        time.sleep(4.0)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(slow, name="slow_for_a_test")
    first, *_ = records(tmp_path, torch_compile=True, torch_compile_backend="slow_for_a_test")
    assert first["interval_seconds"] < 4.0
