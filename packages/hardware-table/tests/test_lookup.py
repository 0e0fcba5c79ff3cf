"""Exact names, near names, slices and cut-down parts."""

import copy
import pickle

import pytest

from hardware_table import lookup, peak_flops

NEAR_NAMES = [  # each group: names that a substring or prefix search would mix up
    {
        "NVIDIA A10": 125e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA RTX A1000": None,
        "NVIDIA A100X": None,
        "NVIDIA A100-SXM-64GB": None,
        "NVIDIA A16": 17.9e12,
        "NVIDIA A100": None,
    },
    {"NVIDIA A40": 149.7e12, "NVIDIA RTX A4000": 76.7e12, "NVIDIA RTX A400": None, "NVIDIA A40-48Q": None},
    {
        "NVIDIA A30": 165e12,
        "NVIDIA RTX A3000 Laptop GPU": None,
        "NVIDIA A2": 18e12,
        "NVIDIA RTX A2000": 31.9e12,
    },
    {"NVIDIA L4": 121e12, "NVIDIA L40": 181.05e12, "NVIDIA L40S": 362.05e12, "NVIDIA L40G": None},
    {"NVIDIA L20": 119.5e12, "NVIDIA L20Y": None, "NVIDIA L2": None},
    {
        "NVIDIA H20": 148e12,
        "NVIDIA H20-3e": 148e12,
        "NVIDIA H200": 989.4e12,
        "NVIDIA H200 NVL": 835.5e12,
        "NVIDIA GH200 480GB": 989.4e12,
    },
    {
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835.5e12,
        "NVIDIA H100": None,
    },
    {
        "NVIDIA B200": 2250e12,
        "NVIDIA GB200": 2500e12,
        "NVIDIA B300 SXM6 AC": 2250e12,
        "NVIDIA GB300": 2500e12,
    },
    {
        "NVIDIA GeForce RTX 4070": 58.3e12,
        "NVIDIA GeForce RTX 4070 Ti": 80.2e12,
        "NVIDIA GeForce RTX 4070 SUPER": 71e12,
        "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2e12,
    },
    {
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA GeForce RTX 4090 D": 147.1e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    },
    {
        "NVIDIA GeForce RTX 5090": 209.5e12,
        "NVIDIA GeForce RTX 5090 D": None,
        "NVIDIA GeForce RTX 5090 D v2": None,
        "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    },
    {
        "Quadro RTX 6000": None,
        "NVIDIA RTX A6000": 154.8e12,
        "NVIDIA RTX 6000 Ada Generation": 364.2e12,
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8e12,
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9e12,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": 469e12,
        "NVIDIA RTX 6000D": None,
    },
    {
        "NVIDIA RTX A4000": 76.7e12,
        "NVIDIA RTX 4000 Ada Generation": 106.9e12,
        "NVIDIA RTX 4000 SFF Ada Generation": 76.7e12,
        "NVIDIA RTX PRO 4000 Blackwell": None,
        "NVIDIA RTX 5000 Ada Generation Laptop GPU": None,
    },
    {"Tesla T4": None, "NVIDIA T400": None, "NVIDIA T4G": None},
    {"AMD Instinct MI300X": 1307.4e12, "AMD Instinct MI300A": 980.6e12, "AMD Instinct MI308X": None},
    {"AMD Instinct MI250X": 191.5e12, "AMD Instinct MI250": 181e12, "AMD Instinct MI250X / MI250": None},
    {"AMD Instinct MI350X": 2306.9e12, "AMD Instinct MI355X": 2516.6e12, "AMD Instinct MI350P": None},
    {
        "": None,
        "NVIDIA": None,
        "cpu": None,
        "RTX 4090": None,
        "NVIDIA GeForce RTX 2080 with Max-Q Design": None,
    },
]


@pytest.mark.parametrize(("name", "expected"), [item for group in NEAR_NAMES for item in group.items()])
def test_near_names_do_not_collide(name: str, expected: float | None) -> None:
    assert peak_flops(name) == expected


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("  nvidia   a100-sxm4-80gb ", "NVIDIA A100-SXM4-80GB"),
        ("GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA Tesla T4", "Tesla T4"),
        ("Intel(R) Data Center GPU Max 1550", "Intel Data Center GPU Max 1550"),
        ("AMD Instinct MI300X VF", "AMD Instinct MI300X"),
        ("Gaudi3", "GAUDI3"),
    ],
)
def test_spellings_of_one_name(spelling: str, name: str) -> None:
    assert lookup(spelling) is not None
    assert lookup(spelling) == lookup(name)


