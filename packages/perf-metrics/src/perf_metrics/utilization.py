"""Model FLOPs utilization, and the peak that it is measured against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def device_peak_flops(
    dtype: str | Mapping[str, float] = "bf16", *, value: float | str | None = None
) -> float | None:
    """Return the peak FLOP/s of one device of this process, or None when it is unknown.

    The order of `hardware_table.get_peak_hardware_flops`: `value` if given, the user's `hardware.yaml`, the
    table by the name of the current device. A processor without a record, the CPU for one, gives None.

    Args:
        dtype: The type that the matrix multiplications run in: "bf16", "fp16", "tf32", "fp32", "fp8", ...; of
            a model that computes in several, each with its share of the FLOPs, such as
            `{"fp8": 0.8, "bf16": 0.2}`: the peak is then that of `mixed_peak_flops`.
        value: A peak given by the user, in FLOP/s; text such as "165.2e12" will do.

    Returns:
        Dense FLOP/s of one device. Sum it over the ranks for the peak of a job.

    Raises:
        ValueError: `value` or the user's file holds something that is not a positive number.
    """
    # Imported here: the plain formulas and the file readers must not need the table.
    from hardware_table import get_peak_hardware_flops

    if not isinstance(dtype, str):
        _check_shares(dtype)
    if isinstance(dtype, str) or value is not None:
        return get_peak_hardware_flops(value, dtype=dtype if isinstance(dtype, str) else "bf16")
    return mixed_peak_flops(dtype, {name: get_peak_hardware_flops(dtype=name) for name in dtype})


def mixed_peak_flops(shares: Mapping[str, float], peaks: Mapping[str, float | None]) -> float | None:
    """Return the peak of a device whose work is of several types: 1 / sum of share / peak.

    The harmonic mean weighted by FLOPs ("Instant GPU Efficiency Visibility at Fleet Scale", section on mixed
    precision): each type takes its share of the FLOPs at its own peak, one after the other.

    Args:
        shares: Share of the FLOPs by type; together 1.
        peaks: Peak FLOP/s by type.

    Returns:
        FLOP/s, or None where the peak of a type with work to do is unknown.

    Raises:
        ValueError: The shares are not positive or do not add up to 1, or a peak is not positive and finite.
    """
    _check_shares(shares)
    seconds = 0.0
    for name, share in shares.items():
        peak = peaks.get(name)
        if share == 0:
            continue
        if peak is None:
            return None
        check_peak(f"peaks[{name!r}]", peak)
        seconds += share / peak
    return 1.0 / seconds


def _check_shares(shares: Mapping[str, float]) -> None:
    numbers = [share for share in shares.values() if isinstance(share, int | float)]
    wrong = len(numbers) < len(shares) or any(not share >= 0 for share in numbers)
    if wrong or not math.isclose(sum(numbers), 1.0):
        raise ValueError(f"shares={dict(shares)!r} must be 0 or more each, and 1 together.")


def sum_peaks(peaks: Iterable[float | None]) -> float | None:
    """Return the peak of a job from those of its devices, which may be unlike; None if one is unknown.

    Raises:
        ValueError: A peak is not a positive finite number.
    """
    known = list(peaks)
    for peak in known:
        if peak is not None:
            check_peak("peaks", peak)
    return None if not known or None in known else math.fsum(peak for peak in known if peak is not None)


def model_flops_utilization(flops: float, seconds: float, peak_flops: float | None) -> float | None:
    """Return MFU: model FLOPs / (seconds x peak), as a share where 1.0 is the peak.

    The value is not clamped: more than 1 means a wrong count, a wrong peak or a clock read too early.

    Args:
        flops: Model FLOPs done in the window by all devices.
        seconds: Net wall time of the window.
        peak_flops: Summed peak FLOP/s of the same devices; None when unknown.

    Returns:
        The share, or None when the peak is unknown or no time has passed.

    Raises:
        ValueError: `peak_flops` is not a positive finite number.
    """
    if peak_flops is None:
        return None
    check_peak("peak_flops", peak_flops)
    return flops / (seconds * peak_flops) if seconds > 0 else None


def check_peak(setting: str, value: float) -> None:
    """Raise ValueError unless `value` is a positive finite number of FLOP/s."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(
            f"{setting}={value!r} must be a positive number of FLOP/s, such as 989e12. Use None when the "
            "peak is unknown."
        )
