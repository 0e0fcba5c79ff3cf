"""What `python -m model_parallel plan` prints for configurations of transformers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, alone: Callable[..., subprocess.CompletedProcess[str]]) -> Plan:
    """`plan(settings, "--tensor", "4")` for a configuration: exit code, and what was printed."""

    def run(settings: dict[str, object], *words: str) -> tuple[int, str, str]:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        done = alone("-m", "model_parallel", "plan", tmp_path, *words)
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_table_of_shares(plan: Plan) -> None:
    code, out, err = plan(LLAMA_8B, "--tensor", "4", "--sequence", "--loss")
    assert code == 0, err
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "model.embed_tokens embedding_rowwise 1 128256 x 4096 32064 x 4096 131,334,144" in rows
    assert "model.layers.*.self_attn.k_proj colwise 32 1024 x 4096 256 x 4096 33,554,432" in rows
    assert "model.layers.*.mlp.down_proj rowwise 32 4096 x 14336 4096 x 3584 469,762,048" in rows
    assert "model.layers.*.input_layernorm whole 32 4096 4096 131,072" in rows
    assert rows[-1] == (
        "tensor=4: 2,007,764,992 of 8,030,261,248 parameters on the rank that holds most (25.0%)"
    )


def test_json(plan: Plan) -> None:
    code, out, err = plan(LLAMA_8B, "--tensor", "16", "--json")
    assert code == 0, err
    found = json.loads(out)
    by_name = {each["name"]: each for each in found["layers"]}
    # 8 key-value heads over 16 ranks are whole on each.
    assert by_name["model.layers.*.self_attn.k_proj"]["local_shape"] == [1024, 4096]
    assert by_name["model.layers.*.self_attn.q_proj"]["local_shape"] == [256, 4096]
    assert found["parameters"] == 8030261248


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor", "3"], "Allowed values of tensor are 1, 2, 4, 8, 16, 32."),
        (["--tensor", "0"], "tensor=0 is not a number of ranks"),
    ],
)
def test_a_size_that_does_not_fit(plan: Plan, words: list[str], message: str) -> None:
    code, _, err = plan(LLAMA_8B, *words)
    assert code == 2
    assert message in err


def test_a_family_that_transformers_does_not_know(plan: Plan) -> None:
    code, _, err = plan({"model_type": "nothing"}, "--tensor", "2")
    assert code == 2
    assert "model_type='nothing' cannot be built by transformers" in err


def test_what_nothing_divides_is_said(plan: Plan) -> None:
    settings = {"model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 1024, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 16, "intermediate_size": 4096}
    code, out, err = plan(settings, "--tensor", "2")
    assert code == 0, err
    assert "gpt_neox.embed_in is whole on each rank: 51,642,368 parameters that nothing divides." in out


def test_what_may_not_be_meant_so_is_said(plan: Plan, tmp_path: Path) -> None:
    """As `shard_tensors` warns of it."""
    settings = {"model_type": "gpt_neox", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 4, "intermediate_size": 64}
    attention = "gpt_neox.layers.*.attention"
    given = {f"{attention}.query_key_value": "colwise", f"{attention}.dense": "rowwise"}
    (tmp_path / "plan.json").write_text(json.dumps(given))
    words = ["--tensor", "2", "--plan", str(tmp_path / "plan.json")]
    code, out, err = plan(settings, *words)
    assert code == 0, err
    assert "query_key_value computes queries, keys and values." in out.splitlines()[-1]
    warnings = json.loads(plan(settings, *words, "--json")[1])["warnings"]
    assert [each for each in warnings if "Use 'packed_colwise'" in each] == [out.splitlines()[-1]]
