import pytest
import torch

from perf_metrics import DefaultMetrics
from perf_metrics.callbacks.device_metrics import (
    MemoryFigures,
    PeakMemory,
    gather_memory_figures,
    take_memory_figures,
)

ACCELERATOR = torch.accelerator.is_available()


@pytest.mark.parametrize("event", ["on_log_step", "on_log"])
def test_the_record_has_lists_of_figures_or_none_at_all(run, event: str) -> None:
    """On a machine with an accelerator the figures are its own; on one without there are no zeros."""
    memory, logs = PeakMemory(), {"loss": 1.0}
    kept = torch.ones(1000, device=torch.accelerator.current_accelerator() if ACCELERATOR else "cpu")
    run.fire("on_train_begin", memory)
    run.fire(event, memory, DefaultMetrics(), logs=logs)
    if not ACCELERATOR:
        assert logs == {"loss": 1.0}
        assert take_memory_figures() is None
        return
    assert logs["peak_mem_reserved"] >= logs["peak_mem_allocated"] == logs["peak_mem"] >= [kept.nbytes]
    assert logs["alloc_retries"] == [0]


def test_what_the_trainer_has_measured_stays(run) -> None:
    """It has reset the peaks then, so the one of the reserved memory would be wrong."""
    logs: dict[str, object] = {"loss": 1.0, "peak_mem_allocated": [5]}
    run.fire("on_log_step", PeakMemory(), logs=logs)
    assert logs["peak_mem_allocated"] == [5]
    assert set(logs) - {"loss", "peak_mem_allocated"} == ({"alloc_retries"} if ACCELERATOR else set())


@pytest.mark.parametrize("logs", [{"eval_loss": 1.0}, {"train_runtime": 2.0}])
def test_only_records_of_intervals_get_figures(run, logs: dict[str, object]) -> None:
    before = dict(logs)
    run.fire("on_log", PeakMemory(), logs=logs)
    assert logs == before


def test_one_rank_alone_is_a_list_of_one() -> None:
    figures = MemoryFigures(allocated=1, reserved=2, retries=0)
    assert gather_memory_figures(figures) == [figures]
    assert gather_memory_figures(None) is None
