"""The panels about the chosen job: MFU beside OFU, and each of its devices."""

from __future__ import annotations

from . import recorded_series as series
from .dashboard_view import View
from .grafana_panels import Column, Json, Query, share, table, time_series

_DEVICE = "{{hostname}} GPU {{gpu}} {{GPU_I_ID}}"
_MHZ: Json = {"unit": "suffix:MHz", "decimals": 0}


def mfu_and_ofu(view: View) -> Json:
    """The job over time."""
    return time_series(
        "MFU and OFU of job $job",
        "OFU at each moment, and MFU of the last log interval. MFU leaves out evaluation and saving.",
        [Query(f"{series.JOB_OFU}{view.job}", "OFU"), Query(f"{series.JOB_MFU}{view.job}", "MFU")],
        share(min=0),
        legend="table",
    )


def ratio(view: View) -> Json:
    """What a mistake in the count shows in."""
    return time_series(
        "MFU / OFU of job $job",
        "Means over the last hour. Near 1 the count of FLOPs is right. perf_metrics.diagnose tells which "
        "mistakes give another ratio, such as 0.75 for recomputation that is not counted.",
        [Query(f"{series.JOB_MFU_OVER_OFU_1H}{view.job}", "MFU / OFU")],
        {"decimals": 2, "min": 0},
    )


def spread(view: View) -> Json:
    """How even the work is."""
    of = f"{series.OFU_IN_JOB}{view.job}"
    return time_series(
        "Spread of OFU over the devices of job $job",
        "Of all its GPUs and MIG slices, on all hosts.",
        [
            Query(f"max({of})", "highest"),
            Query(f"quantile(0.9, {of})", "90 % are below"),
            Query(f"quantile(0.5, {of})", "median"),
            Query(f"quantile(0.1, {of})", "10 % are below"),
            Query(f"min({of})", "lowest"),
        ],
        share(min=0),
    )


def devices(view: View) -> Json:
    """Which device it is."""
    return time_series(
        "OFU of each device of job $job",
        "Choose hosts above, where there are many.",
        [Query(f"{series.OFU_IN_JOB}{view.device}", _DEVICE)],
        share(min=0),
        legend="table",
    )


def clocks(view: View) -> Json:
    """Who is held back."""
    return time_series(
        "SM clock of each device of job $job",
        "A device far below the others while it works is held back by heat, power or a limit, and holds up "
        "the others.",
        [Query(f"{series.SM_CLOCK_IN_JOB}{view.device}", _DEVICE)],
        _MHZ,
        legend="table",
    )


def device_table(view: View) -> Json:
    """The same in figures."""
    return table(
        "Devices of job $job",
        "Means over the last 15 minutes.",
        [
            Column("Host", label="hostname"),
            Column("GPU", label="gpu"),
            Column("Slice", label="GPU_I_ID"),
            Column("OFU", f"{view.by_device} ({series.OFU_IN_JOB_15M}{view.device})", field=share()),
            Column(
                "Tensor activity",
                f"{view.by_device} ({series.ACTIVITY_IN_JOB_15M}{view.device})",
                field=share(),
            ),
            Column("SM clock", f"{view.by_device} ({series.SM_CLOCK_IN_JOB_15M}{view.device})", field=_MHZ),
            Column("Type", label="modelName"),
        ],
        sort_by="OFU",
    )
