"""`hardware.yaml`: what it may hold, and what is said of a file that is wrong."""

from pathlib import Path

import pytest

from hardware_table import DetectedDevice, HardwareFileError, default_config_path, resolve_peak

DEVICE = DetectedDevice(
    name="NVIDIA GeForce RTX 4090", backend="cuda", index=0, units=128, total_memory=24 * 2**30
)


def peak(tmp_path: Path, text: str, dtype: str = "bf16") -> float | None:
    file = tmp_path / "hardware.yaml"
    file.write_text(text, encoding="utf-8")
    return resolve_peak(DEVICE, dtype, config_path=file).flops


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("165.2e12", 165.2e12),  # text to a YAML 1.1 reader
        ("165.2e+12", 165.2e12),
        ("1.652E14", 165.2e12),
        ("165200000000000", 165.2e12),
        ("'165.2e12'", 165.2e12),
        ("330.3e12  # kernel module", 330.3e12),
    ],
)
def test_spellings_of_a_number(tmp_path: Path, written: str, read: float) -> None:
    assert peak(tmp_path, f"overrides:\n  NVIDIA GeForce RTX 4090:\n    bf16: {written}\n") == read


def test_an_override_holds_for_its_device_and_dtype_only(tmp_path: Path) -> None:
    text = (
        "overrides:\n"
        "  geforce rtx 4090: {bfloat16: 100e12}\n"
        "  NVIDIA GeForce RTX 4090 D: {fp16: 200e12}\n"
        "detected:\n"
        "  NVIDIA GeForce RTX 4090: {peak_flops: {tf32: 300e12, bf16: 300e12}}\n"
    )
    assert peak(tmp_path, text) == 100e12
    assert peak(tmp_path, text, "fp16") == 165.2e12
    assert peak(tmp_path, text, "tf32") == 82.6e12  # `detected` is not read


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "overrides:\n", "overrides: {}\n", "detected: 5\n", "---\n"]
)
def test_a_file_without_overrides(tmp_path: Path, text: str) -> None:
    assert peak(tmp_path, text) == 165.2e12


DEVICE_LINE = "overrides:\n  NVIDIA GeForce RTX 4090:\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            DEVICE_LINE + "    bf16: fast\n",
            "line 3: overrides > NVIDIA GeForce RTX 4090 > bf16: .*'fast' is not a",
        ),
        (DEVICE_LINE + "    bf16: -1e12\n", "> bf16: .*must be finite and above 0"),
        (DEVICE_LINE + "    bf16: 0\n", "> bf16: .*must be finite and above 0"),
        (DEVICE_LINE + "    bf16: nan\n", "> bf16: .*must be finite and above 0"),
        (DEVICE_LINE + "    bf16: 1e999\n", "> bf16: .*must be finite and above 0"),
        (DEVICE_LINE + "    bf16: .inf\n", "> bf16: .*is not a number"),
        (DEVICE_LINE + "    bf16: true\n", "> bf16: .*is not a number"),
        (DEVICE_LINE + "    bf16:\n", "> bf16: .*is not a number"),
        (DEVICE_LINE + "    bf16: [165.2e12]\n", "> bf16: must be one number, in FLOP/s"),
        (DEVICE_LINE + "    bf61: 1e12\n", "> bf61: .*is not known. Use one of bf16, fp16"),
        (DEVICE_LINE + "    bf16: 1e12\n    bfloat16: 2e12\n", "> bfloat16: is given twice. Keep one"),
        (DEVICE_LINE + "    bf16: 1e12\n    bf16: 2e12\n", "line 4: .*> bf16: is given twice. Keep one"),
        (
            "overrides:\n  NVIDIA GeForce RTX 4090: 165.2e12\n",
            "RTX 4090: must be a mapping, such as bf16: 165.2e12",
        ),
        ("overrides: 165.2e12\n", "line 1: overrides: must be a mapping, such as device name"),
        ("165.2e12\n", "the file: must be a mapping, such as overrides"),
        ("- overrides\n", "the file: must be a mapping"),
        ("? [a]\n: 1\n", "has a key that is not plain text"),
        (
            "peak_hardware_flops: 165.2e12\n",
            "peak_hardware_flops: is not a known key; known are overrides, detected",
        ),
        ("overrides: {}\noverrides: {}\n", "line 2: overrides: is given twice"),
        ("overrides:\n  a: {bf16: 1e12\n", "is not valid YAML: .*line 3"),
        ("overrides: {}\n---\noverrides: {}\n", "is not valid YAML"),
        ("overrides:\n\tbf16: 1\n", "is not valid YAML: .*line 2"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(HardwareFileError, match=complaint) as caught:
        peak(tmp_path, text)
    assert str(tmp_path / "hardware.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_or_no_file(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_bytes(b"\xff\xfe\x00overrides")
    with pytest.raises(HardwareFileError, match=r"hardware\.yaml cannot be read: .*utf-8"):
        resolve_peak(DEVICE, config_path=file)
    with pytest.raises(HardwareFileError, match=r"cannot be read: .*[Dd]irectory"):
        resolve_peak(DEVICE, config_path=tmp_path)


def test_a_missing_file_is_no_override(tmp_path: Path) -> None:
    assert resolve_peak(DEVICE, config_path=tmp_path / "absent" / "hardware.yaml").origin == "table"


def test_the_default_file_lies_in_the_users_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = default_config_path()
    assert path.name == "hardware.yaml"
    assert path.parent.name == "hardware-table"
    assert tmp_path in path.parents
