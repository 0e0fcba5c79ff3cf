"""The peak to divide by: what the user says, else the user's file, else the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hardware_table.detection import DetectedDevice, detect, warn_once
from hardware_table.hardware_file import default_config_path, load_overrides, parse_flops
from hardware_table.matching import match
from hardware_table.records import Accelerator, canonical_dtype
from hardware_table.table import normalise

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPeak:
    """A peak, and where it is from.

    Attributes:
        flops: Dense peak of the device in FLOP/s, or None if it is not known.
        dtype: Number format, one of `DTYPES`.
        origin: "override" (the user's file), "table" or "unknown".
        explanation: One sentence for people: the origin, or why there is no figure and how to give one.
        uncertain: Whether the table's sources disagree on the figure.
    """

    flops: float | None
    dtype: str
    origin: Literal["override", "table", "unknown"]
    explanation: str
    uncertain: bool = False


def get_peak_hardware_flops(
    value: float | str | None = None,
    *,
    dtype: str = "bf16",
    device_index: int | None = None,
    config_path: Path | None = None,
) -> float | None:
    """Give the dense peak of this process's device in FLOP/s, for MFU.

    In this order: `value` if it is given; the override for the device's name and `dtype` in the user's
    `hardware.yaml`; the table, by the device's name and number of compute units. What was detected is
    written into the section `detected` of the file, which is never read. For a job on several devices, sum
    the figure over the ranks: devices need not be alike.

    Args:
        value: Peak in FLOP/s from a setting or the command line, as a number or text such as "165.2e12".
        dtype: Number format of the matrix multiplications, one of `DTYPES` or a torch name for it.
        device_index: Index among the visible devices; None means the current device.
        config_path: The user's file; None means `default_config_path()`.

    Returns:
        FLOP/s of one device, or None: without an accelerator, without torch to ask, or for a device or
        number format that is not known. Where a figure is missing or uncertain on an accelerator, one
        `HardwareTableWarning` names the device and the override.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `value` is not a finite number above 0, `dtype` is not known, or there is no device
            with this index.
        HardwareFileError: If the user's file is not valid.
    """
    dtype = canonical_dtype(dtype)
    if value is not None:
        return parse_flops(value, "peak_hardware_flops")
    device = detect(device_index)
    return None if device is None else peak_of(device, dtype, config_path or default_config_path())


def peak_of(device: DetectedDevice, dtype: str, path: Path) -> float | None:
    """Find the peak of a detected device, warn if there is doubt, and write down what was detected."""
    from hardware_table.hardware_file import record_detected

    peak = resolve_peak(device, dtype, config_path=path)
    if peak.flops is None or peak.uncertain:
        warn_once(peak.explanation)
    try:
        record_detected(path, device)
    except OSError as error:
        warn_once(f"{device.name!r} could not be written into {path}: {error}")
    return peak.flops


def resolve_peak(
    device: DetectedDevice, dtype: str = "bf16", *, config_path: Path | None = None
) -> ResolvedPeak:
    """Find the peak of a device: the user's override, else the table.

    Args:
        device: The device, from `detect` or told by another process.
        dtype: Number format, one of `DTYPES` or a torch name for it.
        config_path: The user's file; None means `default_config_path()`. It is only read.

    Returns:
        The peak with its origin, or `flops` None with the reason.

    Raises:
        ValueError: If `dtype` is not known.
        HardwareFileError: If the user's file is not valid.
    """
    dtype = canonical_dtype(dtype)
    path = config_path or default_config_path()
    override = load_overrides(path).get((normalise(device.name), dtype))
    if override is not None:
        return ResolvedPeak(flops=override, dtype=dtype, origin="override", explanation=f"override in {path}")
    record, reason = match(device.name, device.units)
    flops = None if record is None else record.peak_flops(dtype)
    if record is None or flops is None:
        reason = reason if record is None else _other_dtypes(record)
        return ResolvedPeak(
            flops=None, dtype=dtype, origin="unknown", explanation=_unknown(device, dtype, reason, path)
        )
    uncertain = record.confidence == "uncertain"
    explanation = _uncertain(device, dtype, flops, record, path) if uncertain else _from_table(record)
    return ResolvedPeak(
        flops=flops, dtype=dtype, origin="table", explanation=explanation, uncertain=uncertain
    )


def _from_table(record: Accelerator) -> str:
    text = f"table: {record.name} ({record.confidence})"
    if record.scaled_from is None:
        return text
    return f"{text}, scaled from {record.scaled_from} to {record.units} {record.unit_kind}s"


def _other_dtypes(record: Accelerator) -> str:
    known = ", ".join(peak.dtype for peak in record.peaks)
    return f"the table has {known} for it. {record.note or ''}".rstrip(" .")


def _unknown(device: DetectedDevice, dtype: str, reason: str | None, path: Path) -> str:
    return (
        f"{dtype} peak of {device.name!r} with {device.units} units is unknown: {reason}. For MFU, pass the "
        f"peak in FLOP/s, or write it, such as 165.2e12, into {path} as {_override(device, dtype)}"
    )


def _uncertain(device: DetectedDevice, dtype: str, flops: float, record: Accelerator, path: Path) -> str:
    return (
        f"{dtype} peak of {device.name!r} is uncertain: {flops / 1e12:g}e12 FLOP/s is used, and sources "
        f"differ ({record.source}). To use another, write into {path} {_override(device, dtype)}"
    )


def _override(device: DetectedDevice, dtype: str) -> str:
    import json

    return f"overrides: {{{json.dumps(device.name)}: {{{dtype}: FLOPS}}}}"
