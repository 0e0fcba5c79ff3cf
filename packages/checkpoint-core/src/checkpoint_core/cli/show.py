"""``show``: what one checkpoint holds, component by component; and tensors on the disk, a piece at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import torch

from checkpoint_core.cli.console import print_table, printable, size_text
from checkpoint_core.cli.ls_verify import Survey, metrics_text, open_checkpoint, survey
from checkpoint_core.components import SharingPattern
from checkpoint_core.directory.manifest import ComponentRecord, Manifest, metrics_document
from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.files import read_json
from checkpoint_core.storage.tensor_files import Place, TensorSpec, read_layout

_PIECE_ELEMENTS = 1024 * 1024
"""Elements held at once."""
_TENSOR_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_OWN_FILES = (SharingPattern.PER_RANK.value, SharingPattern.PER_GROUP.value)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    path: Path
    """The file."""
    name: str
    """Its name in the file."""
    place: Place
    """Where it lies in the file."""

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return self.place.spec

    @property
    def dtype_name(self) -> str:
        """The dtype, such as ``bfloat16``."""
        return str(self.spec.dtype).removeprefix("torch.")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.spec.shape)

    def raw_pieces(self) -> Iterator[bytearray]:
        """The values as they lie in the file: little-endian, in row-major order.

        Yields:
            Bytes of at most :data:`_PIECE_ELEMENTS` elements.

        Raises:
            CheckpointError: The file became shorter since its header was read.
        """
        rest = self.spec.nbytes
        with FileIO(self.path) as file:
            file.seek(self.place.start)
            while rest:
                buffer = bytearray(min(rest, _PIECE_ELEMENTS * self.spec.dtype.itemsize))
                _fill(file, memoryview(buffer), self.path)
                rest -= len(buffer)
                yield buffer

    def pieces(self) -> Iterator[torch.Tensor]:
        """The values in row-major order.

        Yields:
            Flat CPU tensors of at most :data:`_PIECE_ELEMENTS` elements, with memory of their own.

        Raises:
            CheckpointError: The file became shorter since its header was read.
        """
        for buffer in self.raw_pieces():
            yield torch.frombuffer(buffer, dtype=self.spec.dtype)


def _stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in its order. Only the header is read."""
    return [StoredTensor(path, name, place) for name, place in read_layout(path).places.items()]


def _fill(file: FileIO, buffer: memoryview, path: Path) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read. Run the command again.")
        buffer = buffer[count:]


@dataclass(frozen=True)
class Section:
    """One copy of a component's state: the only one, or that of one rank or group."""

    checkpoint: Path
    """The checkpoint's directory."""
    label: str
    """The component's key, with the writer where there are several copies."""
    record: ComponentRecord
    """The component."""
    files: Sequence[str]
    """Names of its files, deleted ones too."""

    @property
    def present(self) -> list[Path]:
        """Those of its files that are there."""
        return [path for name in self.files if (path := self.checkpoint / name).is_file()]

    def tensors(self) -> dict[str, StoredTensor]:
        """Its tensors by name, from the headers of the files that are there.

        Raises:
            CheckpointError: A file is damaged, or two files hold the same tensor.
        """
        found: dict[str, StoredTensor] = {}
        for path in self.present:
            if path.name.endswith(_TENSOR_SUFFIX):
                for tensor in _stored_tensors(path):
                    if tensor.name in found:
                        raise CheckpointError(f"{path} repeats tensor {tensor.name} of another file.")
                    found[tensor.name] = tensor
        return found

    def document(self) -> object:
        """Its JSON document; an empty one for weights, and where the file was deleted.

        Raises:
            CheckpointError: The file is not JSON.
        """
        documents = [read_json(path) for path in self.present if not path.name.endswith(_TENSOR_SUFFIX)]
        return documents[0] if documents else {}


def sections(checkpoint: Path, manifest: Manifest) -> list[Section]:
    """The component table, with one entry for each copy.

    Args:
        checkpoint: The checkpoint's directory.
        manifest: Its manifest.

    Returns:
        The sections, in the manifest's order.
    """
    found = []
    for record in manifest.components:
        if record.pattern in _OWN_FILES:
            who = "rank" if record.pattern == SharingPattern.PER_RANK.value else "group"
            for part in record.parts:
                found.append(Section(checkpoint, f"{record.key} {who} {part.writer}", record, part.files))
        else:
            names = list(dict.fromkeys(name for part in record.parts for name in part.files))
            found.append(Section(checkpoint, record.key, record, names))
    return found


def other_files(manifest: Manifest) -> list[str]:
    """Files of a checkpoint that belong to no component: configuration, tokenizer, metrics.

    Args:
        manifest: The manifest.

    Returns:
        Their names. An index of weight files follows from these files, and is left out.
    """
    owned = {name for record in manifest.components for part in record.parts for name in part.files}
    return [name for name in manifest.files if name not in owned and not name.endswith(_INDEX_SUFFIX)]


