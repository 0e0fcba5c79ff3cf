"""Checkpoints of an earlier commit continue to the losses they had there.

One process continues each run. With `GOLDEN_LAYOUTS=1` the ranks that wrote it do so as well, which the suite
does for one kind only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from resilience.curve import EXACT, curve
from resilience.golden_runs import GOLDEN, KINDS, SAVED, STEPS, prepared, start, words

from llama_pretrain.cli import main

RUNS = sorted(path.parent for path in GOLDEN.glob("*/*/losses.json"))
NAMES = [f"{run.parent.name}-{run.name}" for run in RUNS]
BY_THEIR_RANKS = [run for run in RUNS if os.environ.get("GOLDEN_LAYOUTS") or run.name == "pipeline-shards"]


def check_curve(run: Path, output: Path) -> None:
    expected = {int(step): loss for step, loss in json.loads((run / "losses.json").read_text()).items()}
    assert list(expected) == list(range(SAVED + 1, STEPS + 1))
    found = curve(output, "loss")
    assert list(found) == list(range(1, STEPS + 1))
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=EXACT)


def test_every_kind_is_there() -> None:
    assert {run.name for run in RUNS} == set(KINDS)


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_one_process_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepared(run.parent, tmp_path, run.name)
    (folder / "run" / "losses.json").unlink()
    monkeypatch.chdir(folder)
    assert main(words(None)) == 0
    assert f"resumed at step {SAVED}\n" in capsys.readouterr().err
    check_curve(run, folder / "run")


@pytest.mark.parametrize("run", BY_THEIR_RANKS, ids=[run.name for run in BY_THEIR_RANKS])
def test_their_ranks_go_on(run: Path, tmp_path: Path) -> None:
    folder = prepared(run.parent, tmp_path, run.name)
    start(run.name, folder, KINDS[run.name][0])
    check_curve(run, folder / "run")
