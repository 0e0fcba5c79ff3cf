"""Casting weights, and saying so in the model's configuration."""

from collections.abc import Mapping

import torch

from checkpoint_core.cli.stored import StoredTensor
from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.layout import TensorSpec

_DTYPE_ENTRIES = ("dtype", "torch_dtype")
_QUANTIZATION = "quantization_config"
_FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def cast_spec(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """What a tensor is after the cast.

    Args:
        spec: What it is now.
        dtype: What floating point tensors become; None leaves all as they are.

    Returns:
        The same shape; the new dtype if the tensor is floating point.
    """
    return TensorSpec(dtype, spec.shape) if dtype is not None and spec.dtype.is_floating_point else spec


def cast_bytes(tensor: StoredTensor, raw: bytearray, dtype: torch.dtype) -> bytearray:
    """Cast a piece of a stored tensor.

    Args:
        tensor: The tensor, for its dtype and for messages.
        raw: The piece, as its bytes in the file.
        dtype: The new dtype.

    Returns:
        The piece in the new dtype, as the bytes of a file.

    Raises:
        CheckpointError: A value is too large for the new dtype.
    """
    source = tensor.spec.dtype
    if dtype == source:
        return raw
    values = torch.frombuffer(raw, dtype=source)
    result = bytearray(values.numel() * dtype.itemsize)
    cast = torch.frombuffer(result, dtype=dtype)
    cast.copy_(values)
    overflows = torch.finfo(source).max > torch.finfo(dtype).max
    if overflows and bool((cast.isinf() & ~values.isinf()).any()):
        raise CheckpointError(
            f"tensor {tensor.name} of {tensor.path} has values that {dtype} cannot hold, the largest is "
            f"{torch.finfo(dtype).max:g}; export with --dtype keep, bf16 or fp32"
        )
    return result


def cast_config(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Name the new dtype in a model's configuration, where that has an entry for a floating point dtype.

    Args:
        config: The content of ``config.json``; parts of the model may have a ``..._config`` in it.
        dtype: The new dtype.

    Returns:
        The configuration. Without an entry ``dtype`` or ``torch_dtype`` it is unchanged.
    """
    result = dict(config)
    for key, value in config.items():
        if key in _DTYPE_ENTRIES and _names_float(value):
            result[key] = str(dtype).removeprefix("torch.")
        elif isinstance(value, dict) and key.endswith("_config") and key != _QUANTIZATION:
            result[key] = cast_config(value, dtype)
    return result


def _names_float(value: object) -> bool:
    """Whether an entry names a floating point dtype, or leaves it open."""
    return value is None or (isinstance(value, str) and value.removeprefix("torch.") in _FLOAT_NAMES)
