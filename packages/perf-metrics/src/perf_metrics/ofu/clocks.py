"""OFU of one sample, and the clock that it is measured against."""

from __future__ import annotations

import math
from dataclasses import dataclass

_PREFERRED_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class TensorClock:
    """The clock at which a device's tensor peak is specified.

    Attributes:
        mhz: The clock in MHz; None when it is not known.
        source: Where the figure is from, or, without a figure, why there is none.
    """

    mhz: float | None
    source: str


def ofu_from_activity(tensor_activity: float, sm_mhz: float, tensor_mhz: float) -> float:
    """Return OFU of one sample: tensor pipe activity x SM clock / tensor clock, as a share.

    The definition of "Instant GPU Efficiency Visibility at Fleet Scale". Multiply for each sample and average
    afterwards: the clock is instantaneous and moves under load. The value is not clamped.

    Args:
        tensor_activity: Share of the cycles in which the tensor pipes worked, 0 to 1.
        sm_mhz: SM clock in MHz at the time of the sample.
        tensor_mhz: Clock in MHz at which the tensor peak is specified; see `tensor_clock`.

    Raises:
        ValueError: An argument is not finite, the activity or the clock is negative, or `tensor_mhz` is not
            positive.
    """
    for setting, value in (("tensor_activity", tensor_activity), ("sm_mhz", sm_mhz)):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{setting}={value!r}: must be a finite number, 0 or more")
    check_tensor_mhz(tensor_mhz)
    return tensor_activity * sm_mhz / tensor_mhz


def ofu_from_cycles(
    tensor_cycles: float, seconds: float, tensor_mhz: float, *, counts_per_cycle: float
) -> float:
    """Return OFU from the raw counter of tensor cycles; no clock has to be sampled for it.

    OFU = cycles / (seconds x tensor clock x counts per cycle). What the last factor is, is not documented: 1
    where the driver averages over the SMs, their number where it adds them up. Find it on your hardware:
    `CycleCounts.elapsed` grows by SM clock x `counts_per_cycle` a second.

    Args:
        tensor_cycles: What `CycleCounts.tensor` has grown by.
        seconds: Time in which it did.
        tensor_mhz: Clock in MHz at which the tensor peak is specified.
        counts_per_cycle: What the counter of elapsed cycles grows by in one cycle of the SM clock.

    Raises:
        ValueError: `tensor_cycles` is negative or not finite, or another argument is not positive and finite.
    """
    check_tensor_mhz(tensor_mhz)
    if not math.isfinite(tensor_cycles) or tensor_cycles < 0:
        raise ValueError(f"tensor_cycles={tensor_cycles!r}: must be a finite number, 0 or more")
    for setting, value in (("seconds", seconds), ("counts_per_cycle", counts_per_cycle)):
        if not 0 < value < math.inf:
            raise ValueError(f"{setting}={value!r}: must be a positive number")
    return tensor_cycles / (seconds * tensor_mhz * 1e6 * counts_per_cycle)


def tensor_clock(device_name: str) -> TensorClock:
    """Return the clock at which the tensor peak of a device is specified.

    From `hardware_table`: the clock of the peaks where the record has it, else peak / (compute units x FLOPs
    per cycle). It is never the boost limit that the driver tells: that of an H100 SXM is 1980 MHz, and its
    peak of 989 TFLOP/s is 132 x 4096 x 1830 MHz (NVIDIA's H100 whitepaper v1.04, table 3). A MIG slice runs
    at the clock of its device, whose name is the one to give. For GB200 the table has 2008 MHz with the 152
    SMs that the device reports; the publication takes 2062 MHz, which goes with 148.

    Args:
        device_name: Exact device name, as NVML, torch or DCGM's label `modelName` gives it.

    Returns:
        The clock; `mhz` is None for a device without a record, an ambiguous name, and a record without the
        figures.
    """
    # Imported here: the plain formulas must not need the table.
    from hardware_table import lookup

    record = lookup(device_name)
    if record is None:
        return _unknown(f"no single record of {device_name!r} in hardware-table")
    if record.clock_ghz is not None:
        kind = record.clock_kind
        return TensorClock(round(record.clock_ghz * 1000, 1), f"hardware-table, {record.name}: {kind} clock")
    peak = next((peak for dtype in _PREFERRED_DTYPES if (peak := record.peak(dtype)) is not None), None)
    if peak is None or peak.flops_per_cycle is None or record.units is None:
        return _unknown(f"hardware-table has none for {record.name!r}")
    mhz = peak.flops / (record.units * peak.flops_per_cycle) / 1e6
    return TensorClock(mhz, f"hardware-table, {record.name}: peak / ({record.unit_kind}s x FLOPs per cycle)")


def _unknown(why: str) -> TensorClock:
    return TensorClock(None, f"tensor clock unknown: {why}; give tensor_mhz if you know it")


def check_tensor_mhz(value: float) -> None:
    """Raise ValueError unless `value` is a positive finite number of MHz."""
    if not 0 < value < math.inf:
        raise ValueError(f"tensor_mhz={value!r}: must be a positive number of MHz, such as 1830")
