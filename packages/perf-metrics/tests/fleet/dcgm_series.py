"""The series of dcgm-exporter, of either generation, that a synthetic fleet leaves in Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid5

from .openmetrics_pieces import Pieces
from .synthetic_counters import GPU, Counters

MODEL = "NVIDIA H100 80GB HBM3"
OLD_NAME, NEW_NAME = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"
CLOCK_NAME = "DCGM_FI_DEV_SM_CLOCK"
IDLE_MHZ = 1980

_NAMES = {"old": (OLD_NAME,), "new": (NEW_NAME,), "both": (OLD_NAME, NEW_NAME)}
# As `dcgm_structs.h` has them: a double, an integer, 64 bits; blank or not supported.
_ACTIVITY_BLANKS = (9223372036854775794, 140737488355328, 140737488355330)
_CLOCK_BLANKS = (9223372036854775794, 2147483632, 2147483634)
_NAMESPACE = UUID("6f1c1f2e-7a52-4a53-9d0e-3b8f1d1f0b6a")


def write_counters(pieces: Pieces, counters: Counters, job: str | None) -> None:
    """Write what a device showed while a job, or none, had it; of a slice without its GPU's clock."""
    labels = _labels(counters.gpu, job)
    for name in _NAMES[counters.gpu.host.metric_names]:
        missing = ("activity", "new name") if name == NEW_NAME else ("activity",)
        values = _with_blanks(counters.activity, counters.blank, missing, _ACTIVITY_BLANKS)
        pieces.write(name, labels, counters.times_ms, values)
    if counters.has_clock and not counters.gpu.mig_instance:
        _write_clock(pieces, counters, labels)


def write_clocks_of_slices(pieces: Pieces, devices: Sequence[Counters]) -> None:
    """Write the clocks of GPUs that have slices among these: without a job, which their slices have."""
    wholes = {one.gpu.whole: one for one in devices if one.gpu.mig_instance}
    for whole, counters in wholes.items():
        _write_clock(pieces, counters, _labels(whole, None))


def _write_clock(pieces: Pieces, counters: Counters, labels: str) -> None:
    values = _with_blanks(counters.mhz, counters.blank, ("clock",), _CLOCK_BLANKS)
    pieces.write(CLOCK_NAME, labels, counters.times_ms, values)


def write_idle(pieces: Pieces, gpu: GPU, times_ms: list[int]) -> None:
    """Write what a device shows that no job has."""
    idle = Counters(gpu, times_ms, [0.0] * len(times_ms), [IDLE_MHZ] * len(times_ms))
    write_counters(pieces, idle, None)


def _labels(gpu: GPU, job: str | None) -> str:
    host = gpu.host.name
    labels = {
        "gpu": str(gpu.index),
        "UUID": f"GPU-{uuid5(_NAMESPACE, f'{host}/{gpu.index}')}",
        "device": f"nvidia{gpu.index}",
        "modelName": MODEL,
        "GPU_I_PROFILE": gpu.mig_profile,
        "GPU_I_ID": gpu.mig_instance,
        gpu.host.host_label: host,
        "hpc_job": job or "",
        # What Prometheus adds.
        "instance": f"{host}:9400",
        "job": "dcgm-exporter",
    }
    return ",".join(f'{name}="{value}"' for name, value in labels.items() if value)


def _with_blanks(
    values: list[float] | list[int], blank: dict[int, str], missing: tuple[str, ...], blanks: tuple[int, ...]
) -> list[float]:
    shown: list[float] = list(values)
    for place, what in blank.items():
        if what in missing:
            shown[place] = blanks[place % len(blanks)]
    return shown
