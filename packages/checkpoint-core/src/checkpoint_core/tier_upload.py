"""The upload of one committed checkpoint from the disk, or from the disks of several nodes, to the store."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import FileRecord, PartialDigest, combine, in_threads
from checkpoint_core.manifest import Manifest, read_manifest, wrong_content
from checkpoint_core.peers import Peer, PeerTask
from checkpoint_core.shared_files import RankReport
from checkpoint_core.store_path import RangeReader, StorePath
from checkpoint_core.store_saving import StoreSave

_PIECE_BYTES = 8 * 1024 * 1024
_FILES_AT_ONCE = 2
"""Each with five pieces in flight at most, whatever its size."""
GRACE_SECONDS = 5.0
"""For an upload that was given up to remove what it has uploaded."""
UPLOAD = "upload"
"""What another node is asked to do."""


class UploadStoppedError(CheckpointError):
    """The time limit at exit was reached, Ctrl-C was pressed, or another file could not be uploaded."""


class DamagedSourceError(CheckpointError):
    """The disk does not hold what was committed there."""


@dataclass(kw_only=True)
class TierUpload(StoreSave):
    """Brings one committed checkpoint from the disk to the store."""

    source: Path
    """The checkpoint on the disk."""
    manifest: Manifest
    """What it holds, under plain names."""
    given: Sequence[tuple[Peer, Sequence[str]]]
    """What other nodes upload of it, because they keep it."""
    check_stop: Callable[[], None]
    """Raises when the upload is to end. Called often."""
    waits_for: str | None = None
    """The node whose upload is waited for, for messages."""
    _left_working: bool = False

    def _write_all(self, needed: int) -> None:
        self._claim()
        of_others = {name for _, names in self.given for name in names}
        own = [name for name in self.manifest.files if name not in of_others]
        tasks: list[PeerTask] = []
        try:
            for peer, names in self.given:
                tasks.append(peer.begin(UPLOAD, self._request(names)))
            FileUpload(self.source, self.manifest.files, self._directory, self.check_stop).run(own)
            for task in tasks:
                self._wait(task)
        except BaseException:
            until = time.monotonic() + GRACE_SECONDS
            # A list: each is told to stop, whatever comes of the one before.
            ended = [task.stop(max(until - time.monotonic(), 0.0)) for task in tasks]
            self._left_working = not all(ended)
            raise
        self.check_stop()
        self._commit([])

    def _request(self, names: Sequence[str]) -> dict[str, object]:
        directory = f"{self._place.name}/{self._directory.name}"
        save = {"step": self.manifest.step, "save": self.manifest.save_id}
        return {**save, "files": list(names), "directory": directory}

    def _wait(self, task: PeerTask) -> None:
        self.waits_for = task.name
        while (answer := task.poll()) is None:
            self.check_stop()
        self.waits_for = None
        if "damaged" in answer:
            raise DamagedSourceError(answer["damaged"])

    @property
    def _others_write(self) -> bool:
        """Whether a node did not say that it has stopped, so that something may still come of it."""
        return self._left_working

    def _manifest(self, reports: Sequence[RankReport]) -> Manifest:
        # An id of its own: no other upload, of this checkpoint or another one, writes to the same place.
        return replace(self.manifest, save_id=self._save_id, nodes=1)


@dataclass
class FileUpload:
    """Brings files of a checkpoint from this disk to the directory of a save in the store."""

    source: Path
    """The checkpoint on the disk."""
    files: Mapping[str, FileRecord]
    """Its files, by plain name."""
    directory: StorePath
    """Where they go: each to where a save to the store would have put it."""
    check_stop: Callable[[], None]
    """Raises when the upload is to end. Called often."""
    _failed: bool = False

    def run(self, names: Sequence[str]) -> None:
        """Upload files.

        Args:
            names: Their plain names.

        Raises:
            DamagedSourceError: The disk does not hold what was committed.
            OSError: The disk or the store failed.
        """
        in_threads(_FILES_AT_ONCE, names, self._upload)

    def _upload(self, names: Sequence[str]) -> None:
        try:
            for name in names:
                place = self.directory / name
                place.store.put_stream(place.key, self._content(name), self.files[name].size)
        except BaseException:
            self._failed = True
            raise

    def _content(self, name: str) -> Iterator[bytes]:
        """The bytes of a file. Raises at the end if they are not those committed: then no object appears."""
        digest, position, record = PartialDigest(), 0, self.files[name]
        path = _find_file(self.source, name)
        with closing(RangeReader(path)) as file:
            while piece := file.read(position, _PIECE_BYTES):
                self.check_stop()
                if self._failed:
                    raise UploadStoppedError("another file could not be uploaded.")
                digest.update(position, piece)
                position += len(piece)
                yield piece
        if position != record.size or combine([digest.share(position)]) != record.checksum:
            raise DamagedSourceError(str(wrong_content(path)))


def _find_file(checkpoint: Path, name: str) -> Path:
    """A file of a checkpoint by its plain name: a copy of a save to a store has a directory more."""
    path = checkpoint / name
    return path if path.exists() else checkpoint / read_manifest(checkpoint).save_directory / name
