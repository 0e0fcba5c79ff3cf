"""The examples of `pick-your-packages.md` also run on two ranks, and what it warns of is so."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "pick-your-packages.md"
Run = Callable[..., list["subprocess.CompletedProcess[str]"]]
CODE = re.compile(r"```(?:python|\{\.python continuation\})\n(.*?)```", re.DOTALL)
ON_SEVERAL_RANKS = (
    "A script for torchrun",
    "In the Hugging Face Trainer",
    "In Lightning",
    "In Accelerate",
    "Our loop with your model",
)


def code_of(heading: str) -> str:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "\n\n".join(CODE.findall(section))


def definitions(heading: str) -> dict[str, Any]:
    """What the examples of a section define, without the run at its end."""
    code, _, run = code_of(heading).rpartition("\nwith DistributedEnvironment(")
    assert "train(" in run
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, heading, "exec"), names)
    return names


def check(done: Sequence[subprocess.CompletedProcess[str]]) -> None:
    """Every process has ended well."""
    assert all(each.returncode == 0 for each in done), "".join(each.stderr for each in done)


def test_no_section_of_the_page_is_forgotten() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    with_code = {heading for heading in headings if code_of(heading)}
    assert with_code == {"MFU in a torch loop", *ON_SEVERAL_RANKS}


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


class Bare:
    """A loader as it is, with the name that the example's callback calls."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def use_next(self) -> None:
        pass


def resumes_in_lightning(names: dict[str, Any], place: Path) -> bool:
    with names["DistributedEnvironment"](no_accelerator=True) as env:
        whole = names["train"](place / "whole", env, seed=0, steps=12)
        names["train"](place / "stopped", env, seed=0, steps=7)
        resumed = names["train"](place / "stopped", env, seed=1, steps=12)
    assert len(resumed) == 6
    return bool(resumed == whole[6:])


def test_lightning_reads_ahead_of_a_loader_without_a_length(tmp_path: Path) -> None:
    names = definitions("In Lightning")
    names["ReadAhead"] = Bare
    assert not resumes_in_lightning(names, tmp_path)


def test_lightning_takes_a_loader_with_a_length_as_it_is(tmp_path: Path) -> None:
    from dataloader_dispatch import build_loader

    names = definitions("In Lightning")
    rows = [{"input_ids": row, "labels": row} for row in names["torch"].randint(256, (20, 64))]

    def loader(_: object) -> Bare:
        return build_loader(rows, batch_size=4, shuffle=True, seed=0)  # type: ignore[no-any-return]

    names["ReadAhead"] = loader
    names["Checkpoints"].on_train_batch_start = lambda *_: None
    assert resumes_in_lightning(names, tmp_path)


def test_the_hugging_face_trainer_sets_the_epoch_of_a_bare_loader_back(tmp_path: Path) -> None:
    names = definitions("In the Hugging Face Trainer")
    names["WithoutEnd"] = Bare
    with names["DistributedEnvironment"](no_accelerator=True):
        begun = names["trainer"](tmp_path, seed=0)
        begun.train()
        position = begun.callback_handler.train_dataloader.state_dict()
        assert position["epoch"] > 0
        resumed = names["trainer"](tmp_path, seed=0)
        resumed.args.max_steps = 21
        resumed.train(resume_from_checkpoint=True)
        assert resumed.callback_handler.train_dataloader.state_dict()["epoch"] == 0


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
