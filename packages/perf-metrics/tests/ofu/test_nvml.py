"""Devices, readings and errors, through the real bindings against the compiled library; and the clocks."""

import subprocess
import sys

import pytest

from hardware_table import accelerators
from perf_metrics.ofu.samples import ofu_from_activity, ofu_from_cycles, tensor_clock

READ = """
import json, sys, time
from dataclasses import asdict
from perf_metrics.ofu.nvml import TensorMeter
from perf_metrics.ofu.nvml import Nvml, UnavailableError

def tell(number, identifier=None):
    out = []
    try:
        with Nvml() as nvml:
            device = nvml.devices()[0] if identifier is None else nvml.find(identifier)
            meter = TensorMeter(nvml, device)
            for _ in range(number):
                time.sleep(meter.seconds_to_wait())
                try:
                    reading = meter.read()
                    out.append(None if reading is None else asdict(reading))
                except UnavailableError as error:
                    out.append([error.reason, error.passing])
            out.append(meter.counters_reason)
            meter.close()
            meter.close()
    except UnavailableError as error:
        out.append(error.reason)
    return out
"""
EACH = """
import os
from pathlib import Path

def tell_each(cases):
    answers = []
    for script, number, identifier in cases:
        Path(os.environ["FAKE_NVML_SCRIPT"]).write_text(script)  # read anew when NVML is opened
        answers.append(tell(number, identifier))
    return answers
"""
LIST = """
import json
from perf_metrics.ofu.nvml import Nvml
with Nvml() as nvml:
    devices = nvml.devices()
print(json.dumps([[d.label, d.name, d.chip, d.uuid, d.gpu_instance, d.problem] for d in devices]))
"""
H100 = "NVIDIA H100 80GB HBM3"


def test_activity_clock_and_counters_over_time(fake_nvml) -> None:
    script = "activity 0 40 80.5 12\nclock 0 345 1500 1600 1980\ncycles 0 1000 900 500\n"
    first, *readings, counters = fake_nvml.run(READ + "print(json.dumps(tell(4)))", script)
    assert (first, counters) == (None, None)
    assert [reading["tensor_activity"] for reading in readings] == pytest.approx([0.40, 0.805, 0.12])
    assert [reading["sm_mhz"] for reading in readings] == [1500, 1600, 1980]
    assert [reading["cycles"]["tensor"] for reading in readings] == [1000, 1500, 2000]
    assert readings[0]["cycles"] == {"elapsed": 2000, "active": 1800, "tensor": 1000}
    assert all(0.1 < reading["seconds"] < 60 for reading in readings)
    assert fake_nvml.report == {"inits": 1, "shutdowns": 1, "allocated": 2, "freed": 2, "too_soon": 0}


def test_a_driver_without_the_counters_still_tells_the_activity(fake_nvml) -> None:
    _, reading, counters = fake_nvml.run(READ + "print(json.dumps(tell(2)))")
    assert (reading["tensor_activity"], reading["cycles"]) == (0.5, None)
    assert counters == "GPM metric 248: Not Supported"


@pytest.mark.parametrize(
    ("script", "driver", "reason"),
    [
        ("", "none", "libnvidia-ml.so.1 not found: no NVIDIA driver here"),
        ("", "no_gpm", "the installed driver has no nvmlGpmQueryDeviceSupport"),
        ("gpm 0 0", "gpm", "no tensor activity: the device has no GPM, which needs Hopper or newer"),
        ("fail 0 nvmlInitWithFlags 9 -1", "gpm", "nvmlInit: Driver Not Loaded"),
        (
            "fail 0 nvmlGpmQueryDeviceSupport 4 -1",
            "gpm",
            "nvmlGpmQueryDeviceSupport: Insufficient Permissions",
        ),
        ("fail 0 nvmlDeviceGetHandleByIndex_v2 15 -1", "gpm", "nvmlDeviceGetHandleByIndex: GPU is lost"),
        ("gpus 1\nmig 0 0", "gpm", "in MIG mode, without slices"),
    ],
)
def test_what_cannot_be_measured_has_a_reason(fake_nvml, script: str, driver: str, reason: str) -> None:
    assert fake_nvml.run(READ + "print(json.dumps(tell(2)))", script + "\n", driver) == [reason]


