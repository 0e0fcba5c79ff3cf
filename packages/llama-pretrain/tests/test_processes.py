"""Several processes: real ranks, one job of them under torchrun, over gloo, on a very small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_pretrain.cli import main
from perf_metrics import read_goodput

Start = Callable[..., list[Any]]
RANK_OF_TRAIN = str(Path(__file__).with_name("rank_of_train.py"))
NODE_OF_TRAIN = str(Path(__file__).with_name("node_of_train.py"))
STEPS = 30
# As `train` does with the settings of `_words`.
GENERATE_AS_AT_THE_END = ["generate", "--max-new-tokens", "12", "--temperature", "0.8", "--seed", "1"]


def _words(work: Path, output: str, *more: str) -> list[str]:
    """A run with 8 rows of 32 bytes in a global batch."""
    settings = {
        "model": work / "shape",
        "data": work / "data",
        "output-dir": work / output,
        "sequence-length": 32,
        "per-device-train-batch-size": 4,
        "per-device-eval-batch-size": 4,
        "gradient-accumulation-steps": 2,
        "held-out": 0.2,
        "max-steps": STEPS,
        "lr-scheduler-type": "constant_with_warmup",
        "warmup-steps": 3,
        "logging-steps": 1,
        "eval-steps": 6,
        "save-steps": 6,
        "sample-tokens": 12,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))] + list(more)


def _several(work: Path, output: str, trainer: str, *more: str) -> list[str]:
    """The same global batch on two ranks."""
    return _words(work, output, "--trainer", trainer, "--gradient-accumulation-steps", "1", *more)


def _ddp(work: Path, output: str, *more: str) -> list[str]:
    return _several(work, output, "ddp", *more)


def _pipeline(work: Path, output: str, *more: str) -> list[str]:
    """The same global batch through two stages; three microbatches do not divide its four rows."""
    return _words(work, output, "--trainer", "pipeline", "--schedule", "1f1b", "--microbatches", "3", *more)


def _torchrun(words: Sequence[str]) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launcher, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def _finish(run: subprocess.Popen[str]) -> str:
    """What is left of the output; a run that hangs ends with its launcher."""
    try:
        return run.communicate(timeout=300)[0]
    finally:
        run.kill()


def _told(ranks: list[Any]) -> tuple[list[int], str]:
    """Exit code of each rank, and what all of them wrote."""
    ended = [rank.finish() for rank in ranks]
    return [code for code, _, _ in ended], "".join(out + err for _, out, err in ended)


def _trained(start: Start, words: Sequence[str]) -> str:
    """The output of two ranks that train, evaluate and write a sample."""
    codes, shown = _told(start(["-m", "llama_pretrain", "train", *words], 2))
    assert codes == [0, 0], shown
    for line in ("held-out loss", "sample, temperature", "done in", "loss curve  "):
        assert shown.count(line) == 1, shown
    return shown


def _parameters(shown: str) -> str:
    """What a run says of its model at the start."""
    return next(line for line in shown.splitlines() if line.startswith("model ") and " parameters, " in line)


def _codes(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def _curve(output: Path, key: str) -> dict[int, float]:
    entries = json.loads((output / "trainer_logs.json").read_text())
    return {int(entry["global_step"]): entry[key] for entry in entries if key in entry}


def _only_processes_of(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Look like one rank of two, as a launcher makes it look."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, write_inputs: Callable[[Path], Path]) -> Path:
    """Data, a model's shape, and an uninterrupted run of one process in `whole`."""
    work = write_inputs(tmp_path_factory.mktemp("processes"))
    assert main(_words(work, "whole")) == 0
    return work


