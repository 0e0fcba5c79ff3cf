"""The recipes for other tasks, which their page runs alone, give the same curves on two ranks."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "tasks.md"
BLOCKS = re.findall(r"```(?:python|\{\.python continuation\})\n(.*?)```", PAGE.read_text(), re.DOTALL)
REPORT = """
print("curves", json.dumps(curves), flush=True)
"""
BOTH = "for callbacks in ([StopHalfway()], []):"
FIRST, SECOND = "for callbacks in ([StopHalfway()],):", "for callbacks in ([],):"
Curves = dict[str, list[float]]
Run = Callable[..., list["subprocess.CompletedProcess[str]"]]


@pytest.fixture(scope="module")
def curves_of(run_with_theirs: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Curves]:
    """`curves_of(code, home, trainer="FSDP2", ranks=2)`: the losses of a script, alike on each rank."""

    def launch(code: str, home: Path, *, trainer: str = "DDP", ranks: int = 0) -> Curves:
        home.mkdir(exist_ok=True)
        code = code.replace("trainer_ddp", f"trainer_{trainer.lower()}").replace("DDP", trainer)
        script = tmp_path_factory.mktemp("script") / "train.py"
        script.write_text("import json\n" + code.replace("tempfile.mkdtemp()", repr(str(home))) + REPORT)
        done = run_with_theirs(str(script), ranks=ranks)
        told = [
            json.loads(re.findall("^curves (.*)", each.stdout, re.MULTILINE)[0])
            for each in done
            if each.returncode == 0
        ]
        assert len(told) == len(done), "".join(each.stderr for each in done)
        assert all(each == told[0] for each in told)
        return told[0]  # type: ignore[no-any-return]

    return launch


@pytest.fixture(scope="module")
def alone(curves_of: Callable[..., Curves], tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return curves_of("\n\n".join(BLOCKS), tmp_path_factory.mktemp("alone"))


def assert_same(curves: Curves, expected: Curves) -> None:
    assert curves.keys() == expected.keys()
    for task, curve in curves.items():
        assert len(curve) == 30
        assert curve == pytest.approx(expected[task], rel=1e-5), task


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["DDP", "FSDP2"])
def test_two_ranks_give_the_curves_of_one(
    trainer: str, alone: Curves, curves_of: Callable[..., Curves], tmp_path: Path
) -> None:
    together = curves_of("\n\n".join(BLOCKS), tmp_path / "run", trainer=trainer, ranks=2)
    assert len(together) == 6
    assert_same(together, alone)


def test_adapters_that_two_ranks_have_sharded_are_resumed_by_one(
    curves_of: Callable[..., Curves], tmp_path: Path
) -> None:
    lora = next(block for block in BLOCKS if BOTH in block)
    shared = [block for block in BLOCKS if block.startswith(("import random", "answers = "))]
    code = "\n\n".join([*shared, lora.partition("trainer.save_model")[0]])
    half = curves_of(code.replace(BOTH, FIRST), tmp_path / "run", trainer="FSDP2", ranks=2)
    assert len(half["lora"]) == 15
    # Of the answers it only loads: their run is complete.
    assert_same(
        curves_of(code.replace(BOTH, SECOND).replace("trainer.save_model(base)", ""), tmp_path / "run"),
        curves_of(code, tmp_path / "alone"),
    )
