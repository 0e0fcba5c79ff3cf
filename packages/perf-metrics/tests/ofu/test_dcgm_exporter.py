"""Text as render_metrics.go of dcgm-exporter writes it."""

import pytest

from perf_metrics.ofu.counter_files import read_exporter
from perf_metrics.ofu.samples import Device, mean_ofu, mean_ofu_by_device, mean_ofu_by_job

PRO = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
NEW = "DCGM_FI_PROF_TENSOR_UTIL_RATIO"
CLK = "DCGM_FI_DEV_SM_CLOCK"


def series(name: str, value: str, **labels: str) -> str:
    pairs = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value}\n"


def gpu(number: int, **more: str) -> dict[str, str]:
    return {
        "gpu": str(number),
        "UUID": f"GPU-{number}",
        "pci_bus_id": f"00000000:{number:02}:00.0",
        "device": f"nvidia{number}",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "node1",
        **more,
    }


def test_old_names_with_help_type_and_other_metrics() -> None:
    text = (
        f"# HELP {CLK} SM clock frequency (in MHz).\n# TYPE {CLK} gauge\n"
        + series(CLK, "1410", **gpu(0))
        + 'DCGM_FI_DEV_MEM_CLOCK{gpu="0", UUID="GPU-0"} 9223372036854775794\n'
        + f"# HELP {PRO} Ratio of cycles.\n# TYPE {PRO} gauge\n"
        + series(PRO, "0.929260", **gpu(0))
    )
    readings = read_exporter(text, time_s=1700000000.0)
    (sample,) = readings.samples
    assert sample.device == Device(host="node1", index="0", uuid="GPU-0", model="NVIDIA H100 80GB HBM3")
    assert (sample.tensor_activity, sample.sm_mhz, sample.time_s) == (0.92926, 1410.0, 1700000000.0)
    assert (sample.jobs, readings.notes) == ((), ())
    assert mean_ofu(readings.samples, 1830.0).ofu == pytest.approx(0.92926 * 1410 / 1830)


def test_new_name_new_host_label_and_a_time_stamp() -> None:
    labels = {key: text for key, text in gpu(0).items() if key != "Hostname"} | {"hostname": 'a\\"b'}
    text = series(NEW, "0.5 1700000000250", **labels) + series(CLK, "1830 1700000000250", **labels)
    (sample,) = read_exporter(text).samples
    assert (sample.device.host, sample.time_s) == ('a"b', 1700000000.25)
    assert (sample.tensor_activity, sample.sm_mhz) == (0.5, 1830.0)


def test_both_names_of_the_same_field_are_one_reading() -> None:
    text = series(PRO, "0.4", **gpu(0)) + series(NEW, "0.4", **gpu(0)) + series(CLK, "1830", **gpu(0))
    result = mean_ofu(read_exporter(text).samples, 1830.0)
    assert (result.ofu, result.samples) == (pytest.approx(0.4), 1)


def test_jobs_that_share_a_device_count_once_for_it_and_once_for_each() -> None:
    text = ""
    for job in ("17", "18"):
        text += series(PRO, "0.6", **gpu(0, hpc_job=job)) + series(CLK, "1830", **gpu(0, hpc_job=job))
    text += series(PRO, "0.2", **gpu(1, hpc_job="18")) + series(CLK, "915", **gpu(1, hpc_job="18"))
    readings = read_exporter(text)
    assert len(readings.samples) == 2
    assert mean_ofu(readings.samples, 1830.0).ofu == pytest.approx((0.6 + 0.1) / 2)
    by_job = mean_ofu_by_job(readings.samples, 1830.0)
    assert {name: round(mean.ofu or 0, 6) for name, mean in by_job.items()} == {"17": 0.6, "18": 0.35}
    assert [round(mean.ofu or 0, 6) for mean in mean_ofu_by_device(readings.samples, 1830.0).values()] == [
        0.6,
        0.1,
    ]
    assert readings.notes == (
        "jobs share a device: the counters are the device's, so each of them gets the same figure",
    )


def test_pods_under_old_and_new_labels() -> None:
    text = ""
    for number, names in enumerate(
        (("namespace", "pod", "container"), ("pod_namespace", "pod_name", "container_name"))
    ):
        labels = gpu(number, **dict(zip(names, ("team", "train-0", "main"), strict=True)))
        text += series(PRO, "0.5", **labels) + series(CLK, "1830", **labels)
    idle = gpu(2, namespace="", pod="", container="")
    text += series(PRO, "0.000000", **idle) + series(CLK, "345", **idle)
    readings = read_exporter(text)
    by_job = mean_ofu_by_job(readings.samples, 1830.0)
    assert {name: (mean.ofu, mean.samples) for name, mean in by_job.items()} == {"team/train-0": (0.5, 2)}
    assert list(mean_ofu_by_job(readings.samples, 1830.0, label="pod")) == ["train-0"]
    assert readings.samples[2].jobs == ()
    assert mean_ofu(readings.samples[2:], 1830.0).ofu == 0.0  # idle is a reading, unlike a blank


