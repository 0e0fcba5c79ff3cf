"""The manifest: what a checkpoint consists of, and the digests that prove it whole."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, get_args, get_origin

from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import ALGORITHM, FileRecord, checksum_file, digest, json_bytes, read_json
from checkpoint_core.store_path import StorePath, file_sizes

WEIGHTS_FORMAT = "weights"
STATE_FORMAT = "state"
MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
SPREAD_SCHEMA_VERSION = 2
SAVE_DIGITS = 8
_REMEDY = "Restore the file, or load another checkpoint"
_BEYOND_FILES = 2**63
"""No system counts bytes or steps beyond it."""
_FILE_REMEDY = "Restore the file, load another checkpoint, or delete the file to do without that component"
_LONGEST = 60
_JSON_TYPES = {
    int: (int, "an integer"),
    str: (str, "text"),
    Sequence: (list, "a list"),
    Mapping: (dict, "an object"),
}


@dataclass(frozen=True)
class ComponentPart:
    """What one rank wrote of a component."""

    writer: int
    """The rank that wrote it."""
    files: Sequence[str]
    """Names of the files without which the part cannot be read."""


@dataclass(frozen=True)
class ComponentRecord:
    """One entry of the component table."""

    key: str
    """The component's key."""
    pattern: str
    """Value of its :class:`SharingPattern`."""
    format: str
    """``weights`` (Hugging Face safetensors) or ``state`` (JSON document and tensors)."""
    parts: Sequence[ComponentPart]
    """One part for each rank that wrote."""

    def part(self, writer: int) -> ComponentPart | None:
        """The part that a rank wrote, or None."""
        return next((part for part in self.parts if part.writer == writer), None)


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    """The training step."""
    world_size: int
    """Number of ranks that saved."""
    run_id: str
    """Identifies the run in its output directory; rotation deletes only checkpoints with its own id."""
    save_id: str
    """Identifies the save. Nodes that save for themselves hold one state together only where it is equal."""
    components: Sequence[ComponentRecord]
    """The component table, in order of restoring."""
    files: Mapping[str, FileRecord]
    """Every file of the checkpoint except the manifest, by path relative to it."""
    tied_weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each weights component: the stored name, by alias."""
    metrics: Mapping[str, float] | None = None
    """Metrics given when saving."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the software that wrote the checkpoint."""
    schema_version: int = SCHEMA_VERSION
    """Version of this format."""
    nodes: int = 1
    """Number of nodes that keep the files on disks of their own, each those that its ranks wrote."""

    @property
    def save_directory(self) -> str:
        """Where the files of a save to an object store lie, relative to the manifest."""
        return self.save_id[:SAVE_DIGITS]

    def plain_name(self, file: str) -> str:
        """The name of a file without the directory of its save, equal in all saves."""
        return file.removeprefix(f"{self.save_directory}/")

    def moved(self, directory: str) -> "Manifest":
        """The manifest of the same files in a directory below it."""
        return self.renamed(lambda name: f"{directory}/{name}")

    def renamed(self, new_name: Callable[[str], str]) -> "Manifest":
        """The manifest of the same files under other names."""
        return replace(
            self,
            files={new_name(name): record for name, record in self.files.items()},
            components=[
                replace(
                    each,
                    parts=[
                        replace(part, files=[new_name(name) for name in part.files]) for part in each.parts
                    ],
                )
                for each in self.components
            ],
        )

    def component(self, key: str) -> ComponentRecord | None:
        """The entry of one component, or None."""
        return next((record for record in self.components if record.key == key), None)

    def to_bytes(self) -> bytes:
        """The content of the file, which ends with a digest of itself."""
        head = {"schema_version": self.schema_version, "checksum_algorithm": ALGORITHM}
        body = {**head, **asdict(self)}
        # Earlier versions would take the files of other nodes for deleted ones.
        body["schema_version"] = SCHEMA_VERSION if self.nodes == 1 else SPREAD_SCHEMA_VERSION
        if self.nodes == 1:
            del body["nodes"]
        if self.metrics is not None:
            body["metrics"] = metrics_document(self.metrics)
        return json_bytes({**body, "checksum": _digest(body)})


def metrics_document(metrics: Mapping[str, float]) -> dict[str, object]:
    """Metrics as strict JSON: JSON has no infinity and no NaN, so those are text.

    Args:
        metrics: Values by name.

    Returns:
        The document.

    Raises:
        CheckpointError: A value is not an int or a float.
    """
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise CheckpointError(f"metrics={metrics!r} is a {kind}. Give a dict of numbers by name.")
    document: dict[str, object] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise CheckpointError(f"metrics has the key {name!r}, which is not text. Use str(key).")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"metrics[{name!r}] is a {type(value).__name__}, not an int or a float. Use float(value)."
            )
        number = float(value) if isinstance(value, float) else value
        document[name] = number if number - number == 0 else str(number)
    return document


def parse_metrics(document: Mapping[str, Any]) -> dict[str, float]:
    """The inverse of :func:`metrics_document`.

    Args:
        document: The document.

    Returns:
        Values by name.
    """
    return {name: float(value) if isinstance(value, str) else value for name, value in document.items()}