def tell_each(fake_nvml, cases: list[tuple[str, int, str | None]]) -> list[list[object]]:
    """For each script: so many readings of a device, by its identifier; all in one process."""
    answers: list[list[object]] = fake_nvml.run(f"{READ}{EACH}print(json.dumps(tell_each({cases!r})))")
    return answers


def test_errors_of_a_sample(fake_nvml) -> None:
    """The first sample fails; after it two are needed for a reading."""
    errors = {
        "nvmlGpmSampleGet 4": ["nvmlGpmSampleGet: Insufficient Permissions", False],
        "nvmlDeviceGetClockInfo 3": ["nvmlDeviceGetClockInfo: Not Supported", False],
        "nvmlGpmSampleGet 10": ["nvmlGpmSampleGet: Timeout", True],
        "nvmlGpmSampleGet 77": ["nvmlGpmSampleGet: error of the scripted library", False],
    }
    answers = tell_each(fake_nvml, [(f"fail 0 {rule} 1\n", 3, None) for rule in errors])
    for answer, error in zip(answers, errors.values(), strict=True):
        assert answer[:2] == [error, None]
        assert answer[2]["tensor_activity"] == 0.5
    assert fake_nvml.report["allocated"] == fake_nvml.report["freed"] == 2 * len(errors)


def test_a_value_that_is_no_share_is_not_passed_on(fake_nvml) -> None:
    values = ("nan", "inf", "-1.0")
    answers = tell_each(fake_nvml, [(f"activity 0 {value}\n", 2, None) for value in values])
    assert [answer[1] for answer in answers] == [
        [f"GPM metric 5: the driver gave {value}", True] for value in values
    ]


def test_samples_too_close_together_are_refused_before_the_driver_sees_them(fake_nvml) -> None:
    program = READ.replace("time.sleep(meter.seconds_to_wait())", "pass") + "print(json.dumps(tell(2)))"
    assert fake_nvml.run(program)[1] == ["GPM samples must be more than 100 ms apart", True]
    assert fake_nvml.report["too_soon"] == 0


def test_devices_and_slices_of_a_node(fake_nvml) -> None:
    script = (
        "gpus 4\nmig 1 2\nname 2 NVIDIA A100-SXM4-80GB\nfail 2 nvmlDeviceGetMigMode 3 -1\n"
        "fail 3 nvmlDeviceGetName 4 -1\n"
    )
    part = f"{H100} MIG 1g.10gb"
    assert fake_nvml.run(LIST, script) == [
        ["0", H100, H100, "GPU-00000000-0000-0000-0000-000000000000", None, None],
        ["1/0", part, H100, "MIG-00000000-0000-0000-0000-000000000010", 7, None],
        ["1/1", part, H100, "MIG-00000000-0000-0000-0000-000000000011", 8, None],
        ["2", *["NVIDIA A100-SXM4-80GB"] * 2, "GPU-00000000-0000-0000-0000-000000000002", None, None],
        ["3", "unknown", "unknown", "", None, "nvmlDeviceGetName: Insufficient Permissions"],
    ]


