"""The callbacks under Lightning's trainer, by both of its names."""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from perf_metrics import DefaultMetrics, GoodputLogger, JsonLogger, ProgressCallback, read_goodput
from perf_metrics.callbacks.device_metrics import PeakMemory
from perf_metrics.callbacks.lightning import LightningCallbacks
from perf_metrics.callbacks.lightning_state import TokenCounts

PEAK, FLOPS = 1e12, 5000.0


def module_class(framework: Any) -> Any:
    """A language model in Lightning's way; its work takes time on the clock."""

    class Module(framework.LightningModule):
        def __init__(self, model: nn.Module, clock: Any) -> None:
            super().__init__()
            self.model, self.ticks = model, clock
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.ticks.now += 1
            loss: Tensor = self.model(**batch).loss
            self.losses.append(loss.item())
            self.log("margin", batch_idx / 2)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.ticks.now += 10
            self.log("val_loss", self.model(**batch).loss)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.ticks.now += 100

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module


class Run:
    """A trainer with our callbacks, and what came of it."""

    def __init__(
        self, framework: Any, folder: Path, clock: Any, callbacks: list[Any], **settings: Any
    ) -> None:
        chosen = {
            "max_steps": 12,
            "log_every_n_steps": 4,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "accelerator": "cpu",
        }
        self.stream = io.StringIO()
        self.ours = LightningCallbacks(
            [PeakMemory(), DefaultMetrics(PEAK), ProgressCallback(False, self.stream), JsonLogger()],
            flops_per_token=FLOPS,
            clock=clock,
            framework=framework.__name__,
        )
        self.trainer = framework.Trainer(
            default_root_dir=folder, callbacks=[self.ours, *callbacks], **{**chosen, **settings}
        )
        self.file = folder / "trainer_logs.json"

    def entries(self, key: str) -> list[dict[str, Any]]:
        return [entry for entry in json.loads(self.file.read_text()) if key in entry]


@pytest.mark.parametrize("framework", [lightning.pytorch, pytorch_lightning], ids=lambda f: f.__name__)
def test_records_of_a_run(tmp_path: Path, llama, rows, clock, framework: Any) -> None:
    module = module_class(framework)(llama, clock)
    run = Run(framework, tmp_path, clock, [], accumulate_grad_batches=2)
    run.trainer.fit(
        module, DataLoader(rows(96, clock, 0.125), batch_size=4), DataLoader(rows(8), batch_size=4)
    )
    assert isinstance(run.ours, framework.Callback)
    records = run.entries("loss")
    assert [record["global_step"] for record in records] == [4, 8, 12]
    assert [record["epoch"] for record in records] == pytest.approx([1 / 3, 2 / 3, 1])
    for number, record in enumerate(records):
        # 4 steps of 2 batches of 4 rows, every second one padded from 16 to 12; each row shifts out a label.
        assert (record["compute_tokens"], record["input_tokens"], record["tokens"]) == (512, 448, 448 - 32)
        assert record["interval_seconds"] == 8 * (1 + 4 * 0.125)
        assert record["data_wait_share"] == pytest.approx(1 / 3)
        assert record["tok_per_sec"] == 448 / 12
        assert record["flos"] == FLOPS * 512
        assert record["mfu"] == pytest.approx(FLOPS * 512 / (12 * PEAK))
        losses = module.losses[8 * number : 8 * number + 8]
        assert record["loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)
        assert record["train_loss_step"] == pytest.approx(losses[-1])
        assert record["margin"] == (8 * number + 7) / 2
        assert record["learning_rate"] == pytest.approx(0.1 / (4 * number + 4))
        assert not {"val_loss", "peak_mem_allocated", "alloc_retries"} & record.keys()


def test_validating_and_saving_are_left_out_exactly(tmp_path: Path, llama, rows, clock) -> None:
    class Slow(lightning.pytorch.Callback):
        """Another callback, whose work at the end of a batch is part of training."""

        def on_train_batch_end(self, *_: object) -> None:
            clock.now += 0.5

    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    run = Run(
        lightning.pytorch, tmp_path, clock, [Slow(), saving], enable_checkpointing=True, val_check_interval=2
    )
    module = module_class(lightning.pytorch)(llama, clock)
    validation = DataLoader(rows(8, clock, 1000.0), batch_size=4)
    run.trainer.fit(module, DataLoader(rows(24, clock, 0.125), batch_size=4), validation)
    assert len(list(tmp_path.glob("*.ckpt"))) == 4
    # Two batches of two rows, before training as well, seven times.
    assert clock.now > 7 * 2 * 4000
    records = run.entries("loss")
    # Each step takes 2 seconds. What the other callback does after a record belongs to the next one.
    assert [record["interval_seconds"] for record in records] == [7.5, 8.0, 8.0]
    evaluations = run.entries("eval_loss")
    assert [entry["global_step"] for entry in evaluations] == [2, 4, 6, 8, 10, 12]
    assert [entry["eval_seconds"] for entry in evaluations] == [2 * 10 + 8 * 1000] * 6
    assert all("val_loss" not in record for record in records)
    lines = run.stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines if " eval " in line] == [f"{n}/12" for n in range(2, 13, 2)]
    assert lines[1].split()[0] == "step"


