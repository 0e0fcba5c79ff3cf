from collections.abc import Callable

import pytest

from perf_metrics import (
    DefaultMetrics,
    JsonLogger,
    ProgressCallback,
    device_peak_flops,
    model_flops_utilization,
)

RECORD = {"input_tokens": 8192, "interval_seconds": 2.0, "flos": 3.0e12}


def test_throughput_and_utilization(run) -> None:
    logs = dict(RECORD)
    run.fire("on_log_step", DefaultMetrics(10e12), logs=logs)
    assert logs == {**RECORD, "tok_per_sec": 4096.0, "mfu": 0.15}


def test_utilization_of_the_hardware_counts_what_is_recomputed(run) -> None:
    logs = {**RECORD, "hardware_flos": 4.0e12}
    run.fire("on_log_step", DefaultMetrics(10e12), logs=logs)
    assert (logs["mfu"], logs["hfu"]) == (0.15, 0.2)
    unknown = {"hardware_flos": 4.0e12, "interval_seconds": 2.0}
    run.fire("on_log_step", DefaultMetrics(), logs=unknown)
    assert unknown["hfu"] is None


def test_a_trainer_without_on_log_step_gets_the_same_entries(run) -> None:
    """And one with both events gets them once."""
    by_step, by_log = dict(RECORD), dict(RECORD)
    metrics = DefaultMetrics(10e12)
    run.fire("on_log_step", metrics, logs=by_step)
    run.fire("on_log", metrics, logs=by_log)
    assert by_step == by_log
    run.fire("on_log", metrics, logs=by_step)
    assert by_step == by_log


@pytest.mark.parametrize(
    "logs", [{"eval_loss": 1.0, "eval_seconds": 2.0}, {"train_runtime": 3.0, "mfu": 0.4}]
)
def test_evaluations_and_final_metrics_stay_as_they_are(run, logs: dict[str, object]) -> None:
    before = dict(logs)
    run.fire("on_log", DefaultMetrics(1e12), logs=logs)
    assert logs == before


@pytest.mark.parametrize("make", [DefaultMetrics, JsonLogger, ProgressCallback])
def test_events_that_cost_something_are_not_listened_to(make: Callable[[], object]) -> None:
    """A trainer computes the entries of these events only for callbacks that have the method."""
    costly = ["on_train_metrics", "on_forward_backward_begin", "on_forward_backward_end"]
    assert [name for name in costly if hasattr(make(), name)] == []
    # Every callback has these, as one trainer wants them; none of the three uses them.
    for name in ("on_step_begin", "on_optimizer_step", "on_save"):
        assert getattr(make(), name).does_nothing


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
        ({"hardware_flos": 5.0, "interval_seconds": 1.0}, {"hfu"}),
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
