"""Our Llama, divided by its own plan in a loop without a trainer, trains on the curve of one process."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from warm_start import WarmStart

pytestmark = pytest.mark.xdist_group("embedding")
SCRIPT = Path(__file__).with_name("divided_llama.py")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRON = {name: value for name, value in os.environ.items() if name not in LAUNCHED} | {
    "OMP_NUM_THREADS": "1"
}
GROUPED = {"num_key_value_heads": 2}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "plain": {},
        "shared key-value heads, sequence, divided loss": {
            "model": GROUPED,
            "sequence": True,
            "loss": "sharded",
        },
        "tied, sequence, fused loss": {
            "model": {"tie_word_embeddings": True},
            "sequence": True,
            "loss": "fused",
        },
    },
    4: {
        "2 key-value heads and vocabulary 251 over 4": {"model": {**GROUPED, "vocab_size": 251}},
        "the same, sequence, fused loss": {
            "model": {**GROUPED, "vocab_size": 251},
            "sequence": True,
            "loss": "fused",
        },
    },
}


@pytest.fixture(scope="module")
def notes(warm: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 saw in each case."""
    found: dict[str, dict[str, Any]] = {}
    for ranks, cases in CASES.items():
        found |= dict(zip(cases, run(warm, tmp_path_factory.mktemp("told"), ranks, cases), strict=True))
    return found


def run(warm: WarmStart, told: Path, ranks: int, cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    port = str(free_port())
    words = [str(SCRIPT), json.dumps(list(cases.values()))]
    started = []
    for rank in range(ranks):
        values = (str(rank), str(ranks), str(rank), str(ranks), "localhost", port)
        environ = ENVIRON | dict(zip(LAUNCHED, values, strict=True))
        started.append(warm.start(words, environ, told / f"out-{rank}", told / f"err-{rank}"))
    try:
        codes = [process.wait(240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert set(codes) == {0}, "".join(path.read_text()[-4000:] for path in sorted(told.glob("err-*")))
    printed = "".join((told / f"out-{rank}").read_text() for rank in range(ranks))
    each = [json.loads(line) for line in re.findall(r"^notes (.*)$", printed, re.MULTILINE)]
    assert len(each) == ranks
    assert all(one == each[0] for one in each), "each rank sees the same"
    result: list[dict[str, Any]] = each[0]
    return result


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_the_curve_is_that_of_one_process(notes: dict[str, dict[str, Any]], name: str) -> None:
    found = notes[name]
    assert found["equal"], "initial values, bitwise"
    assert found["clipped"], "gradients are clipped"
    assert found["loss"] < 1e-5, found
    assert found["norm"] < 1e-5, found


def test_the_plan_is_that_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from llama_pretrain import Llama
    from model_parallel import tensor_plan

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    theirs = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    assert dict(Llama.tp_plan) == tensor_plan(theirs)
