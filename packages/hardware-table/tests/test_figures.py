"""The table against the figures it was written from, and each peak against its derivation."""

import csv
import math
import re
from pathlib import Path

import pytest

import hardware_table
from hardware_table import DTYPES, Accelerator, accelerators, lookup, peak_flops

HERE = Path(__file__).parent
TOLERANCE = 0.013
"""How far units x rate x clock may be from a peak without a stated reason."""

RATE_OF_FAMILY = {  # 16-bit FLOPs per cycle and unit with FP32 accumulation, by capability and category
    ("7.0", "data centre"): 1024,
    ("7.5", "data centre"): 1024,
    ("7.5", "workstation"): 1024,
    ("7.5", "consumer"): 512,
    ("8.0", "data centre"): 2048,
    ("8.6", "data centre"): 1024,
    ("8.6", "workstation"): 1024,
    ("8.6", "consumer"): 512,
    ("8.7", "integrated"): 2048,
    ("8.9", "data centre"): 1024,
    ("8.9", "workstation"): 1024,
    ("8.9", "consumer"): 512,
    ("9.0", "data centre"): 4096,
    ("10.0", "data centre"): 8192,
    ("10.3", "data centre"): 8192,
    ("11.0", "integrated"): 8192,
    ("12.0", "workstation"): 1024,
    ("12.0", "consumer"): 512,
    ("12.1", "integrated"): 1024,
}
OTHER_RATE = {
    "NVIDIA A10G": 512,
    "NVIDIA L40": 512,
    "NVIDIA L20": 512,
    "NVIDIA H20": 1024,
    "NVIDIA H20-3e": 1024,
}
RATE_OF_AMD = {"gfx908": 512, "gfx90a": 1024, "gfx942": 2048, "gfx950": 4096, "gfx1100": 512}


