"""The order in which a peak is found, and what is said when there is none."""

import warnings
from pathlib import Path

import pytest

from hardware_table import DetectedDevice, HardwareTableWarning, get_peak_hardware_flops, resolve_peak
from hardware_table.resolve import peak_of


def device(name: str, units: int) -> DetectedDevice:
    return DetectedDevice(name=name, backend="cuda", index=0, units=units, total_memory=10**10)


@pytest.mark.parametrize("value", [165.2e12, "165.2e12", " 1.652e14 ", 165200000000000])
def test_the_argument_comes_first_and_asks_no_device(value: float | str, tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("corrupt: [")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_peak_hardware_flops(value, config_path=file) == 165.2e12
    assert file.read_text() == "corrupt: ["


@pytest.mark.parametrize("value", ["fast", "", "nan", "inf", 0, -1.0, float("inf"), "0"])
def test_a_wrong_argument_is_refused(value: float | str) -> None:
    with pytest.raises(ValueError, match=r"peak_hardware_flops=.*in FLOP/s, such as 165.2e12"):
        get_peak_hardware_flops(value)


def test_wrong_types_and_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="peak_hardware_flops=True is not a number"):
        get_peak_hardware_flops(True)
    with pytest.raises(TypeError, match=r"peak_hardware_flops=\[1\] is not a number"):
        get_peak_hardware_flops([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype='bf61' is not known"):
        get_peak_hardware_flops(1e12, dtype="bf61")


def test_an_override_comes_before_the_table(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    a10 = device("NVIDIA A10", 72)
    found = resolve_peak(a10, config_path=file)
    assert (found.flops, found.origin) == (125e12, "table")
    file.write_text("overrides:\n  NVIDIA A10: {bf16: 110e12}\n")
    found = resolve_peak(a10, config_path=file)
    assert (found.flops, found.origin, found.explanation) == (110e12, "override", f"override in {file}")
    assert resolve_peak(a10, "tf32", config_path=file).flops == 62.5e12


def test_another_card_in_the_same_machine_is_not_given_the_old_figure(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    assert peak_of(device("NVIDIA A10", 72), "bf16", file) == 125e12
    assert "NVIDIA A10" in file.read_text()
    assert resolve_peak(device("NVIDIA A10G", 80), config_path=file).flops == 70e12
    assert resolve_peak(device("NVIDIA A10", 36), config_path=file).flops == 62.5e12


def test_a_scaled_figure_says_so(tmp_path: Path) -> None:
    found = resolve_peak(device("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42), config_path=tmp_path / "none.yaml")
    assert found.flops == pytest.approx(121.3e12, rel=1e-3)
    assert "scaled from 108 to 42 SMs" in found.explanation


@pytest.mark.parametrize(
    ("name", "units", "reason"),
    [
        ("NVIDIA Unheard Of", 7, "it is not in the table"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, "it is a laptop part"),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", 46, "it is a laptop part"),
        ("GRID A100D-80C", 108, "it is a virtual GPU"),
        ("NVIDIA H100", 132, "several devices report this name: NVIDIA H100 80GB HBM3"),
        ("NVIDIA GeForce RTX 5090 D", 170, "export-limited"),
        ("Tesla V100-SXM2-16GB", 80, "the table has fp16 for it. No BF16 tensor cores"),
    ],
)
def test_an_unknown_peak_names_the_device_the_reason_and_the_override(
    tmp_path: Path, name: str, units: int, reason: str
) -> None:
    file = tmp_path / "hardware.yaml"
    found = resolve_peak(device(name, units), config_path=file)
    assert (found.flops, found.origin) == (None, "unknown")
    for part in (repr(name), reason, str(file), f'overrides: {{"{name}": {{bf16: FLOPS}}}}'):
        assert part in found.explanation
    # The advice works as it is written.
    advice = found.explanation.partition(" as overrides: ")[2].replace("FLOPS", "77e12")
    file.write_text(f"overrides: {advice}\n")
    assert resolve_peak(device(name, units), config_path=file).flops == 77e12


@pytest.mark.parametrize(
    ("name", "units", "flops"),
    [
        ("NVIDIA GB10", 48, 118.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 469e12),
        ("NVIDIA RTX PRO 5000 Blackwell", 110, 258e12),
        ("GAUDI3", 8, 1677.7e12),
        ("Intel(R) Data Center GPU Max 1550", 512, 419.4e12),
        ("NVIDIA L20", 92, 119.5e12),
    ],
)
def test_a_doubtful_figure_is_flagged(tmp_path: Path, name: str, units: int, flops: float) -> None:
    found = resolve_peak(device(name, units), config_path=tmp_path / "none.yaml")
    assert (found.flops, found.uncertain) == (flops, True)
    assert "is uncertain" in found.explanation
    assert not resolve_peak(device("NVIDIA L4", 58), config_path=tmp_path / "none.yaml").uncertain


def test_a_missing_or_doubtful_figure_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            assert peak_of(device("NVIDIA Said Once", 1), "bf16", file) is None
            assert peak_of(device("NVIDIA GB10", 48), "fp16", file) == 118.8e12
            assert peak_of(device("NVIDIA L4", 58), "fp16", file) == 121e12
    assert [w.category for w in said] == [HardwareTableWarning] * 2
    assert "'NVIDIA Said Once'" in str(said[0].message)
    assert "'NVIDIA GB10' is uncertain" in str(said[1].message)


def test_a_file_that_cannot_be_written_costs_a_warning_and_no_figure(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("{overrides: {H20: {bf16: 1e12}}}")
    with pytest.warns(HardwareTableWarning, match=r"'NVIDIA L4' could not be written into .*no room"):
        assert peak_of(device("NVIDIA L4", 58), "bf16", file) == 121e12
    with pytest.warns(HardwareTableWarning, match="'NVIDIA H20' could not be written"):
        assert peak_of(device("NVIDIA H20", 78), "bf16", file) == 1e12
