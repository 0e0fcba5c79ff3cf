"""Layers that are converted to FP8, or prepared for low precision, on the stages of a pipeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("ranks_of_quant.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CONVERTED = {
    "fp8, 1f1b": "Float8Linear",
    "fp8, zbv": "Float8Linear",
    "qat, 1f1b": "FakeQuantizedLinear",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks have seen."""
    directory = tmp_path_factory.mktemp("quant")
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(WORKER), str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"seen-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("way", CONVERTED)
def test_curve_is_that_of_one_process(ranks: list[Any], way: str) -> None:
    for seen in ranks:
        here, alone = seen[way]["ranks"], seen[way]["alone"]
        assert len(here["losses"]) == 6
        assert here["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert CONVERTED[way] in here["classes"]