def read(file_name: str) -> list[dict[str, str]]:
    with (HERE / file_name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float | None:
    return float(text) if text else None


def tera(text: str) -> float | None:
    return float(f"{text}e12") if text else None


EXPECTED = read("expected_figures.csv")
OBSERVED = read("observed_names.csv")


@pytest.mark.parametrize("row", EXPECTED, ids=lambda row: f"{row['name']}-{row['reported_units']}")
def test_every_expected_figure_is_in_the_table(row: dict[str, str]) -> None:
    units = int(row["reported_units"]) if row["reported_units"] else None
    record = lookup(row["name"], units=units)
    assert record is not None
    for dtype in ("bf16", "fp16", "tf32", "fp8", "fp4"):
        assert record.peak_flops(dtype) == tera(row[dtype]), dtype
        assert peak_flops(row["name"], dtype, units=units) == tera(row[dtype])
    assert record.units == number(row["units"])
    assert record.clock_ghz == number(row["clock_ghz"])
    assert (record.compute_capability or "") == row["compute_capability"]
    assert [entry.bandwidth / 1e9 for entry in record.memory] == [
        float(text) for text in row["memory_gb_per_s"].split("|") if text
    ] or {entry.bandwidth / 1e9 for entry in record.memory} == {float(row["memory_gb_per_s"])}
    main = record.peak("bf16") or record.peak("fp16")
    assert main is not None
    assert main.flops_per_cycle == int(row["flops_per_cycle"])


def test_the_expected_figures_cover_every_record() -> None:
    covered = {
        lookup(row["name"], units=int(row["reported_units"]) if row["reported_units"] else None)
        for row in EXPECTED
    }
    assert covered == set(accelerators())


@pytest.mark.parametrize("row", OBSERVED, ids=lambda row: row["name"])
def test_names_observed_on_real_machines(row: dict[str, str]) -> None:
    units = int(row["reported_units"]) if row["reported_units"] else None
    found, right = peak_flops(row["name"], units=units), tera(row["bf16"])
    if right is None:
        assert found is None
    else:
        assert found == pytest.approx(right, rel=0.006)  # A16: 17.9 printed, 18 derived
    if "MIG" in row["name"]:
        assert peak_flops(row["name"]) is None


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "fp64", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "int8", 624e12),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
        ("NVIDIA A100 80GB PCIe", "fp64", 19.5e12),
        ("NVIDIA A100 80GB PCIe", "int8", 624e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9e12),
        ("NVIDIA H100 80GB HBM3", "fp64", 66.9e12),
        ("NVIDIA H100 80GB HBM3", "int8", 1978.9e12),
        ("NVIDIA H200", "fp32", 66.9e12),
        ("NVIDIA H200", "fp64", 66.9e12),
        ("NVIDIA H200", "int8", 1978.9e12),
        ("NVIDIA B200", "fp32", 75e12),
        ("NVIDIA B200", "fp64", 37e12),
        ("NVIDIA B200", "int8", 4500e12),
        ("NVIDIA H20", "fp32", 44e12),
        ("NVIDIA H20", "int8", 296e12),
        ("NVIDIA H100 NVL", "fp32", 60e12),
        ("NVIDIA H200 NVL", "fp32", 60e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "fp32", 120e12),
        ("NVIDIA A10", "fp32", 31.2e12),
        ("NVIDIA RTX A6000", "fp32", 38.7e12),
        ("NVIDIA RTX A5500", "fp32", 34.1e12),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6e12),
        ("NVIDIA GeForce RTX 4080", "fp32", 48.7e12),
        ("NVIDIA GeForce RTX 4080 SUPER", "fp32", 52.2e12),
        ("NVIDIA GeForce RTX 4070 Ti", "fp32", 40.1e12),
        ("NVIDIA GeForce RTX 4070 SUPER", "fp32", 35.5e12),
        ("NVIDIA GeForce RTX 4070", "fp32", 29.1e12),
        ("NVIDIA GeForce RTX 4060 Ti", "fp32", 22.1e12),
        ("NVIDIA GeForce RTX 4060", "fp32", 15.1e12),
        ("NVIDIA GeForce RTX 3090 Ti", "fp32", 40e12),
        ("NVIDIA GeForce RTX 3090", "fp32", 35.6e12),
        ("NVIDIA GeForce RTX 3080 Ti", "fp32", 34.1e12),
        ("NVIDIA GeForce RTX 3080", "fp32", 29.8e12),
        ("NVIDIA GeForce RTX 3070", "fp32", 20.3e12),
    ],
)
def test_fp32_fp64_and_int8_figures(name: str, dtype: str, expected: float) -> None:
    assert peak_flops(name, dtype) == expected


def test_formats_that_run_at_another_clock_are_derived_at_it() -> None:
    h100 = lookup("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert h100.derived_flops("torch.float64") == h100.derived_flops("fp32") == 132 * 256 * 1.98e9
    assert h100.derived_flops("int8") == 132 * 8192 * 1.83e9


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA RTX PRO 5000 Blackwell", "bf16", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bf16", None),
        ("NVIDIA GB10", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("AMD Instinct MI355X", "bf16", 2500e12),
        ("AMD Instinct MI350X", "bf16", 2300e12),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Radeon RX 7900 XTX", "bf16", 122.8e12),
        ("GAUDI2", "bf16", 432e12),
        ("GAUDI3", "bf16", 1835e12),
    ],
)
def test_the_published_figure_stands_beside_the_one_in_use(
    name: str, dtype: str, published: float | None
) -> None:
    record = lookup(name)
    assert record is not None
    peak = record.peak(dtype)
    assert peak is not None
    assert peak.published == published


@pytest.mark.parametrize("record", accelerators(), ids=lambda record: record.name)
def test_each_peak_follows_from_its_parts_or_says_why_not(record: Accelerator) -> None:
    if record.units is None:
        assert record.name == "NVIDIA B100"  # the one product whose units and clock nobody publishes
        assert record.why
        return
    for peak in record.peaks:
        derived = record.derived_flops(peak.dtype)
        if derived is None:
            assert (record.name, peak.dtype) in {("NVIDIA H20", "fp32"), ("NVIDIA H20-3e", "fp32")}
            continue
        for figure in (peak.flops, peak.published):
            if figure is not None and abs(derived / figure - 1) > TOLERANCE:
                assert record.why, f"{peak.dtype}: derived {derived:g}, table {figure:g}"
        if record.name != "NVIDIA GB10":  # its FP4 figure is half of a rounded sparse one
            assert derived == pytest.approx(peak.flops, rel=TOLERANCE)


