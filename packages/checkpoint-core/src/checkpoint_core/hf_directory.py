"""Weights of a Hugging Face directory, or of a checkpoint, straight into a model."""

from collections.abc import Container, Sequence
from pathlib import Path

from torch import nn

from checkpoint_core.directory.discovery import wrong_content
from checkpoint_core.directory.manifest import MANIFEST_NAME, read_manifest
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.state.capture import WEIGHTS_FORMAT
from checkpoint_core.state.receive import StoredState, receive
from checkpoint_core.state.weights import ModelState, check_nothing_left
from checkpoint_core.storage.files import checksum_file
from checkpoint_core.storage.hf_layout import weight_files


def load_model_weights(
    model: nn.Module,
    directory: str | Path,
    *,
    verify_checksums: bool = True,
    elsewhere: Container[str] = (),
) -> None:
    """Load the weights of a Hugging Face directory, or of a checkpoint, into a model.

    Of parameters that are DTensors each rank reads only the bytes of its own part; there is no communication.

    Args:
        model: The model; its parameters keep their dtype and device.
        directory: A directory with ``model.safetensors`` or an index and its shards.
        verify_checksums: In a checkpoint, first read the weight files whole and compare their checksums.
            Every rank does so for itself; for a large sharded model verify once and pass False. Other
            directories have no checksums.
        elsewhere: For a part of a model: names of weights that other ranks hold, which may be left over.

    Raises:
        CheckpointError: The weights are missing, damaged, or do not fit the model; or the dtype of a
            parameter cannot hold its values, not even rounded.
    """
    try:
        paths = weight_files(Path(directory))
        if verify_checksums and (Path(directory) / MANIFEST_NAME).is_file():
            _verify(Path(directory), paths)
        stored = StoredState(paths, WEIGHTS_FORMAT)
        try:
            reception = receive(ModelState(model), stored)
            check_nothing_left([name for name in reception.unclaimed if name not in elsewhere])
            stored.fill(reception.fills, threads=1)
            reception.finish()
        finally:
            stored.close()
    except OSError as error:
        raise CheckpointError(f"loading weights from {directory}: {describe_error(error)}") from error


def _verify(checkpoint: Path, paths: Sequence[Path]) -> None:
    records = read_manifest(checkpoint).files
    for path in paths:
        if checksum_file(path) != records.get(path.name):
            raise wrong_content(path)