@pytest.mark.parametrize(
    ("name", "units", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 312e12 * 42 / 108),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", 14, 312e12 * 14 / 108),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 989.4e12 * 16 / 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 16, 989.4e12 * 16 / 132),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 132, 989.4e12),
        ("NVIDIA GeForce RTX 3080", 68, 59.5e12),
        ("NVIDIA GeForce RTX 3080", 70, 61.3e12),
        ("NVIDIA H100", 114, 756e12),
        ("NVIDIA H100", 132, None),
        ("NVIDIA H100 MIG 1g.10gb", 16, None),
        ("NVIDIA H800", 114, 756e12),
        ("Orin", 16, 42.6e12),
        ("Orin (nvgpu)", 14, 26.7e12),
        ("Orin", 8, None),
        ("AMD Instinct MI250X / MI250 ", 110, 191.5e12),
        ("AMD Instinct MI250X / MI250", 104, 181e12),
        ("AMD Instinct MI300X", 38, 1307.4e12 * 38 / 304),
        ("Intel(R) Data Center GPU Max 1550", 448, 419.4e12 * 448 / 512),
        ("Intel(R) Data Center GPU Max 1550", 1024, 838.8e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, None),
        ("GRID A100D-80C", 108, None),
        ("NVIDIA A40-48Q", 84, None),
        ("NVIDIA H100-1-10C", 16, None),
        ("NVIDIA B100 MIG 1g.23gb", 18, None),
        ("NVIDIA Unheard Of MIG 1g.10gb", 16, None),
    ],
)
def test_reported_units_scale_slices_and_tell_cards_of_one_name_apart(
    name: str, units: int, expected: float | None
) -> None:
    found = peak_flops(name, units=units)
    assert found == (expected if expected is None else pytest.approx(expected, rel=1e-9))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA H100",
        "Orin",
        "Orin (nvgpu)",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_a_name_that_needs_the_units_is_none_without_them(name: str) -> None:
    assert lookup(name) is None


def test_a_scaled_record_says_so_and_claims_no_more_than_it_knows() -> None:
    whole, part = lookup("NVIDIA A100-SXM4-40GB"), lookup("NVIDIA A100-SXM4-40GB", units=54)
    assert whole is not None
    assert part is not None
    assert (part.units, part.scaled_from) == (54, 108)
    assert whole.scaled_from is None
    assert part.peak_flops("tf32") == 78e12
    assert part.derived_flops() == pytest.approx(54 * 2048 * 1.41e9)
    assert part.memory_bandwidth() is None
    assert all(peak.published is None for peak in part.peaks)
    assert "Scaled from 108 to 54 SMs" in (part.note or "")


def test_records_survive_pickling_and_cannot_be_changed() -> None:
    record = lookup("NVIDIA H200")
    assert record is not None
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    with pytest.raises(AttributeError):
        record.units = 1  # type: ignore[misc]


def test_dtype_names() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert peak_flops(name, "torch.bfloat16") == peak_flops(name, "BF16") == 989.4e12
    assert peak_flops(name, "float8_e4m3fn") == 1978.9e12
    assert peak_flops(name, "fp4") is None
    with pytest.raises(ValueError, match=r"dtype='bf61' is not known. Use one of bf16, fp16"):
        peak_flops(name, "bf61")
    with pytest.raises(TypeError, match=r"pass str\(dtype\)"):
        peak_flops(name, 16)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"device_name=None must be text"):
        lookup(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"units=0 must be at least 1"):
        lookup("NVIDIA A10", units=0)
    with pytest.raises(TypeError, match=r"units=True must be an integer"):
        lookup("NVIDIA A10", units=True)
