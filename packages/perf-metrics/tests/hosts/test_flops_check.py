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


STATE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
ENDLESS = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
"""As transformers 5 saves it."""


@pytest.mark.parametrize(
    ("family", "options", "settings"),
    [
        ("nemotron_h", [], {"head_dim": 16, "mamba_head_dim": 16, "mamba_num_heads": 8, "n_groups": 2}),
        ("granitemoehybrid", [], {**STATE, "shared_intermediate_size": 96}),
        (
            "mamba2",
            ["--check"],
            {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
        ),
        ("bamba", ["--check"], {**STATE, "num_key_value_heads": 2, "attn_layer_indices": [1]}),
    ],
)
def test_an_endless_limit_is_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    options: list[str],
    settings: dict[str, object],
) -> None:
    assert run(tmp_path, *options, model_type=family, **settings, **ENDLESS) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "state-space projections" in out
    if options:
        assert out.split()[-1] == "1.0000"


def test_what_the_formula_does_not_know_and_what_transformers_refuses_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, model_type="falcon_h1", **STATE, mamba_d_ssm=128, **ENDLESS) == 2
    assert "which the formula does not cover" in capsys.readouterr().err
    assert run(tmp_path, model_type="falcon_h1", **STATE, time_step_limit="soon") == 2
    error = capsys.readouterr().err
    assert "transformers cannot build model_type='falcon_h1': " in error
    assert "time_step_limit" in error
    assert error.count("\n") == 1
