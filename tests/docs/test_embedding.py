"""The scripts of `pick-your-packages.md` also run on two ranks; its short forms have a file of their own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "pick-your-packages.md"
Run = Callable[..., list["subprocess.CompletedProcess[str]"]]
CODE = re.compile(r"```(?:python|\{\.python continuation\})\n(.*?)```", re.DOTALL)
ON_SEVERAL_RANKS = ("A script for torchrun", "Our loop with your model")


def code_of(heading: str) -> str:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "\n\n".join(CODE.findall(section))


def check(done: Sequence[subprocess.CompletedProcess[str]]) -> None:
    """Every process has ended well."""
    assert all(each.returncode == 0 for each in done), "".join(each.stderr for each in done)


def test_no_section_of_the_page_is_forgotten() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    with_code = {heading for heading in headings if code_of(heading)}
    assert with_code == {"Short forms", *ON_SEVERAL_RANKS}


@pytest.mark.parametrize("heading", ON_SEVERAL_RANKS)
def test_what_the_section_asserts_holds_on_two_ranks(
    heading: str, run_with_theirs: Run, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(code_of(heading))
    check(run_with_theirs(str(script), ranks=2))


def test_one_process_goes_on_where_two_stopped(run_with_theirs: Run, tmp_path: Path) -> None:
    code, _, _ = code_of("A script for torchrun").rpartition("\nwith DistributedEnvironment(")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    begun, rest = tmp_path / "begun.py", tmp_path / "rest.py"
    begun.write_text(f"{code}\ntrain(Path({str(stopped)!r}), steps=7)\n")
    rest.write_text(
        f"{code}\nwhole = train(Path({str(whole)!r}), steps=10)\n"
        f"resumed = train(Path({str(stopped)!r}), steps=10)\n"
        "assert len(resumed) == 4\n"
        "assert torch.allclose(torch.tensor(resumed), torch.tensor(whole[6:]), rtol=1e-5)\n"
    )
    check(run_with_theirs(str(begun), ranks=2))
    check(run_with_theirs(str(rest)))


PREPARED = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from checkpoint_core import CheckpointManager


def made(stateful):
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful)
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2, shuffle=True)
    names = ("model", "optimizer", "scheduler", "loader")
    return dict(zip(names, accelerator.prepare(model, optimizer, scheduler, loader)))


for stateful in (True, False):
    state = made(stateful)
    try:
        CheckpointManager(f"{sys.argv[1]}-{stateful}", state)
    except TypeError as error:
        print(error)
    del state["loader"]
    CheckpointManager(f"{sys.argv[1]}-{stateful}", state).save(1)
    resumed = made(stateful)
    del resumed["loader"]
    CheckpointManager(f"{sys.argv[1]}-{stateful}", resumed).load()
    print(torch.equal(state["model"].weight, resumed["model"].weight))
"""


def test_what_accelerate_has_prepared_is_saved_or_refused_by_name(
    run_with_theirs: Run, tmp_path: Path
) -> None:
    script = tmp_path / "prepared.py"
    script.write_text(PREPARED)
    # In a process of its own: Accelerate keeps what it found out about the job for as long as the process.
    (done,) = run_with_theirs(str(script), str(tmp_path / "runs"))
    assert done.stdout.splitlines()[1::2] == ["True", "True"], done.stderr
    told = "component 'loader': the position of a DataLoaderShard cannot be saved, since Accelerate does not"
    assert done.stdout.count(told) == 2
