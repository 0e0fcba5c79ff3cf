"""What most tests need: a small model, its components, and a manager over a directory of the test."""

import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis.configuration import set_hypothesis_home_dir
from torch import nn
from warm_start import WarmStart

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    OptimizerState,
    Preprocessor,
    RNGState,
    SharingPattern,
    StateComponent,
    Stateful,
    StaticStatefulProvider,
)
from checkpoint_core.encoding import local_part
from checkpoint_core.files import FileRecord, combine
from checkpoint_core.saving import capture, own_state, plan_files
from checkpoint_core.tensor_files import create_tensor_file, plan_file, spec_of, write_parts
from dist_env import StaticDistributedEnvironment, forget_warnings

# Without this, every run would leave a directory of examples in the working tree.
set_hypothesis_home_dir(tempfile.gettempdir())


class Counter:
    """The smallest state: one number."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = int(str(state["value"]))


class TrainingJob:
    """A model with dropout, AdamW, a scheduler and a step counter, with everything they need to persist."""

    def __init__(
        self,
        output_dir: Path | str,
        *,
        seed: int = 0,
        preprocessor: Preprocessor | None = None,
        **config: object,
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[3, 7])
        self.counter = Counter()
        shared = SharingPattern.REPLICATED
        self.components = [
            StateComponent(
                key="model", stateful=ModelState(self.model), sharing_pattern=shared, required=True
            ),
            StateComponent(
                key="optimizer",
                stateful=OptimizerState(self.optimizer, self.model),
                sharing_pattern=shared,
            ),
            StateComponent(key="scheduler", stateful=self.scheduler, sharing_pattern=shared),
            StateComponent(key="trainer", stateful=self.counter, sharing_pattern=SharingPattern.GLOBAL),
            StateComponent(key="rng", stateful=RNGState(), sharing_pattern=SharingPattern.PER_RANK),
        ]
        self.manager = CheckpointManager(
            CheckpointConfig(output_dir=output_dir, **config),  # type: ignore[arg-type]
            dist=StaticDistributedEnvironment(),
            stateful_provider=StaticStatefulProvider(self.components),
            preprocessor=preprocessor,
        )

    def train(self, steps: int) -> list[float]:
        """Train on random data and return the losses."""
        losses = []
        for _ in range(steps):
            self.counter.value += 1
            loss = self.model(torch.randn(4, 6)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self) -> Path:
        return self.manager.save_checkpoint(self.counter.value)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., TrainingJob]:
    """Makes jobs that share the output directory ``tmp_path / "run"``."""

    def make(**options: object) -> TrainingJob:
        return TrainingJob(tmp_path / "run", **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def training_job() -> Callable[..., TrainingJob]:
    """Makes jobs that save to a place of the test's choice."""
    return TrainingJob


@pytest.fixture
def counter() -> Callable[..., Counter]:
    """Makes counters."""
    return Counter


@pytest.fixture(scope="session")
def run_worker(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """Runs a script, or one of `workers`, which must end well, and returns what it printed."""
    folder = Path(__file__).parent / "workers"
    # A safe path does not hold the script's folder, where some workers have further modules.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    # What the workers would import: theirs are processes that fork ranks.
    warm = WarmStart(
        [
            "torch._dynamo",
            "torch.distributed.fsdp",
            "torch.distributed.checkpoint",
            "checkpoint_core.manager",
        ],
        environ,
    )

    def run(
        script: str | Path, *arguments: object, timeout: float = 600
    ) -> "subprocess.CompletedProcess[str]":
        words = [str(folder / script), *map(str, arguments)]
        out, err = (tmp_path_factory.mktemp("told") / name for name in ("out", "err"))
        process = warm.start(words, environ, out, err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        done = subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())
        assert done.returncode == 0, done.stderr + done.stdout
        return done

    yield run
    warm.close()


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which the operating system lets no file of this process grow beyond a number of bytes."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def store() -> Callable[..., Path]:
    """Writes one stateful object's files, without a checkpoint around them."""

    def write(stateful: Stateful, stem: str, directory: Path, max_shard_size: int = 10**9) -> Path:
        directory.mkdir(exist_ok=True)
        whole = own_state(capture(stateful, sharded=False))
        files = plan_files(stateful, stem, whole, max_shard_size)
        files.create(directory)
        files.write(directory, threads=2)
        return directory

    return write


@pytest.fixture
def write_safetensors() -> Callable[..., FileRecord]:
    """Writes a whole safetensors file."""

    def write(
        path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], threads: int = 1
    ) -> FileRecord:
        layout = plan_file({name: spec_of(tensor) for name, tensor in tensors.items()}, metadata)
        parts = {name: local_part(tensor, name) for name, tensor in tensors.items()}
        shares = [create_tensor_file(path, layout), write_parts(path, layout, parts, threads)]
        return FileRecord(layout.size, combine(shares))

    return write


@pytest.fixture(autouse=True)
def _every_warning_is_heard() -> None:
    """Each is given once a process; which tests ran before in it must not matter."""
    forget_warnings()
