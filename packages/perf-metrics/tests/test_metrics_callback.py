import pytest

from perf_metrics import DefaultMetrics, device_peak_flops, model_flops_utilization

RECORD = {"input_tokens": 8192, "interval_seconds": 2.0, "flos": 3.0e12}


def test_throughput_and_utilization(run) -> None:
    logs = dict(RECORD)
    run.fire("on_log_step", DefaultMetrics(10e12), logs=logs)
    assert logs == {**RECORD, "tok_per_sec": 4096.0, "mfu": 0.15}


def test_an_unknown_peak_is_none_and_not_zero(run) -> None:
    logs = dict(RECORD)
    run.fire("on_log_step", DefaultMetrics(), logs=logs)
    assert logs["mfu"] is None
    assert logs["tok_per_sec"] == 4096.0


def test_more_than_the_peak_is_shown(run) -> None:
    logs = dict(RECORD)
    run.fire("on_log_step", DefaultMetrics(1e12), logs=logs)
    assert logs["mfu"] == 1.5


@pytest.mark.parametrize(
    ("record", "added"),
    [
        ({"loss": 1.0}, set()),
        ({"input_tokens": 5, "interval_seconds": 0.0, "flos": 1.0}, set()),
        ({"input_tokens": 5, "interval_seconds": 1.0}, {"tok_per_sec"}),
        ({"input_tokens": 5, "interval_seconds": 1.0, "flos": None}, {"tok_per_sec"}),
        ({"flos": 5.0, "interval_seconds": 1.0}, {"mfu"}),
        ({"peak_mem_allocated": [3, 4]}, {"peak_mem"}),
    ],
)
def test_nothing_is_made_up(run, record: dict[str, object], added: set[str]) -> None:
    logs = dict(record)
    run.fire("on_log_step", DefaultMetrics(1e12), logs=logs)
    assert set(logs) - set(record) == added


@pytest.mark.parametrize("peak", [0, -1.0, float("nan"), float("inf"), "989e12", True])
def test_a_peak_is_a_positive_number(peak: object) -> None:
    with pytest.raises(ValueError, match=r"peak_hardware_flops=.*positive number of FLOP/s"):
        DefaultMetrics(peak)  # type: ignore[arg-type]


def test_utilization() -> None:
    assert model_flops_utilization(4e12, 2.0, 8e12) == 0.25
    assert model_flops_utilization(4e12, 2.0, None) is None
    assert model_flops_utilization(4e12, 0.0, 8e12) is None
    with pytest.raises(ValueError, match="peak_flops=0"):
        model_flops_utilization(4e12, 2.0, 0)


def test_the_device_peak_takes_what_the_user_gives(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert device_peak_flops(value="165.2e12") == 165.2e12
    assert device_peak_flops("fp32", value=1e12) == 1e12
    with pytest.raises(ValueError, match="fast"):
        device_peak_flops(value="fast")
