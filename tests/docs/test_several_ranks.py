"""The examples of the pages on several ranks run on several ranks, and give the losses of one process."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
Run = Callable[..., list["subprocess.CompletedProcess[str]"]]
REPORT = """
logged = [round(entry["loss"], 5) for entry in trainer.state.log_history if "loss" in entry]
print("losses", logged, losses)
"""


def short_form(page: str) -> str:
    """The script that a page begins with."""
    text = (GUIDES / page).read_text()
    found: list[str] = re.findall(r"```\{\.python notest\}\n(.*?)```", text, re.DOTALL)
    return found[0]


def losses(done: Sequence[subprocess.CompletedProcess[str]]) -> set[str]:
    """What the ranks print; each of them prints the same."""
    assert all(each.returncode == 0 for each in done), "".join(each.stderr for each in done)
    return {each for rank in done for each in re.findall(r"losses (\[[^\]]*\]) \[", rank.stdout)}


@pytest.mark.parametrize("page", ["data-parallel.md", "sharded.md", "pipeline.md", "classification.md"])
def test_the_page_runs_on_two_ranks(
    page: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (GUIDES / page).read_text()
    first, *others = re.findall(r"```(?:python|\{\.python continuation\})\n(.*?)```", text, re.DOTALL)
    one, several = tmp_path / "one.py", tmp_path / "several.py"
    one.write_text(first + REPORT)
    # Alone, the examples of pipelines cut nothing; what they assert holds on every rank.
    several.write_text("\n\n".join([first + REPORT, *(others if page == "pipeline.md" else [])]))
    alone, together = losses(run(str(one))), losses(run(str(several), ranks=2))
    assert len(alone) == 1
    assert alone == together


@pytest.mark.parametrize("page", ["data-parallel.md", "sharded.md", "pipeline.md"])
def test_a_script_of_ten_lines_says_nothing_of_the_ranks(
    page: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = short_form(page)
    assert sum(bool(line) for line in short.splitlines()) == 10
    script = tmp_path / "train.py"
    script.write_text(short)
    done = run(str(script), ranks=2)
    told = "".join(each.stderr for each in done)
    assert all(each.returncode == 0 for each in done), told
    assert "".join(each.stdout for each in done).count("step 2") == 2
    assert "process group" not in told, "nothing is left for torch to warn of"


def test_a_rank_that_fails_without_an_environment_ends_the_job_by_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a launcher that ends nobody: torchrun may end the other rank before it can say why."""
    short = short_form("data-parallel.md")
    failure = "if __import__('os').environ['RANK'] == '1':\n    raise OSError('no such text')\nprint("
    script = tmp_path / "train.py"
    script.write_text(short.replace("print(", failure))
    monkeypatch.chdir(tmp_path)
    first, second = run(str(script), ranks=2)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "OSError: no such text" in second.stderr
    assert re.search(r"rank 1 on \S+ failed: OSError: no such text", first.stderr), first.stderr


ONE_READER_A_HOST = """
import os, json
place = int(os.environ["RANK"])
os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(place % 2))
from dataloader_dispatch import DataloaderDispatcher, DocumentStream, StreamLoader, SynchronizedDataLoader
from dist_env import DistributedEnvironment
documents = [[number] * (number * 7 % 13 + 1) for number in range(1, 300)]
with DistributedEnvironment(no_accelerator=True) as env:
    {block}
    print("rows", json.dumps([batch["input_ids"].tolist() for batch in batches]))
    of_host.close()
    stream = DocumentStream(documents, sequence_length=16, eos_token_id=0, seed=3, shards=8)
    print("one", json.dumps([batch["input_ids"].tolist() for batch in StreamLoader(stream, batch_size=4)]))
"""


def test_one_reader_on_each_host(run: Run, tmp_path: Path) -> None:
    text = (GUIDES / "data.md").read_text()
    (block,) = [
        each
        for each in re.findall(r"```\{\.python notest\}\n(.*?)```", text, re.DOTALL)
        if "of_host = " in each
    ]
    script = tmp_path / "read.py"
    script.write_text(ONE_READER_A_HOST.replace("{block}", block.replace("\n", "\n    ")))
    done = run(str(script), ranks=4)
    assert all(each.returncode == 0 for each in done), "".join(each.stderr for each in done)

    def printed(name: str, rank: int) -> list[list[list[int]]]:
        found: list[list[list[int]]] = json.loads(
            re.findall(f"^{name} (.*)", done[rank].stdout, re.MULTILINE)[0]
        )
        return found

    ranks, one = [printed("rows", rank) for rank in range(4)], printed("one", 0)
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) >= 8
    for step, batches in enumerate(zip(*ranks, strict=True)):
        of_one = [row for batch in one[4 * step : 4 * step + 4] for row in batch]
        assert sorted(row for batch in batches for row in batch) == sorted(of_one), step
