"""A job is started again: what its arguments say of the beginning applies to the run once, on all ranks.

Real processes, which kill themselves in one start after the other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from ports import free_port
from torch import nn
from warm_start import WarmStart

from checkpoint_core import LAUNCHER_VARIABLE, CheckpointManager
from dist_env import DistributedEnvironment
from trainer_core import (
    MARK_NAME,
    ConfigurationError,
    EarlierStart,
    Ranks,
    TrainingArguments,
    find_earlier_start,
)
from trainer_core.memory_tier import LAUNCH_VARIABLE, RESTARTS_VARIABLE
from trainer_core.restarts import leave_mark

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
from dist_env import DistributedEnvironment, may_pass
from trainer_core import Ranks, TrainingArguments, find_earlier_start
from trainer_core.restarts import leave_mark

env = DistributedEnvironment(no_accelerator=True)
with env:
    ranks = Ranks(env)
    ranks.connect()
    for output_dir, settings in json.loads(sys.argv[1]):
        begins = {"resume_from_checkpoint": False, "overwrite_output_dir": True}
        args = TrainingArguments(output_dir=output_dir, seed=7, **begins, **settings)
        try:
            found = find_earlier_start(args, env)
            leave_mark(args, ranks)
            print(json.dumps(found))
        except Exception as error:
            passes = " It may pass." if may_pass(error) else ""
            print(json.dumps(f"{type(error).__name__}: {error}{passes}"))
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


@pytest.mark.full
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


Case = tuple[str, dict[str, object]]
"""An output directory, and settings."""


def two_ranks(
    warm: WarmStart,
    tmp_path: Path,
    cases: Sequence[Case],
    launchers: tuple[int, int],
    disks: tuple[str, str] = ("a", "b"),
    *,
    count: int = 0,
    local_ranks: tuple[int, int] = (0, 0),
) -> list[list[object]]:
    """What two ranks, each in a folder of its own, find of an earlier start, or what is refused."""
    port, ranks = str(free_port()), []
    for rank in (0, 1):
        folder = tmp_path / disks[rank]
        folder.mkdir(exist_ok=True)
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(local_ranks[rank])}
        told |= {"LOCAL_WORLD_SIZE": str(max(local_ranks) + 1), "TORCHELASTIC_MAX_RESTARTS": "3"}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        told |= {LAUNCHER_VARIABLE: str(launchers[rank]), "TORCHELASTIC_RESTART_COUNT": str(count * rank)}
        script, out, err = tmp_path / f"rank{rank}.py", folder / f"out{rank}", folder / f"err{rank}"
        script.write_text(f"import os; os.chdir({str(folder)!r})\n" + AGREEING)
        ranks.append((warm.start([str(script), json.dumps(cases)], os.environ | told, out, err), out, err))
    assert [rank.wait(LIMIT_S) for rank, _, _ in ranks] == [0, 0], [err.read_text() for *_, err in ranks]
    return [[json.loads(line) for line in out.read_text().splitlines()] for _, out, _ in ranks]


def test_nodes_that_know_different_things_agree(warm: WarmStart, tmp_path: Path) -> None:
    """Rank 0 comes on a new node, with another launcher and an empty disk; rank 1 was there before."""
    cases: list[Case] = [("run", {}), ("damaged", {}), ("node", {"save_on_each_node": True})]
    first = two_ranks(warm, tmp_path, cases, (os.getpid(), os.getpid()))
    assert first == [[[False, False]] * 3] * 2
    (tmp_path / "b" / "damaged" / MARK_NAME).write_text("{")
    # The new node has a run of an earlier job on its disk, and one in which only a file is in the way.
    (tmp_path / "c").mkdir()
    with CheckpointManager(tmp_path / "c" / "node", {"model": nn.Linear(1, 1)}) as manager:
        manager.save(step=3)
    second = two_ranks(warm, tmp_path, cases, (os.getppid(), os.getpid()), ("c", "b"), count=1)
    assert second[0] == second[1]
    run, damaged, node = map(str, second[0])
    assert run == "[True, True]"
    assert re.search(r"rank 1 on .*b/damaged/.* is damaged; remove it", damaged), damaged
    assert re.search(r"rank 0 on .*c/node/checkpoint-3 is of another run.*move it away", node), node
    assert "It may pass" not in damaged + node


def test_what_may_pass_on_one_rank_is_told_as_such_on_all(warm: WarmStart, tmp_path: Path) -> None:
    (tmp_path / "b" / "run").mkdir(parents=True)
    # What lies at the beginning of it cannot be read, as on a device that fails.
    (tmp_path / "b" / "run" / MARK_NAME).symlink_to("/proc/self/mem")
    first, second = two_ranks(warm, tmp_path, [("run", {})], (os.getpid(), os.getpid()))
    assert first == second
    assert re.search(r"rank 1 on .*Input/output error.* It may pass\.$", str(first[0])), first


def test_marks_are_of_nodes_and_only_those_that_keep_checkpoints_need_one(
    warm: WarmStart, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run").write_text("in the way of the directory")
    (tmp_path / "b" / "node").write_text("")
    cases: list[Case] = [("run", {}), ("node", {"save_on_each_node": True})]
    mine, others = two_ranks(warm, tmp_path, cases, (os.getpid(), os.getppid()))
    assert mine == others
    assert mine[0] == [False, False]
    assert "rank 1 of 2 cannot leave the mark of this start" in str(mine[1])
    assert "on this node, rank 1: " in (tmp_path / "b" / "err1").read_text()
    assert len(json.loads((tmp_path / "a" / "run" / MARK_NAME).read_text())["launchers"]) == 2
    # Both on one node: the first speaks for it.
    two_ranks(warm, tmp_path, [("one", {})], (os.getpid(), os.getppid()), local_ranks=(0, 1))
    assert len(json.loads((tmp_path / "a" / "one" / MARK_NAME).read_text())["launchers"]) == 1
    assert not (tmp_path / "b" / "one").exists()


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingArguments:
    """Those of a fresh start, in a job that may start again."""
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    begins = {"resume_from_checkpoint": False, "overwrite_output_dir": True}
    return TrainingArguments(output_dir=str(tmp_path / "run"), seed=7, **begins)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_mark_that_cannot_be_read_is_an_error(arguments: TrainingArguments, is_folder: bool) -> None:
    env = DistributedEnvironment(always=False, no_accelerator=True)
    assert find_earlier_start(arguments, env) == EarlierStart(False, False)
    mark = arguments.run_path / MARK_NAME
    mark.parent.mkdir()
    if is_folder:
        mark.mkdir()
    else:
        mark.write_text("{}")
    with pytest.raises(
        ConfigurationError, match=r"does not tell whether an earlier start .*started-by\.json"
    ):
        find_earlier_start(arguments, env)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", LAUNCH_VARIABLE])
def test_two_launches_of_one_process_are_two_jobs(
    arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    env = DistributedEnvironment(always=False, no_accelerator=True)
    monkeypatch.setenv(variable, "one")
    leave_mark(arguments, Ranks(env))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_earlier_start(arguments, env) == EarlierStart(True, True)
    monkeypatch.setenv(variable, "two")
    assert find_earlier_start(arguments, env) == EarlierStart(False, False)
