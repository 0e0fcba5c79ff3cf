"""The scripts of `multi-node.md` run as they are; an `srun` starts the nodes of a job on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

from perf_metrics import load_logs

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SCRIPT = GUIDES / "train.sbatch"
PAGE = (GUIDES / "multi-node.md").read_text()
LIMIT_S = 300
LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# Starts each task of two nodes here, as srun does there. Sent USR1, it hands the signal to every process of
# the step.
SRUN = """#!{python}
import os, signal, subprocess, sys
from pathlib import Path

words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
place = {{"SLURM_NODEID": "{node}", "SLURM_PROCID": "{node}", "SLURM_LOCALID": "0"}}
tasks = [
    subprocess.Popen(words, env=os.environ | {{k: v.replace("{node}", str(node)) for k, v in place.items()}})
    for node in range(2)
]


def parents():
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended meanwhile


def below(process, known):
    children = [child for child, parent in known.items() if parent == process]
    return children + [each for child in children for each in below(child, known)]


def to_all(number, frame):
    for process in below(os.getpid(), dict(parents())):
        os.kill(process, number)


signal.signal(signal.SIGUSR1, to_all)
Path(os.environ["SRUN_IS_READY"]).write_text(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) echo localhost; echo localhost ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


class Job:
    """A job of two nodes, with one process each, in a folder of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.requeued = place / "requeued"
        self.ready = place / "srun"
        self.starts = 0
        self.number = free_port() - 10_000
        commands = place / "commands"
        commands.mkdir()
        for name, text in (
            ("srun", SRUN.format(python=sys.executable, node="{node}")),
            ("scontrol", SCONTROL),
        ):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        for name in ("torchrun", "llama-pretrain"):
            (commands / name).symlink_to(Path(sys.executable).parent / name)
        self.path = f"{commands}:{os.environ['PATH']}"

    def start(self, script: str, *options: str) -> subprocess.Popen[str]:
        self.ready.unlink(missing_ok=True)
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        slurm = {
            "SLURM_JOB_ID": str(self.number),
            "SLURM_RESTART_COUNT": str(self.starts),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NNODES": "2",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_GPUS_ON_NODE": "1",
        }
        own = {
            "PATH": self.path,
            "REQUEUED": str(self.requeued),
            "SRUN_IS_READY": str(self.ready),
            "OUTPUT_DIR": "runs/big",
            "MESH": "dp=2",
            "OMP_NUM_THREADS": "1",
        }
        self.starts += 1
        return subprocess.Popen(
            ["bash", script, *options],
            cwd=self.place,
            env=variables | slurm | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_a_step(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.losses():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def time_is_nearly_up(self) -> None:
        os.kill(int(self.ready.read_text()), signal.SIGUSR1)

    def losses(self) -> dict[int, float]:
        file = self.place / "runs" / "big" / "trainer_logs.json"
        if not file.is_file():
            return {}
        # The run may be in the middle of writing an entry.
        return {entry["global_step"]: entry["loss"] for entry in load_logs(file) if "loss" in entry}

    def checkpoints(self) -> list[int]:
        found = (self.place / "runs" / "big").glob("checkpoint-*")
        return sorted(int(path.name.rpartition("-")[2]) for path in found)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    lines = (json.dumps({"text": f"{number} is the number after {number - 1}. " * 8}) for number in range(60))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    job = Job(tmp_path)
    yield job
    if job.ready.is_file():  # what a failed test has left
        subprocess.run(["kill", job.ready.read_text()], check=False, capture_output=True)


def options(steps: int, *more: str) -> list[str]:
    settings = {
        "model": "shape",
        "data": "text.jsonl",
        "sequence-length": 32,
        "per-device-train-batch-size": 2,
        "max-steps": steps,
        "held-out": 0,
        "logging-steps": 1,
        "save-steps": 100_000,
        "sample-tokens": 0,
        "lr-scheduler-type": "constant",
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))] + list(more)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()


def without_torchrun(place: Path) -> str:
    """The second script of the page, with one GPU a node."""
    scripts = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
    assert len(scripts) == 1
    path = place / "direct.sbatch"
    path.write_text(scripts[0].replace("--mesh dp=2,shard=8", "--mesh dp=2"))
    return str(path)


@pytest.mark.full
@pytest.mark.parametrize("with_torchrun", [True, False])
def test_before_the_time_is_up_the_run_is_saved_and_put_back(job: Job, with_torchrun: bool) -> None:
    script = str(SCRIPT) if with_torchrun else without_torchrun(job.place)
    process = job.start(script, *options(100_000))
    job.wait_for_a_step(process)
    job.time_is_nearly_up()
    shown = finish(process)
    assert process.returncode == (1 if with_torchrun else 75), shown
    assert job.requeued.read_text().split() == [str(job.number)], shown
    assert shown.count("The same command continues from there.") == 1, shown
    (stopped_at,) = job.checkpoints()
    assert list(job.losses()) == list(range(1, stopped_at + 1))

    process = job.start(script, *options(stopped_at + 3))
    shown = finish(process)
    assert process.returncode == 0, shown
    assert list(job.losses()) == list(range(1, stopped_at + 4))
    assert job.requeued.read_text().split() == [str(job.number)], "what is done is not put back"
    assert not list(job.place.glob("exit-codes-*"))


@pytest.mark.full
def test_a_limit_that_the_run_keeps_itself_works_as_well(job: Job) -> None:
    process = job.start(str(SCRIPT), *options(100_000, "--max-train-seconds", "1"))
    shown = finish(process)
    assert job.requeued.is_file(), shown
    assert len(job.checkpoints()) == 1


def test_wrong_input_ends_the_job(job: Job) -> None:
    process = job.start(str(SCRIPT), *options(4, "--learning-rate", "-1"))
    shown = finish(process)
    assert process.returncode == 1
    assert "learning_rate=-1.0" in shown
    assert not job.requeued.exists()


@pytest.mark.full
def test_a_rank_that_is_killed_ends_the_job(job: Job) -> None:
    process = job.start(str(SCRIPT), *options(100_000))
    job.wait_for_a_step(process)
    for line in subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines():
        if (
            str(job.number) not in line
            and "llama_pretrain train" in line
            and is_rank_1(int(line.split()[0]), job)
        ):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    shown = finish(process)
    assert process.returncode == 1
    assert "rank 1 on" in shown
    assert not job.requeued.exists()


def is_rank_1(process: int, job: Job) -> bool:
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"RANK=1" in variables and f"REQUEUED={job.requeued}".encode() in variables


def test_each_script_of_the_page_is_a_script(tmp_path: Path) -> None:
    for script in (str(SCRIPT), without_torchrun(tmp_path)):
        subprocess.run(["bash", "-n", script], check=True)
    assert '--8<-- "docs/guides/train.sbatch"' in PAGE
    assert shutil.which("bash")


def by_hand() -> list[str]:
    found = re.findall(r"```bash\n(torchrun --nnodes .*?)```", PAGE, re.DOTALL)
    assert len(found) == 3  # static, c10d, and the doctor
    return found


@pytest.mark.full
@pytest.mark.parametrize("command", by_hand())
def test_the_commands_of_the_page_start_two_nodes(command: str, job: Job) -> None:
    port = str(free_port())
    for there, here in {
        "node0": "localhost",
        "29500": port,
        "29400": port,
        "--nproc-per-node 8": "--nproc-per-node 1",
        "--nproc-per-node 2": "--nproc-per-node 1",
        "shard=8": "shard=1",
        "/shared/runs/big": "runs/big",
    }.items():
        command = command.replace(there, here)
    trains = "llama_pretrain" in command
    words = " ".join(options(3)) if trains else "--no-accelerator --max-bytes 1024"
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", f"{command.rstrip()} {words}"],
            cwd=job.place,
            env=variables | {"PATH": job.path, "NODE": str(node), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    shown = [finish(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], shown
    assert (
        (list(job.losses()) == [1, 2, 3]) if trains else any("healthy: 2 rank(s)" in text for text in shown)
    )
