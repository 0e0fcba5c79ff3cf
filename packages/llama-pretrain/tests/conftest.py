"""What several test files use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dist_env import forget_warnings
from llama_pretrain import Llama, LlamaConfig, preset

# Each folder is for an extra or a group; the sessions that install it run its tests, the plain one has none.
_NEEDS = {
    "hf": ("transformers",),
    "bench": ("accelerate", "transformers", "lightning"),
    "lm_eval": ("lm_eval", "transformers", "accelerate"),
}
_MISSING = {
    folder: [name for name in names if importlib.util.find_spec(name) is None]
    for folder, names in _NEEDS.items()
}
collect_ignore = [folder for folder, names in _MISSING.items() if names]


def pytest_report_header() -> list[str]:
    return [f"tests/{each}: not collected, as {_MISSING[each]} is missing" for each in collect_ignore]


def _small_config(**changes: object) -> LlamaConfig:
    """A Llama of odd shape: grouped heads, and a head size that is not hidden_size / heads."""
    shape: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 128,
        "rope_theta": 5000.0,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaConfig(**(shape | changes))  # type: ignore[arg-type]


@pytest.fixture
def small_config() -> Callable[..., LlamaConfig]:
    return _small_config


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def small_model(request: pytest.FixtureRequest) -> Llama:
    torch.manual_seed(0)
    return Llama(_small_config(tie_word_embeddings=request.param)).eval()


def _write_inputs(work: Path) -> Path:
    (work / "data" / "deep").mkdir(parents=True)
    for number in range(20):
        text = "".join(f"def f{n}(x):\n    return x + {n * number}\n\n" for n in range(number + 4))
        (work / "data" / ("deep" if number % 2 else ".") / f"{number:02d}.py").write_text(text)
    shape = replace(preset("tiny"), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)
    (work / "shape").mkdir()
    shape.save(work / "shape")
    return work


@pytest.fixture(scope="session")
def write_inputs() -> Callable[[Path], Path]:
    """Writes 20 small files in `data` and a model of 2 layers of 32 in `shape`, and returns the directory."""
    return _write_inputs


@pytest.fixture(autouse=True)
def _every_warning_is_heard() -> None:
    """Each is given once a process; which tests ran before in it must not matter."""
    forget_warnings()
