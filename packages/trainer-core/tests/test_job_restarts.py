"""A job is started again: what its arguments say of the beginning applies to the run once, on all ranks.

Real processes, which kill themselves in one start after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ports import free_port
from warm_start import WarmStart

from checkpoint_core import LAUNCHER_VARIABLE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes of Linux")
LIMIT_S = 240
PROGRAM = """
import json, os, signal, sys, torch
from pathlib import Path
from torch import nn
from trainer_core import Trainer, TrainingArguments

class Rows:
    batch_size = 2
    def __len__(self): return 4
    def __iter__(self):
        for seed in range(4):
            ids = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(seed))
            yield {"input_ids": ids, "labels": ids}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
    def forward(self, input_ids): return self.head(torch.tanh(self.embed(input_ids)))

settings, notes, dies_at = json.loads(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
end = dies_at[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]

def die_at(place):
    if place == end: os.kill(os.getpid(), signal.SIGKILL)

class Dies:
    def on_init_end(self, args, state, control, **_):
        die_at("init")
    def on_train_begin(self, args, state, control, trainer, **_):
        loaded = trainer.checkpoint_manager.loaded
        with notes.open("a") as file:
            file.write(json.dumps([state.global_step, loaded and str(loaded.path)]) + "\\n")
        die_at("begin")
    def on_step_end(self, args, state, control, **_):
        die_at(state.global_step)

arguments = TrainingArguments(
    seed=7, per_device_train_batch_size=2, logging_steps=1, max_steps=4, save_strategy="steps",
    use_cpu=True, **settings,
)
trainer = Trainer(arguments, model_init=Model, train_dataset=Rows(), callbacks=[Dies()])
trainer.train()
die_at("evaluation")
"""
AGREEING = """
import json, os, sys
from dist_env import DistributedEnvironment
from trainer_core import Ranks, TrainingArguments, find_earlier_start
from trainer_core.restarts import leave_mark

env = DistributedEnvironment(no_accelerator=True)
with env:
    begins = {"resume_from_checkpoint": False, "overwrite_output_dir": True}
    args = TrainingArguments(output_dir="run", seed=7, **begins)
    ranks = Ranks(env)
    ranks.connect()
    print(json.dumps(find_earlier_start(args, env)))
    leave_mark(args, ranks)
"""
Noted = list[tuple[int, str | None]]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmStart]:
    modules = ["torch._dynamo", "trainer_core.trainer", "torch.distributed"]
    start = WarmStart(modules, os.environ | {"OMP_NUM_THREADS": "1"})
    yield start
    start.close()


class Job:
    """A launcher that starts one rank again and again; this process is taken for it.

    Args:
        warm: What forks the ranks.
        folder: A folder.
        settings: Of the run.
        launcher: Another process above this one, for another job.
    """

    def __init__(
        self, warm: WarmStart, folder: Path, settings: Mapping[str, object], launcher: int | None = None
    ) -> None:
        self.warm, self.folder, self.settings = warm, folder, settings
        self.launcher = os.getpid() if launcher is None else launcher
        self.said = ""

    def starts(self, *dies_at: object) -> Noted:
        """Step and checkpoint that each start begins with; `dies_at` says where it then kills itself."""
        program, notes = self.folder / "program.py", self.folder / "notes"
        program.write_text(PROGRAM)
        notes.unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        told = {LAUNCHER_VARIABLE: str(self.launcher), "TORCHELASTIC_MAX_RESTARTS": "9"}
        words = [str(program), json.dumps(self.settings), str(notes), json.dumps(dies_at)]
        for count, end in enumerate(dies_at):
            env = kept | told | {"TORCHELASTIC_RESTART_COUNT": str(count)}
            out, err = self.folder / "out", self.folder / "err"
            code = self.warm.start(words, env, out, err).wait(LIMIT_S)
            self.said = out.read_text() + err.read_text()
            assert code == (-9 if end else 0), self.said
        return noted(notes)


def noted(path: Path) -> Noted:
    return [(step, loaded) for step, loaded in map(json.loads, path.read_text().splitlines())]


def test_a_fresh_start_begins_once(warm: WarmStart, tmp_path: Path) -> None:
    """Lost before it owns its directory, before its first save, and after its end: in its last evaluation."""
    run = tmp_path / "run"
    settings: dict[str, object] = {"output_dir": str(run), "save_steps": 4}
    Job(warm, tmp_path, settings).starts("")
    settings |= {"resume_from_checkpoint": False, "overwrite_output_dir": True}
    another = Job(warm, tmp_path, settings, os.getppid())
    assert another.starts("init", 2, "evaluation", "") == [
        (0, None),
        (0, None),
        (4, f"{run}/checkpoint-4"),
    ]
    (previous,) = run.glob("previous-*")
    assert (previous / "checkpoint-4").is_dir()
    assert "resume_from_checkpoint=False applied to the first start of this job" in another.said
    # A new job has not begun what is there.
    assert Job(warm, tmp_path, settings).starts("") == [(0, None)]
    assert len(list(run.glob("previous-*"))) == 2


@pytest.mark.parametrize("memory", [False, True])
def test_a_checkpoint_to_begin_from_gives_way_to_the_own_ones(
    warm: WarmStart, tmp_path: Path, memory: bool
) -> None:
    before = {"output_dir": str(tmp_path / "before"), "save_steps": 1, "save_total_limit": None}
    Job(warm, tmp_path, before).starts("")
    source, run = tmp_path / "before" / "checkpoint-1", tmp_path / "run"
    settings = {
        "output_dir": str(run),
        "save_steps": 4 if memory else 3,
        "memory_save_steps": 3 if memory else 0,
        "resume_from_checkpoint": str(source),
    }
    begun = Job(warm, tmp_path, settings).starts("begin", 4, "")
    own = begun[2][1]
    assert begun == [(1, str(source)), (1, str(source)), (3, own)]
    assert str(own).startswith("/dev/shm/checkpoint-core-" if memory else f"{run}/checkpoint-")


@pytest.mark.full
def test_an_older_checkpoint_of_the_same_directory_is_begun_from_once(
    warm: WarmStart, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings: dict[str, object] = {"output_dir": str(run), "save_steps": 1, "save_total_limit": None}
    Job(warm, tmp_path, settings).starts("")
    settings["resume_from_checkpoint"] = str(run / "checkpoint-1")
    begun = Job(warm, tmp_path, settings, os.getppid()).starts("init", "begin", 3, "")
    assert [step for step, _ in begun] == [1, 1, 2]


def test_a_checkpoint_in_memory_before_any_on_storage_is_of_the_same_run(
    warm: WarmStart, tmp_path: Path
) -> None:
    """Lost between the first save in memory and the first on storage, and once more after that."""
    run = tmp_path / "run"
    settings = {"output_dir": str(run), "save_steps": 3, "memory_save_steps": 1, "save_total_limit": 1}
    begun = Job(warm, tmp_path, settings).starts(3, 4, "")
    assert [step for step, _ in begun] == [0, 2, 3]
    # Rotated away as the run's own.
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]


def test_torchrun_is_found_behind_a_shell_that_ends_with_its_rank(tmp_path: Path) -> None:
    program, notes = tmp_path / "program.py", tmp_path / "notes"
    program.write_text(PROGRAM)
    settings = {"output_dir": str(tmp_path / "run"), "save_steps": 100, "memory_save_steps": 2}
    words = [str(program), json.dumps(settings), str(notes), json.dumps([4, ""])]
    launcher = ("--standalone", "--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.05")
    shell = ("--no-python", "sh", "-c", f'"{sys.executable}" "$@"; exit $?', "sh")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launcher, *shell, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    (first, _), (second, loaded) = noted(notes)
    assert (first, second) == (0, 2)
    assert str(loaded).startswith("/dev/shm/checkpoint-core-")


def test_nodes_that_know_different_things_agree(warm: WarmStart, tmp_path: Path) -> None:
    """Rank 0 comes on a new node, with another launcher and an empty disk; rank 1 was there before."""
    program, port = tmp_path / "program.py", str(free_port())
    program.write_text(AGREEING)

    def start(launchers: tuple[int, int], disks: tuple[str, str], count: int) -> list[list[bool]]:
        ranks = []
        for rank in (0, 1):
            folder = tmp_path / disks[rank]
            folder.mkdir(exist_ok=True)
            told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_MAX_RESTARTS": "3"}
            told |= {LAUNCHER_VARIABLE: str(launchers[rank]), "TORCHELASTIC_RESTART_COUNT": str(count * rank)}
            place = f"import os; os.chdir({str(folder)!r})\n"
            program.with_name(f"rank{rank}.py").write_text(place + AGREEING)
            script, out, err = f"{tmp_path}/rank{rank}.py", folder / f"out{rank}", folder / f"err{rank}"
            ranks.append((warm.start([script], os.environ | told, out, err), out, err))
        assert [rank.wait(LIMIT_S) for rank, _, _ in ranks] == [0, 0], [err.read_text() for *_, err in ranks]
        return [json.loads(out.read_text()) for _, out, _ in ranks]

    assert start((os.getpid(), os.getpid()), ("a", "b"), 0) == [[False, False]] * 2
    assert start((os.getppid(), os.getpid()), ("c", "b"), 1) == [[True, True]] * 2