def test_two_containers_of_a_pod_are_one_job() -> None:
    text = ""
    for container in ("main", "logger"):
        labels = gpu(0, namespace="team", pod="train-0", container=container)
        text += series(PRO, "0.5", **labels) + series(CLK, "1830", **labels)
    (mean,) = mean_ofu_by_job(read_exporter(text).samples, 1830.0).values()
    assert (mean.ofu, mean.samples) == (0.5, 1)


def test_a_label_of_ones_own() -> None:
    text = series(PRO, "0.5", **gpu(0, slurm_job="9")) + series(CLK, "1830", **gpu(0, slurm_job="9"))
    readings = read_exporter(text, job_labels=("slurm_job",))
    assert list(mean_ofu_by_job(readings.samples, 1830.0)) == ["slurm_job=9"]


def test_slices_with_and_without_a_clock_of_their_own() -> None:
    text = series(CLK, "1410", **gpu(0))
    for number, activity in (("3", "0.25"), ("4", "0.75")):
        text += series(PRO, activity, **gpu(0, GPU_I_PROFILE="1g.10gb", GPU_I_ID=number))
    text += series(CLK, "1200", **gpu(0, GPU_I_PROFILE="1g.10gb", GPU_I_ID="4"))
    readings = read_exporter(text)
    assert [
        (s.device.mig_profile, s.device.mig_instance, s.tensor_activity, s.sm_mhz) for s in readings.samples
    ] == [("1g.10gb", "3", 0.25, 1410.0), ("1g.10gb", "4", 0.75, 1200.0)]
    assert readings.notes == ("1 slices have no clock of their own and take that of their GPU",)


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        (CLK, "9223372036854775792", "blank"),
        (CLK, "9223372036854775793", "not found"),
        (CLK, "9223372036854775794", "not supported"),
        (CLK, "9223372036854775795", "not permitted"),
        (CLK, "2147483634", "not supported"),
        (PRO, "140737488355330.000000", "not supported"),
        (PRO, "NaN", "nan is not a value"),
        (PRO, "", "no value"),
        (PRO, "92.9", "92.9 is not a share of cycles"),
    ],
)
def test_sentinels_are_no_values(name: str, value: str, meaning: str) -> None:
    good = {PRO: "0.5", CLK: "1830"}
    text = "".join(series(key, value if key == name else text, **gpu(0)) for key, text in good.items())
    readings = read_exporter(text)
    assert readings.notes == (f"{name}: 1 of 1 series are blank ({meaning})",)
    result = mean_ofu(readings.samples, 1830.0)
    assert (result.ofu, result.left_out) == (None, 1)
    assert result.reason == f"1 of 1 samples lack the {'SM clock' if name == CLK else 'tensor activity'}"


def test_what_is_missing_is_said() -> None:
    readings = read_exporter(series(CLK, "1410", **gpu(0)))
    assert readings.notes == (
        f"no series {PRO} or {NEW}: before 4.0.0 dcgm-exporter exports it with dcp-metrics-included.csv only",
    )
    readings = read_exporter(series(PRO, "0.5", **gpu(0)))
    assert readings.notes == (f"no series {CLK}: without the SM clock there is no OFU",)
    assert mean_ofu(readings.samples, 1830.0).ofu is None
    assert mean_ofu((), 1830.0).reason == "there are no samples"


def test_two_values_for_one_device_are_none() -> None:
    text = series(PRO, "0.6", **gpu(0, hpc_job="1")) + series(PRO, "0.7", **gpu(0, hpc_job="2"))
    readings = read_exporter(text + series(CLK, "1830", **gpu(0, hpc_job="1")))
    assert readings.samples[0].tensor_activity is None
    assert "1 readings differ between the series of one device and were left out" in readings.notes


def test_a_line_that_is_not_of_the_format_is_named() -> None:
    with pytest.raises(ValueError, match="line 2 is not of the Prometheus text format"):
        read_exporter("\n" + f'{PRO}{{gpu="0"}} half\n')


def test_the_tensor_clock_must_be_one() -> None:
    samples = read_exporter(series(PRO, "0.5", **gpu(0)) + series(CLK, "1830", **gpu(0))).samples
    unknown = mean_ofu(samples, None)
    assert (unknown.ofu, unknown.reason) == (None, "the tensor clock of the device is not known")
    with pytest.raises(ValueError, match="tensor_mhz=0"):
        mean_ofu(samples, 0)
