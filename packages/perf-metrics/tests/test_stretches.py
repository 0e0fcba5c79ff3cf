import pytest
import torch

from perf_metrics.throughput import StretchTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_stretch_is_what_its_end_says(clock: Clock) -> None:
    timer = StretchTimer(clock)
    clock.now += 50
    timer.start()
    for seconds, kind in (
        (1, "data"),
        (2, "train"),
        (4, "evaluate"),
        (8, "save"),
        (16, "data"),
        (32, "train"),
    ):
        clock.now += seconds
        timer.end(kind)
    interval = timer.take()
    assert (interval.net_seconds, interval.data_seconds) == (1 + 2 + 16 + 32, 17)
    assert interval.data_wait_share == 17 / 51
    assert timer.take().data_wait_share is None
    timer.stop()


def test_compilation_is_left_out_wherever_it_happens(clock: Clock) -> None:
    def compiler(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        clock.now += 1000
        return module

    compiled = torch.compile(lambda x: x * 2 + 1, backend=compiler)
    timer = StretchTimer(clock)
    timer.start()
    clock.now += 1
    compiled(torch.ones(3))
    clock.now += 1
    timer.end("train")
    assert clock.now > 1000
    assert timer.take().net_seconds == 2
    timer.stop()
    torch.compile(lambda x: x * 3, backend=compiler)(torch.ones(3))
    timer.end("train")
    assert timer.take().net_seconds == 1000
