"""`perf-metrics flops` on a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf_metrics.commands.flops import _read
from perf_metrics.commands.main import main

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def command(tmp_path: Path, config: object, *options: str) -> int:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return main(["flops", "--hf-config", str(path), *options])


def test_tables_by_layer_type_and_by_convention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, LLAMA, "--seq", "8192") == 0
    heading, parts, conventions = capsys.readouterr().out.strip().split("\n\n")
    assert heading.startswith("llama: 32 layers, 8,029,995,008 parameters")
    assert [line.split("  ")[0] for line in parts.splitlines()[1:]] == [
        "attention projections", "attention scores", "mlp", "output projection", "total",
        "with full recomputation",
    ]  # fmt: skip
    rows = {line.split("  ")[0]: line.split()[-1] for line in parts.splitlines()[1:]}
    assert rows["attention scores"] == "22.2%"
    row = next(line for line in conventions.splitlines() if line.startswith("all parameters"))
    assert row.split()[2:4] == ["61.065", "1.054"]


def test_json_with_halved_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, LLAMA, "--seq", "8192", "--causal", "half", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parts"]["attention scores"]["forward"] == 4 * 32 * 4096 * 8192 / 2
    assert answer["flops_per_token"] == answer["conventions"]["model, causal half"]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("[1]", ["--seq", "8"], "must be a JSON object"),
        ("{", ["--seq", "8"], "not a JSON file"),
        (LLAMA, ["--seq", "0"], "sequence_length=0"),
        (LLAMA | {"num_hidden_layers": None}, ["--seq", "8"], "config.num_hidden_layers=None"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, options: list[str], message: str
) -> None:
    assert command(tmp_path, config, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, LLAMA | {"limit": [{"__float__": "Infinity"}]}, "--seq", "8") == 0
    read = _read(tmp_path / "config.json")
    assert read["limit"] == [float("inf")]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", '{"a": "\xff"}'.encode("latin-1")]
)
def test_a_file_that_no_parser_reads_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["flops", "--hf-config", str(path), "--seq", "8"]) == 2
    assert f"--hf-config={path} is not a JSON file" in capsys.readouterr().err
