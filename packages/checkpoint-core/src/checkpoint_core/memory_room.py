"""The room for checkpoints in memory: of the file system, of the machine, and of its container."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from checkpoint_core.directory import checkpoint_directories, clean_leftovers
from checkpoint_core.errors import CheckpointError, free_bytes
from checkpoint_core.retention import manifests_of_run

MEMORY_COPIES = 2
"""Number of checkpoints that are kept in memory: the newest may turn out to be damaged."""


class MemoryRoomError(CheckpointError):
    """The memory has not room for the checkpoints that are kept in it; later it may have."""


def make_room(directory: Path, needed: int, run_id: str, root: Path = Path("/")) -> None:
    """Refuse to begin a save in memory that later ones would not fit beside.

    What no later save would remove is removed first: torn and damaged checkpoints, and those of another run,
    which a start has left that found none of them usable. The directory belongs to one job and one run.

    Args:
        directory: The directory of the checkpoints.
        needed: Bytes of this checkpoint.
        run_id: The id of the run.
        root: Where the kernel's files are found.

    Raises:
        MemoryRoomError: There is not room for all that are kept and one in the making; names the numbers.
    """
    clean_leftovers(directory)
    own = manifests_of_run(directory, run_id)
    for step, path in checkpoint_directories(directory):
        if step not in own:
            shutil.rmtree(path, ignore_errors=True)
    free, where = min(_room(directory, root))
    wanted = max(1, MEMORY_COPIES + 1 - len(own)) * needed
    if wanted > free:
        raise MemoryRoomError(
            f"not enough memory for checkpoints: one takes {needed} bytes ({needed / 1e9:.2f} GB), and "
            f"{MEMORY_COPIES} of them beside one in the making need {(MEMORY_COPIES + 1) * needed} bytes, "
            f"but {where} has {free} bytes free beside the {len(own)} that are there. Make it larger (a "
            "container has --memory and --shm-size), save to memory on more nodes, or leave the memory tier "
            "out."
        )


def _room(directory: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Free bytes by every measure that applies, and what each is of."""
    yield free_bytes(directory), str(directory.parent)
    with suppress(OSError, ValueError):
        # A file system in memory may be larger than the memory: the kernel then ends processes.
        available = _entries(root / "proc/meminfo")["MemAvailable:"]
        yield available * 1024, "the memory of this machine"
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2, beside version 1 or alone
                for place in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                    yield from _room_in_cgroup(root / place, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
                yield from _room_in_cgroup(root / "sys/fs/cgroup/memory", path, *names)


def _room_in_cgroup(mount: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[tuple[int, str]]:
    """What a control group and those around it leave: each of them limits all that is in it."""
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        # Those outside of a container are not seen in it: its own is at the root of the mount.
        with suppress(OSError, ValueError, KeyError):  # without a limit it says "max"
            most = int((group / limit).read_text())
            used = int((group / usage).read_text())
            # Pages of files count as used, and the kernel gives them up, also those that were read twice and
            # so are active. Those of /dev/shm are in neither: they count as anonymous there.
            stat = _entries(group / "memory.stat")
            cache = stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"]
            yield max(0, most - max(0, used - cache)), f"the memory limit of {group}"
        group = group.parent


def _entries(path: Path) -> dict[str, int]:
    """Names and numbers of a file that has one of each a line."""
    fields = [line.split() for line in path.read_text().splitlines()]
    return {each[0]: int(each[1]) for each in fields if len(each) > 1}
