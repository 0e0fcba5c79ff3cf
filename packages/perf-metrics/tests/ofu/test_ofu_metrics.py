"""The callback, against the compiled library: figures in the record, and one warning where there are none."""

import logging

import pytest
import torch

from perf_metrics.callbacks.device_metrics import OFUMetrics
from perf_metrics.ofu.nvml import Nvml, UnavailableError, current_cuda_device, identifier_of

GPU = "GPU-00000000-0000-0000-0000-00000000000"
TRAIN = """
import json, logging, sys, time
from types import SimpleNamespace
from perf_metrics.callbacks.device_metrics import OFUMetrics
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("perf_metrics").addHandler(handler)
state = SimpleNamespace(is_world_process_zero=True)

def train(metrics, event="on_log_step", records=2, seconds=None):
    logged = []
    metrics.on_train_begin(None, state, None)
    for _ in range(records):
        metrics._sampler.wait(20) if seconds is None else time.sleep(seconds)
        logged.append({"loss": 1.0, "mfu": 0.4})
        getattr(metrics, event)(None, state, None, logs=logged[-1])
    metrics.on_train_end(None, state, None)
    return logged
"""


def test_ofu_stands_beside_mfu_without_torch(fake_nvml) -> None:
    """The mean over the process's devices, in the event that the trainer has; a second run starts afresh."""
    program = TRAIN + (
        f"m = OFUMetrics(['{GPU}0', '{GPU}2'], interval_s=0.1)\n"
        "print(json.dumps([train(m), train(m, 'on_log'), said, 'torch' in sys.modules]))"
    )
    script = "gpus 3\nactivity 0 40\nclock 0 915\nactivity 2 80\n"
    first, second, said, torch_loaded = fake_nvml.run(program, script)
    for record in first + second:
        assert record.pop("ofu") == pytest.approx((0.2 + 0.8) / 2)
        assert record.pop("ofu_per_rank") == pytest.approx([0.5])
        assert record == {"loss": 1.0, "mfu": 0.4}
    assert (said, torch_loaded) == ([], False)
    report = fake_nvml.report
    assert (report["inits"], report["shutdowns"]) == (2, 2)
    assert report["allocated"] == report["freed"]


@pytest.mark.parametrize(
    ("devices", "script", "driver", "reason"),
    [
        (
            [f"{GPU}0"],
            "fail 0 nvmlGpmSampleGet 4 -1",
            "gpm",
            f"{GPU}0: unavailable: nvmlGpmSampleGet: Insufficient",
        ),
        (
            [f"{GPU}0"],
            "",
            "no_gpm",
            f"{GPU}0: unavailable: the installed driver has no nvmlGpmQueryDeviceSupport",
        ),
        ([f"{GPU}0"], "", "none", "unavailable: libnvidia-ml.so.1 not found: no NVIDIA driver here"),
        (
            [f"{GPU}5"],
            "",
            "gpm",
            f"{GPU}5: unavailable: no device '{GPU}5': nvmlDeviceGetHandleByUUID: Not Found",
        ),
        (None, "", "gpm", "unavailable: torch is not loaded, so give `devices` of OFUMetrics"),
    ],
)
def test_what_is_missing_is_none_and_said_once(
    fake_nvml, devices: list[str] | None, script: str, driver: str, reason: str
) -> None:
    program = TRAIN + f"print(json.dumps([train(OFUMetrics({devices!r}, interval_s=0.1), records=3), said]))"
    records, said = fake_nvml.run(program, script + "\n", driver)
    assert records == [{"loss": 1.0, "mfu": 0.4, "ofu": None}] * 3
    assert len(said) == 1
    assert said[0].startswith(f"ofu is not known: {reason}")


def test_missing_bindings_do_not_end_the_training(fake_nvml) -> None:
    program = (
        TRAIN + f"sys.modules['pynvml'] = None\nprint(json.dumps([train(OFUMetrics(['{GPU}0'])), said]))"
    )
    records, said = fake_nvml.run(program)
    assert records == [{"loss": 1.0, "mfu": 0.4, "ofu": None}] * 2
    assert [text.partition(": ")[2] for text in said] == [
        "unavailable: NVML needs nvidia-ml-py, which is not installed. "
        "Install it with `pip install 'perf-metrics[nvml]'`."
    ]