@pytest.mark.parametrize("record", accelerators(), ids=lambda record: record.name)
def test_a_rate_or_clock_that_is_not_the_familys_is_explained(record: Accelerator) -> None:
    if record.clock_kind not in ("boost", "engine", "matrix"):
        assert record.why
    peak = record.peak("fp16")
    assert peak is not None
    rate = peak.flops_per_cycle
    if record.vendor == "AMD":
        if record.chip == "gfx908":  # bf16 at half the fp16 rate
            bf16 = record.peak("bf16")
            assert bf16 is not None
            rate = bf16.flops_per_cycle
        assert rate == RATE_OF_AMD[record.chip or ""]
    elif record.vendor == "NVIDIA":
        expected = RATE_OF_FAMILY[(record.compute_capability or "", record.category)]
        assert rate == OTHER_RATE.get(record.name, expected)
        if rate != expected:
            assert record.why


@pytest.mark.parametrize("record", accelerators(), ids=lambda record: record.name)
def test_records_are_complete_and_consistent(record: Accelerator) -> None:
    assert record.peaks
    assert [peak.dtype for peak in record.peaks] == [d for d in DTYPES if record.peak(d)]
    assert all(math.isfinite(peak.flops) and peak.flops > 0 for peak in record.peaks)
    assert record.source
    assert record.confidence in ("measured", "published", "unchecked", "derived", "uncertain")
    # An alias shared with others, the record's own name never.
    assert lookup(record.name) == record
    for alias in record.aliases:
        assert lookup(alias, units=record.units) == record or alias == "NVIDIA H100"
    tf32, bf16 = record.peak_flops("tf32"), record.peak_flops("bf16")
    if tf32 and bf16:
        assert tf32 == pytest.approx(bf16 / 2, rel=0.011)
    assert hash(record) == hash(lookup(record.name))


def test_every_citation_has_a_reference_and_every_reference_is_cited() -> None:
    import tomllib

    data = tomllib.loads(
        (Path(hardware_table.__file__).parent / "accelerators.toml").read_text(encoding="utf-8")
    )
    cited: set[str] = set()
    for entry in data["accelerator"]:
        text = " ".join(entry.get(key, "") for key in ("source", "why", "note"))
        cited |= set(re.findall(r"\[([a-z0-9-]+)\]", text))
    assert cited == set(data["references"])


def test_devices_without_bf16_units_have_no_bf16_peak() -> None:
    for name in ("Tesla V100-SXM2-16GB", "Tesla T4", "TITAN RTX", "NVIDIA GeForce RTX 2080 Ti"):
        assert peak_flops(name, "bf16") is None
        assert peak_flops(name, "fp16") is not None


def test_memory_size_tells_the_bandwidth_where_the_name_does_not() -> None:
    grace_hopper = lookup("NVIDIA GH200 480GB")
    assert grace_hopper is not None
    assert grace_hopper.memory_bandwidth() is None
    assert grace_hopper.memory_bandwidth(94 * 2**30) == 4000e9
    assert grace_hopper.memory_bandwidth(141 * 10**9) == 4900e9
    assert grace_hopper.memory_bandwidth(24 * 10**9) is None
    geforce = lookup("NVIDIA GeForce RTX 3060")
    assert geforce is not None
    assert geforce.memory_bandwidth(12 * 2**30) == 360e9
    assert geforce.memory_bandwidth(8 * 2**30) == 240e9
    hopper = lookup("NVIDIA H100 PCIe")
    assert hopper is not None
    assert hopper.memory_bandwidth() == 2000e9
