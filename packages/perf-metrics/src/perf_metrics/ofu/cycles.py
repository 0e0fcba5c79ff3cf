"""Tensor activity from running counts of cycles, where the data show how these are counted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import stdev

from .samples import MAX_ACTIVITY, Device, Readings, Sample

# DCGM 4.6.0 describes fields 1084 and 1086 as "raw monotonic counter of GPU SM cycles elapsed" and "... of
# GPU SM MMA (any tensor) cycles active" (`dcgm_fields.h`), and passes on what NVML's GPM metrics 248 and 250
# give (`dcgm_fields.cpp`, `DcgmCacheManager.cpp`). None of them says whether a count grows by 1 or by the
# number of SMs in one cycle, nor that both grow alike. Where they do, their ratio is the activity that field
# 1004 gives; where only one of them is summed over the SMs, it is off by their number: far more than below.

AGREES = 0.02
"""How far the ratio of the counts may be from the gauge, as a share: OFU itself is off by 1.9 points. To it
comes twice the standard error of their differences, as the gauge may cover less than the counts do."""
LEAST_ACTIVITY = 2.5
"""Times that tolerance. Below it, a ratio that is wrong by a factor of two would be within the tolerance."""
SCALE_AGREES = 0.05
"""How far counts per cycle may be from 1 or the number of SMs, as a share: clocks are samples."""


@dataclass(frozen=True)
class CycleScale:
    """How the running counts of a device are counted, as a measurement shows it.

    Attributes:
        tensor_activity: Tensor cycles / elapsed cycles, as a share; None where it is not the activity.
        measured: Elapsed cycles / (seconds x SM clock); None without counts or clock.
        counts_per_cycle: 1, or the number of SMs, where `measured` is within 5 % of it; else None.
        reason: Why something is None, in words; None if nothing is.
    """

    tensor_activity: float | None
    measured: float | None
    counts_per_cycle: int | None
    reason: str | None


def cycle_scale(
    elapsed: float,
    tensor: float,
    seconds: float,
    *,
    sm_mhz: float | None,
    tensor_activity: float | None,
    units: int | None,
) -> CycleScale:
    """Return how the running counts of a device are counted, by its clock and its gauge over the same time.

    Args:
        elapsed: What the count of elapsed SM cycles has grown by.
        tensor: What the count of tensor cycles has grown by.
        seconds: Time in which they did.
        sm_mhz: Mean SM clock in MHz.
        tensor_activity: Mean tensor activity that the gauge has told, as a share.
        units: Number of SMs of the device; None when unknown.
    """
    if not elapsed > 0 or not seconds > 0:
        return CycleScale(None, None, None, "the cycle counters have not grown")
    reasons = []
    disagreement = _disagreement(tensor / elapsed, tensor_activity)
    if disagreement is not None:
        reasons.append(disagreement)
    measured, counts = None, None
    if not sm_mhz:
        reasons.append("without the SM clock the counts in one cycle cannot be told")
    else:
        measured = elapsed / (seconds * sm_mhz * 1e6)
        near = [one for one in (1, units) if one and abs(measured / one - 1) <= SCALE_AGREES]
        counts = near[0] if near else None
        if counts is None:
            sms = "the number of SMs, which is unknown" if units is None else f"the {units} SMs"
            reasons.append(f"{measured:.4g} counts in a cycle are neither 1 nor {sms}")
    ratio = tensor / elapsed if disagreement is None else None
    return CycleScale(ratio, measured, counts, "; ".join(reasons) or None)


def _disagreement(ratio: float, gauge: float | None, error: float = 0.0) -> str | None:
    """Say why a ratio of tensor cycles to elapsed ones is not taken for the activity; None if it is."""
    if gauge is None:
        return "no activity gauge (field 1004) shows whether both are counted alike"
    tolerance = AGREES + 2 * error
    if abs(ratio - gauge) > tolerance:
        return f"their ratio of {ratio:.4g} is not the activity of {gauge:.4g} that the gauge tells"
    if gauge < LEAST_ACTIVITY * tolerance:
        return f"an activity of {gauge:.1%} (± {tolerance:.1%}) does not show whether both are counted alike"
    return None


@dataclass
class _Counted:
    """Growth of a device's counts from one sample to the next, by the place of the later one."""

    ratios: dict[int, float] = field(default_factory=dict)
    elapsed: list[float] = field(default_factory=list)
    tensor: list[float] = field(default_factory=list)
    gauges: list[float | None] = field(default_factory=list)
    resets: int = 0

    def problem(self) -> str | None:
        """Say why the ratios are not taken for the activity; None if they are."""
        ratio, gauge, error = self.means()
        problem = _disagreement(ratio, gauge, error)
        highest = max(self.ratios.values())
        if problem is None and highest > MAX_ACTIVITY:
            return f"a ratio of {highest:.4g} in one interval is not a share of cycles"
        return problem

    def means(self) -> tuple[float, float | None, float]:
        """Return ratio and gauge over the intervals that have a gauge, and the error of their difference."""
        gauged = [
            (elapsed, tensor, gauge)
            for elapsed, tensor, gauge in zip(self.elapsed, self.tensor, self.gauges, strict=True)
            if gauge is not None
        ]
        if not gauged:
            return 0.0, None, 0.0
        total = math.fsum(elapsed for elapsed, _, _ in gauged)
        ratio = math.fsum(tensor for _, tensor, _ in gauged) / total
        gauge = math.fsum(elapsed * share for elapsed, _, share in gauged) / total
        apart = [tensor / elapsed - share for elapsed, tensor, share in gauged]
        return ratio, gauge, stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0


