"""Saving without permission and without room: an error that says what to do, older checkpoints stay."""

import ctypes
import errno
import json
import os
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
    find_latest_checkpoint,
)

GLOBAL = SharingPattern.GLOBAL
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
CAPABILITY_VERSION_3 = 0x20080522
"""All of linux/sched.h and linux/capability.h that is needed."""


class Preprocessor:
    """A tokenizer that does what a test wants."""

    def __init__(self, action: Callable[[Path], object]) -> None:
        self.action = action

    def save_pretrained(self, directory: str) -> None:
        self.action(Path(directory))


def in_child(action: Callable[[], object]) -> object:
    """What an action returns, as JSON has it, from a process of its own."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read_end)
            with os.fdopen(write_end, "w") as file:
                json.dump(action(), file)
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(text)


def error_of(action: Callable[[], object]) -> str:
    """The message of a CheckpointError, or an empty text."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def without_privileges() -> None:
    """Let permissions bind this process, also where it runs as root."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if LIBC.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


@contextmanager
def permissions(path: Path, mode: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def test_a_read_only_directory(job, tmp_path: Path) -> None:
    """Loading works, saving says what to do, a leftover of a dead process is no obstacle."""
    run = tmp_path / "run"
    first = job()
    first.train(1)
    first.save()
    dead = run / ".tmp-checkpoint-2-00000000-1-1-00000000"
    dead.mkdir()

    def attempt() -> object:
        without_privileges()
        other = job(seed=1)
        step = other.manager.load_checkpoint().step
        other.train(1)
        calls = {
            "save": other.save,
            "export": lambda: other.manager.save_model(run / "exported"),
        }
        return [step, {name: error_of(call) for name, call in calls.items()}]

    with permissions(run, 0o555):
        step, messages = in_child(attempt)
    assert step == 1
    for name, parts in {
        "save": ["saving checkpoint-2: Permission denied", str(run)],
        "export": ["saving the model to", str(run / "exported")],
    }.items():
        for part in (*parts, "permission to read and write there", "choose another directory"):
            assert part in messages[name]
    assert names(run) == [dead.name, "checkpoint-1"]


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", ""])
def test_files_that_may_not_be_read(job, tmp_path: Path, name: str) -> None:
    first = job()
    for step in (1, 2):
        path = first.manager.save_checkpoint(step)

    def attempt() -> object:
        without_privileges()
        named = error_of(lambda: job().manager.load_checkpoint(path))
        return [named, job().manager.load_checkpoint().step]

    with permissions(path / name, 0):
        message, step = in_child(attempt)
    assert f"Permission denied: {path / (name or 'manifest.json')}" in message
    assert "Give this user permission" in message
    assert step == 1


def test_an_export_to_a_file(job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"saving the model to .*: .*file is a file. Choose a directory"
    ):
        job().manager.save_model(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_on_the_way_to_the_directory(job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    component = StateComponent(key="model", stateful=ModelState(nn.Linear(2, 2)), sharing_pattern=GLOBAL)
    config = CheckpointConfig(output_dir=tmp_path / "file" / "run")
    manager = CheckpointManager(config, stateful_provider=[component])
    with pytest.raises(CheckpointError, match=r"saving checkpoint-1: Not a directory: .*file"):
        manager.save_checkpoint(1)


def test_no_room_for_the_manifest(largest_file, counter, tmp_path: Path) -> None:
    """The last file of all: everything else has been written by then."""
    components = [
        StateComponent(key=f"counter{n}", stateful=counter(n), sharing_pattern=GLOBAL) for n in range(20)
    ]
    manager = CheckpointManager(CheckpointConfig(output_dir=tmp_path), stateful_provider=components)
    manager.save_checkpoint(1)
    with largest_file(1000), pytest.raises(CheckpointError, match=r"no space left to write .*manifest\.json"):
        manager.save_checkpoint(2)
    assert names(tmp_path) == ["checkpoint-1"]
    assert manager.load_checkpoint().step == 1


def mount(directory: Path, options: str) -> bool:
    """Mount a file system in memory, for this process alone; False where that is not allowed."""
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    return LIBC.mount(b"tmpfs", str(directory).encode(), b"tmpfs", 0, options.encode()) == 0


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Where a file system can be mounted; the jobs of the test write there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk", target_is_directory=True)
    return tmp_path / "disk"


def fill(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize("options", [{}, {"async_save": True}])
def test_a_disk_that_fills_up_in_the_middle_of_a_save(
    largest_file, job, disk: Path, options: dict[str, bool]
) -> None:
    """The room was there when the save began. Where no disk can be mounted, a limit on files stands in."""
    can_mount = in_child(lambda: mount(disk, "size=2m"))
    filler = disk / "filler"

    def attempt() -> object:
        first = job(save_total_limit=None, **options)
        limit = resource.RLIM_INFINITY if can_mount and mount(disk, "size=2m") else 2000

        def save() -> None:
            first.train(1)
            first.save()
            first.manager.wait()

        save()
        if can_mount:
            first.manager._preprocessor = Preprocessor(lambda _: fill(filler))
        with largest_file(limit):
            during = error_of(save)
        left = names(disk)
        # Now it is full from the beginning.
        before = error_of(save) if can_mount else "not enough space for the checkpoint"
        filler.unlink(missing_ok=True)
        first.manager._preprocessor = None
        save()
        newest = find_latest_checkpoint(disk, verify_checksums=True)
        return [during, left, before, newest and newest.name, job(seed=1).manager.load_checkpoint().step]

    during, left, before, newest, step = in_child(attempt)
    assert "saving checkpoint-2: no space left to write" in during
    assert ".tmp-checkpoint-2-" in during
    assert "bytes are free there. Free space, raise the quota" in during
    assert left == ["checkpoint-1", *(["filler"] if can_mount else [])]
    assert "not enough space for the checkpoint" in before
    steps = 4 if can_mount else 3
    assert (newest, step) == (f"checkpoint-{steps}", steps)


@pytest.mark.parametrize(
    ("options", "part"), [("nr_inodes=6", "Free space"), ("ro", "choose another directory")]
)
def test_a_disk_that_takes_no_more_files(job, disk: Path, options: str, part: str) -> None:
    """Out of files with much room left, and mounted for reading. Without a disk, a read-only directory."""
    can_mount = in_child(lambda: mount(disk, options))

    def attempt() -> object:
        if not (can_mount and mount(disk, options)):
            disk.chmod(0o555)
            without_privileges()
        return [error_of(job().save), names(disk)]

    message, left = in_child(attempt)
    assert "saving checkpoint-0: " in message
    assert (part if can_mount else "choose another directory") in message
    assert left == []


def test_a_quota(job, tmp_path: Path) -> None:
    """The system says EDQUOT, here to the preprocessor, which writes like everything else."""

    def exceed(directory: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(directory / "vocab.json"))

    first = job()
    path = first.manager.save_checkpoint(1)
    first.manager._preprocessor = Preprocessor(exceed)
    with pytest.raises(CheckpointError, match=r"no space left to write .*vocab\.json .*raise the quota"):
        first.manager.save_checkpoint(2)
    assert names(tmp_path / "run") == [path.name]
