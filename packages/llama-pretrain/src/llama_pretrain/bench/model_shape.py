"""From the settings of `bench` to the shape of its model."""

from __future__ import annotations

from pathlib import Path

from trainer_core import ConfigurationError

from ..model.config import CONFIG_FILE, LlamaConfig
from ..model.presets import preset
from .options import BenchArguments


def model_shape(args: BenchArguments) -> LlamaConfig:
    """Return the shape of the model, which has room for the rows.

    Raises:
        ConfigurationError: If there is no such model, or its positions are fewer than a row has.
    """
    found = (Path(args.model) / CONFIG_FILE).is_file()
    config = LlamaConfig.load(args.model) if found else preset(args.model)
    if args.sequence_length > config.max_position_embeddings:
        rule = f"is more than the max_position_embeddings of {args.model}, {config.max_position_embeddings}"
        raise ConfigurationError("sequence_length", args.sequence_length, rule, "lower it")
    return config