def current_versions() -> dict[str, str]:
    """Versions of the software that writes."""
    import torch  # here: who only looks at a directory, or at its lease, needs none of it

    return {
        "checkpoint-core": version("checkpoint-core"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        checkpoint: The checkpoint's directory.

    Returns:
        The manifest.

    Raises:
        CheckpointError: It is missing, damaged, of a newer schema, or names files outside the directory.
    """
    path = checkpoint / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST_NAME}: it was not committed, or not written by checkpoint-core."
        )
    return parse_manifest(path, read_json(path))


def parse_manifest(path: Path, document: object) -> Manifest:
    """Check a manifest that was read.

    Args:
        path: Where it was read, for messages.
        document: Its content.

    Returns:
        The manifest.

    Raises:
        CheckpointError: It is damaged, of a newer schema, or names files outside the directory.
    """
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object. {_REMEDY}.")
    schema = document.get("schema_version")
    if isinstance(schema, int) and schema > SPREAD_SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has schema version {schema}, but this version reads up to "
            f"{SPREAD_SCHEMA_VERSION}. Upgrade checkpoint-core."
        )
    checksum = document.pop("checksum", None)
    try:
        if checksum != _digest(document):
            raise CheckpointError(f"{path} is damaged: its own checksum does not match. {_REMEDY}.")
        return _parse(document)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{path} is malformed ({reason}). {_REMEDY}.") from error


def verify_checkpoint(checkpoint: Path, *, checksums: bool, one_node: bool = False) -> Manifest:
    """Check that the files of a checkpoint are what was committed. Deleted files are left out.

    Args:
        checkpoint: The checkpoint's directory.
        checksums: Compare digests too, not only sizes.
        one_node: Whether files that other nodes keep are left out as well.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: A file is damaged, or kept by another node; names it.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {checkpoint}.")
    manifest = read_manifest(checkpoint)
    sizes = file_sizes(checkpoint, list(manifest.files))
    if manifest.files and not sizes and isinstance(checkpoint, StorePath):
        # A commit that came late, of a process that was taken for dead: what it had uploaded was cleaned up.
        raise CheckpointError(f"{checkpoint} is damaged: none of its files is there. {_REMEDY}.")
    if manifest.nodes > 1 and not one_node and (absent := sorted(set(manifest.files) - set(sizes))):
        raise CheckpointError(
            f"{checkpoint} is not whole: {absent[0]} is not in it. {manifest.nodes} nodes saved it, each "
            "its own files. Load it on those nodes, with save_on_each_node=True and remote_dir; or copy the "
            "files of all nodes into one directory."
        )
    for name, size in sizes.items():
        path, record = checkpoint / name, manifest.files[name]
        if size != record.size:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, but {record.size} were written. {_FILE_REMEDY}."
            )
        if checksums and checksum_file(path).checksum != record.checksum:
            raise wrong_content(path)
    return manifest


def wrong_content(path: Path) -> CheckpointError:
    """The error for a file that does not match its checksum, with the remedy."""
    return CheckpointError(f"{path} is damaged: its content does not match its checksum. {_FILE_REMEDY}.")


def _parse(document: dict[str, Any]) -> Manifest:
    if (algorithm := document.pop("checksum_algorithm")) != ALGORITHM:
        raise ValueError(f"checksum_algorithm is {algorithm!r}, not {ALGORITHM!r}")
    if unknown := sorted(set(document) - set(Manifest.__dataclass_fields__)):
        raise ValueError(f"it has the unknown entry {unknown[0]!r}")
    manifest: Manifest = _typed({"nodes": 1, **document}, Manifest, "")
    if len({component.key for component in manifest.components}) < len(manifest.components):
        raise ValueError("two components have the same key")
    for name in manifest.files:
        _check_inside(name)
    for component in manifest.components:
        if late := [part.writer for part in component.parts if part.writer >= manifest.world_size]:
            raise ValueError(
                f"component {component.key} is of rank {late[0]}, but {manifest.world_size} saved"
            )
        names = {name for part in component.parts for name in part.files}
        if not names or not names <= set(manifest.files):
            raise ValueError(f"component {component.key} names files that the file table does not have")
    return manifest


def _typed(value: object, kind: Any, where: str) -> Any:
    """A JSON value as what the type of a field says, down to the fields of dataclasses.

    Raises:
        KeyError: A field is missing.
        TypeError: The value is of another type; names its place.
        ValueError: A number is beyond what systems count.
    """
    make: Callable[..., object] = kind  # where it is a dataclass
    if get_origin(kind) is UnionType:
        return None if value is None else _typed(value, get_args(kind)[0], where)
    if kind is float:
        # Text stands for what JSON has no number for.
        if type(value) not in (int, float, str):
            raise TypeError(f"{where} is {_show(value)}, not a number")
        return float(value) if isinstance(value, str) else value
    origin = Mapping if is_dataclass(kind) else get_origin(kind) or kind
    json_type, name = _JSON_TYPES[origin]
    if type(value) is not json_type:
        raise TypeError(f"{where} is {_show(value)}, not {name}")
    if isinstance(value, dict) and is_dataclass(kind):
        below = f"{where}." if where else ""
        found = {each.name: _typed(value[each.name], each.type, below + each.name) for each in fields(kind)}
        return make(**found)
    if isinstance(value, list):
        return [_typed(item, get_args(kind)[0], f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _typed(item, get_args(kind)[1], f"{where}[{key!r}]") for key, item in value.items()}
    least = 1 if where in ("world_size", "schema_version", "nodes") else 0
    if isinstance(value, int) and not least <= value < _BEYOND_FILES:
        raise ValueError(f"{where} is {_show(value)}, which is not from {least} to 2**63 - 1")
    return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _check_inside(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\x00" in name:
        raise ValueError(f"file name {name!r} points outside the checkpoint")


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(text.encode("ascii"))
