"""A rank dies in mid-step, torchrun starts the job again, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Kills behind other launchers are in the tests of resilience and llama-pretrain.
pytestmark = pytest.mark.full

KILL_AT, SAVED_BEFORE, STEPS = 7, 6, 14


@dataclass(frozen=True)
class Runs:
    """Two runs of the same settings, of which one was killed and started again."""

    killed: Path
    whole: Path
    logs: dict[str, str]
    """What the ranks of the killed one wrote to stderr, by file."""

    def final(self, folder: Path, rank: int) -> dict[str, Any]:
        """What a rank wrote down at the end."""
        found: dict[str, Any] = json.loads((folder / f"final-{rank}.json").read_text())
        return found


@pytest.fixture(scope="module")
def runs(torchrun: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Both runs, each to its end."""
    killed, whole, logs = (tmp_path_factory.mktemp(name) for name in ("killed", "whole", "logs"))
    options = ["--max-restarts", "1", "--log-dir", str(logs), "--redirects", "3"]
    interrupted = torchrun(2, "restarting.py", str(killed), str(KILL_AT), options=options, timeout=300)
    texts = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("stderr.log")}
    told = "".join(f"--- {name}\n{text}" for name, text in texts.items())
    assert interrupted.code == 0, interrupted.err + told
    assert (killed / "killed").exists()
    undisturbed = torchrun(2, "restarting.py", str(whole), "-1", timeout=240)
    assert undisturbed.code == 0, undisturbed.err
    return Runs(killed, whole, texts)


def test_curve_and_weights_are_those_of_the_run_without_a_kill(runs: Runs) -> None:
    assert runs.final(runs.killed, 0)["began_at"] == SAVED_BEFORE
    assert runs.final(runs.whole, 0)["began_at"] == 0
    assert len(runs.final(runs.whole, 0)["log"]) == STEPS
    for rank in (0, 1):
        found, expected = runs.final(runs.killed, rank), runs.final(runs.whole, rank)
        assert found["log"] == expected["log"]
        assert found["weights"] == expected["weights"]
    assert runs.final(runs.whole, 0)["weights"] == runs.final(runs.whole, 1)["weights"]


def test_survivor_names_the_rank_that_died(runs: Runs) -> None:
    """It has time for that, although the launcher asks it to end as soon as the other one is gone."""
    survivor = [text for name, text in runs.logs.items() if name.endswith("attempt_0/0/stderr.log")]
    assert len(survivor) == 1, sorted(runs.logs)
    assert "RankFailedError" in survivor[0]
    assert "rank 1 on " in survivor[0]
