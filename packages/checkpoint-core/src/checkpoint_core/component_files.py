"""The files in which a component's state is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoint_core.ranks.whole import WholeState
from checkpoint_core.state.capture import STATE_FORMAT, WEIGHTS_FORMAT
from checkpoint_core.storage.files import json_bytes, write_bytes
from checkpoint_core.storage.hf_layout import divide_weights, index_bytes, shard_metadata
from checkpoint_core.storage.layout import FileLayout, plan_file
from checkpoint_core.storage.sharding import LocalPart
from checkpoint_core.storage.tensor_files import create_tensor_file, write_parts

Shares = dict[str, tuple[int, int]]
"""Size of a file and the share of one writer in its checksum, by file name."""


@dataclass(frozen=True)
class ComponentFiles:
    """The files of one component."""

    format: str
    layouts: Mapping[str, FileLayout]
    """The safetensors files, by name."""
    documents: Mapping[str, bytes]
    """Content of the other files that reading needs."""
    companions: Mapping[str, bytes]
    """Content of files for other programs, which reading does not need."""
    tied: Mapping[str, str]
    """Name of the stored tensor, by alias."""
    parts: Mapping[str, LocalPart]
    """What this rank writes, by tensor name."""

    @property
    def names(self) -> list[str]:
        """Names of the files that reading needs."""
        return [*self.documents, *self.layouts]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        texts = (*self.documents.values(), *self.companions.values())
        return sum(len(text) for text in texts) + sum(layout.size for layout in self.layouts.values())

    def create(self, directory: Path) -> Shares:
        """Make the files, complete but for the tensors. Called by one rank.

        Args:
            directory: Where; none of the files may exist.

        Returns:
            What was written of each file.
        """
        shares: Shares = {}
        for name, layout in self.layouts.items():
            shares[name] = (layout.size, create_tensor_file(directory / name, layout))
        for name, text in {**self.documents, **self.companions}.items():
            shares[name] = (len(text), int(write_bytes(directory / name, text).checksum, 16))
        return shares

    def write(self, directory: Path, threads: int) -> Shares:
        """Write the tensors of this rank into the files, and sync them to the disk.

        Args:
            directory: Where the files are.
            threads: How many threads write.

        Returns:
            What was written of each file.
        """
        return {
            name: (layout.size, write_parts(directory / name, layout, self.parts, threads))
            for name, layout in self.layouts.items()
        }


def plan_files(whole: WholeState, stem: str, max_shard_size: int) -> ComponentFiles:
    """Divide a state into files.

    Args:
        whole: The state.
        stem: Beginning of the file names.
        max_shard_size: Bytes of tensor data per file of weights.

    Returns:
        The files, the same on every rank but for the parts.
    """
    if whole.format == STATE_FORMAT:
        layouts = {f"{stem}.safetensors": plan_file(whole.specs, {})} if whole.specs else {}
        documents = {f"{stem}.json": json_bytes(whole.document)}
        return ComponentFiles(STATE_FORMAT, layouts, documents, whole.companions, {}, whole.parts)
    shards = divide_weights(whole.specs, stem, max_shard_size)
    layouts = {name: plan_file(part, shard_metadata(part, whole.tied)) for name, part in shards.items()}
    companions = dict(whole.companions)
    if len(shards) > 1:
        companions[f"{stem}.safetensors.index.json"] = index_bytes(shards)
    return ComponentFiles(WEIGHTS_FORMAT, layouts, {}, companions, whole.tied, whole.parts)
