"""Checkpoints in memory: newest first, damaged ones passed over, and gone when the launcher is."""

import functools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint_core import (
    LAUNCHER_VARIABLE,
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    MemoryDirectory,
    memory_tier,
)
from checkpoint_core.memory_room import _room, make_room

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses memory of Linux")
LONG_S = 60


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the launcher."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def memory(launcher: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[MemoryDirectory]:
    directory = MemoryDirectory(tmp_path / "run", launcher=launcher.pid)
    directory.open()
    yield directory
    directory.remove()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Job:
    """A model whose weight is the step, and its manager."""

    def __init__(self, tmp_path: Path, memory: MemoryDirectory | None, **settings: object) -> None:
        self.model = nn.Linear(4, 4)
        place = None if memory is None else memory.path
        config = CheckpointConfig(tmp_path / "run", memory_dir=place, **settings)  # type: ignore[arg-type]
        self.manager = CheckpointManager(config, {"model": self.model})

    def save(self, step: int, *, to_memory: bool) -> Path:
        nn.init.constant_(self.model.weight, step)
        saved = self.manager.save_to_memory(step) if to_memory else self.manager.save(step)
        assert saved is not None
        return saved

    def load(self) -> Path:
        loaded = self.manager.load()
        assert loaded is not None
        assert torch.equal(self.model.weight.detach(), torch.full((4, 4), float(loaded.step)))
        assert self.manager.loaded == loaded
        return loaded.path


