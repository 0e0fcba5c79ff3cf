"""Finding a device's record by its exact name and the number of compute units it reports."""

from __future__ import annotations

import math
from typing import NamedTuple

from hardware_table.records import Accelerator, canonical_dtype
from hardware_table.table import load_table, normalise, take_apart

_NO_SINGLE_PEAK = {
    "laptop": "it is a laptop part, whose power limit and clock are set by each notebook",
    "Max-Q": "it is a laptop part, whose power limit and clock are set by each notebook",
    "vGPU": "it is a virtual GPU, whose share of the card is set by the host",
}


class Match(NamedTuple):
    """The record that a name stands for, or the reason why there is none."""

    accelerator: Accelerator | None
    reason: str | None = None


def accelerators() -> tuple[Accelerator, ...]:
    """List every record of the table, in the table's order.

    Returns:
        All records. Cards that share a device name but differ in compute units have one record each.
    """
    return load_table().accelerators


def lookup(device_name: str, *, units: int | None = None) -> Accelerator | None:
    """Find the record of a device by its exact name.

    Case, spaces, trademark signs and a leading "NVIDIA" do not count, everything else does: no part of a name
    is ever searched for, and an unknown name has no default.

    Args:
        device_name: Name as `torch.cuda.get_device_name()` or `torch.xpu.get_device_name()` gives it.
        units: Number of compute units (SMs, CUs, EUs) that the device reports. It tells cards of one name
            apart and scales slices and cut-down parts. Without it, a name that stands for several different
            cards, and a MIG slice, have no record.

    Returns:
        The record, scaled to `units` where the whole device has another number, or None: unknown name,
        ambiguous name, MIG slice of unknown size, laptop part, virtual GPU.

    Raises:
        TypeError: If `device_name` is not text or `units` is not an integer.
        ValueError: If `units` is below 1.
    """
    return match(device_name, units).accelerator


def peak_flops(device_name: str, dtype: str = "bf16", *, units: int | None = None) -> float | None:
    """Give the dense peak of a device in FLOP/s.

    Args:
        device_name: Exact device name; see `lookup`.
        dtype: Number format, one of `DTYPES` or a torch name for it. 16-bit formats are with FP32
            accumulation; fp32 is without tensor cores (with them it is tf32), fp64 with them where there are.
        units: Number of compute units that the device reports; see `lookup`.

    Returns:
        Peak in FLOP/s (165.2e12 for 165.2 TFLOP/s), or None if the device or its rate in this format is not
        known.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `dtype` is not known or `units` is below 1.
    """
    dtype = canonical_dtype(dtype)
    accelerator = lookup(device_name, units=units)
    return None if accelerator is None else accelerator.peak_flops(dtype)


def match(device_name: str, units: int | None = None) -> Match:
    """Find the record of a device, or say why there is none; see `lookup`."""
    _check(device_name, units)
    table = load_table()
    whole = normalise(device_name)
    if whole in table.by_name:
        return _choose(table.by_name[whole], whole, units)
    base, modifier = take_apart(device_name)
    if modifier in _NO_SINGLE_PEAK:
        return Match(None, _NO_SINGLE_PEAK[modifier])
    if base in table.excluded:
        return Match(None, table.excluded[base])
    found = table.by_name.get(base)
    if found is None:
        return Match(None, "it is not in the table")
    if modifier == "MIG" and (units is None or found[0].units is None):
        return Match(None, "it is a MIG slice, whose share needs the number of SMs that the device reports")
    return _choose(found, base, units)


def _check(device_name: str, units: int | None) -> None:
    if not isinstance(device_name, str):
        raise TypeError(f"device_name={device_name!r} must be text, as torch names the device.")
    if units is None:
        return
    if isinstance(units, bool) or not isinstance(units, int):
        raise TypeError(
            f"units={units!r} must be an integer, the number of compute units that the device reports."
        )
    if units < 1:
        raise ValueError(
            f"units={units} must be at least 1, the number of compute units that the device reports."
        )


def _choose(found: tuple[Accelerator, ...], name: str, units: int | None) -> Match:
    if units is None:
        own = [record for record in found if normalise(record.name) == name]
        return _agreed(own or list(found), found)
    same_units = [record for record in found if record.units == units]
    return _agreed(same_units or [record.scaled(units) for record in found], found)


def _agreed(records: list[Accelerator], found: tuple[Accelerator, ...]) -> Match:
    # Cards of one name may differ in clock. Only an answer that all of them give is an answer.
    if all(_same_peaks(records[0], other) for other in records[1:]):
        return Match(records[0])
    shared = ", ".join(f"{record.name} ({record.units} {record.unit_kind}s)" for record in found)
    return Match(None, f"several devices report this name: {shared}")


def _same_peaks(one: Accelerator, other: Accelerator) -> bool:
    if len(one.peaks) != len(other.peaks):
        return False
    return all(
        a.dtype == b.dtype and math.isclose(a.flops, b.flops, rel_tol=2e-3)
        for a, b in zip(one.peaks, other.peaks, strict=True)
    )
