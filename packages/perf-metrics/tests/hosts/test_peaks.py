"""Under other trainers the peak is that of every device, for the type that the run computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from perf_metrics import DefaultMetrics, IntervalCounts, JsonLogger, LightningCallbacks, load_logs

PEAKS = {"bf16": 4e12, "fp32": 1e12}


@pytest.fixture(autouse=True)
def _device_with_known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    # The table has no processors, and this is the place where it is asked.
    monkeypatch.setattr("perf_metrics.utilization.device_peak_flops", PEAKS.get)


def check(folder: Path, peak: float) -> None:
    (record,) = [entry for entry in load_logs(folder) if "flos" in entry]
    assert record["peak_flops"] == peak
    assert record["mfu"] == pytest.approx(record["flos"] / record["interval_seconds"] / peak)


@pytest.mark.parametrize(
    ("bf16", "parameters", "computed"),
    [(True, torch.float32, "bf16"), (False, torch.float32, "fp32"), (False, torch.bfloat16, "bf16")],
)
def test_under_transformers(
    tmp_path: Path, llama: Any, rows: Any, bf16: bool, parameters: torch.dtype, computed: str
) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        logging_steps=2,
        bf16=bf16,
        include_num_input_tokens_seen="all",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    callbacks = [IntervalCounts(1000.0), DefaultMetrics(), JsonLogger()]
    Trainer(llama.to(parameters), arguments, train_dataset=rows(16), callbacks=callbacks).train()
    check(tmp_path, PEAKS[computed])


@pytest.mark.parametrize(("precision", "computed"), [("bf16-mixed", "bf16"), ("32-true", "fp32")])
def test_under_lightning(tmp_path: Path, llama: Any, rows: Any, precision: Any, computed: str) -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    ours = LightningCallbacks(
        [DefaultMetrics(), JsonLogger()], flops_per_token=1000.0, framework="lightning.pytorch"
    )
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        max_steps=2,
        log_every_n_steps=2,
        precision=precision,
        accelerator="cpu",
        callbacks=[ours],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(rows(16), batch_size=4))
    check(tmp_path, PEAKS[computed])
