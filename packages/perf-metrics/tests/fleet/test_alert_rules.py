"""Each alert fires when it should and not when it should not, by promtool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf_metrics.monitoring.alerts import alert_rules
from perf_metrics.monitoring.rules import recording_and_alert_rules
from perf_metrics.monitoring.series import FleetLabels

from .promtool_rules import H100, NEW, OLD, RuleTest

pytestmark = pytest.mark.usefixtures("prometheus_binaries")

JOB = {"hpc_job": "a"}
UNHEARD = "NVIDIA Unheard Of"


@pytest.fixture
def fleet(tmp_path: Path) -> RuleTest:
    return RuleTest(tmp_path, recording_and_alert_rules())


def alert(name: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, **labels}


def on_gpu(name: str, index: int) -> dict[str, str]:
    return alert(name, gpu=str(index), modelName=H100, **JOB)


def nothing(*minutes: int) -> dict[int, list[dict[str, str]]]:
    return {minute: [] for minute in minutes}


def device(index: int) -> dict[str, str]:
    return {"gpu": str(index), "hostname": "node1", "UUID": f"GPU-node1-{index}", "modelName": H100}


def four_gpus(fleet: RuleTest, activity: str = "0.5x400", mhz: str = "1350x400") -> None:
    """Four GPUs with the same figures; the usual ones are an OFU of 0.5 x 1350 / 1830 = 36.9 %."""
    for index in range(4):
        fleet.gpu(index, activity, mhz)


def expect_texts(
    fleet: RuleTest, minute: int, name: str, labels: dict[str, str], summary: str, value: str = ""
) -> None:
    """The alert has its severity, this summary, and its description with the value in it."""
    (rule,) = (rule for rule in alert_rules(FleetLabels()) if rule.name == name)
    description = re.sub(r"\{\{ \$value .*?\}\}", value, rule.description)
    description = description.replace("{{ $labels.modelName }}", labels.get("modelName", ""))
    texts = {"summary": summary, "description": description}
    fleet.expect_alert(minute, name, {"severity": rule.severity, **labels}, texts)


def test_a_steady_job_whose_mfu_is_about_its_ofu_raises_none(fleet: RuleTest) -> None:
    for index, activity in enumerate(("0.50 0.54", "0.52 0.49", "0.47 0.52", "0.50 0.40")):
        fleet.gpu(index, f"{activity} " * 200, "1350 1201 1558 1400 " * 100)
    fleet.add("training_mfu_ratio", JOB, "0.33x400")
    fleet.expect_firing(nothing(20, 100, 200, 390))


def test_a_fall_of_more_than_a_fifth(fleet: RuleTest) -> None:
    """In minute 245 the past is (201 x 0.5 + 30 x 0.25) / 231, from minute 0 to 15 minutes before."""
    four_gpus(fleet, "0.5x200 0.25x100", "1830x400")
    fleet.expect_firing({**nothing(200, 220, 230), 245: [alert("JobOFUFell", **JOB)]})
    expect_texts(fleet, 245, "JobOFUFell", JOB, "OFU of job a fell to 53.47% of what it was")


@pytest.mark.parametrize(
    "activity",
    ["0.5x200 0.45x100", "0.5x200 0x14 0.5x90", "0.3x200 0.5x100", "0.5x30 0.3x300"],
    ids=["small", "short", "rise", "start"],
)
def test_what_is_no_fall(fleet: RuleTest, activity: str) -> None:
    """Less than a fifth, an evaluation of 15 minutes, a rise, and a job without an hour behind it."""
    four_gpus(fleet, activity)
    fleet.expect_firing(nothing(*range(60, 290, 5)))


def test_a_fall_ends_with_the_job(fleet: RuleTest) -> None:
    four_gpus(fleet, "0.5x200 0.2x60 stale", "1350x260 stale")
    fleet.expect_firing({250: [alert("JobOFUFell", **JOB)], **nothing(263)})


@pytest.mark.parametrize(("mfu", "apart"), [("0.75", "25%"), ("0.25", "-25%")], ids=["above", "below"])
def test_mfu_and_ofu_apart(fleet: RuleTest, mfu: str, apart: str) -> None:
    four_gpus(fleet, "0.5x200", "1830x200")
    fleet.add("training_mfu_ratio", JOB, f"_x20 {mfu}x200")
    fleet.expect_firing({**nothing(40), 100: [alert("JobMFUAndOFUDiffer", **JOB)]})
    summary = f"MFU of job a less OFU of its GPUs is {apart} of peak"
    expect_texts(fleet, 100, "JobMFUAndOFUDiffer", JOB, summary)


@pytest.mark.parametrize("mfu", ["0.46x300", "0.28x300", "0.37x100 0.55x10 0.37x200"])
def test_mfu_and_ofu_less_than_ten_points_apart_or_for_a_moment(fleet: RuleTest, mfu: str) -> None:
    four_gpus(fleet)
    fleet.add("training_mfu_ratio", JOB, mfu)
    fleet.expect_firing(nothing(*range(60, 300, 5)))


def test_a_start_without_work_is_no_difference(fleet: RuleTest) -> None:
    four_gpus(fleet, "0x29 0.5x300")
    fleet.add("training_mfu_ratio", JOB, "_x30 0.37x300")
    fleet.expect_firing(nothing(35, 60, 80, 120))


def test_a_device_that_does_far_less_than_the_others_of_its_job(fleet: RuleTest) -> None:
    four_gpus(fleet)
    fleet.gpu(4, "0.1x400", "1830x400")
    fleet.expect_firing({**nothing(10), 40: [on_gpu("JobGPUWorksLess", 4)]})
    labels, summary = {**device(4), **JOB}, "GPU 4 of node1 does far less than the others of job a"
    expect_texts(fleet, 40, "JobGPUWorksLess", labels, summary, "10%")


def test_a_slice_is_named(fleet: RuleTest) -> None:
    mig = {"GPU_I_PROFILE": "1g.10gb", "GPU_I_ID": "7"}
    four_gpus(fleet)
    fleet.gpu(4, "0x400", "1830x400", **mig)
    labels = {**device(4), **mig, **JOB}
    summary = "GPU 4 of node1, slice 7 does far less than the others of job a"
    expect_texts(fleet, 40, "JobGPUWorksLess", labels, summary, "0%")


def test_devices_that_do_somewhat_less_or_belong_to_another_job(fleet: RuleTest) -> None:
    four_gpus(fleet)
    fleet.gpu(4, "0.3x400", "1350x400")
    fleet.gpu(5, "0.05x400", "1350x400", job="b")
    fleet.gpu(6, "0x400", "345x400", job=None)
    fleet.expect_firing(nothing(60))


def test_a_device_whose_clock_is_far_below_its_peers(fleet: RuleTest) -> None:
    """It is busier than those that wait for it, so that its OFU is theirs."""
    four_gpus(fleet)
    fleet.gpu(4, "0.75x400", "900x400")
    fleet.expect_firing({**nothing(10), 40: [on_gpu("JobGPUSlowClock", 4)]})
    labels, summary = {**device(4), **JOB}, "GPU 4 of node1 holds up job a with a low clock"
    expect_texts(fleet, 40, "JobGPUSlowClock", labels, summary, "900")


def test_a_stage_that_does_more_has_a_clock_of_its_own(fleet: RuleTest) -> None:
    for index in range(3):
        fleet.gpu(index, "0.4x400", "1700x400")
    fleet.gpu(3, "0.7x400", "1350x400")
    fleet.expect_firing(nothing(40))


def test_clocks_that_are_low_for_another_reason(fleet: RuleTest) -> None:
    """Somewhat below its peers; of another type; of another job; and with nothing to do."""
    four_gpus(fleet)
    fleet.gpu(4, "0.5x400", "1180x400")
    fleet.gpu(5, "0.6x400", "1000x400", modelName="NVIDIA A100-SXM4-80GB")
    fleet.gpu(6, "0.5x400", "800x400", job="b")
    fleet.gpu(7, "0x400", "345x400")
    fleet.expect_firing({60: [on_gpu("JobGPUWorksLess", 7)]})


def test_a_job_that_waits_has_no_slow_device(fleet: RuleTest) -> None:
    for index, mhz in enumerate((1980, 1980, 345, 345, 1980)):
        fleet.gpu(index, "0x400", f"{mhz}x400")
    fleet.expect_firing(nothing(25))


def test_a_job_without_tensor_activity(fleet: RuleTest) -> None:
    four_gpus(fleet, "0x400")
    fleet.gpu(5, "0x400", "345x400", job=None)
    fleet.expect_firing({**nothing(25), 40: [alert("JobWithoutTensorActivity", **JOB)]})
    summary = "No GPU of job a has used its tensor cores for 30 minutes"
    expect_texts(fleet, 40, "JobWithoutTensorActivity", JOB, summary)


def test_a_job_of_which_one_device_works_now_and_then_has_activity(fleet: RuleTest) -> None:
    four_gpus(fleet, "0x400")
    fleet.gpu(4, "0x20 0.02x4 0x400", "1350x400")
    fleet.expect_firing(nothing(40, 50))


def test_a_gpu_whose_tensor_clock_is_not_known(fleet: RuleTest) -> None:
    for index in (0, 1):
        fleet.gpu(index, "0.5x400", "1350x400", modelName=UNHEARD)
    fleet.gpu(2, "0.5x400", "1350x400")
    unheard = {"modelName": UNHEARD}
    fleet.expect_firing({**nothing(10), 30: [alert("GPUTensorClockUnknown", **unheard)]})
    summary = f"OFU of 2 devices of the type {UNHEARD} is not known"
    expect_texts(fleet, 30, "GPUTensorClockUnknown", unheard, summary)


def test_a_tensor_activity_in_percent(fleet: RuleTest) -> None:
    """It gives neither OFU nor a mean, so that nothing else would tell."""
    four_gpus(fleet)
    fleet.gpu(4, "55x400", "1350x400", names=(OLD, NEW))
    fleet.gpu(5, "9223372036854775794x400", "1350x400")  # a blank
    above = {"modelName": H100}
    fleet.expect_firing({**nothing(10), 40: [alert("GPUActivityAbove1", **above)]})
    expect_texts(
        fleet, 40, "GPUActivityAbove1", above, f"1 devices of the type {H100} show a tensor activity above 1"
    )


def test_an_mfu_above_the_peak(fleet: RuleTest) -> None:
    four_gpus(fleet)
    fleet.add("training_mfu_ratio", JOB, "37x20")
    fleet.expect_firing({**nothing(3), 12: [alert("JobMFUAbove1", **JOB)]})
    expect_texts(fleet, 12, "JobMFUAbove1", JOB, "Job a reports an MFU of 3700%")
