"""`perf-metrics flops` with a model that is built without values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf_metrics.commands.main import main

SHAPE = {"vocab_size": 331, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def run(tmp_path: Path, *options: str, **config: object) -> int:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | {"num_attention_heads": 4} | config))
    return main(["flops", "--hf-config", str(path), "--seq", "64", *options])


def test_the_formula_is_held_against_the_counter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--check", model_type="llama") == 0
    block = capsys.readouterr().out.strip().split("\n\n")[-1]
    assert block.count("agrees") == 4
    assert block.split()[-1] == "1.0000"


def test_a_family_that_is_not_known_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--json", model_type="persimmon") == 0
    answer = json.loads(capsys.readouterr().out)
    # Two layers: attention 4 of 64 x 64, two of 64 x 96; the head; attention 12 L d S.
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 96) + 331 * 64
    assert answer["flops_per_token"] == 6 * weights + 12 * 2 * 64 * 64


def test_a_family_that_nobody_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, model_type="no such thing") == 2
    assert "transformers cannot build model_type='no such thing'" in capsys.readouterr().err
