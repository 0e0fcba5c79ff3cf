"""The state of one component, taken out of its object and ready to be compared, staged or written."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from checkpoint_core.components import Stateful
from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.encoding import EncodedState, encode_state, join_path
from checkpoint_core.state.model_config import config_bytes
from checkpoint_core.state.optimizer import OptimizerState
from checkpoint_core.state.weights import ModelState
from checkpoint_core.storage.hf_layout import MODEL_STEM

WEIGHTS_FORMAT = "weights"
STATE_FORMAT = "state"


@dataclass(frozen=True)
class CapturedState:
    """What this rank holds of a component's state. Tensors share memory with the live state."""

    format: str
    """:data:`WEIGHTS_FORMAT` or :data:`STATE_FORMAT`."""
    encoded: EncodedState
    """Document and tensors. For weights the document only tells which names share a tensor."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name of the stored tensor, by alias."""
    companions: Mapping[str, bytes] = field(default_factory=dict)
    """Content of files for other programs, which reading does not need."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Tensors by name, plain ones and DTensors."""
        return self.encoded.tensors


def capture(stateful: Stateful, stem: str, *, sharded: bool) -> CapturedState:
    """Take the state out of a component.

    Args:
        stateful: The component's object. A :class:`ModelState` is stored as Hugging Face weights, anything
            else as a JSON document with a tensor file where there are tensors.
        stem: Beginning of the file names.
        sharded: Whether the ranks hold parts of one state, so that DTensors are in place.

    Returns:
        The captured state.

    Raises:
        CheckpointError: The state holds something that cannot be stored; names the place.
    """
    if isinstance(stateful, ModelState):
        return _capture_weights(stateful, stem, sharded)
    tensor_name = OptimizerState.tensor_name if isinstance(stateful, OptimizerState) else join_path
    state: object = stateful.state_dict()
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{type(stateful).__name__}.state_dict() returned a {type(state).__name__}, not a dict, which "
            "could not be loaded again; wrap it in a dict"
        )
    encoded = encode_state(state, tensor_name=tensor_name, sharded=sharded)
    return CapturedState(STATE_FORMAT, encoded)


def _capture_weights(state: ModelState, stem: str, sharded: bool) -> CapturedState:
    encoded = encode_state(state.state_dict(), sharded=sharded)
    tied = {**_aliases(encoded), **state.tied}
    own = {name: tensor for name, tensor in encoded.tensors.items() if name not in tied}
    config = config_bytes(state.unwrapped) if stem == MODEL_STEM and state.unwrapped is not None else None
    companions = {} if config is None else {"config.json": config}
    # Parts of a model have different names on each rank, and no document is stored for weights.
    document = None if sharded else encoded.document
    return CapturedState(WEIGHTS_FORMAT, EncodedState(document, own), tied, companions)


def _aliases(encoded: EncodedState) -> dict[str, str]:
    """Name of the stored tensor, by alias, for weights that share memory."""
    document = encoded.document
    nodes = document.items() if isinstance(document, dict) else ()
    return {str(key): str(node["name"]) for key, node in nodes if node["name"] != key}