def damage(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_newest_good_checkpoint_of_both_places_is_loaded(
    tmp_path: Path, memory: MemoryDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, memory)
    job.save(2, to_memory=False)
    for step in (1, 2, 3, 4):
        job.save(step, to_memory=True)
    assert sorted(path.name for path in memory.path.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert Job(tmp_path, memory).load() == memory.path / "checkpoint-4"
    damage(memory.path / "checkpoint-4")
    with caplog.at_level(logging.WARNING):
        assert Job(tmp_path, memory).load() == memory.path / "checkpoint-3"
    assert f"passing over {memory.path}/checkpoint-4, which is in memory: " in caplog.text
    damage(memory.path / "checkpoint-3")
    assert Job(tmp_path, memory).load() == tmp_path / "run" / "checkpoint-2"
    again = Job(tmp_path, memory)
    again.load()
    again.save(5, to_memory=False)
    assert Job(tmp_path, memory).load() == tmp_path / "run" / "checkpoint-5"


@pytest.mark.parametrize("older_on_storage", [True, False])
def test_a_damaged_newest_on_storage_does_not_hide_a_good_one_in_memory(
    tmp_path: Path, memory: MemoryDirectory, caplog: pytest.LogCaptureFixture, older_on_storage: bool
) -> None:
    job = Job(tmp_path, memory)
    if older_on_storage:
        job.save(2, to_memory=False)
    for step in (3, 4, 5):
        job.save(step, to_memory=True)
    damage(job.save(6, to_memory=False))
    damage(memory.path / "checkpoint-5")
    with caplog.at_level(logging.WARNING):
        assert Job(tmp_path, memory).load() == memory.path / "checkpoint-4"
    assert "passing over checkpoint-6: " in caplog.text
    after = Job(tmp_path, memory)
    after.load()
    after.save(6, to_memory=False)
    assert Job(tmp_path, memory).load() == tmp_path / "run" / "checkpoint-6"


def test_what_was_loaded_from_memory_is_the_same_run_on_storage(
    tmp_path: Path, memory: MemoryDirectory
) -> None:
    job = Job(tmp_path, memory)
    for step in (1, 2):
        job.save(step, to_memory=False)
    job.save(3, to_memory=True)
    after = Job(tmp_path, memory)
    assert after.manager.owns(after.load())
    after.save(4, to_memory=False)
    # Those of the same run rotate away, and none for having been loaded.
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_a_torn_save_is_passed_over_and_its_room_given_back(tmp_path: Path, memory: MemoryDirectory) -> None:
    Job(tmp_path, memory).save(3, to_memory=True)
    program = f"""
import os, sys, torch
from checkpoint_core import CheckpointConfig, CheckpointManager
import checkpoint_core.saving as saving
manager = CheckpointManager(CheckpointConfig({str(tmp_path / "run")!r}, memory_dir={str(memory.path)!r}),
                            {{"model": torch.nn.Linear(4, 4)}})
manager.load()
saving.publish = lambda *_: os.kill(os.getpid(), 9)
manager.save_to_memory(4)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert len(list(memory.path.iterdir())) == 2
    job = Job(tmp_path, memory)
    assert job.load() == memory.path / "checkpoint-3"
    job.save(4, to_memory=True)
    assert sorted(path.name for path in memory.path.iterdir()) == ["checkpoint-3", "checkpoint-4"]


def test_the_directory_goes_with_the_launcher_however_that_ends(
    launcher: subprocess.Popen[bytes], memory: MemoryDirectory, tmp_path: Path
) -> None:
    Job(tmp_path, memory).save(1, to_memory=True)
    assert memory.path.stat().st_mode & 0o077 == 0
    memory.open()  # as after a restart: the second keeper leaves the directory to the first
    time.sleep(0.3)
    assert (memory.path / "checkpoint-1").is_dir()
    launcher.kill()
    wait_for(lambda: not memory.path.exists())


def test_what_a_job_left_that_was_killed_with_its_keeper_goes_with_the_next_start(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stale = MemoryDirectory(tmp_path / "run", launcher=ended.pid).path
    stale.mkdir()
    ended.communicate()
    other = MemoryDirectory(tmp_path / "other", launcher=launcher.pid)
    try:
        other.open()
        assert not stale.exists()
        assert other.path.exists()
    finally:
        other.remove()


def test_what_cannot_work_is_refused_by_name(tmp_path: Path, launcher: subprocess.Popen[bytes]) -> None:
    on_disk = Path("/proc")
    with pytest.raises(CheckpointError, match="/proc is not a file system in memory"):
        MemoryDirectory("run", launcher=launcher.pid, root=on_disk).open()
    with pytest.raises(CheckpointError, match="needs an open CheckpointManager with memory_dir"):
        Job(tmp_path, None).save(1, to_memory=True)
    with pytest.raises(CheckpointError, match="memory_dir='s3://bucket/run' is in an object store"):
        CheckpointConfig(tmp_path, memory_dir="s3://bucket/run")


def test_room_is_asked_for_all_copies_and_the_one_in_the_making(
    tmp_path: Path, memory: MemoryDirectory
) -> None:
    free = os.statvfs(memory.path).f_bavail * os.statvfs(memory.path).f_frsize
    some = free * 2 // 5
    message = f"one takes {some} bytes .*, and 2 of them beside one in the making need {3 * some} bytes"
    with pytest.raises(CheckpointError, match=message):
        make_room(memory.path, some, "none", tmp_path)
    job = Job(tmp_path, memory)
    for step in (1, 2):
        job.save(step, to_memory=True)
    (run_id,) = {json.loads(file.read_text())["run_id"] for file in memory.path.glob("*/manifest.json")}
    make_room(memory.path, some, run_id, tmp_path)
    assert len(list(memory.path.iterdir())) == 2


STAT_1 = "inactive_file 9\nactive_file 9\ntotal_inactive_file 400\ntotal_active_file 600\n"
STAT_2 = "anon 5\ninactive_file 100\nactive_file 900\n"
"""Most of the cache was read more than once, as training data is."""


@pytest.mark.parametrize(
    ("files", "free", "where"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 3 kB\n"}, 3072, "the memory of this machine"),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": "5000\n",
                "sys/fs/cgroup/job/memory.current": "4000\n",
                "sys/fs/cgroup/job/memory.stat": STAT_2,
            },
            2000,
            "the memory limit of .*/sys/fs/cgroup/job",
        ),
        (
            {  # a container sees its own group as the root, and one around a process that has no limit itself
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "4500\n",
                "sys/fs/cgroup/memory.current": "4000\n",
                "sys/fs/cgroup/memory.stat": STAT_2,
            },
            1500,
            "the memory limit of .*/sys/fs/cgroup",
        ),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/step/memory.current": "10\n",
                "sys/fs/cgroup/job/step/memory.stat": STAT_2,
                "sys/fs/cgroup/job/memory.max": "3000\n",
                "sys/fs/cgroup/job/memory.current": "4000\n",
                "sys/fs/cgroup/job/memory.stat": STAT_2,
            },
            0,
            "the memory limit of .*/sys/fs/cgroup/job",
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/memory.stat": STAT_1,
            },
            1000,
            "the memory limit of .*/sys/fs/cgroup/memory",
        ),
    ],
    ids=["machine", "version 2", "container", "around", "version 1"],
)
def test_room_is_that_of_the_memory_and_not_of_its_file_system_alone(
    tmp_path: Path, memory: MemoryDirectory, files: dict[str, str], free: int, where: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    if free:
        make_room(memory.path, free // 3, "none", tmp_path)
    with pytest.raises(CheckpointError, match=f"but {where} has {free} bytes free"):
        make_room(memory.path, free // 3 + 1, "none", tmp_path)


def test_this_machine_tells_its_memory(memory: MemoryDirectory) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (total,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    # By itself: a small /dev/shm would hide that nothing was found in the kernel's files.
    told = [free for free, where in _room(memory.path, Path("/")) if where == "the memory of this machine"]
    assert len(told) == 1
    assert 0 < told[0] <= total
    with pytest.raises(CheckpointError, match="not enough memory"):
        make_room(memory.path, total, "none")


def test_a_run_whose_memory_becomes_short_leaves_saves_out(
    tmp_path: Path,
    memory: MemoryDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = tmp_path / "proc" / "meminfo"
    told.parent.mkdir()
    monkeypatch.setattr(memory_tier, "make_room", functools.partial(make_room, root=tmp_path))
    job = Job(tmp_path, memory)
    told.write_text("MemAvailable: 0 kB\n")
    with pytest.raises(CheckpointError, match="but the memory of this machine has 0 bytes free"):
        job.save(1, to_memory=True)
    told.write_text("MemAvailable: 9999 kB\n")
    job.save(2, to_memory=True)
    told.write_text("MemAvailable: 0 kB\n")
    for step in (3, 4):
        assert job.manager.save_to_memory(step) is None
    (record,) = caplog.records  # one for all that follow one another
    assert "saving checkpoint-3: not enough memory for checkpoints" in record.getMessage()
    assert "left out until there is room" in record.getMessage()
    # Nor does it end what continues after a loss.
    again = Job(tmp_path, memory)
    assert again.load() == memory.path / "checkpoint-2"
    assert again.manager.save_to_memory(3) is None
    told.write_text("MemAvailable: 9999 kB\n")
    assert again.save(5, to_memory=True) == memory.path / "checkpoint-5"
    assert sorted(path.name for path in memory.path.iterdir()) == ["checkpoint-2", "checkpoint-5"]


def test_nodes_leave_a_save_out_together(
    tmp_path: Path, memory: MemoryDirectory, run_worker: Callable[..., object]
) -> None:
    run_worker("memory_nodes.py", tmp_path, memory.path)
    first, second = (json.loads((tmp_path / f"seen{rank}").read_text()) for rank in range(2))
    assert first == second
    assert "saving checkpoint-1: rank 1 (" in first["seen"][0], "the first one is refused"
    assert first["seen"][1:] == ["checkpoint-2", None, None, "checkpoint-5"]
    assert first["there"] == ["checkpoint-2", "checkpoint-5"]
    warnings = (tmp_path / "log0").read_text()
    assert warnings.count("left out until there is room") == 1
    assert "rank 1 (" in warnings
    assert not (tmp_path / "log1").read_text()


def test_what_another_start_has_left_unusable_gives_its_room_back(
    tmp_path: Path, memory: MemoryDirectory
) -> None:
    """As where a node is replaced before anything is on storage: the run begins again, with another id."""
    before = Job(tmp_path, memory)
    for step in (7, 8):
        before.save(step, to_memory=True)
    (memory.path / "checkpoint-9").mkdir()
    (memory.path / "checkpoint-9" / "manifest.json").write_text("")
    job = Job(tmp_path, memory)  # which did not load
    for step in (1, 2, 3):
        job.save(step, to_memory=True)
        assert (memory.path / f"checkpoint-{step}").is_dir()
    assert sorted(path.name for path in memory.path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_the_package_imports_without_what_only_unix_has() -> None:
    program = "import checkpoint_core, sys; sys.exit('checkpoint_core.memory_keeper' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


WRAPPED = """
import os
from checkpoint_core import MemoryDirectory
print(MemoryDirectory("run").launcher)
"""


@pytest.mark.parametrize("told_by", ["torchrun", "variable", "nobody"])
def test_the_launcher_is_found_behind_a_shell(tmp_path: Path, told_by: str) -> None:
    (tmp_path / "rank.py").write_text(WRAPPED)
    shell = ["sh", "-c", f"{sys.executable} {tmp_path / 'rank.py'}; true"]
    told = {
        "torchrun": {"TORCHELASTIC_RUN_ID": "none"},
        "variable": {LAUNCHER_VARIABLE: str(os.getpid())},
        "nobody": {},
    }[told_by]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    with subprocess.Popen(shell, env=kept | told, stdout=subprocess.PIPE, text=True) as process:
        found = int(process.communicate()[0])
    assert found == (process.pid if told_by == "nobody" else os.getpid())


FIRST_PROCESS = """
import os, subprocess, sys
shell = ["sh", "-c", f"{sys.executable} {sys.argv[1]}; true"]
found = subprocess.run(shell, env={**os.environ, **TOLD}, capture_output=True, text=True, check=True)
print(os.getpid(), found.stdout, end="")
"""


@pytest.mark.parametrize("told", [{"TORCHELASTIC_RUN_ID": "none"}, {LAUNCHER_VARIABLE: "1"}])
def test_the_launcher_is_found_where_it_is_the_first_process(tmp_path: Path, told: dict[str, str]) -> None:
    """As in a container whose command is the launcher, with a shell between it and the rank."""
    (tmp_path / "rank.py").write_text(WRAPPED)
    (tmp_path / "launcher.py").write_text(f"TOLD = {told}\n{FIRST_PROCESS}")
    own = ["unshare", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    own += ["--fork", "--pid", "--mount-proc"]
    try:
        allowed = subprocess.run([*own, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if allowed.returncode:
        pytest.skip(f"this machine does not allow namespaces of processes: {allowed.stderr.strip()}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    kept.pop(LAUNCHER_VARIABLE, None)
    program = [*own, sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "rank.py")]
    done = subprocess.run(program, env=kept, capture_output=True, text=True, check=False)
    assert done.stdout == "1 1\n", done.stderr
