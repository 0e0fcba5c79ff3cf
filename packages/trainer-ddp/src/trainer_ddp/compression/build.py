"""From settings to compression."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from trainer_core import ConfigurationError, Traffic

from ..arguments import CompressionArguments
from .base import GradientCompression
from .powersgd import PowerSGD
from .rounding import RoundedGradients


def build_compression(
    settings: CompressionArguments,
    model: nn.Module,
    process_group: ProcessGroup | None,
    traffic: Traffic,
) -> GradientCompression | None:
    """Build what the settings ask for. Collective.

    Args:
        settings: The method and its options.
        model: The model, unwrapped, on its device.
        process_group: The ranks that average gradients; none for the default group.
        traffic: Counts what this rank hands to collectives for gradients.

    Returns:
        The compression, not yet registered; none for the method "no".

    Raises:
        ConfigurationError: If the method would change nothing for this model, or cannot work with it or with
            the backend.
    """
    if settings.method == "no":
        return None
    _check_dense(settings.method, model)
    if settings.method == "powerSGD":
        return PowerSGD(settings, model, process_group, traffic)
    return RoundedGradients(settings.method, model, process_group, traffic)


def _check_dense(method: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigurationError(
                "compression.method",
                method,
                f"needs dense gradients, and the embedding {name!r} gives sparse ones",
                f"give {name!r} sparse=False, or leave compression out",
            )
