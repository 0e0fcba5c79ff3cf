"""The number formats that the table has peaks for, and the names people use for them."""

DTYPES: tuple[str, ...] = ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4", "int8")
"""Number formats, in the order in which they are listed."""

_SYNONYMS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float4": "fp4",
    "float4_e2m1fn_x2": "fp4",
    "nvfp4": "fp4",
}


def canonical_dtype(dtype: str) -> str:
    """Name a number format as the table does.

    Args:
        dtype: One of `DTYPES`, or a torch name such as `"bfloat16"` or `"torch.bfloat16"`, in any case.

    Returns:
        The member of `DTYPES`.

    Raises:
        TypeError: If `dtype` is not text.
        ValueError: If the name is not known.
    """
    if not isinstance(dtype, str):
        raise TypeError(f"dtype={dtype!r} must be text such as 'bf16'; for a torch dtype pass str(dtype)")
    name = dtype.strip().casefold().removeprefix("torch.")
    name = _SYNONYMS.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")
    return name