def test_a_record_without_a_sample_has_none_and_is_no_reason_to_warn(fake_nvml) -> None:
    program = TRAIN + f"print(json.dumps([train(OFUMetrics(['{GPU}0'], interval_s=30), seconds=0.2), said]))"
    assert fake_nvml.run(program) == [[{"loss": 1.0, "mfu": 0.4, "ofu": None}] * 2, []]


def test_samples_within_an_evaluation_are_left_out(fake_nvml) -> None:
    """An evaluation as long as the whole interval leaves no samples; after it they are counted again."""
    program = TRAIN + (
        f"m = OFUMetrics(['{GPU}0'], interval_s=0.1)\n"
        "m.on_train_begin(None, state, None)\nm.on_prediction_step(None, state, None)\n"
        "time.sleep(0.5)\nm.on_prediction_step(None, state, None)\n"
        "during, after, aborted = {'loss': 1}, {'loss': 1}, {'loss': 1}\n"
        "m.on_log_step(None, state, None, logs=during)\nm.on_evaluate(None, state, None)\n"
        "m._sampler.wait(20)\nm.on_log_step(None, state, None, logs=after)\n"
        "m.on_prediction_step(None, state, None)\nm.on_step_begin(None, state, None)\nm._sampler.wait(20)\n"
        "m.on_log_step(None, state, None, logs=aborted)\nm.on_train_end(None, state, None)\n"
        "print(json.dumps([during['ofu'], after['ofu'], aborted['ofu'], said]))"
    )
    assert fake_nvml.run(program) == [None, 0.5, 0.5, []]


@pytest.mark.parametrize("logs", [{"eval_loss": 1.0}, {"train_runtime": 2.0}])
def test_only_records_of_intervals_get_figures(run, logs: dict[str, object]) -> None:
    before = dict(logs)
    run.fire("on_log", OFUMetrics([f"{GPU}0"]), logs=logs)
    assert logs == before


def test_one_record_is_measured_once(run) -> None:
    """A trainer with both events: what `on_log_step` has written stays."""
    metrics, logs = OFUMetrics([f"{GPU}0"]), {"loss": 1.0}
    run.fire("on_log_step", metrics, logs=logs)
    logs["ofu"] = 0.25
    run.fire("on_log", metrics, logs=logs)
    assert logs["ofu"] == 0.25


def test_the_device_of_this_process(run, caplog: pytest.LogCaptureFixture) -> None:
    """On a machine with an NVIDIA GPU, NVML finds torch's device; on another the reason is said."""
    if torch.cuda.is_available() and torch.version.hip is None:
        with Nvml() as nvml:
            assert nvml.find(current_cuda_device()).name == torch.cuda.get_device_name()
        return
    with pytest.raises(UnavailableError, match=r"^this process has no CUDA device$"):
        current_cuda_device()
    metrics, logs = OFUMetrics(), {"loss": 1.0}
    run.fire("on_train_begin", metrics)
    with caplog.at_level(logging.WARNING, "perf_metrics"):
        run.fire("on_log_step", metrics, logs=logs)
    run.fire("on_train_end", metrics)
    assert logs == {"loss": 1.0, "ofu": None}
    assert caplog.messages == ["ofu is not known: unavailable: this process has no CUDA device"]


@pytest.mark.parametrize(
    ("visible", "identifier"),
    [("", "uuid"), ("2,3", "uuid"), ("GPU-1", "uuid"), ("MIG-5", "MIG-5"), ("MIG-5, MIG-6", "MIG-5")],
)
def test_a_slice_goes_by_the_name_by_which_it_was_chosen(visible: str, identifier: str) -> None:
    assert identifier_of(0, "uuid", visible) == identifier


def test_bad_settings_are_refused_before_the_training() -> None:
    with pytest.raises(ValueError, match=r"^interval_s=60 must be"):
        OFUMetrics(interval_s=60)
    with pytest.raises(ValueError, match=r"^tensor_mhz=-1 must be"):
        OFUMetrics(tensor_mhz=-1)
