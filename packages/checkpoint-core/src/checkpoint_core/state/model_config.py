"""The configuration of a model as ``config.json``, which tells other programs what the weights are for."""

import dataclasses
import json

from torch import nn

from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.names import unwrap


def config_bytes(model: nn.Module) -> bytes | None:
    """The content of ``config.json``.

    Args:
        model: A model whose ``config`` has ``to_dict()``, or is a dataclass or a dict.

    Returns:
        The JSON file's bytes, or None when the model has no such ``config``.

    Raises:
        CheckpointError: The configuration holds something JSON cannot hold.
    """
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        values = dict(to_dict())
        # Hugging Face's own loaders pick the class by this entry and fill it in only when they save.
        if "architectures" in values and not values["architectures"]:
            values["architectures"] = [type(inner).__name__]
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = dataclasses.asdict(config)
    elif isinstance(config, dict):
        values = config
    else:
        return None
    try:
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode("ascii")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json cannot be written: the configuration of {type(inner).__name__} holds a value that "
            f"JSON has no form for ({error}); give it a to_dict() that returns plain values"
        ) from error
