"""Several states as one, to be sent together."""

from collections.abc import Sequence
from typing import cast

import torch

from checkpoint_core.state.encoding import EncodedState

_SEPARATOR = "/"


def bundle(states: Sequence[EncodedState]) -> EncodedState:
    """Several states as one.

    Args:
        states: The states.

    Returns:
        Their documents in a list, and their tensors under names that begin with the number of the state.
    """
    tensors = {
        f"{number}{_SEPARATOR}{name}": tensor
        for number, state in enumerate(states)
        for name, tensor in state.tensors.items()
    }
    return EncodedState([state.document for state in states], tensors)


def unbundle(bundled: EncodedState) -> list[EncodedState]:
    """The states that :func:`bundle` was given, each with its tensors under their own names."""
    documents = cast(list[object], bundled.document)
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in documents]
    for name, tensor in bundled.tensors.items():
        number, _, own_name = name.partition(_SEPARATOR)
        tensors[int(number)][own_name] = tensor
    return [EncodedState(document, named) for document, named in zip(documents, tensors, strict=True)]