@pytest.mark.full
def test_one_curve_from_one_process_over_two_and_back(
    work: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words(work, "relay", "--max-steps", "6")) == 0
    told_by_one = capsys.readouterr().out

    codes = work / "codes"
    codes.mkdir()
    run = _torchrun([RANK_OF_TRAIN, str(codes), "", f"9/{STEPS}", *_ddp(work, "relay")])
    seen = _finish(run)
    assert _codes(codes) == {"0": "75", "1": "75"}, seen
    assert seen.count("trainer    ddp, 2 processes") == 1
    assert "changed    trainer: single at the last start, now ddp" in seen
    assert seen.count("The same command continues from there.") == 1
    stopped_at = max(int(path.name.rpartition("-")[2]) for path in (work / "relay").glob("checkpoint-*"))
    assert stopped_at in (9, 10)

    shown = _trained(start, _several(work, "relay", "fsdp2", "--max-steps", "12"))
    assert f"resumed at step {stopped_at}" in shown
    assert "changed    trainer: ddp at the last start, now fsdp2" in shown

    shown = _trained(start, _pipeline(work, "relay", "--max-steps", "18"))
    assert "resumed at step 12" in shown
    assert shown.count("trainer    pipeline, 2 processes, 1f1b with 3 microbatches") == 1
    assert "changed    trainer: fsdp2 at the last start, now pipeline" in shown
    assert _parameters(shown) == _parameters(told_by_one)
    checkpoint = str(work / "relay" / "checkpoint-18")
    assert main([*GENERATE_AS_AT_THE_END, "--checkpoint", checkpoint]) == 0
    assert "".join(capsys.readouterr().out.split()) in "".join(shown.split())
    files = {path.name for path in (work / "relay").iterdir() if path.is_file()}
    known = {"trainer_logs.json", "loss_curve.png", "config.yaml", "run.json", "sessions.json"}
    assert files == {*known, ".started-by.json"}, "which tells a restart by torchrun that the run has begun"
    assert (work / "relay" / "checkpoint-18" / "manifest.json").is_file()

    shown = _trained(start, _words(work, "relay", "--mesh", "tp=2", "--max-steps", "24"))
    assert "resumed at step 18" in shown
    assert "trainer    tensor parallel, 2 processes (tp=2)" in shown
    checkpoint = str(work / "relay" / "checkpoint-24")
    capsys.readouterr()
    assert main([*GENERATE_AS_AT_THE_END, "--checkpoint", checkpoint]) == 0
    assert "".join(capsys.readouterr().out.split()) in "".join(shown.split())

    assert main(_words(work, "relay")) == 0
    assert "changed    trainer: ddp at the last start, now single" in capsys.readouterr().out
    starts = [(each.ranks, each.first_step, each.outcome) for each in read_goodput(work / "relay").sessions]
    steps = [0, 6, stopped_at, 12, 18, 24]
    assert starts == [(1 if step in (0, 24) else 2, step, "end") for step in steps]
    for key in ("loss", "grad_norm", "learning_rate", "total_tokens", "eval_loss", "eval_tokens"):
        expected = _curve(work / "whole", key)
        assert _curve(work / "relay", key) == pytest.approx(expected, rel=1e-5), key


def test_a_run_continues_where_each_node_has_a_disk_of_its_own(work: Path, start: Start) -> None:
    disks = work / "disks"
    for steps in ("6", "12"):
        words = _ddp(work, "unused", "--output-dir", "run", "--save-on-each-node", "--max-steps", steps)
        codes, shown = _told(start([NODE_OF_TRAIN, str(disks), *words], 2))
        assert codes == [0, 0], shown
    assert "resumed at step 6" in shown
    for rank in "01":
        assert (disks / rank / "run" / "checkpoint-12" / "model.safetensors").is_file()
        assert (disks / rank / "run" / "run.json").is_file()
    assert _curve(disks / "0" / "run", "loss") == pytest.approx(
        {step: loss for step, loss in _curve(work / "whole", "loss").items() if step <= 12}, rel=1e-5
    )


def test_every_rank_ends_where_ranks_were_told_different_things(work: Path, start: Start) -> None:
    folder = work / "codes-of-unlike"
    folder.mkdir()
    words = [RANK_OF_TRAIN, str(folder), "--learning-rate 0.5", "", *_ddp(work, "unlike")]
    codes, shown = _told(start(words, 2))
    assert codes == [2, 2], shown
    for rank in (0, 1):
        start = f"llama-pretrain: error: [rank {rank}] learning_rate="
        assert any(line.startswith(start) for line in shown.splitlines()), shown
    assert "Traceback" not in shown, shown
    assert not (work / "unlike").exists()


@pytest.mark.parametrize("trainer", ["ddp", "pipeline"])
def test_with_one_process_it_is_like_single(
    work: Path, trainer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"alone-{trainer}"
    assert main(_words(work, output, "--trainer", trainer)) == 0
    shown = capsys.readouterr().out
    axis = {"ddp": "dp", "pipeline": "pp"}[trainer]
    assert f"one process, which is like single; for two: llama-pretrain train --mesh {axis}=2\n" in shown
    for key in ("loss", "grad_norm", "eval_loss"):
        assert _curve(work / output, key) == _curve(work / "whole", key), key
    assert main(["eval", "--output-dir", str(work / output)]) == 0
    last = _curve(work / "whole", "eval_loss")[STEPS]
    assert f"loss        {last:.4f} nats per byte" in capsys.readouterr().out


def test_a_trainer_of_one_process_is_refused_in_several(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_processes_of(monkeypatch, rank=1)
    assert main(_words(work, "refused")) == 2
    shown = capsys.readouterr().err
    assert "[rank 1] trainer='single' runs in one process, but 2 were started" in shown
    assert "`llama-pretrain train --mesh dp=2`" in shown
    assert shown.count("\n") == 1
    for command in ("eval", "generate", "export out"):
        assert main([*command.split(), "--output-dir", str(work / "whole")]) == 2
        assert f"{command.split()[0]} runs in one. Use" in capsys.readouterr().err
    assert not (work / "refused").exists()


def test_each_rank_checks_by_itself_before_it_waits_for_others(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_processes_of(monkeypatch, rank=1)
    assert main(_ddp(work, "whole", "--seed", "5")) == 2
    assert "[rank 1] seed=5 differs from the run in" in capsys.readouterr().err
