"""Records as text for a terminal and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap

from hardware_table.detection import DetectedDevice
from hardware_table.records import Accelerator
from hardware_table.resolve import ResolvedPeak

_LABEL = 20
_WIDTH = 100


def record_dict(record: Accelerator) -> dict[str, object]:
    """Give a record as plain values: FLOP/s and bytes per second."""
    values = asdict(record)
    for peak in values["peaks"]:
        peak["derived"] = record.derived_flops(peak["dtype"])
    return values


def table_lines(records: Sequence[Accelerator], dtypes: Sequence[str]) -> Iterator[str]:
    """Lay records out as a table: one line each, dense TFLOP/s by number format."""
    header = ["device", "arch", "units", "GHz", *dtypes, "GB/s", "confidence"]
    rows = [[*_row(record, dtypes)] for record in records]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    left = (0, 1, len(header) - 1)
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    yield ""
    yield "Dense TFLOP/s per device; 16-bit formats with FP32 accumulation; int8 in TOP/s. '-': not known."


def _row(record: Accelerator, dtypes: Sequence[str]) -> Iterator[str]:
    yield record.name
    yield record.architecture
    yield "-" if record.units is None else f"{record.units} {record.unit_kind}"
    yield "-" if record.clock_ghz is None else f"{record.clock_ghz:g}"
    for dtype in dtypes:
        yield _tera(record.peak_flops(dtype))
    yield "/".join(dict.fromkeys(f"{entry.bandwidth / 1e9:g}" for entry in record.memory)) or "-"
    yield record.confidence


def record_lines(record: Accelerator) -> Iterator[str]:
    """Lay out all that is known of one record."""
    yield record.name
    if record.aliases:
        yield from _field("also reported as", ", ".join(record.aliases))
    chip = f" ({record.chip})" if record.chip else ""
    yield from _field("device", f"{record.vendor} {record.architecture}{chip}, {record.category}")
    if record.compute_capability:
        yield from _field("compute capability", record.compute_capability)
    yield from _field(
        "units", "not published" if record.units is None else f"{record.units} {record.unit_kind}s"
    )
    clock = "not published" if record.clock_ghz is None else f"{record.clock_ghz:g} GHz ({record.clock_kind})"
    boost = f", boost {record.boost_ghz:g} GHz" if record.boost_ghz else ""
    yield from _field("clock", clock + boost)
    for entry in record.memory:
        size = f" ({entry.gigabytes:g} GB)" if entry.gigabytes else ""
        yield from _field("memory bandwidth", f"{entry.bandwidth / 1e9:g} GB/s{size}")
    yield ""
    yield f"  {'dtype':6}{'TFLOP/s':>10}{'published':>12}{'derived':>10}  FLOPs/cycle/{record.unit_kind}"
    for peak in record.peaks:
        derived = _tera(record.derived_flops(peak.dtype))
        rate = "-" if peak.flops_per_cycle is None else str(peak.flops_per_cycle)
        yield f"  {peak.dtype:6}{_tera(peak.flops):>10}{_tera(peak.published):>12}{derived:>10}  {rate}"
    yield ""
    yield from _field("confidence", record.confidence)
    yield from _field("source", record.source)
    for label, text in (("why", record.why), ("note", record.note)):
        if text:
            yield from _field(label, text)
    for reference in record.references:
        yield from _field("", reference)


def device_lines(device: DetectedDevice) -> Iterator[str]:
    """Lay out what torch says of a device."""
    yield device.name
    yield from _field("backend", f"{device.backend}, device {device.index}")
    yield from _field("units", str(device.units))
    yield from _field("memory", f"{device.total_memory / 1e9:.1f} GB")
    if device.compute_capability:
        yield from _field("compute capability", device.compute_capability)


def peak_lines(peaks: Sequence[ResolvedPeak], path: Path) -> Iterator[str]:
    """Lay out the peaks in use and where each is from."""
    known = [peak for peak in peaks if peak.flops is not None]
    if not known:
        yield from _field("peak", next(peak.explanation for peak in peaks if peak.dtype == "bf16"))
    for peak in known:
        yield from _field(peak.dtype, f"{_tera(peak.flops)} TFLOP/s, {peak.explanation}")
    yield from _field("file", str(path))


def _field(label: str, text: str) -> list[str]:
    indent = " " * (_LABEL + 2)
    lines = wrap(text, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return [f"  {label:{_LABEL}}{line}" if i == 0 else indent + line for i, line in enumerate(lines)]


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:.6g}"
