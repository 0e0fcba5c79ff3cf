"""The examples of the pages on several ranks run on several ranks, and give the losses of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
REPORT = """
logged = [round(entry["loss"], 5) for entry in trainer.state.log_history if "loss" in entry]
print("losses", logged, losses)
"""


def losses(script: Path, *launcher: str) -> set[str]:
    """What the ranks print; each of them prints the same."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=variables | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"losses (\[[^\]]*\]) \[", done.stdout))


@pytest.mark.parametrize("page", ["data-parallel.md", "sharded.md", "pipeline.md", "classification.md"])
def test_the_page_runs_under_torchrun(page: str, tmp_path: Path) -> None:
    text = (GUIDES / page).read_text()
    first, *others = re.findall(r"```(?:python|\{\.python continuation\})\n(.*?)```", text, re.DOTALL)
    one, several = tmp_path / "one.py", tmp_path / "several.py"
    one.write_text(first + REPORT)
    # Alone, the examples of pipelines cut nothing; what they assert holds on every rank.
    several.write_text("\n\n".join([first + REPORT, *(others if page == "pipeline.md" else [])]))
    alone, together = losses(one), losses(several, *TORCHRUN)
    assert len(alone) == 1
    assert alone == together
