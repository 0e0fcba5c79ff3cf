"""The command `import`: what it takes over, and what it refuses; and what `eval` scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llama_pretrain import Llama, load_pretrained, save_pretrained
from llama_pretrain.cli import main


def test_a_model_without_a_tokenizer_is_taken_and_that_is_said(
    small_model: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pretrained(small_model, tmp_path / "source")
    assert main(["import", str(tmp_path / "source"), str(tmp_path / "target"), "--dtype", "bfloat16"]) == 0
    assert "tokenizer       none in the source" in capsys.readouterr().out
    taken = load_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    assert torch.equal(taken.lm_head.weight, small_model.lm_head.weight.bfloat16())


def test_pickled_weights_are_refused_and_never_read(
    small_model: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    save_pretrained(small_model, source)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert main(["import", str(source), str(tmp_path / "target")]) == 2
    error = capsys.readouterr().err
    assert "pytorch_model.bin, which only unpickling could read" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "target"), "source='nowhere' contains no config.json"),
        (("source", "source"), "is not an empty directory"),
        (("source", "target", "--dtype", "int4"), "dtype='int4' must be one of float32"),
    ],
)
def test_what_cannot_be_is_told(
    small_model: Llama,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_pretrained(small_model, tmp_path / "source")
    assert main(["import", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_is_scored_without_what_its_settings_add_to_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} of eight. " * 9)
    words = "--data text --held-out 0.3 --sequence-length 32 --max-steps 2 --eval-steps 2 --save-steps 2"
    penalties = "--label-smoothing 0.2 --z-loss 0.1 --output-dir run --sample-tokens 0 --warmup-steps 0"
    assert main(["train", *words.split(), *penalties.split()]) == 0
    assert "per byte, with label_smoothing and z_loss;" in capsys.readouterr().out
    # Outside of a run none of its settings is known: the weights alone decide.
    score = ["eval", "--data", "text", "--sequence-length", "32"]
    scores = []
    for where in (["--output-dir", "run"], ["--checkpoint", "run/checkpoint-2"]):
        assert main([*score, *where]) == 0
        scores.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("loss")])
    assert scores[0] == scores[1]
