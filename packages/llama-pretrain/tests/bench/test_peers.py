"""The peers of `bench` do the same work as the plain loop; run with the extra `bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llama_pretrain.bench.baselines import BASELINES, chosen
from llama_pretrain.bench.command import run_rounds
from llama_pretrain.bench.summary import agreement
from llama_pretrain.commands.arguments import BenchArguments


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_all_do_the_same_work(
    mixed_precision: str, write_inputs: Callable[[Path], Path], tmp_path: Path
) -> None:
    args = BenchArguments(
        model=str(write_inputs(tmp_path) / "shape"),
        sequence_length=16,
        per_device_train_batch_size=2,
        steps=5,
        warm_up_steps=6,
        rounds=1,
        mixed_precision=mixed_precision,
        use_cpu=True,
    )
    baselines, missing = chosen(())
    assert not missing
    measured = run_rounds(args, baselines)
    assert not measured.failures
    agreed = agreement(measured.trials, mixed_precision)
    assert agreed is not None
    assert agreed.deviations.keys() == BASELINES.keys()
    assert agreed.other_work() == []
    assert all(
        {"torch", *BASELINES[name].distributions} == trials[0].versions.keys()
        for name, trials in measured.trials.items()
    )
