"""The command `bench`: trials in fresh processes, what is printed and written, and what is refused."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_pretrain.bench import baselines
from llama_pretrain.bench.baselines import BASELINES, Baseline, chosen, torch_loop
from llama_pretrain.bench.command import run_rounds
from llama_pretrain.bench.summary import agreement, published, summarise
from llama_pretrain.bench.trial import PeakMemory, StepClock, Trial, Window, run_trial
from llama_pretrain.cli import main
from llama_pretrain.commands.arguments import BenchArguments
from trainer_core import ConfigurationError

SMALL = {"sequence_length": 16, "per_device_train_batch_size": 2, "steps": 10, "warm_up_steps": 6}


@pytest.fixture(scope="module")
def shape(write_inputs: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs")) / "shape"


@pytest.fixture
def small(shape: Path) -> BenchArguments:
    return BenchArguments(model=str(shape), use_cpu=True, rounds=1, **SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.full)])
def test_two_baselines_run_trials_and_do_the_same_work(
    shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    file = tmp_path / "bench.json"
    words = ["--model", str(shape), "--contenders", "ours,torch", "--use-cpu", "--rounds", str(number)]
    for name, value in SMALL.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    assert main(["bench", *words, "--json", str(file)]) == 0
    told: dict[str, Any] = json.loads(file.read_text())
    assert told["command"] == ["llama-pretrain", "bench", *words, "--json", str(file)]
    assert told["device"]
    assert {"python", "torch", "trainer-core", "llama-pretrain"} <= told["versions"].keys()
    assert told["settings"]["contenders"] == ["ours", "torch"]
    assert list(told["contenders"]) == ["ours", "torch"]
    for figures in told["contenders"].values():
        assert len(figures["turns"]) == number
        for trial in figures["turns"]:
            assert trial["loss_after"] < trial["loss_before"]
            assert len(trial["windows"]) == 2
            assert all(window["wall_s"] > 0 for window in trial["windows"])
    ours, plain = told["contenders"].values()
    assert plain["over_torch"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert ours["turns"][0]["loss_after"] == pytest.approx(plain["turns"][0]["loss_after"], rel=1e-6)
    assert told["agreement"]["beside"] == "torch"
    assert told["agreement"]["deviations"]["ours"] <= told["agreement"]["tolerance"]
    said = capsys.readouterr().out
    rounds = [line.split(":")[0] for line in said.splitlines() if line.startswith("round")]
    ours_first = ("trainer-core", "plain torch loop")
    order = [(turn, who) for turn in range(number) for who in ours_first[:: -1 if turn % 2 else 1]]
    assert rounds == [f"round {turn + 1}/{number}  {who}" for turn, who in order]
    measured, _, others = said.partition("not measured here")
    assert "the same work" in measured
    assert "torchtitan" not in measured
    assert "torchtitan" in others


def test_figures_follow_from_trials(small: BenchArguments) -> None:
    fast, slow = Window(0.1, 0.3), Window(0.2, 0.4)
    trial = Trial(
        windows=[fast, fast, slow],
        peak_memory_bytes=5,
        loss_before=6.0,
        loss_after=5.0,
        flops_per_token=1e6,
        peak_flops=1e9,
        device="a device",
        threads=1,
        versions={},
    )
    slower = replace(trial, windows=[fast, slow, slow], peak_memory_bytes=7)
    found = summarise({"torch": [trial, trial, slower], "ours": [trial, slower, slower]}, small)
    ours = found["ours"]
    assert ours.mfu is not None
    assert ours.over_torch is not None
    assert (ours.step_ms.median, ours.step_ms.low, ours.step_ms.high) == (200, 100, 200)
    assert (ours.cpu_ms.median, ours.cpu_ms.low) == (400, 300)
    assert ours.tokens_per_second.median == pytest.approx(2 * 16 / 0.2)
    assert ours.mfu.median == pytest.approx(1e6 * 32 / 0.2 / 1e9)
    assert ours.peak_memory_bytes == 7
    assert (ours.over_torch.median, ours.over_torch.low) == (1.0, 0.5)
    unknown = summarise({"ours": [replace(trial, peak_flops=None, peak_memory_bytes=None)]}, small)["ours"]
    assert (unknown.mfu, unknown.peak_memory_bytes, unknown.over_torch) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "value"), [("LEARNING_RATE", 3.3e-4), pytest.param("CLIP_NORM", 1e9, marks=pytest.mark.full)]
)
def test_other_work_is_found(
    small: BenchArguments, name: str, value: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, plain = run_trial("ours", small, tmp_path), run_trial("torch", small, tmp_path)
    same = agreement({"ours": [ours], "torch": [plain]}, "no")
    assert same is not None
    assert same.other_work() == []
    monkeypatch.setattr(baselines, name, value)
    other = agreement({"ours": [ours], "torch": [run_trial("torch", small, tmp_path)]}, "no")
    assert other is not None
    assert other.other_work() == ["ours"]


@pytest.mark.full
def test_a_baseline_that_fails_takes_no_further_trials(
    small: BenchArguments, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = run_rounds(replace(small, rounds=2), [Baseline("nobody", "Nobody", torch_loop, ())])
    assert measured.failures == {"nobody": "KeyError: 'nobody'"}
    assert measured.trials == {}
    assert capsys.readouterr().out == "round 1/2  Nobody: failed: KeyError: 'nobody'\n"


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, baseline in BASELINES.items():
        needs = ("no-such-distribution",) if name == "hf" else ("torch",)
        monkeypatch.setitem(BASELINES, name, replace(baseline, distributions=needs))
    takes_part, missing = chosen(())
    assert [each.name for each in takes_part] == ["ours", "torch", "accelerate", "lightning"]
    assert [each.missing() for each in missing] == [["no-such-distribution"]]
    with pytest.raises(ConfigurationError, match=r"needs no-such-distribution.*llama-pretrain\[bench\]"):
        chosen(("ours", "hf"))


def test_steps_are_counted_and_timed_in_windows() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    cpu = torch.device("cpu")
    with StepClock(6, 10, cpu, PeakMemory(cpu)) as clock:
        for _ in range(15):
            optimizer.step()
        with pytest.raises(RuntimeError, match="made 15 optimizer steps, not 16"):
            clock.windows()
        optimizer.step()
    optimizer.step()
    assert clock.count == 16
    assert len(clock.windows()) == 2


def test_published_figures_are_of_the_size_asked_for() -> None:
    assert {row.size for row in published("70b")} == {"70b"}
    assert {row.size for row in published("tiny")} == {"7b"}
    assert all(row.source and row.device for row in published("13b"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--warm-up-steps", "5"], "warm_up_steps=5"),
        (["--rounds", "0"], "rounds=0"),
        (["--steps", "12"], "steps=12"),
        (["--mixed-precision", "fp16"], "mixed_precision='fp16'"),
        (["--contenders", "ours,touch"], "Did you mean 'torch'"),
        (["--contenders", "ours,ours"], "names one twice"),
        (["--model", "8b"], "model='8b'"),
        (["--sequence-length", "2048"], "max_position_embeddings of tiny, 1024"),
        (["--json", "no/such/folder.json"], "which is not a directory"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


@pytest.mark.full
def test_sigterm_leaves_no_baseline_and_no_files(tmp_path: Path) -> None:
    temporary, result = tmp_path / "temporary", tmp_path / "bench.json"
    temporary.mkdir()
    words = ["--steps", "100000", "--warm-up-steps", "6", "--rounds", "1", "--contenders", "torch"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "llama_pretrain", "bench", *words, "--use-cpu", "--json", str(result)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    deadline = time.monotonic() + 120
    while not (trials := processes_with(str(temporary))):
        assert bench.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in trials if Path(f"/proc/{pid}").exists()]
    assert not list(temporary.iterdir())
    assert not result.exists()


def test_a_trial_dies_with_the_bench(
    small: BenchArguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trial = [Baseline("torch", "torch", torch_loop, ())]
    bench = multiprocessing.get_context("fork").Process(target=run_rounds, args=(small, trial))
    bench.start()
    deadline = time.monotonic() + 120
    while not processes_with(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bench.kill()
    bench.join()
    deadline = time.monotonic() + 2 + 8  # the latter for a busy machine
    while processes_with(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes_with(word: str) -> list[int]:
    """Return the processes that have a text in their command line."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if word.encode() in line.read_bytes():
                found.append(int(line.parent.name))
    return found
