"""The console script: output for people and for programs, and one line for bad input."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from hardware_table import accelerators
from hardware_table.cli import main

Captured = pytest.CaptureFixture[str]


def test_list_shows_every_device_in_a_table(capsys: Captured) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["device", "arch", "units", "GHz", "bf16"]
    assert len(lines) == 1 + len(accelerators()) + 2
    row = next(line for line in lines if line.startswith("NVIDIA H100 PCIe "))
    assert (
        " ".join(row.split()) == "NVIDIA H100 PCIe Hopper 114 SM 1.62 756 756 378 - - 1513 - - 2000 measured"
    )
    assert max(map(len, lines)) < 170


def test_list_filters_by_architecture_and_dtype(capsys: Captured) -> None:
    assert main(["list", "--arch", "cdna3", "--dtype", "float8"]) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()[1:-2]] == [
        "AMD Instinct MI325X",
        "AMD Instinct MI300X",
        "AMD Instinct MI300A",
    ]
    assert "fp8" in out
    assert "bf16" not in out
    for term in ("9.0", "GH100"):
        assert main(["list", "--arch", term, "--json"]) == 0
        records = json.loads(capsys.readouterr().out)
        assert any(record["name"] == "NVIDIA H20" for record in records)
    assert main(["list", "--arch", "hopper", "--dtype", "fp4"]) == 0  # nothing, but no mistake either


def test_list_as_json_is_the_whole_table(capsys: Captured) -> None:
    assert main(["list", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == len(accelerators())
    a10 = next(record for record in records if record["name"] == "NVIDIA A10")
    assert a10["peaks"][0] == {
        "dtype": "bf16",
        "flops": 125e12,
        "published": 125e12,
        "flops_per_cycle": 1024,
        "derived": pytest.approx(124.97e12, rel=1e-4),
    }
    assert a10["memory"] == [{"bandwidth": 600e9, "gigabytes": None}]


def test_show_tells_derivation_source_and_reason(capsys: Captured) -> None:
    assert main(["show", "h100 80gb hbm3"]) == 0
    out = capsys.readouterr().out
    for part in (
        "NVIDIA H100 80GB HBM3",
        "132 SMs",
        "1.83 GHz (tensor)",
        "boost 1.98 GHz",
        "989.4",
        "[h100]",
    ):
        assert part in out
    assert "below the 1980 MHz SM boost clock" in " ".join(out.split())


def test_show_a_slice(capsys: Captured) -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert main(["show", name, "--units", "42", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["units"], record["scaled_from"]) == (42, 108)
    assert record["peaks"][0]["flops"] == pytest.approx(121.33e12, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["show", "RTX 4090"], "Similar names: NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 4090 D"),
        (["show", "NVIDIA A1OG"], "Similar names: NVIDIA A10"),
        (["show", ""], "it is not in the table"),
        (["show", "NVIDIA H100"], "Give the full name of one, or --units"),
        (["show", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"], "needs the number of SMs"),
        (["show", "NVIDIA A10", "--units", "0"], "units=0 must be at least 1"),
        (["list", "--arch", "Pascal"], "--arch 'Pascal' is not in the table. Use one of Blackwell Ultra"),
        (["list", "--dtype", "f8"], "dtype='f8' is not known"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys: Captured, arguments: list[str], complaint: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hardware-table: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["shew"], ["show"], ["show", "A10", "--units", "many"], ["list", "--x"]]
)
def test_a_wrong_command_line_is_one_line_and_status_2(capsys: Captured, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("hardware-table")
    assert err.count("\n") == 1
    assert "See --help" in err


def test_the_module_runs_and_stops_quietly_when_its_reader_does() -> None:
    listing = subprocess.Popen(
        [sys.executable, "-m", "hardware_table", "list", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert listing.stdout is not None
    assert listing.stdout.readline() == b"[\n"
    listing.stdout.close()
    assert listing.stderr is not None
    assert listing.stderr.read() == b""
    listing.stderr.close()
    assert listing.wait(timeout=60) == 0


def test_version(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hardware-table {version('hardware-table')}\n"


def test_help_keeps_square_brackets_as_they_are(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["list", "--help"])
    assert "[--arch NAME]" in capsys.readouterr().out