def test_a_device_by_its_uuid_or_bus_id(fake_nvml) -> None:
    uuid = "00000000-0000-0000-0000-00000000000"
    found = {
        f"GPU-{uuid}1": 0.5,
        f"{uuid}1": 0.5,
        "00000000:11:00.0": 0.5,
        f"MIG-{uuid}1": 0.7,
        f"MIG-{uuid}0": 0.2,
    }
    refused = {
        "GPU-1": "no device 'GPU-1': nvmlDeviceGetHandleByUUID: Not Found",
        "00000000:10:00.0": f"GPU-{uuid}0 is divided into MIG slices: name the slice, as "
        "`nvidia-smi -L` lists it",
    }
    script = "gpus 2\nmig 0 2\nslice 0 0 20\nslice 0 1 70\n"
    answers = tell_each(fake_nvml, [(script, 2, identifier) for identifier in (*found, *refused)])
    activities = [answer[1]["tensor_activity"] for answer in answers[: len(found)]]
    assert activities == pytest.approx(list(found.values()))
    assert answers[len(found) :] == [[reason] for reason in refused.values()]


@pytest.mark.parametrize("content", [None, "def nvmlInit(): ...\n"])
def test_missing_and_old_bindings_say_what_to_install(tmp_path, content: str | None) -> None:
    """Without the module: -S leaves the installed packages out, and the path names what is needed."""
    block = (
        "sys.modules['pynvml'] = None\n" if content is None else f"sys.path.insert(0, {str(tmp_path)!r})\n"
    )
    if content is not None:
        (tmp_path / "pynvml.py").write_text(content)
    program = f"import sys\n{block}from perf_metrics.ofu.nvml import Nvml\nNvml()\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ModuleNotFoundError")
    assert error.endswith("with `pip install 'perf-metrics[nvml]'`.")


@pytest.mark.parametrize(
    ("name", "mhz"),
    [
        # The publication, and the products of survey section a: never the boost limit of 1980 MHz.
        (H100, 1830),
        ("NVIDIA H200", 1830),
        ("NVIDIA A100-SXM4-80GB", 1410),
        ("NVIDIA B200", 1856),
        ("NVIDIA H100 NVL", 1545),
        ("NVIDIA H100 PCIe", 1620),
    ],
)
def test_tensor_clocks(name: str, mhz: float) -> None:
    clock = tensor_clock(name)
    assert clock.mhz == pytest.approx(mhz)
    assert clock.source.startswith(f"hardware-table, {name}: ")


@pytest.mark.parametrize("name", ["Nvidia X", "NVIDIA H100", "NVIDIA B100"])
def test_an_unknown_an_ambiguous_and_an_unpublished_clock(name: str) -> None:
    clock = tensor_clock(name)
    assert clock.mhz is None
    assert clock.source.startswith("tensor clock unknown: ")


def test_the_clocks_of_the_table_agree_with_its_peaks() -> None:
    """f = peak / (units x FLOPs per cycle), within rounding of the published peaks."""
    seen = 0
    for record in accelerators():
        peak = record.peak("bf16")
        if record.vendor != "NVIDIA" or record.units is None or peak is None or peak.flops_per_cycle is None:
            continue
        clock = tensor_clock(record.name).mhz
        assert clock == pytest.approx(peak.flops / record.units / peak.flops_per_cycle / 1e6, rel=0.01), (
            record.name
        )
        seen += 1
    assert seen > 50


def test_ofu_of_a_sample() -> None:
    assert ofu_from_activity(0.5, 1464, 1830) == pytest.approx(0.4)
    assert ofu_from_activity(0, 345, 1830) == 0
    # Half the cycles of 132 SMs over two seconds at the tensor clock.
    assert ofu_from_cycles(132 * 1.83e9, 2.0, 1830, counts_per_cycle=132) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ((-0.1, 1500, 1830), "tensor_activity"),
        ((float("nan"), 1500, 1830), "tensor_activity"),
        ((0.5, float("inf"), 1830), "sm_mhz"),
        ((0.5, 1500, 0), "tensor_mhz"),
    ],
)
def test_ofu_refuses_what_is_no_sample(arguments: tuple[float, float, float], setting: str) -> None:
    with pytest.raises(ValueError, match=f"^{setting}="):
        ofu_from_activity(*arguments)
