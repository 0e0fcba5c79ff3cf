"""What the files of a checkpoint hold, component by component."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint_core.cli.stored import StoredTensor, stored_tensors
from checkpoint_core.components import SharingPattern
from checkpoint_core.directory.manifest import ComponentRecord, Manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.files import read_json

TENSOR_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_OWN_FILES = (SharingPattern.PER_RANK.value, SharingPattern.PER_GROUP.value)


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
            if path.name.endswith(TENSOR_SUFFIX):
                for tensor in stored_tensors(path):
                    if tensor.name in found:
                        raise CheckpointError(f"{path} repeats tensor {tensor.name} of another file")
                    found[tensor.name] = tensor
        return found

    def document(self) -> object:
        """Its JSON document; an empty one for weights, and where the file was deleted.

        Raises:
            CheckpointError: The file is not JSON.
        """
        documents = [read_json(path) for path in self.present if not path.name.endswith(TENSOR_SUFFIX)]
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
    return [name for name in manifest.files if name not in owned and not name.endswith(INDEX_SUFFIX)]
