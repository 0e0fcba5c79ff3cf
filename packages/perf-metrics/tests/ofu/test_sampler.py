"""Sampling in the background, against the compiled library; and `perf-metrics watch`."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from perf_metrics.ofu.nvml import CycleCounts, Device, Reading
from perf_metrics.ofu.sampler import OFUSampler, WindowSums
from perf_metrics.ofu.samples import TensorClock

START = """
import json, threading, time
from dataclasses import asdict
from perf_metrics.ofu.sampler import OFUSampler

def tell(window):
    devices = [asdict(d) | {"reason": d.reason} for d in window.devices]
    return {"devices": devices, "ofu": window.ofu, "problem": window.problem,
            "reasons": window.reasons, "problems": window.problems}

def samples(sampler, number):
    end = time.monotonic() + 20
    while time.monotonic() < end and any(t.sums.samples < number and not t.ended for t in sampler._threads):
        time.sleep(0.01)
"""
NO_GPM = "unavailable: no tensor activity: the device has no GPM, which needs Hopper or newer"
GPU = "GPU-00000000-0000-0000-0000-00000000000"


def test_ofu_is_multiplied_for_each_sample_and_averaged_afterwards(fake_nvml) -> None:
    program = START + (
        "with OFUSampler(interval_s=0.1) as s:\n samples(s, 3)\n first = s.window()\n s.wait(5)\n"
        " second = s.window()\nprint(json.dumps([tell(first), tell(second)]))"
    )
    script = "activity 0 80 20 20\nclock 0 345 1830 610 610\ncycles 0 1000 900 500\n"
    first, second = fake_nvml.run(program, script)
    device = first["devices"][0]
    assert device["samples"] >= 3
    extra = device["samples"] - 3
    products = [0.8 * 1.0, *[0.2 / 3] * (2 + extra)]
    mean = sum(products) / len(products)
    assert device["ofu"] == pytest.approx(mean) == pytest.approx(first["ofu"])
    # The product of the means is something else: activity and clock go together here.
    assert device["ofu"] > 1.2 * device["tensor_activity"] * device["sm_mhz"] / device["tensor_mhz"]
    assert (device["lowest_sm_mhz"], device["highest_sm_mhz"], device["tensor_mhz"]) == (610, 1830, 1830)
    assert 0.1 < device["seconds"] / device["samples"] < 20
    # The counters are known from the second sample on, and grow from there.
    assert device["cycles"]["tensor"] == 500 * (device["samples"] - 1)
    assert 0 < device["cycles_seconds"] < device["seconds"]
    assert second["devices"][0]["ofu"] == pytest.approx(0.2 / 3)
    assert first["reasons"] == second["reasons"] == []


@pytest.mark.parametrize(
    ("counts", "sms"),
    [(1, 1), (132, 132), (66, None)],
)
def test_the_scale_of_the_raw_counters(fake_nvml, counts: int, sms: int | None) -> None:
    """At 1464 MHz of 1830 and half the cycles OFU is 40 %, with whichever scale, or unknown."""
    program = START + (
        "with OFUSampler(interval_s=0.1) as s:\n samples(s, 12)\n (d,) = s.window().devices\n"
        "print(json.dumps([asdict(d.cycle_scale()), d.ofu_of_cycles(), d.ofu]))"
    )
    rate = 1464e6 * counts
    scale, ofu, sampled = fake_nvml.run(
        program, f"activity 0 50\nclock 0 1464\nrates 0 {rate} {0.9 * rate} {0.5 * rate}\n"
    )
    assert scale["tensor_activity"] == pytest.approx(0.5)
    assert scale["measured"] == pytest.approx(counts, rel=0.05)
    assert scale["counts_per_cycle"] == sms
    assert sampled == pytest.approx(0.4)
    if sms is None:
        assert ofu is None
        assert scale["reason"].endswith("counts in a cycle are neither 1 nor the 132 SMs")
    else:
        assert ofu == pytest.approx(0.4, rel=0.05)
        assert scale["reason"] is None


def test_raw_counters_that_are_counted_differently_give_no_ofu(fake_nvml) -> None:
    program = START + (
        "with OFUSampler(interval_s=0.1) as s:\n samples(s, 3)\n (d,) = s.window().devices\n"
        "print(json.dumps([asdict(d.cycle_scale()), d.ofu_of_cycles()]))"
    )
    scale, ofu = fake_nvml.run(program, "activity 0 50\nclock 0 1464\nrates 0 1464e6 1464e6 96624e6\n")
    assert (ofu, scale["tensor_activity"]) == (None, None)
    assert scale["reason"] == "their ratio of 66 is not the activity of 0.5 that the gauge tells"
    assert fake_nvml.report == {"inits": 1, "shutdowns": 1, "allocated": 2, "freed": 2, "too_soon": 0}


def test_counters_that_begin_anew_are_not_counted_backwards() -> None:
    sums = WindowSums(Device("0", "x", "x", "GPU-0"), TensorClock(1830, "given"))
    before = None
    for tensor in (100.0, 250.0, 5.0, 25.0):  # the driver is loaded anew before the third sample
        reading = Reading(0.5, 1830, 0.5, CycleCounts(10 * tensor, 5 * tensor, tensor))
        sums.add(reading, before)
        before = reading.cycles
    window = sums.window(None)
    assert window.cycles == CycleCounts(1700, 850, 170)
    assert (window.samples, window.seconds, window.cycles_seconds) == (4, 2.0, 1.0)


def test_sixteen_samples_of_a_window_make_an_interval() -> None:
    sums = WindowSums(Device("0", "x", "x", "GPU-0"), TensorClock(1830, "given"))
    random = Random(0)
    for _ in range(15):
        sums.add(Reading(random.gauss(0.5, 0.01), 1830, 0.5, None), None)
    assert sums.window(None).interval is None
    for _ in range(25):
        sums.add(Reading(random.gauss(0.5, 0.01), 1830, 0.5, None), None)
    window = sums.window(None)
    assert window.interval is not None
    assert (window.interval.samples, window.interval.step_s) == (40, 0.5)
    assert window.interval.mean == pytest.approx(window.ofu)
    assert window.interval.half_width is not None
    assert 0.001 < window.interval.half_width < 0.02


def test_slow_forbidden_old_and_unknown_devices_do_not_stop_the_others(fake_nvml) -> None:
    script = (
        "gpus 6\ndelay 1 nvmlGpmSampleGet 30000\nfail 2 nvmlGpmSampleGet 4 -1\ngpm 3 0\n"
        "name 4 NVIDIA X9000\nfail 5 nvmlGpmSampleGet 10 1\n"
    )
    program = START + (
        "with OFUSampler(interval_s=0.2) as s:\n"
        " good, *_, passing = s._threads\n"
        " end = time.monotonic() + 20\n"
        " while time.monotonic() < end and not (good.sums.samples > 2 and passing._problem):\n"
        "  time.sleep(0.01)\n"
        " window = s.window()\nprint(json.dumps(tell(window)))"
    )
    window = fake_nvml.run(program, script)
    good, slow, forbidden, old, unknown, passing = window["devices"]
    assert (good["ofu"], good["reason"]) == (0.5, None)
    assert good["samples"] >= 3
    assert slow["ofu"] is None
    assert re.fullmatch(r"unavailable: no answer from the driver for \d+\.\d s", slow["reason"])
    assert forbidden["reason"] == "unavailable: nvmlGpmSampleGet: Insufficient Permissions"
    assert (
        old["reason"] == "unavailable: no tensor activity: the device has no GPM, which needs Hopper or newer"
    )
    assert (unknown["ofu"], unknown["tensor_activity"], unknown["sm_mhz"]) == (None, 0.5, 1830)
    assert unknown["reason"].startswith(
        "unavailable: tensor clock unknown: no single record of 'NVIDIA X9000'"
    )
    assert (passing["ofu"], passing["reason"], passing["problem"]) == (0.5, None, "nvmlGpmSampleGet: Timeout")
    assert window["ofu"] is None  # not the mean of those that answered
    assert [reason[:2] for reason in window["reasons"]] == ["1:", "2:", "3:", "4:"]
    # Where the driver answers, what was allocated for any of them is freed.
    fake_nvml.run(program, script.replace("30000", "0"))
    assert fake_nvml.report["allocated"] == fake_nvml.report["freed"] == 10


def test_slices_are_measured_by_themselves_at_the_clock_of_their_device(fake_nvml) -> None:
    program = START + (
        "with OFUSampler(interval_s=0.1) as s:\n s.wait(5)\n window = s.window()\n"
        f"with OFUSampler(['{GPU}1', '{GPU}7'], interval_s=0.1, tensor_mhz=1000) as s:\n s.wait(5)\n"
        " chosen = s.window()\nprint(json.dumps([tell(window), tell(chosen)]))"
    )
    script = "gpus 2\nmig 0 2\nslice 0 0 25\nslice 0 1 75\n"
    window, chosen = fake_nvml.run(program, script)
    assert [(d["label"], d["ofu"]) for d in window["devices"]] == [("0/0", 0.25), ("0/1", 0.75), ("1", 0.5)]
    assert window["ofu"] == 0.5
    assert [d["ofu"] for d in chosen["devices"]] == [pytest.approx(0.5 * 1.83), None]
    assert chosen["devices"][1]["label"] == f"{GPU}7"
    assert chosen["problems"] == [
        f"{GPU}7: unavailable: no device '{GPU}7': nvmlDeviceGetHandleByUUID: Not Found"
    ]


def test_start_and_stop_twice_and_again(fake_nvml) -> None:
    program = START + (
        "s = OFUSampler(interval_s=0.1)\nbefore = tell(s.window())\ns.stop()\ns.start()\ns.start()\n"
        "number = threading.active_count()\ns.wait(5)\ns.stop()\ns.stop()\nleft = tell(s.window())\n"
        "gone = threading.active_count()\ns.start()\ns.wait(5)\nagain = tell(s.window())\ns.stop()\n"
        "print(json.dumps([before, number, left, gone, again]))"
    )
    before, number, left, gone, again = fake_nvml.run(program)
    assert (before["ofu"], before["reasons"]) == (None, ["unavailable: the sampler was not started"])
    assert (number, gone) == (2, 1)
    assert left["ofu"] == again["ofu"] == 0.5
    assert fake_nvml.report == {"inits": 2, "shutdowns": 2, "allocated": 4, "freed": 4, "too_soon": 0}


def test_what_is_sampled_in_a_pause_is_left_out(fake_nvml) -> None:
    program = START + (
        "with OFUSampler(interval_s=0.5) as s:\n s.pause()\n s.pause()\n time.sleep(0.75)\n"
        " paused = s.window()\n"
        " began = time.monotonic()\n s.resume()\n s.resume()\n s.wait(20)\n took = time.monotonic() - began\n"
        " print(json.dumps([tell(paused), tell(s.window()), took]))"
    )
    paused, resumed, took = fake_nvml.run(program)
    assert (paused["devices"][0]["samples"], paused["reasons"]) == (0, ["0: no sample yet"])
    assert (resumed["devices"][0]["samples"], resumed["ofu"]) == (1, 0.5)
    # It began after the resumption: the one that was under way then covers some of the pause.
    assert took >= resumed["devices"][0]["seconds"]


def test_a_thread_that_waits_for_the_driver_does_not_hold_up_the_end(fake_nvml) -> None:
    program = START + (
        "s = OFUSampler(interval_s=0.1)\ns.start()\ntime.sleep(0.3)\nbegan = time.monotonic()\ns.stop()\n"
        "print(json.dumps(time.monotonic() - began))"
    )
    assert 1.5 < fake_nvml.run(program, "delay 0 nvmlGpmSampleGet 30000\n") < 25


@pytest.mark.parametrize(
    ("script", "driver", "problem"),
    [
        ("", "none", "libnvidia-ml.so.1 not found: no NVIDIA driver here"),
        ("gpus 0", "gpm", "NVML lists no devices"),
        ("fail 0 nvmlInitWithFlags 4 -1", "gpm", "nvmlInit: Insufficient Permissions"),
    ],
)
def test_without_devices_there_is_a_reason_and_no_exception(
    fake_nvml, script: str, driver: str, problem: str
) -> None:
    program = START + "with OFUSampler() as s:\n print(json.dumps([tell(s.window()), s.wait(1)]))"
    window, waited = fake_nvml.run(program, script + "\n", driver)
    assert (window["problem"], window["ofu"], window["devices"], waited) == (problem, None, [], True)


@pytest.mark.parametrize("interval", [0.0, 0.099, 30.1, float("nan")])
def test_the_interval_has_bounds(interval: float) -> None:
    with pytest.raises(ValueError, match=r"^interval_s=.*must be 0\.1 to 30\.0 seconds"):
        OFUSampler(interval_s=interval)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"^devices='GPU-1' must be a list"):
        OFUSampler("GPU-1")
    with pytest.raises(ValueError, match=r"^tensor_mhz=0 must be a positive number"):
        OFUSampler(tensor_mhz=0)


WATCH = """
import sys
from perf_metrics.commands import OneLineParser
from perf_metrics.commands.ofu import fill_watch
parser = OneLineParser(prog="perf-metrics watch")
fill_watch(parser)
options = parser.parse_args(sys.argv[1:])
sys.exit(options.run(options))
"""


def watch(fake_nvml, script: str, *words: str, driver: str = "gpm") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WATCH, *words]
    environment = fake_nvml.environment(script, driver)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_watch_once_shows_a_table_and_appends_lines(fake_nvml, tmp_path: Path) -> None:
    script = "gpus 2\nactivity 0 60\nclock 0 915\ngpm 1 0\n"
    lines = tmp_path / "ofu.jsonl"
    lines.write_text('{"older": true}\n')
    done = watch(fake_nvml, script, "--once", "--interval", "0.2", "--json-lines", str(lines))
    assert (done.returncode, done.stderr) == (0, "")
    title, header, first, second = done.stdout.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", title)
    assert " ".join(header.split()) == "GPU name OFU tensor active SM MHz lowest highest tensor MHz"
    assert " ".join(first.split()) == "0 NVIDIA H100 80GB HBM3 30.0% 60.0% 915 915 915 1830"
    assert second.startswith("1    NVIDIA H100 80GB HBM3    n/a")
    assert second.endswith(
        "unavailable: no tensor activity: the device has no GPM, which needs Hopper or newer"
    )
    older, one, two = map(json.loads, lines.read_text().splitlines())
    assert older == {"older": True}
    assert (one["gpu"], one["ofu"], one["tensor_activity"], one["sm_mhz"]) == (
        "0",
        pytest.approx(0.3),
        0.6,
        915,
    )
    assert (one["reason"], one["tensor_mhz"], one["uuid"]) == (None, 1830, f"{GPU}0")
    assert abs(one["timestamp"] - time.time()) < 60
    assert (two["ofu"], two["samples"]) == (None, 0)
    assert two["reason"].startswith("unavailable: ")


def test_watch_into_a_pipe_has_blocks_without_escape_codes_until_interrupted(fake_nvml) -> None:
    command, environment = [sys.executable, "-c", WATCH, "--interval", "0.2"], fake_nvml.environment("")
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = [process.stdout.readline() for _ in range(7)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
    assert [line.split()[:1] for line in seen] == [
        seen[0].split()[:1],
        ["GPU"],
        ["0"],
        [],
        *([seen[4].split()[:1], ["GPU"], ["0"]]),
    ]
    assert "\x1b" not in "".join(seen)
    assert fake_nvml.report["shutdowns"] == 1


def test_watch_on_a_terminal_draws_over_the_last_table(fake_nvml) -> None:
    parent, child = pty.openpty()
    command, environment = [sys.executable, "-c", WATCH, "--interval", "0.2"], fake_nvml.environment("")
    with subprocess.Popen(command, env=environment, stdout=child, stderr=child) as process:
        os.close(child)
        shown = b""
        while shown.count(b"\x1b[J") < 2:
            shown += os.read(parent, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    os.close(parent)
    assert shown.startswith(b"\x1b[2J\x1b[H")
    assert shown.count(b"\x1b[2J") == 1
    assert shown.count(b"\x1b[H") >= 2
    assert b"NVIDIA H100 80GB HBM3" in shown
    assert b"Traceback" not in shown


def test_watch_without_a_driver_says_so_and_ends(fake_nvml) -> None:
    done = watch(fake_nvml, "", driver="none")
    assert (done.returncode, done.stdout) == (1, "")
    message = "perf-metrics watch: unavailable: libnvidia-ml.so.1 not found: no NVIDIA driver here\n"
    assert done.stderr == message


@pytest.mark.parametrize("words", [["--interval", "0.05"], ["--interval", "x"], ["--tensor-mhz", "-1"]])
def test_watch_refuses_bad_settings_in_one_line(fake_nvml, words: list[str]) -> None:
    done = watch(fake_nvml, "", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"perf-metrics watch: argument {words[0]}: ")
    assert done.stderr.count("\n") == 1
