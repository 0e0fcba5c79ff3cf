"""Whether several ranks may write to one file of a directory, and how it gets one writer where they may not.

Ranks of one host write through one page cache, so they may. Ranks of several hosts may on a parallel file
system, which keeps what its hosts write to ranges of one file coherent. NFS does not: a host may write back
whole pages, over what another host wrote to the same page. Nothing tells whether an unknown file system is
coherent, so only those that are known to be count.

Where ranks may not, each file of a SHARDED state is written by its owner; see ``tensor_owners.py``.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.directory import machine_token
from checkpoint_core.encoding import LocalPart
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import PartialDigest, create_file, sync_descriptor, write_at
from checkpoint_core.tensor_files import FileLayout, create_tensor_file, write_parts
from checkpoint_core.tensor_owners import WholeFiles, send_to_owners

COHERENT = frozenset({"beegfs", "ceph", "gfs2", "gpfs", "lustre", "ocfs2", "panfs", "pvfs2", "wekafs"})
"""File systems, as the kernel names them, on which hosts may write to ranges of one file."""
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
Shares = dict[str, tuple[int, int]]
"""Size of a file and the share of one writer in its checksum, by file name."""


class RankReport(TypedDict):
    """What one rank wrote."""

    components: dict[str, tuple[list[str], str, dict[str, str]]]
    """Files, format and tied names of each component whose files it made."""
    files: Shares


def gather_reports(ranks: RankAgreement, phase: str, write: Callable[[], RankReport]) -> list[RankReport]:
    """Write on every rank, and get the reports of all, to which files may be added. Collective."""
    reports = ranks.run(phase, write)
    return [RankReport(components=each["components"], files=dict(each["files"])) for each in reports]


def check_one_writer(reports: Sequence[RankReport]) -> None:
    """Refuse a checkpoint of which two ranks have written one file, each somewhere else.

    Args:
        reports: What each rank wrote.

    Raises:
        CheckpointError: Naming the file.
    """
    writers = Counter(name for report in reports for name in report["files"])
    if twice := sorted(name for name, count in writers.items() if count > 1):
        raise written_twice(twice[0])


def written_twice(name: str) -> CheckpointError:
    """The error for a file that two parts of a checkpoint want to write."""
    return CheckpointError(
        f"two parts of the checkpoint want to write {name}. Rename the component key that clashes with "
        "another component or with a file of the preprocessor."
    )


def file_system(directory: Path) -> str | None:
    """The kind of file system of a directory.

    Args:
        directory: It need not exist; then its nearest parent that does counts.

    Returns:
        Its name in the table of mounts, such as ``nfs4`` or ``lustre``; None on systems without that table.
    """
    place = os.path.realpath(directory)
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    best, found = "", None
    for line in lines:
        left, _, right = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), left.split()[4])
        # The last mount of a place hides the earlier ones.
        if len(point) >= len(best) and (place == point or place.startswith(point.rstrip("/") + "/")):
            best, found = point, right.split()[0]
    return found


def needs_one_writer(
    ranks: RankAgreement, phase: str, directory: Path, setting: bool | None, local_world_size: int
) -> bool:
    """Decide whether each file of a directory must have one writer. Collective.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        directory: Where the files are to be written.
        setting: ``CheckpointConfig.one_writer_per_file``.
        local_world_size: Number of ranks on this host.

    Returns:
        The setting; or without one whether the ranks are on several hosts, and the file system that they see
        is not known to be coherent.
    """
    if len(ranks.nodes()) > 1:
        # Only ranks of one node write to a directory, in which a file is either whole or not at all.
        return ranks.is_spread
    if setting is not None or ranks.world_size == 1:
        return bool(setting)
    # All of it is exchanged, so that ranks whose environments contradict one another decide alike.
    seen = ranks.run(
        phase,
        lambda: [machine_token(), local_world_size < ranks.world_size, file_system(directory) in COHERENT],
    )
    several = len({machine for machine, _, _ in seen}) > 1 or any(others for _, others, _ in seen)
    return several and not all(coherent for _, _, coherent in seen)


def begin_save(ranks: RankAgreement, phase: str, directory: Path, begin: Callable[[], str]) -> Path:
    """Let the leader of every node make the directory in which its node writes. Collective.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        directory: Where it is made.
        begin: Makes it, and returns its name.

    Returns:
        The directory of this rank's node.

    Raises:
        CheckpointError: On every rank, when any failed; or where nodes that keep a checkpoint together see
            one directory, in which one would replace the files of the other.
    """
    names = ranks.run(phase, lambda: begin() if ranks.is_leader else "")

    def check() -> None:
        for rank, name in enumerate(names) if ranks.is_leader else ():
            if name and rank != ranks.leader and (directory / name).exists():
                raise CheckpointError(
                    f"{directory} is also the directory of the node of rank {rank}, but with "
                    "save_on_each_node=True and remote_dir each node needs one of its own. Name a directory "
                    "on the disk of each node, or leave save_on_each_node out."
                )

    if ranks.is_spread:
        ranks.run(phase, check)
    return directory / names[ranks.leader]


def write_own_files(
    directory: Path,
    layouts: Mapping[str, FileLayout],
    files: WholeFiles,
    parts: Mapping[str, LocalPart],
    rank: int,
    threads: int,
) -> dict[str, tuple[int, int]]:
    """Write the files that this rank owns, of which it holds all.

    Args:
        directory: Where.
        layouts: The files by name, in the order of ``files``.
        files: Who writes them.
        parts: What this rank holds, by tensor name.
        rank: This rank.
        threads: How many threads write.

    Returns:
        Size and share in the checksum, by file name.
    """
    shares = {}
    for (name, layout), owner in zip(layouts.items(), files.owners, strict=False):
        if owner == rank:
            head = create_tensor_file(directory / name, layout)
            shares[name] = (layout.size, head ^ write_parts(directory / name, layout, parts, threads))
    return shares


def write_exchanged_files(
    ranks: RankAgreement,
    phase: str,
    directory: Path,
    layouts: Mapping[str, FileLayout],
    files: WholeFiles,
    parts: Mapping[str, LocalPart],
) -> list[dict[str, tuple[int, int]]]:
    """Write files of which other ranks hold parts, each on its owner. Collective.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        directory: Where.
        layouts: The files by name, in the order of ``files``.
        files: Who writes them, and who holds what.
        parts: What this rank holds, by tensor name.

    Returns:
        What each rank has written: size and share in the checksum, by file name.

    Raises:
        CheckpointError: On every rank, when any failed.
    """
    current: list[_WholeFile] = []
    shares: dict[str, tuple[int, int]] = {}

    def finish() -> None:
        if current:
            file = current.pop()
            shares[file.path.name] = (file.size, file.finish())

    def feed(name: str, data: bytes) -> None:
        if not current or current[0].path.name != name:
            finish()
            current.append(_WholeFile(directory / name, layouts[name].size))
        current[0].write(data)

    def end() -> dict[str, tuple[int, int]]:
        finish()
        return shares

    try:
        send_to_owners(ranks, phase, layouts, files, parts, feed)
        found = ranks.run(phase, end)
    finally:
        for file in current:
            file.close()
    # What has travelled as JSON, which has no tuples.
    return [{name: (size, share) for name, (size, share) in each.items()} for each in found]


class _WholeFile:
    """A file that is written from its beginning to its end."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._digest = PartialDigest()
        self._offset = 0
        self._descriptor = create_file(path)

    def write(self, data: bytes) -> None:
        """Write the next bytes."""
        write_at(self._descriptor, data, self._offset, self.path, self._digest)
        self._offset += len(data)

    def finish(self) -> int:
        """Sync the file to the disk, and close it; returns its share in the checksum."""
        try:
            sync_descriptor(self._descriptor, self.path)
        finally:
            self.close()
        return self._digest.share(self.size)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
