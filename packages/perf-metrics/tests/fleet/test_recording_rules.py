"""What the rules record, by promtool; the values are such that binary fractions hold them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from perf_metrics import tensor_clock
from perf_metrics.fleet.job_samples import MOST_MHZ
from perf_metrics.monitoring.rules import known_tensor_clocks, recording_and_alert_rules, recording_rules
from perf_metrics.monitoring.series import FleetLabels
from perf_metrics.ofu.counter_files import CLOCK_NAME, blank_reason

from .promtool_rules import CLOCK, H100, NEW, OLD, RuleTest

pytestmark = pytest.mark.usefixtures("prometheus_binaries")

JOB_A, JOB_B = {"hpc_job": "a"}, {"hpc_job": "b"}


@pytest.fixture
def fleet(tmp_path: Path) -> RuleTest:
    return RuleTest(tmp_path, recording_and_alert_rules())


def of_gpu(index: int, **labels: str) -> dict[str, str]:
    """The labels of a GPU in recorded series."""
    device = {"gpu": str(index), "UUID": f"GPU-node1-{index}", "modelName": H100, "hostname": "node1"}
    return {**device, **labels}


def test_ofu_is_activity_times_sm_clock_over_tensor_clock(fleet: RuleTest) -> None:
    fleet.gpu(0, "0.5x9", "915x9")
    fleet.gpu(1, "0.25x9", "1830x9")
    fleet.gpu(2, "0.75x9", "1830x9", job="b")
    fleet.expect(
        5,
        "{__name__=~'.*:ofu:ratio'}",
        ({"__name__": "gpu:ofu:ratio", **of_gpu(0)}, 0.25),
        ({"__name__": "gpu:ofu:ratio", **of_gpu(1)}, 0.25),
        ({"__name__": "gpu:ofu:ratio", **of_gpu(2)}, 0.75),
        ({"__name__": "job_gpu:ofu:ratio", **of_gpu(0), **JOB_A}, 0.25),
        ({"__name__": "job_gpu:ofu:ratio", **of_gpu(1), **JOB_A}, 0.25),
        ({"__name__": "job_gpu:ofu:ratio", **of_gpu(2), **JOB_B}, 0.75),
        ({"__name__": "job:ofu:ratio", **JOB_A}, 0.25),
        ({"__name__": "job:ofu:ratio", **JOB_B}, 0.75),
        ({"__name__": "fleet:ofu:ratio"}, 1.25 / 3),
    )


def test_each_sample_is_multiplied_before_the_mean_is_taken(fleet: RuleTest) -> None:
    """The mean of the products is 0.3125; the product of the means would be 0.375."""
    fleet.gpu(0, "0.25 0.75 " * 40, "1830 915 " * 40)
    for name in ("job:ofu:ratio_avg1h", "job:ofu:ratio_avg15m"):
        fleet.expect(70, f"abs({name} - 0.3125) < bool 0.005", (JOB_A, 1))


def test_both_names_of_the_metric_count_once_and_the_new_one_comes_first(fleet: RuleTest) -> None:
    fleet.gpu(0, "0.5x9", "1830x9", names=(OLD,))
    fleet.gpu(1, "0.5x9", "1830x9", names=(NEW,))
    fleet.gpu(2, "0.25x9", "1830x9", names=(OLD,))
    fleet.gpu(2, "0.5x9", "1830x9", names=(NEW,))
    expected = ((of_gpu(index, __name__="gpu:ofu:ratio"), 0.5) for index in range(3))
    fleet.expect(5, "gpu:ofu:ratio", *expected)
    fleet.expect(5, "job:gpus:count", ({"__name__": "job:gpus:count", **JOB_A}, 3))


@pytest.mark.parametrize("blank", [2147483632, 140737488355328, 9223372036854775794, 1.5, -1])
def test_blanks_of_the_activity_are_left_out(fleet: RuleTest, blank: float) -> None:
    assert blank_reason(OLD, blank) is not None
    fleet.gpu(0, f"0.5x9 {blank}x9", "1830x19")
    fleet.gpu(1, "0.25x19", "1830x19")
    fleet.expect(5, "job:ofu:ratio", ({"__name__": "job:ofu:ratio", **JOB_A}, 0.375))
    fleet.expect(15, "job:ofu:ratio", ({"__name__": "job:ofu:ratio", **JOB_A}, 0.25))


def test_a_blank_under_the_new_name_leaves_the_value_of_the_old_one(fleet: RuleTest) -> None:
    fleet.gpu(0, "0.5x9", "1830x9", names=(OLD,))
    fleet.gpu(0, "9223372036854775794x9", None, names=(NEW,))
    fleet.expect(5, "gpu:ofu:ratio", (of_gpu(0, __name__="gpu:ofu:ratio"), 0.5))


@pytest.mark.parametrize("blank", [2147483632, 2147483635, 140737488355330, 9223372036854775794])
def test_blanks_of_the_clock_are_left_out(fleet: RuleTest, blank: float) -> None:
    fleet.gpu(0, "0.5x19", f"1830x9 {blank}x9")
    fleet.expect(5, "gpu:ofu:ratio", (of_gpu(0, __name__="gpu:ofu:ratio"), 0.5))
    fleet.expect(15, "gpu:ofu:ratio")


def test_no_blank_passes_for_a_clock() -> None:
    first = 0x7FFFFFF0
    assert blank_reason(CLOCK_NAME, first) is not None
    assert blank_reason(CLOCK_NAME, first - 1) is None
    assert first > MOST_MHZ


@pytest.mark.parametrize("names", [(OLD,), (NEW,), (OLD, NEW)])
def test_a_gpu_counts_once_while_series_of_it_live_under_two_names(
    fleet: RuleTest, names: tuple[str, ...]
) -> None:
    """An exporter is renamed, or a second one runs beside it: the host, the index and the metric differ."""
    fleet.gpu(0, "0.5x9", "1830x9")
    fleet.gpu(1, "0.25x9", "1830x9")
    for index, activity in ((0, "0.5x9"), (1, "0.25x9")):
        renamed = {"UUID": f"GPU-node1-{index}", "gpu": str(7 - index), "instance": "new:9400"}
        renamed |= {"modelName": H100, "hostname": "node1.cluster.local", **JOB_A}
        for name in names:
            fleet.add(name, renamed, activity)
        fleet.add(CLOCK, renamed, "1830x9")
    fleet.gpu(2, "0.75x9", "1830x9", job="b")
    for query, expected in (
        (
            "job:gpus:count",
            [({"__name__": "job:gpus:count", **JOB_A}, 2), ({"__name__": "job:gpus:count", **JOB_B}, 1)],
        ),
        (
            "job:ofu:ratio",
            [({"__name__": "job:ofu:ratio", **JOB_A}, 0.375), ({"__name__": "job:ofu:ratio", **JOB_B}, 0.75)],
        ),
        ("fleet:ofu:ratio", [({"__name__": "fleet:ofu:ratio"}, 0.5)]),
        ("fleet:ofu_in_jobs:ratio", [({"__name__": "fleet:ofu_in_jobs:ratio"}, 0.5)]),
        ("count({__name__=~'(job_)?gpu:(ofu|tensor_activity|device|sm_clock).*'}) by (__name__) != 3", []),
    ):
        fleet.expect(5, query, *expected)


def test_the_names_of_a_gpu_do_not_change_to_and_fro(fleet: RuleTest) -> None:
    """Which of two series is higher changes all the time; an alert of 15 minutes would never fire."""
    fleet.gpu(0, "0.25 0.5 " * 30, "1830x60")
    fleet.gpu(0, "0.5 0.25 " * 30, "1830x60", host="other", UUID="GPU-node1-0")
    fleet.expect(50, "count(count_over_time(gpu:ofu:ratio[40m]))", ({}, 1))


@pytest.mark.parametrize("mhz", [1_830_000, 1_830_000_000, 4000])
def test_a_clock_that_cannot_be_true_gives_no_ofu(fleet: RuleTest, mhz: int) -> None:
    fleet.gpu(0, "0.5x30", f"{mhz}x30")
    fleet.gpu(1, "0.25x30", "1830x30", job="b")
    fleet.expect(5, "job:ofu:ratio", ({"__name__": "job:ofu:ratio", **JOB_B}, 0.25))
    fleet.expect(5, "fleet:ofu:ratio", ({"__name__": "fleet:ofu:ratio"}, 0.25))
    fleet.expect_firing({20: [{"alertname": "GPUWithoutOFU", "modelName": H100}]})


def test_hosts_have_one_label_whatever_the_exporters_version(fleet: RuleTest) -> None:
    fleet.gpu(0, "0.5x9", "1830x9")
    device = {"gpu": "1", "UUID": "GPU-node1-1", "modelName": H100, "hostname": "node1", **JOB_A}
    fleet.add(NEW, device, "0.5x9")
    fleet.add(CLOCK, device, "1830x9")
    expected = ((of_gpu(index, __name__="gpu:ofu:ratio"), 0.5) for index in range(2))
    fleet.expect(5, "gpu:ofu:ratio", *expected)


def test_a_shared_device_counts_for_each_of_its_jobs_and_once_for_the_fleet(fleet: RuleTest) -> None:
    for job in ("a", "b"):
        fleet.gpu(0, "0.5x9", "1830x9", job=job)
    fleet.gpu(1, "0x9", "345x9", job=None)
    fleet.gpu(2, "0.25x9", "1830x9", job="b")
    fleet.expect(
        5,
        "{__name__=~'(job|fleet):ofu.*:ratio'}",
        ({"__name__": "job:ofu:ratio", **JOB_A}, 0.5),
        ({"__name__": "job:ofu:ratio", **JOB_B}, 0.375),
        ({"__name__": "fleet:ofu:ratio"}, 0.25),
        ({"__name__": "fleet:ofu_in_jobs:ratio"}, 0.375),
    )
    fleet.expect(5, "count(gpu:ofu:ratio)", ({}, 3))


def test_a_slice_has_its_own_clock_or_else_that_of_its_gpu(fleet: RuleTest) -> None:
    for index in (0, 1):
        device = {"gpu": str(index), "UUID": f"GPU-node1-{index}", "modelName": H100, "Hostname": "node1"}
        mig = {**device, "GPU_I_PROFILE": "3g.40gb"}
        fleet.add(CLOCK, device, "915x9")  # has no job
        for slice_id in ("1", "2"):
            fleet.add(OLD, {**mig, "GPU_I_ID": slice_id, **JOB_A}, "0.5x9")
    fleet.add(CLOCK, {**mig, "GPU_I_ID": "2", **JOB_A}, "1830x9")
    expected = [
        (of_gpu(index, GPU_I_PROFILE="3g.40gb", GPU_I_ID=slice_id), ofu)
        for index, slice_id, ofu in ((0, "1", 0.25), (0, "2", 0.25), (1, "1", 0.25), (1, "2", 0.5))
    ]
    fleet.expect(5, "sum without (none) (gpu:ofu:ratio)", *expected)


def test_gpus_are_counted_by_what_they_do(fleet: RuleTest) -> None:
    """Two work, one is idle in a job, one has none; of a GPU with two slices one has a job."""
    for index, activity in enumerate(("0.5x30", "0.5x30", "0x30")):
        fleet.gpu(index, activity, "1830x30")
    fleet.gpu(3, "0x30", "1830x30", job=None)
    fleet.gpu(4, "0x30", "1830x30", job=None)
    fleet.gpu(4, "0.5x30", "1830x30", GPU_I_ID="1", GPU_I_PROFILE="3g.40gb")
    fleet.gpu(4, "0x30", "1830x30", job=None, GPU_I_ID="2", GPU_I_PROFILE="3g.40gb")
    counted = {"working": 3, "idle": 1, "unallocated": 2}
    fleet.expect(
        20,
        "sum by (state) (fleet:gpus:count)",
        *(({"state": state}, number) for state, number in counted.items()),
    )


def test_goodput_is_the_share_of_steps(fleet: RuleTest) -> None:
    for kind, seconds in (("start", 100), ("steps", 300)):
        fleet.add("training_device_seconds_total", {"hpc_job": "a", "kind": kind}, f"{seconds}x30")
    fleet.expect(5, "sum by (hpc_job) (job:goodput:ratio)", ({"hpc_job": "a"}, 0.75))


def test_a_device_whose_tensor_clock_is_not_known_has_no_ofu_and_is_counted(fleet: RuleTest) -> None:
    fleet.gpu(0, "0.5x9", "1830x9", modelName="NVIDIA Unheard Of")
    fleet.gpu(1, "0.5x9", "1830x9")
    fleet.expect(5, "job:ofu:ratio", ({"__name__": "job:ofu:ratio", **JOB_A}, 0.5))
    fleet.expect(5, "job:gpus:count", ({"__name__": "job:gpus:count", **JOB_A}, 2))


def test_means_end_with_the_job(fleet: RuleTest) -> None:
    fleet.gpu(0, "0.5x20 stale", "1830x20 stale")
    fleet.gpu(1, "0.5x60", "1830x60", job="b")
    fleet.expect(15, "job:ofu:ratio_avg1h{hpc_job='a'}", ({"__name__": "job:ofu:ratio_avg1h", **JOB_A}, 0.5))
    fleet.expect(25, "{__name__=~'job.*', hpc_job='a'}")
    fleet.expect(25, "job:ofu:ratio_avg1h", ({"__name__": "job:ofu:ratio_avg1h", **JOB_B}, 0.5))


def test_mfu_is_beside_ofu_only_while_there_is_both(fleet: RuleTest) -> None:
    """The job loads for 20 minutes without OFU; before its first record it tells no MFU."""
    fleet.gpu(0, "0x19 0.5x79", "1830x99")
    fleet.gpu(1, "0.5x99", "1830x99", job="b")
    fleet.add("training_mfu_ratio", JOB_A, "_x20 0.25x79")
    fleet.add("training_mfu_ratio", {}, "0.75x99")
    fleet.expect(
        50, "job:mfu_over_ofu:ratio_avg1h", ({"__name__": "job:mfu_over_ofu:ratio_avg1h", **JOB_A}, 0.5)
    )
    fleet.expect(
        50, "job:mfu_minus_ofu:ratio_avg1h", ({"__name__": "job:mfu_minus_ofu:ratio_avg1h", **JOB_A}, -0.25)
    )
    fleet.expect(50, "job:mfu:ratio", ({"__name__": "job:mfu:ratio", **JOB_A}, 0.25))


def test_jobs_of_one_name_in_two_clusters_are_two(tmp_path: Path) -> None:
    fleet = RuleTest(tmp_path, recording_and_alert_rules(cluster_label="cluster"))
    fleet.gpu(0, "0.5x9", "1830x9", host="x1", cluster="x")
    fleet.gpu(0, "0.25x9", "1830x9", host="y1", cluster="y")
    fleet.add("training_mfu_ratio", {**JOB_A, "cluster": "x"}, "0.25x9")
    fleet.expect(
        5,
        "{__name__=~'(job|fleet):ofu:ratio|job:mfu_over_ofu:.*'}",
        ({"__name__": "job:ofu:ratio", "cluster": "x", **JOB_A}, 0.5),
        ({"__name__": "job:ofu:ratio", "cluster": "y", **JOB_A}, 0.25),
        ({"__name__": "fleet:ofu:ratio", "cluster": "x"}, 0.5),
        ({"__name__": "fleet:ofu:ratio", "cluster": "y"}, 0.25),
        ({"__name__": "job:mfu_over_ofu:ratio_avg1h", "cluster": "x", **JOB_A}, 0.5),
    )


def test_the_label_of_the_job_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    fleet = RuleTest(tmp_path, recording_and_alert_rules(job_label="pod"))
    fleet.gpu(0, "0.5x9", "1830x9", pod="train-0")
    fleet.expect(5, "job:ofu:ratio", ({"__name__": "job:ofu:ratio", "pod": "train-0"}, 0.5))


def test_a_clock_that_is_given_comes_before_that_of_the_table(tmp_path: Path) -> None:
    fleet = RuleTest(tmp_path, recording_and_alert_rules(tensor_mhz={H100: 915, 'My "GPU" \\ 1': 1830.5}))
    fleet.gpu(0, "0.5x9", "915x9")
    fleet.gpu(1, "0.5x9", "1830.5x9", modelName='My "GPU" \\ 1')
    fleet.expect(5, "sort(sum by (gpu) (gpu:ofu:ratio))", ({"gpu": "0"}, 0.5), ({"gpu": "1"}, 0.5))


def test_every_gpu_of_the_table_has_its_clock(tmp_path: Path) -> None:
    fleet = RuleTest(tmp_path, recording_and_alert_rules(), every_clock=True)
    clocks = known_tensor_clocks()
    assert len(clocks) > 70
    assert {"NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200", "NVIDIA GB200"} < set(clocks)
    assert clocks[H100] == 1830
    assert "NVIDIA H100" not in clocks, "several devices report this name"
    assert not [name for name in clocks if "AMD" in name or "GAUDI" in name]
    fleet.gpu(0, "0x9", "0x9")
    expected = (
        ({"__name__": "gpu:tensor_clock_mhz", "modelName": name}, mhz) for name, mhz in clocks.items()
    )
    fleet.expect(5, "gpu:tensor_clock_mhz", *expected)
    assert all(tensor_clock(name).mhz == mhz for name, mhz in clocks.items())


@pytest.mark.parametrize("settings", [{}, {"job_label": "pod", "cluster_label": "cluster", "interval_s": 10}])
def test_promtool_accepts_the_file(tmp_path: Path, settings: dict) -> None:
    (tmp_path / "rules.yml").write_text(recording_and_alert_rules(**settings))
    command = ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout


def test_the_file_says_what_the_rules_are() -> None:
    text = recording_and_alert_rules(interval_s=15)
    groups = yaml.safe_load(text)["groups"]
    assert [group["interval"] for group in groups] == ["15s"] * 3
    read = [(rule["record"], rule["expr"]) for rule in groups[0]["rules"]]
    assert read == [(rule.name, rule.expression) for rule in recording_rules(FleetLabels())]
    names = [(rule["record"], *rule.get("labels", {}).values()) for rule in groups[0]["rules"]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"job_label": "hpc-job"}, "job_label='hpc-job' is not the name of a label"),
        ({"job_label": "UUID"}, "job_label='UUID' is the label that tells the device"),
        ({"cluster_label": ""}, "cluster_label='' is not the name of a label"),
        ({"cluster_label": "hpc_job"}, "cluster_label='hpc_job' is the job_label too"),
        ({"interval_s": 0}, "interval_s=0 must be a whole number of seconds, 1 to 30"),
        ({"interval_s": 60}, "interval_s=60 must be"),
        ({"interval_s": 7.5}, "interval_s=7.5 must be"),
        ({"tensor_mhz": {"X": 0}}, "tensor_mhz=0 must be a positive number of MHz"),
    ],
)
def test_settings_that_make_no_rules_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recording_and_alert_rules(**settings)
