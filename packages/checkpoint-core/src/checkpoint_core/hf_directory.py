"""Weights of a Hugging Face directory, or of a checkpoint, straight into a model."""

from pathlib import Path

from torch import nn

from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.state.capture import WEIGHTS_FORMAT
from checkpoint_core.state.receive import StoredState, receive
from checkpoint_core.state.weights import ModelState, check_nothing_left
from checkpoint_core.storage.hf_layout import weight_files


def load_model_weights(model: nn.Module, directory: str | Path) -> None:
    """Load the weights of a Hugging Face directory, or of a checkpoint, into a model.

    Of parameters that are DTensors each rank reads only the bytes of its own part; there is no communication.

    Args:
        model: The model; its parameters keep their dtype and device.
        directory: A directory with ``model.safetensors`` or an index and its shards.

    Raises:
        CheckpointError: The weights are missing, damaged, or do not fit the model.
    """
    try:
        stored = StoredState(weight_files(Path(directory)), WEIGHTS_FORMAT)
        try:
            reception = receive(ModelState(model), stored)
            check_nothing_left(reception.unclaimed)
            stored.fill(reception.fills, threads=1)
            reception.finish()
        finally:
            stored.close()
    except OSError as error:
        raise CheckpointError(f"loading weights from {directory}: {describe_error(error)}") from error
