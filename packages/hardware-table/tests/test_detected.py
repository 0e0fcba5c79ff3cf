"""Writing what was detected: the user's text stays, several may write, a failure leaves the old file."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hardware_table import DetectedDevice, HardwareFileError, resolve_peak
from hardware_table.hardware_file import record_detected


def device(name: str, units: int, backend: str = "cuda") -> DetectedDevice:
    return DetectedDevice(name=name, backend=backend, index=0, units=units, total_memory=80 * 10**9)


H100 = device("NVIDIA H100 80GB HBM3", 132)
SLICE = device("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16)
UNKNOWN = device("NVIDIA Unheard Of", 7)


def test_a_new_file_shows_the_device_and_how_to_override(tmp_path: Path) -> None:
    file = tmp_path / "new" / "hardware.yaml"
    record_detected(file, H100)
    text = file.read_text(encoding="utf-8")
    entry = yaml.safe_load(text)["detected"]["NVIDIA H100 80GB HBM3"]
    assert entry["units"] == 132
    peaks = {"bf16": 989.4e12, "tf32": 494.7e12, "fp64": 66.9e12, "fp8": 1978.9e12}
    assert {dtype: entry["peak_flops"][dtype] for dtype in peaks} == peaks
    # The lines that the comment tells to uncomment are an override once uncommented.
    file.write_text(
        text.replace('#  "NVIDIA', '  "NVIDIA').replace("#    bf16: 165.2e12", "    bf16: 500e12"), "utf-8"
    )
    assert resolve_peak(H100, config_path=file).flops == 500e12
    record_detected(file, SLICE)
    assert resolve_peak(H100, config_path=file).flops == 500e12


def test_slices_and_unknown_devices_are_written_with_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    for each in (SLICE, UNKNOWN, H100):
        record_detected(file, each)
    detected = yaml.safe_load(file.read_text(encoding="utf-8"))["detected"]
    assert list(detected) == [SLICE.name, UNKNOWN.name, H100.name]
    assert detected[SLICE.name]["scaled_from_units"] == 132
    assert detected[SLICE.name]["peak_flops"]["bf16"] == pytest.approx(989.4e12 * 16 / 132, rel=1e-6)
    assert detected[UNKNOWN.name]["unknown"] == "it is not in the table"


def test_nothing_is_written_when_nothing_changed(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    record_detected(file, H100)
    before = file.stat()
    record_detected(file, H100)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_changed_device_replaces_its_old_figures(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    record_detected(file, device("NVIDIA H100 80GB HBM3", 114))
    record_detected(file, H100)
    assert yaml.safe_load(file.read_text())["detected"][H100.name]["units"] == 132
    assert file.read_text().count(H100.name + '":') == 2  # the commented example and the entry


USER_FILES = [
    "overrides:\n  # mine, measured on 3 May\n  'NVIDIA H100 80GB HBM3':   {bf16: 900e12}  # keep\n",
    "detected:\n    old:\n        units: 5   # five\n\n# my overrides\noverrides:\n  H20: {bf16: 1e12}\n",
    "detected: {a: {units: 1}}\noverrides:\n  H20: {bf16: 1e12}\n",
    "detected:\noverrides:\n  H20: {bf16: 1e12}\n",
    "detected: nonsense\noverrides:\n  H20: {bf16: 1e12}   # without a newline at the end",
    "detected:\n- 1\n- 2\n# note\noverrides:\n  H20: {bf16: 1e12}\n",
    "# only a comment",
    "",
]


@pytest.mark.parametrize("text", USER_FILES)
def test_what_the_user_wrote_stays_to_the_letter(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(text, encoding="utf-8")
    record_detected(file, H100)
    record_detected(file, SLICE)
    after = file.read_text(encoding="utf-8")
    detected = yaml.safe_load(after)["detected"]
    assert {H100.name, SLICE.name} <= set(detected)
    users_lines = [
        line for line in text.splitlines() if "overrides" in line or "H20" in line or "keep" in line
    ]
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    for line in users_lines + comments:
        assert line in after.splitlines()
    if "five" in text:
        assert "        units: 5   # five" in after.splitlines()


def test_a_layout_without_room_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    for text in ("{overrides: {H20: {bf16: 1e12}}}\n", "overrides:\n  H20: {bf16: 1e12}\n...\n"):
        file.write_text(text)
        with pytest.raises(OSError, match="no room for a section"):
            record_detected(file, H100)
        assert file.read_text() == text


def test_a_corrupt_file_is_an_error_and_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("overrides: {H20: {bf16: quick}}\n")
    with pytest.raises(HardwareFileError, match="H20 > bf16"):
        record_detected(file, H100)
    assert file.read_text() == "overrides: {H20: {bf16: quick}}\n"


def test_links_and_permissions_are_kept(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "hw.yaml"
    real.parent.mkdir()
    real.write_text("overrides:\n")
    real.chmod(0o600)
    link = tmp_path / "hardware.yaml"
    link.symlink_to(real)
    record_detected(link, H100)
    assert link.is_symlink()
    assert H100.name in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600


WRITER = """
import sys
from pathlib import Path
from hardware_table import DetectedDevice
from hardware_table.hardware_file import record_detected
path, rank = Path(sys.argv[1]), int(sys.argv[2])
sys.stdin.readline()  # all start at once
for step in range(10):
    record_detected(path, DetectedDevice(
        name=f"card {rank}", backend="cuda", index=0, units=step + 1, total_memory=10**9))
    text = path.read_text()
    assert text.endswith("\\n") and "H20: {bf16: 1e12}  # mine" in text, text
"""


def test_ranks_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("overrides:\n  H20: {bf16: 1e12}  # mine\n")
    ranks = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(file), str(rank)], stdin=subprocess.PIPE)
        for rank in range(4)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(b"\n")
        rank.stdin.close()
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0, 0, 0]
    detected = yaml.safe_load(file.read_text())["detected"]
    assert {name: entry["units"] for name, entry in detected.items()} == {f"card {i}": 10 for i in range(4)}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hardware.yaml.lock", "hardware.yaml"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from hardware_table import DetectedDevice
from hardware_table.hardware_file import record_detected
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # a write past 64 bytes fails as on a full disk
try:
    record_detected(Path(sys.argv[1]), DetectedDevice(
        name="NVIDIA A10", backend="cuda", index=0, units=72, total_memory=10**9))
except OSError as error:
    print("refused:", error)
"""


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("overrides:\n  H20: {bf16: 1e12}\n")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("refused:")
    assert file.read_text() == "overrides:\n  H20: {bf16: 1e12}\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hardware.yaml.lock", "hardware.yaml"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, HardwareFileError)):
        record_detected(tmp_path / "file" / "hardware.yaml", H100)
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208
