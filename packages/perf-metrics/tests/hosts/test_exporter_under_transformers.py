"""The exporter in a real run of `transformers.Trainer`, scraped while it trains."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from transformers import Trainer, TrainerCallback, TrainingArguments

from perf_metrics import DefaultMetrics, IntervalCounts, PrometheusExporter


class ScrapeAtEachRecord(TrainerCallback):
    """Stands after the exporter, and reads it as Prometheus does."""

    def __init__(self, exporter: PrometheusExporter) -> None:
        self.exporter = exporter
        self.served: list[dict[str, float]] = []

    def on_log(self, args, state, control, **_) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.exporter.port}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        self.served.append({sample.name: sample.value for family in families for sample in family.samples})


def test_each_record_of_a_run_is_served_while_it_trains(tmp_path: Path, llama, rows) -> None:
    exporter = PrometheusExporter(port=0)
    scraping = ScrapeAtEachRecord(exporter)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        include_num_input_tokens_seen="non_padding",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(
        llama,
        arguments,
        train_dataset=rows(80),
        eval_dataset=rows(8),
        callbacks=[IntervalCounts(1e6), DefaultMetrics(1e12), exporter, scraping],
    )
    trainer.train()
    assert exporter.port is None
    first, first_evaluation, second, second_evaluation, final = scraping.served
    assert "training_evaluation_loss" not in first
    assert 0 < first["training_mfu_ratio"] < 1
    assert 0 < first["training_tokens_total"] < second["training_tokens_total"]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [served["training_loss"] for served in (first, second)] == [entry["loss"] for entry in history]
    assert [served["training_step"] for served in (first, second)] == [2, 4]
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    told = [served["training_evaluation_loss"] for served in (first_evaluation, second_evaluation)]
    assert told == evaluations
    assert final == second_evaluation
