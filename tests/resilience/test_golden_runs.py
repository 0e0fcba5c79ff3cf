"""Checkpoints of an earlier commit continue to the losses they had there.

One process continues each run. With `GOLDEN_LAYOUTS=1` the ranks that wrote it do so as well, which the suite
does for one kind only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ports import free_port
from resilience.curve import EXACT, curve
from resilience.golden_runs import GOLDEN, KINDS, SAVED, STEPS, prepared, words
from warm_start import WarmStart

from llama_pretrain.cli import main

pytestmark = pytest.mark.xdist_group("warm")
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
def test_their_ranks_go_on(
    run: Path, tmp_path: Path, warm: WarmStart, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ranks = prepared(run.parent, tmp_path, run.name), KINDS[run.name][0]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    job = environ | meeting | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    errors = [tmp_path / f"err-{rank}" for rank in range(ranks)]
    monkeypatch.chdir(folder)
    started = [
        warm.start(
            ["-m", "llama_pretrain", *words(run.name)],
            job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            tmp_path / f"out-{rank}",
            errors[rank],
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * ranks, "".join(path.read_text() for path in errors)
    check_curve(run, folder / "run")