def test_the_rest_of_a_run_and_its_final_metrics(tmp_path: Path, llama, rows, clock) -> None:
    module = module_class(lightning.pytorch)(llama, clock)
    run = Run(lightning.pytorch, tmp_path, clock, [], max_steps=6)
    loaders = DataLoader(rows(24, clock, 0.125), batch_size=4), DataLoader(rows(8), batch_size=4)
    run.trainer.fit(module, *loaders)
    assert [record["compute_tokens"] for record in run.entries("loss")] == [4 * 64, 2 * 64]
    (final,) = run.entries("train_runtime")
    # 6 steps of a second and a half, and two validations of 2 batches, of which one came before training.
    assert {key: value for key, value in final.items() if key != "timestamp"} == {
        "global_step": 6, "epoch": 1.0, "train_runtime": 9.0, "train_runtime_gross": 9.0 + 20,
        "total_tokens": 24 * 13, "total_input_tokens": 24 * 14, "train_steps_per_second": 0.667,
        "tokens_per_second": round(24 * 13 / 9, 2), "input_tokens_per_second": round(24 * 14 / 9, 2),
        "flops_per_second": round(FLOPS * 24 * 16 / 9, 2),
        "mfu": pytest.approx(FLOPS * 24 * 16 / 9 / PEAK),
    }  # fmt: skip
    assert "this session" in run.stream.getvalue()


def test_each_event_is_fired(tmp_path: Path, llama, rows, clock) -> None:
    seen: list[tuple[str, int]] = []

    class Everything:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("on_"):
                raise AttributeError(name)
            return lambda args, state, control, **_: seen.append((name, state.global_step))

    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    run = Run(lightning.pytorch, tmp_path, clock, [saving], enable_checkpointing=True, max_steps=2)
    run.ours.callbacks = [Everything()]
    run.trainer.log_every_n_steps = 2
    module = module_class(lightning.pytorch)(llama, clock)
    run.trainer.fit(module, DataLoader(rows(8), batch_size=4), DataLoader(rows(4), batch_size=4))
    assert seen == [
        ("on_train_begin", 0), ("on_epoch_begin", 0),
        ("on_step_begin", 0), ("on_step_end", 1), ("on_step_begin", 1), ("on_step_end", 2),
        ("on_log_step", 2), ("on_log", 2), ("on_save", 2), ("on_evaluate", 2), ("on_log", 2),
        ("on_epoch_end", 2), ("on_log", 2), ("on_train_end", 2),
    ]  # fmt: skip
    # The place at the end of the trainer's list is given back.
    assert [type(callback).__name__ for callback in run.trainer.callbacks] == [
        "LightningCallbacks",
        "ModelCheckpoint",
    ]


class Features(lightning.pytorch.LightningModule):
    """A model whose batches are not token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("counted", [True, False])
def test_batches_of_another_kind(
    tmp_path: Path, clock, counted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def count(batch: Any) -> TokenCounts:
        return TokenCounts(input_tokens=len(batch[0]), compute_tokens=2 * len(batch[0]))

    run = Run(lightning.pytorch, tmp_path, clock, [], max_steps=4)
    if counted:
        run.ours = LightningCallbacks([JsonLogger()], count_tokens=count, framework="lightning.pytorch")
        run.trainer.callbacks = [run.ours]
    with caplog.at_level(logging.WARNING, logger="perf_metrics"):
        run.trainer.fit(Features(), DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=5))
    warnings = [record.message for record in caplog.records if record.name == "perf_metrics"]
    (record,) = run.entries("loss")
    if counted:
        assert (record["input_tokens"], record["compute_tokens"], warnings) == (20, 40, [])
    else:
        assert not {"input_tokens", "compute_tokens", "flos", "mfu"} & record.keys()
        assert ["count_tokens" in warning for warning in warnings] == [True]


def test_a_failed_run_leaves_nothing_behind(tmp_path: Path, llama, rows, clock) -> None:
    class Failing(lightning.pytorch.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            raise RuntimeError("of the test")

    class Told:
        def on_exception(self, *_: object, exception: BaseException, **__: object) -> None:
            told.append(str(exception))

    told: list[str] = []
    run = Run(lightning.pytorch, tmp_path, clock, [Failing()])
    run.ours.callbacks += [GoodputLogger(), Told()]
    before = list(run.trainer.callbacks)
    with pytest.raises(RuntimeError, match="of the test"):
        run.trainer.fit(module_class(lightning.pytorch)(llama, clock), DataLoader(rows(8), batch_size=4))
    assert run.trainer.callbacks == before
    assert told == ["of the test"]
    assert [session.outcome for session in read_goodput(tmp_path).sessions] == ["no end"]


def test_it_can_be_pickled() -> None:
    ours = LightningCallbacks([DefaultMetrics(PEAK)], framework="lightning.pytorch")
    copy = pickle.loads(pickle.dumps(ours))
    assert isinstance(copy, LightningCallbacks)
    assert isinstance(copy, lightning.pytorch.Callback)
    assert copy.callbacks[0].peak_hardware_flops == PEAK


LAZY = """
import sys
from perf_metrics.callbacks.lightning import LightningCallbacks
print(sorted({"torch", "lightning", "pytorch_lightning"} & set(sys.modules)))
if sys.argv[1:]:
    ours = LightningCallbacks([])
    print("pytorch_lightning" in sys.modules, isinstance(ours, sys.modules["lightning.pytorch"].Callback))
"""


@pytest.mark.parametrize("make", [[], pytest.param(["make"], marks=pytest.mark.full)], ids=["import", "make"])
def test_lightning_is_imported_when_an_instance_is_made(make: list[str]) -> None:
    command = [sys.executable, "-c", LAZY, *make]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", *(["False True"] if make else [])], done.stderr


def test_settings() -> None:
    with pytest.raises(
        ValueError,
        match=r"framework=None cannot tell .* both lightning\.pytorch and pytorch_lightning",
    ):
        LightningCallbacks([])
    with pytest.raises(ValueError, match=r"framework='flash' must be one of lightning\.pytorch"):
        LightningCallbacks([], framework="flash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"flops_per_token=-1"):
        LightningCallbacks([], flops_per_token=-1, framework="lightning.pytorch")
