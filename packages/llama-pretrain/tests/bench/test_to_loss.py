"""`bench --to-loss`: all contenders reach the loss in the same steps, and what cannot be reached is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_pretrain.arguments import PretrainArguments
from llama_pretrain.bench import to_loss
from llama_pretrain.bench.baselines import BASELINES
from llama_pretrain.bench.to_loss import run_to_loss
from llama_pretrain.cli import main
from llama_pretrain.commands.arguments import BenchArguments
from llama_pretrain.data import evaluation_loader, split_data, standard_library
from llama_pretrain.model.config import preset
from llama_pretrain.model.llama import Llama
from llama_pretrain.tokenizer import ByteTokenizer
from trainer_core import ConfigurationError

SMALL = ["--sequence-length", "16", "--per-device-train-batch-size", "2", "--rounds", "1", "--use-cpu"]


@pytest.mark.parametrize("names", ["ours,torch", pytest.param(",".join(BASELINES), marks=pytest.mark.full)])
def test_contenders_reach_a_loss_in_the_same_steps(
    names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "to-loss.json"
    words = ["bench", "--to-loss", "3.3", "--contenders", names, *SMALL, "--json", str(file)]
    assert main(words) == 0
    told: dict[str, Any] = json.loads(file.read_text())
    trials = [trial for figures in told["contenders"].values() for trial in figures["turns"]]
    assert len(trials) == len(names.split(","))
    assert len({trial["steps"] for trial in trials}) == 1
    assert told["largest_deviation"] < 1e-4
    for trial in trials:
        last, steps, loss = trial["evaluations"][-1]
        assert 0 < trial["start_seconds"] < last == trial["seconds"]
        assert steps == trial["steps"]
        assert loss <= 3.3
        assert all(earlier > 3.3 for _, _, earlier in trial["evaluations"][:-1])
    assert "the same work" in capsys.readouterr().out


def test_a_loss_that_is_not_reached_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_pretrain.bench.baselines.MOST_STEPS", 50)
    monkeypatch.setattr(to_loss, "MOST_STEPS", 50)
    args = BenchArguments(to_loss=0.5, sequence_length=16, per_device_train_batch_size=2, use_cpu=True)
    with pytest.raises(RuntimeError, match=r"did not reach 0\.5 in 50 steps; the nearest was [3-5]\."):
        run_to_loss("torch", args, tmp_path, 0.0)


def test_rows_of_all_held_out_text_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Tensor] = []
    clock = to_loss.LossClock

    def note(wanted: float, model: Llama, rows: Tensor, began: float) -> to_loss.LossClock:
        evaluated.append(rows)
        return clock(wanted, model, rows, began)

    monkeypatch.setattr("llama_pretrain.bench.baselines.MOST_STEPS", 1)
    monkeypatch.setattr(to_loss, "MOST_STEPS", 1)
    monkeypatch.setattr(to_loss, "LossClock", note)
    with pytest.raises(RuntimeError, match="did not reach"):
        run_to_loss("torch", BenchArguments(to_loss=0.5, use_cpu=True), tmp_path, 0.0)
    settings = PretrainArguments(max_eval_samples=None)
    held_out = split_data(standard_library(), settings)[1]
    assert held_out is not None
    batches = list(evaluation_loader(held_out, ByteTokenizer(), settings))
    rows, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    full = rows[(labels[:, 1:] >= 0).all(1)]
    assert 256 < len(full) < len(rows)
    assert torch.equal(evaluated[0], full[[i * (len(full) - 1) // 255 for i in range(256)]])


def test_rows_that_no_held_out_file_fills_are_refused(tmp_path: Path) -> None:
    length = 10_000_000
    config = preset("tiny", vocab_size=320, bos_token_id=256, eos_token_id=257, pad_token_id=258)
    (tmp_path / "shape").mkdir()
    replace(config, max_position_embeddings=length).save(tmp_path / "shape")
    args = BenchArguments(model=str(tmp_path / "shape"), to_loss=2.0, sequence_length=length, use_cpu=True)
    with pytest.raises(ConfigurationError, match=r"sequence_length=10000000 must be at most the length of"):
        run_to_loss("torch", args, tmp_path, 0.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"to_loss": 0.0}, "to_loss"),
        ({"to_loss": 6.0}, "to_loss"),
        ({"to_loss": 2.0, "steps": 50}, "steps"),
        ({"to_loss": 2.0, "warm_up_steps": 20}, "warm_up_steps"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        BenchArguments(**given)
