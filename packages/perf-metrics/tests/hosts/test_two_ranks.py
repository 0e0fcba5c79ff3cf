"""Both trainers on two ranks: counts are of both, and one of them writes."""

import json
from pathlib import Path

import pytest
from warm_start import run_ranks

WORKER = Path(__file__).parent / "workers" / "two_ranks.py"
# Imported once for both ranks, which takes longer than what they do.
MODULES = (
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "lightning.pytorch",
    "perf_metrics",
)


@pytest.mark.full
def test_two_ranks_under_both_trainers(tmp_path: Path) -> None:
    run_ranks(2, [str(WORKER), str(tmp_path)], MODULES, tmp_path)
    for host in ("transformers", "lightning"):
        entries = json.loads((tmp_path / host / "trainer_logs.json").read_text())
        records = [entry for entry in entries if "loss" in entry]
        assert [record["global_step"] for record in records] == [4, 8]
        for record in records:
            # 4 steps of 4 rows of 16 tokens on each of 2 ranks.
            assert record["input_tokens"] == record["compute_tokens"] == 2 * 4 * 4 * 16
            assert record["flos"] == 1000.0 * 512
            assert record["tok_per_sec"] == 512 / record["interval_seconds"]
            assert "peak_mem_allocated" not in record
        if host == "transformers":
            # 4 evaluations, each of a batch of half a second on each rank.
            (final,) = [entry for entry in entries if "train_loss" in entry]
            assert sum(record["interval_seconds"] for record in records) < final["train_runtime"] - 2
        else:
            assert [record["loss"] for record in records] == pytest.approx([1.5, 1.5])
