"""What several test files use."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from ports import free_port
from warm_start import WarmProcess, WarmStart

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


_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Started:
    """A process of the program, and the files that it writes to."""

    process: WarmProcess
    stdout: Path
    stderr: Path

    def finish(self) -> tuple[int, str, str]:
        """Exit code, and what it wrote to standard output and standard error; one that hangs is killed."""
        try:
            code = self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"it hangs:\n{self.stdout.read_text()}\n{self.stderr.read_text()}")
        return code, self.stdout.read_text(), self.stderr.read_text()


@pytest.fixture(scope="session")
def _warm() -> Iterator[WarmStart]:
    trainers = ("trainer_ddp", "trainer_fsdp2", "trainer_pipeline")
    start = WarmStart(["llama_pretrain.train", *trainers, "torch._dynamo", "matplotlib.figure"], _environ())
    yield start
    start.close()


def _environ(**job: str) -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    return outside | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | job


@pytest.fixture(scope="session")
def start(_warm: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Started]]:
    """`start(["-m", "llama_pretrain", "eval"])`: a process, or several as the `ranks` of a job."""

    def run(words: Sequence[str], ranks: int = 0) -> list[Started]:
        folder = tmp_path_factory.mktemp("told")
        port = str(free_port())
        jobs = [(str(rank), str(rank), str(ranks), str(ranks), "localhost", port) for rank in range(ranks)]
        started = []
        for number, job in enumerate(jobs or [()]):
            told = (folder / f"out-{number}", folder / f"err-{number}")
            environ = _environ(**dict(zip(_LAUNCHED, job, strict=False)))
            started.append(Started(_warm.start(words, environ, *told), *told))
        return started

    return run


@pytest.fixture(autouse=True)
def _every_warning_is_heard() -> None:
    """Each is given once a process; which tests ran before in it must not matter."""
    forget_warnings()
