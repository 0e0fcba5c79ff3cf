"""The evaluation harness scores an exported model as this package does; run with the group `lm_eval`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_pretrain import ByteTokenizer, Llama, load_pretrained
from llama_pretrain.cli import main

TASKS = Path(__file__).parent / "tasks"
WITHOUT_NETWORK = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def exported(write_inputs: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model after 30 steps, as `llama-pretrain export` writes it."""
    work = write_inputs(tmp_path_factory.mktemp("run"))
    run = ["--output-dir", str(work / "run")]
    shape = ["--model", str(work / "shape"), "--data", str(work / "data"), "--sequence-length", "64"]
    assert main(["train", *shape, *run, "--max-steps", "30", "--sample-tokens", "0", "--use-cpu"]) == 0
    assert main(["export", str(work / "export"), *run]) == 0
    return work / "export"


@pytest.fixture(scope="module")
def report(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the harness writes about the model, asked as the manual says."""
    output = tmp_path_factory.mktemp("report")
    words = (
        f"run --model hf --model_args pretrained={exported} --include_path . --tasks next_words,whole_texts"
    )
    harness = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words.split(), "--device", "cpu", "-s", "-o", str(output)],
        cwd=TASKS,
        env={**os.environ, **WITHOUT_NETWORK, "HF_HOME": str(output / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert harness.returncode == 0, harness.stderr[-3000:]
    return output


def test_a_continuation_has_our_log_probability(exported: Path, report: Path) -> None:
    model = load_pretrained(exported)
    asked = 0
    for sample in _samples(report, "next_words"):
        before, choices = sample["doc"]["before"], sample["doc"]["choices"]
        for choice, ((said, _),) in zip(choices, sample["resps"], strict=True):
            assert float(said) == pytest.approx(_log_probability(model, before, choice), abs=1e-4)
            asked += 1
    assert asked == 10


def test_a_text_has_our_log_probability(exported: Path, report: Path) -> None:
    model = load_pretrained(exported)
    bits, size = 0.0, 0
    for sample in _samples(report, "whole_texts"):
        text = sample["doc"]["text"]
        ours = _log_probability(model, "", text)
        assert float(sample["resps"][0][0]) == pytest.approx(ours, abs=1e-4)
        bits, size = bits - ours / math.log(2), size + len(text.encode())
    assert _results(report)["whole_texts"]["bits_per_byte,none"] == pytest.approx(bits / size, rel=1e-6)


def test_accuracy_counts_the_most_probable_choice(exported: Path, report: Path) -> None:
    model = load_pretrained(exported)
    right = []
    for sample in _samples(report, "next_words"):
        scores = [_log_probability(model, sample["doc"]["before"], each) for each in sample["doc"]["choices"]]
        right.append(max(range(len(scores)), key=scores.__getitem__) == sample["doc"]["right"])
    assert _results(report)["next_words"]["acc,none"] == pytest.approx(sum(right) / len(right))


@torch.no_grad()
def _log_probability(model: Llama, before: str, after: str) -> float:
    """Of `after` behind `before`; nothing before means behind the separator, as in training."""
    tokenizer = ByteTokenizer()
    known = list(tokenizer.encode(before)) or [tokenizer.eos_token_id]
    asked = list(tokenizer.encode(after))
    logits = model(torch.tensor([known + asked]))[0, len(known) - 1 : -1].double()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(asked)[:, None])
    return float(chosen.sum())


def _samples(report: Path, task: str) -> list[Mapping[str, Any]]:
    (path,) = report.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _results(report: Path) -> Mapping[str, Any]:
    (path,) = report.rglob("results_*.json")
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found
