"""How the state of one component becomes files of a checkpoint, and files become state again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoint_core.components import Stateful
from checkpoint_core.encoding import EncodedState, decode_state, encode_state, join_path
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import (
    FileRecord,
    json_bytes,
    read_json,
    read_safetensors,
    tensor_bytes,
    write_bytes,
    write_safetensors,
)
from checkpoint_core.hf_layout import MODEL_STEM, config_bytes, divide_weights, read_weights
from checkpoint_core.optimizer import OptimizerState
from checkpoint_core.weights import ModelState

WEIGHTS_FORMAT = "weights"
STATE_FORMAT = "state"
_HEADER_BYTES_PER_TENSOR = 256

TensorFiles = Mapping[str, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]]


@dataclass(frozen=True)
class CapturedState:
    """State taken from a component, ready to be written."""

    format: str
    """:data:`WEIGHTS_FORMAT` or :data:`STATE_FORMAT`."""
    tensor_files: TensorFiles
    """Tensors and metadata of each safetensors file."""
    documents: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the other files that reading needs."""
    companions: Mapping[str, bytes] = field(default_factory=dict)
    """Content of files for other programs, which reading does not need."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name of the stored tensor, by alias."""

    @property
    def files(self) -> list[str]:
        """Names of the files that reading needs."""
        return [*self.documents, *self.tensor_files]

    @property
    def size(self) -> int:
        """Bytes on disk, estimated from above."""
        total = sum(len(data) for data in (*self.documents.values(), *self.companions.values()))
        for tensors, metadata in self.tensor_files.values():
            total += sum(tensor_bytes(tensor) for tensor in tensors.values())
            total += sum(len(name) + _HEADER_BYTES_PER_TENSOR for name in (*tensors, *metadata))
        return total

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Write the files durably.

        Args:
            directory: Where; none of the files may exist.

        Returns:
            Size and checksum of each file.
        """
        records = {
            name: write_safetensors(directory / name, tensors, metadata)
            for name, (tensors, metadata) in self.tensor_files.items()
        }
        for name, data in {**self.documents, **self.companions}.items():
            records[name] = write_bytes(directory / name, data)
        return records


def capture(stateful: Stateful, stem: str, max_shard_size: int) -> CapturedState:
    """Take the state out of a component.

    Args:
        stateful: The component's object. A :class:`ModelState` is stored as Hugging Face weights, anything
            else as a JSON document with a tensor file where there are tensors.
        stem: Beginning of the file names.
        max_shard_size: Bytes of tensor data per file of weights.

    Returns:
        The captured state; its tensors share memory with the live state.

    Raises:
        CheckpointError: The state holds something that cannot be stored; names the place.
    """
    if isinstance(stateful, ModelState):
        return _capture_weights(stateful, stem, max_shard_size)
    tensor_name = OptimizerState.tensor_name if isinstance(stateful, OptimizerState) else join_path
    encoded = encode_state(stateful.state_dict(), tensor_name=tensor_name)
    tensor_files: TensorFiles = {f"{stem}.safetensors": (encoded.tensors, {})} if encoded.tensors else {}
    return CapturedState(STATE_FORMAT, tensor_files, {f"{stem}.json": json_bytes(encoded.document)})


def read(directory: Path, files: Sequence[str], storage_format: str) -> EncodedState:
    """Read what :func:`capture` wrote.

    Args:
        directory: The checkpoint.
        files: Names of the component's files.
        storage_format: Its format.

    Returns:
        The encoded state. Tensors of weights are backed by the mapped files.

    Raises:
        CheckpointError: The format is unknown or a file is damaged.
    """
    paths = [directory / name for name in files]
    if storage_format == WEIGHTS_FORMAT:
        return read_weights(paths)
    if storage_format != STATE_FORMAT:
        raise CheckpointError(
            f"{directory.name} stores {files[0]} in the unknown format {storage_format!r}; "
            "upgrade checkpoint-core"
        )
    document: object = None
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        if path.suffix == ".json":
            document = read_json(path)
        else:
            # Objects keep these tensors, so they must not hang on a file that rotation will delete.
            tensors.update(read_safetensors(path, copy=True)[0])
    return EncodedState(document, tensors)


def restore(stateful: Stateful, encoded: EncodedState) -> None:
    """Put state back into a component.

    Args:
        stateful: The component's object.
        encoded: Its encoded state.

    Raises:
        CheckpointError: The state refers to a tensor that is not there, or does not fit the object.
    """
    state = decode_state(encoded.document, _lookup(encoded.tensors))
    if not isinstance(state, dict):
        raise CheckpointError(f"the stored state is a {type(state).__name__}, not a dict")
    stateful.load_state_dict(state)


def _capture_weights(state: ModelState, stem: str, max_shard_size: int) -> CapturedState:
    weights = divide_weights(state.state_dict(), stem, max_shard_size)
    companions: dict[str, bytes] = {}
    if weights.index is not None:
        companions[f"{stem}.safetensors.index.json"] = weights.index
    if stem == MODEL_STEM and (config := config_bytes(state.model)) is not None:
        companions["config.json"] = config
    tensor_files = {name: (part, weights.metadata(name)) for name, part in weights.shards.items()}
    return CapturedState(WEIGHTS_FORMAT, tensor_files, companions=companions, tied=weights.tied)


def _lookup(tensors: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    def find(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"the state refers to tensor {name}, which its files do not hold")
        return tensors[name]

    return find