def activity_from_cycles(samples: Iterable[Sample]) -> Readings:
    """Take tensor activity from the cycle counters in the place of the gauge, where the two agree.

    The ratio of their growth is the activity of exactly the time from one sample to the next, whatever the
    gauge has covered of it. How they are counted is not documented, so they are used for a device only where
    that ratio is the mean of its gauge over the same intervals, within 2 points and twice the standard error
    of their differences; a note says for which devices, and for which not and why. The first sample of a
    device keeps its gauge; so does one after a count has fallen (the driver was loaded anew), or has not
    grown (it was read twice between changes).

    Args:
        samples: Of any devices. Those of one device are taken by their times, or in the order given where
            a time is missing.

    Returns:
        The samples in the order given, with notes. No notes if no device has counts at two times.
    """
    given = list(samples)
    places: defaultdict[Device, list[int]] = defaultdict(list)
    for place, sample in enumerate(given):
        places[sample.device].append(place)
    used: dict[str, float] = {}
    notes: list[str] = []
    replaced = resets = 0
    for device, own in places.items():
        counted = _count(given, _in_time(given, own))
        resets += counted.resets
        if not counted.ratios:
            continue
        problem = counted.problem()
        if problem is not None:
            notes.append(f"{device}: cycle counters (fields 1084 and 1086) are not used: {problem}")
            continue
        ratio, gauge, _ = counted.means()
        used[str(device)] = abs(ratio - (gauge or 0.0))
        replaced += len(counted.ratios)
        for place, share in counted.ratios.items():
            given[place] = replace(given[place], tensor_activity=share)
    if used:
        notes.insert(0, _used(replaced, len(given), used))
    if resets:
        notes.append(
            f"cycle counters began anew {resets} times: those intervals are left out, and the gauge stays"
        )
    return Readings(tuple(given), tuple(notes))


def _used(replaced: int, samples: int, apart: Mapping[str, float]) -> str:
    devices = list(apart)
    some = ", ".join(devices[:4]) + (f" and {len(devices) - 4} more" if len(devices) > 4 else "")
    return (
        f"tensor activity of {replaced} of {samples} samples is that of the cycle counters (fields 1086 / "
        f"1084), which agree with the gauge within {100 * max(apart.values()):.1f} points: {some}"
    )


def _in_time(samples: Sequence[Sample], places: list[int]) -> list[int]:
    times = [samples[place].time_s for place in places]
    known = [time for time in times if time is not None]
    return (
        [place for _, place in sorted(zip(known, places, strict=True))]
        if len(known) == len(times)
        else places
    )


def _count(samples: Sequence[Sample], places: Sequence[int]) -> _Counted:
    counted = _Counted()
    for earlier, later in pairwise(places):
        before, now = samples[earlier], samples[later]
        if (
            before.elapsed_cycles is None
            or before.tensor_cycles is None
            or now.elapsed_cycles is None
            or now.tensor_cycles is None
        ):
            continue
        elapsed, tensor = now.elapsed_cycles - before.elapsed_cycles, now.tensor_cycles - before.tensor_cycles
        if elapsed < 0 or tensor < 0:
            counted.resets += 1
        elif elapsed > 0:
            counted.ratios[later] = tensor / elapsed
            counted.elapsed.append(elapsed)
            counted.tensor.append(tensor)
            counted.gauges.append(now.tensor_activity)
    return counted
