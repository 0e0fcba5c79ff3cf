"""The examples of the pages on several ranks run on several ranks, and give the losses of one process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
REPORT = """
logged = [round(entry["loss"], 5) for entry in trainer.state.log_history if "loss" in entry]
print("losses", logged, losses)
"""


SHORT = re.findall(r"```\{\.python notest\}\n(.*?)```", (GUIDES / "data-parallel.md").read_text(), re.DOTALL)


def run(script: Path, *launcher: str, **job: str) -> subprocess.CompletedProcess[str]:
    """Run a script in its folder, outside of any job that this process may belong to."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=variables | {"OMP_NUM_THREADS": "1"} | job,
    )


def losses(script: Path, *launcher: str) -> set[str]:
    """What the ranks print; each of them prints the same."""
    done = run(script, *launcher)
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


@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        ("trainer_ddp", "DDPTrainer"),
        ("trainer_fsdp2", "FSDP2Trainer"),
        ("trainer_pipeline", "PipelineTrainer"),
    ],
)
def test_a_script_of_ten_lines_says_nothing_of_the_ranks(module: str, trainer: str, tmp_path: Path) -> None:
    (short,) = SHORT
    assert sum(bool(line) for line in short.splitlines()) == 10
    script = tmp_path / "train.py"
    script.write_text(short.replace("trainer_ddp", module).replace("DDPTrainer", trainer))
    done = run(script, *TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2\n") == 2
    assert "process group" not in done.stderr, "nothing is left for torch to warn of"


def test_a_rank_that_fails_without_an_environment_ends_the_job_by_name(tmp_path: Path) -> None:
    """Under a launcher that ends nobody: torchrun may end the other rank before it can say why."""
    (short,) = SHORT
    failure = "if __import__('os').environ['RANK'] == '1':\n    raise OSError('no such text')\nprint("
    script = tmp_path / "train.py"
    script.write_text(short.replace("print(", failure))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    jobs = [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda variables: run(script, **variables), jobs)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "OSError: no such text" in second.stderr
    assert re.search(r"rank 1 on \S+ failed: OSError: no such text", first.stderr), first.stderr
