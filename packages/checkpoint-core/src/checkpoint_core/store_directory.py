"""Checkpoints in an object store: what is committed, what a killed save left, and how both are removed.

```
<output_dir>/checkpoint-10/manifest.json           the commit: put last, on the condition that nobody else has
<output_dir>/checkpoint-10/1f3a9c2e/...            the files of that save, a Hugging Face directory
<output_dir>/.tmp-checkpoint-10-<token>-1f3a9c2e   a save under way, or killed
```

Stores have no rename, so files are put where they stay. Each save has a directory of its own, named by the
first digits of its random id: nothing is ever written twice, so a process that was taken for dead, or another
run, cannot reach into a checkpoint. The manifest is the only object with a name that several saves share. It
is created on the condition that it does not exist, or replaced on the condition that it is as it was when the
save began.

A marker, named as the temporary directories on a disk are, is there before the first file of a save and until
after its commit, and while files are removed. So all that is not committed has a marker, and
:func:`finish_leftover` has one rule for every kind: files that a manifest does not name are deleted.
"""

import json
import logging
from pathlib import Path, PurePosixPath

from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import json_bytes
from checkpoint_core.manifest import MANIFEST_NAME, read_manifest
from checkpoint_core.store_path import StorePath

_logger = logging.getLogger(__name__)


def put_marker(marker: StorePath, directory: StorePath) -> None:
    """Write a marker.

    Args:
        marker: Where.
        directory: The directory of the save that it is for.
    """
    marker.store.put(marker.key, _content(marker, directory))


def claim(marker: StorePath, directory: StorePath) -> None:
    """Write the marker of a new save.

    Args:
        marker: Where.
        directory: The directory of the save that it is for.

    Raises:
        CheckpointError: The store cannot commit.
    """
    if not marker.store.put_claim(marker.key, _content(marker, directory)):
        raise CheckpointError(
            f"{marker.bucket} cannot commit a checkpoint: it ignores the condition of a conditional put, "
            "so two runs could overwrite one another's checkpoints without noticing. Use a store that "
            "honours If-None-Match, as S3, GCS, Azure, MinIO and SeaweedFS do, or save to a directory."
        )


def _content(marker: StorePath, directory: StorePath) -> bytes:
    return json_bytes({"directory": str(directory.relative_to(marker.parent))})


def marked_directory(marker: StorePath) -> StorePath | None:
    """The directory of a save that a marker is for.

    Args:
        marker: The marker.

    Returns:
        The directory; None where the marker is gone, or is not one of ours.
    """
    try:
        document = json.loads(marker.read_bytes())
        name = document["directory"]
        parts = PurePosixPath(name).parts
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        _logger.warning("%s is not a marker of a save, and is left alone", marker)
        return None
    # Two levels, and the token of the marker's own name: nothing else is ever deleted.
    if len(parts) != 2 or ".." in parts or parts[1] != marker.name.rpartition("-")[2]:
        _logger.warning("%s names %r, which is not the directory of its save; it is left alone", marker, name)
        return None
    return marker.parent / parts[0] / parts[1]


def newest_change(marker: StorePath) -> float:
    """When anything of a marked save was last written, in seconds since 1970 by the store's clock."""
    times = [0.0]
    try:
        times.append(marker.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
    if (directory := marked_directory(marker)) is not None:
        times += [info.modified for info in directory.store.objects(directory.key)]
    return max(times)


def finish_leftover(marker: StorePath) -> None:
    """Remove the marker of a process that has ended, and the files of its save unless they are committed.

    Args:
        marker: The marker.
    """
    directory = marked_directory(marker)
    if directory is None:
        return
    if not is_committed(directory):
        delete_directory(directory)
    marker.store.delete([marker.key])


def is_committed(directory: StorePath) -> bool:
    """Whether the files of a save are those of a checkpoint.

    Args:
        directory: The directory of the save.

    Returns:
        Whether the manifest names them. A manifest that cannot be read may.
    """
    checkpoint = directory.parent
    try:
        return read_manifest(checkpoint).save_directory == directory.name
    except CheckpointError:
        return (checkpoint / MANIFEST_NAME).is_file()


def delete_directory(directory: StorePath) -> None:
    """Delete all objects below a place."""
    directory.store.delete([info.key for info in directory.store.objects(directory.key)])


def remove_committed(checkpoint: StorePath, marker: StorePath) -> None:
    """Delete a checkpoint: the manifest first, so that no moment shows it half deleted.

    Args:
        checkpoint: The checkpoint.
        marker: Tells others, until the files are gone, what becomes of them; ends in the token of the save.
    """
    directory = checkpoint / read_manifest(checkpoint).save_directory
    put_marker(marker, directory)
    store = checkpoint.store
    store.delete([(checkpoint / MANIFEST_NAME).key])
    delete_directory(directory)
    store.delete([marker.key])


class OtherRuns:
    """Notices another run that saves to the same place while this one does."""

    def __init__(self) -> None:
        self._known: set[Path] | None = None

    def check(self, checkpoints: list[Path], run_id: str) -> None:
        """Refuse a place in which another run has committed a checkpoint since the first call.

        Args:
            checkpoints: What is there.
            run_id: The id of this run.

        Raises:
            CheckpointError: Naming the checkpoint.
        """
        first, known = self._known is None, self._known or set()
        for path in checkpoints:
            if path in known or not (path / MANIFEST_NAME).is_file():
                continue
            try:
                owner = None if first else read_manifest(path).run_id
            except CheckpointError:
                owner = None
            if owner not in (None, run_id):
                raise CheckpointError(
                    f"{path} was saved by another run ({owner}, this one is {run_id}) since this one began "
                    "to save here. Stop one of them, or give each an output_dir of its own."
                )
            known.add(path)
        self._known = known