_Tensors = Mapping[str, Mapping[str, StoredTensor]]


def show_checkpoint(path: Path, *, as_json: bool) -> int:
    """Print the manifest and every tensor of a checkpoint, from the headers alone.

    Args:
        path: The checkpoint.
        as_json: Print one JSON document instead of tables.

    Returns:
        0, or 1 when a file is damaged as far as its size and header tell.

    Raises:
        CheckpointError: It is not a checkpoint, or its manifest is damaged.
    """
    manifest = open_checkpoint(path)
    found = survey(path, checksums=False)
    problems = list(found.problems)
    tensors: dict[str, Mapping[str, StoredTensor]] = {}
    parts = sections(path, manifest)
    for section in parts:
        try:
            tensors[section.label] = section.tensors()
        except CheckpointError as error:
            problems.append(str(error))
    if as_json:
        print(json.dumps(_document(path, manifest, found, parts, tensors, problems), indent=2))
    else:
        _print_text(path, manifest, found, parts, tensors, problems)
    return 1 if problems else 0


def _print_text(
    path: Path,
    manifest: Manifest,
    found: Survey,
    parts: list[Section],
    tensors: _Tensors,
    problems: list[str],
) -> None:
    facts = {
        "checkpoint": str(path),
        "step": str(manifest.step),
        "ranks": str(manifest.world_size),
        "run": manifest.run_id,
        "schema": str(manifest.schema_version),
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "size": size_text(sum(record.size for record in manifest.files.values())),
        "metrics": metrics_text(manifest),
    }
    for name, value in facts.items():
        print(f"{name:<11} {printable(value) or '-'}")
    print()
    rows = [
        [s.label, s.record.pattern, s.record.format, _bytes(manifest, s.files), ", ".join(s.files)]
        for s in parts
    ]
    rows += [[f"({name})", "", "file", _bytes(manifest, [name]), name] for name in other_files(manifest)]
    print_table(("component", "pattern", "format", "bytes", "files"), rows)
    lines = [row for section in parts for row in _tensor_rows(section, tensors, manifest)]
    if lines:
        print()
        print_table(("component", "tensor", "dtype", "shape", "bytes"), lines)
    for name in found.deleted:
        print(f"deleted: {printable(name)}")
    for problem in problems:
        print(f"damaged: {printable(problem)}")


def _tensor_rows(section: Section, tensors: _Tensors, manifest: Manifest) -> list[list[str]]:
    rows = [
        [section.label, name, tensor.dtype_name, str(list(tensor.spec.shape)), str(tensor.spec.nbytes)]
        for name, tensor in tensors.get(section.label, {}).items()
    ]
    for alias, name in _ties(section, tensors, manifest).items():
        rows.append([section.label, alias, "tied", f"to {name}", "0"])
    return rows


def _document(
    path: Path,
    manifest: Manifest,
    found: Survey,
    parts: list[Section],
    tensors: _Tensors,
    problems: list[str],
) -> dict[str, object]:
    components = [
        {
            "component": section.record.key,
            "label": section.label,
            "pattern": section.record.pattern,
            "format": section.record.format,
            "files": [
                {"name": name, "bytes": manifest.files[name].size, "deleted": name in found.deleted}
                for name in section.files
            ],
            "tensors": [
                {
                    "name": name,
                    "dtype": tensor.dtype_name,
                    "shape": list(tensor.spec.shape),
                    "bytes": tensor.spec.nbytes,
                    "file": tensor.path.relative_to(path).as_posix(),
                }
                for name, tensor in tensors.get(section.label, {}).items()
            ],
            "tied": _ties(section, tensors, manifest),
        }
        for section in parts
    ]
    return {
        "checkpoint": str(path),
        "schema_version": manifest.schema_version,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "run_id": manifest.run_id,
        "versions": dict(manifest.versions),
        "metrics": None if manifest.metrics is None else metrics_document(manifest.metrics),
        "components": components,
        "other_files": [
            {"name": name, "bytes": manifest.files[name].size, "deleted": name in found.deleted}
            for name in other_files(manifest)
        ],
        "problems": problems,
    }


def _ties(section: Section, tensors: _Tensors, manifest: Manifest) -> dict[str, str]:
    """Stored name by alias, for the tensors of this copy."""
    here = tensors.get(section.label, {})
    ties = manifest.tied_weights.get(section.record.key, {})
    return {alias: name for alias, name in ties.items() if name in here}


def _bytes(manifest: Manifest, names: Sequence[str]) -> str:
    return str(sum(manifest.files[name].size for name in names))
