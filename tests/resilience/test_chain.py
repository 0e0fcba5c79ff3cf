"""One run by several trainers is one curve; the script has more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from resilience.chain import print_chain, run_chain
from resilience.chain_picture import plot
from resilience.layouts import DDP_2, PIPELINE_2X2, SINGLE
from resilience.workload import Workload

STEPS = 30
LAYOUTS = (SINGLE, PIPELINE_2X2, DDP_2)


@pytest.mark.full
def test_each_trainer_goes_on_where_the_one_before_stopped(tmp_path: Path) -> None:
    words = Workload.write(tmp_path / "work", STEPS).words
    chain = run_chain(words, STEPS, tmp_path / "chain", LAYOUTS)
    print_chain(chain)
    assert chain.holds
    assert [leg.trainer for leg in chain.legs] == [layout.name for layout in LAYOUTS]
    assert [leg.first for leg in chain.legs[1:]] == [leg.last + 1 for leg in chain.legs[:-1]]
    plot(chain, tmp_path / "chain.png")
    assert (tmp_path / "chain.png").read_bytes().startswith(b"\x89PNG")
