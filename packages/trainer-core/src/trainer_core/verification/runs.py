"""The runs that `verify` compares: one model, one seed, and the same rows in each global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dist_env import DistributedEnvInterface, ParallelLayout, StaticDistributedEnvironment

from ..arguments import DataParallelArguments
from ..distributed.executor import own_part
from ..model import ModelInit
from ..state import TrainerControl, TrainerState
from ..trainer import Trainer

ROWS_PER_RANK = 4
"""Of a global batch; as many as a pipeline's microbatches by default."""


@dataclass(frozen=True)
class Run:
    """What a run has logged, and what it held at its end.

    Attributes:
        losses: By step, in nats per token.
        state_bytes: Parameters, as many bytes of gradients, and optimizer state of this rank.
        began: Step that it began behind.
    """

    losses: list[float]
    state_bytes: int
    began: int


class StopBehind:
    """A callback that asks for the end of a run behind a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Ask for it."""
        if state.global_step == self._step:
            control.should_training_stop = True


@dataclass
class Runs:
    """Makes the runs of one verification, each in a directory of its own.

    Attributes:
        model_init: Builds the model.
        rows: The examples.
        env: All ranks.
        directory: Where runs write.
        settings: Those of the user, which win.
        steps: Optimizer steps of a run.
    """

    model_init: ModelInit
    rows: Sequence[Mapping[str, Tensor]]
    env: DistributedEnvInterface
    directory: Path
    settings: Mapping[str, object]
    steps: int
    _made: int = field(default=0, init=False)

    @property
    def batch_size(self) -> int:
        """Rows of a global batch."""
        return ROWS_PER_RANK * self.env.world_size

    @property
    def alone(self) -> DistributedEnvInterface:
        """This rank by itself, on its device."""
        return StaticDistributedEnvironment(device=self.env.device)

    @property
    def on_cpu(self) -> DistributedEnvInterface:
        """This rank by itself, on the CPU."""
        return StaticDistributedEnvironment(device=torch.device("cpu"))

    def new_place(self) -> str:
        """Name of a directory that no run has used; alike on all ranks."""
        self._made += 1
        return f"run-{self._made}"

    def trainer(
        self, env: DistributedEnvInterface, place: str, *callbacks: object, **given: object
    ) -> Trainer:
        """The trainer of a run; a rank alone has a directory to itself."""
        where = self.directory / place
        if env.world_size == 1 and self.env.world_size > 1:
            where /= f"rank-{self.env.rank}"
        mesh = given.get("mesh")
        data_ranks = ParallelLayout.parse(mesh).data_count if isinstance(mesh, str) else 1
        chosen = {
            "output_dir": str(where),
            "use_cpu": env.device.type == "cpu",
            "seed": 7,
            "per_device_train_batch_size": self.batch_size // data_ranks,
            "max_steps": self.steps,
            "num_train_epochs": -1,
            "learning_rate": 1e-3,
            "max_grad_norm": 1.0,
            "logging_steps": 1,
            "check_flops": False,
            "save_strategy": "no",
            **self.settings,
            **given,
        }
        return Trainer(
            # A wrong name must fail the check: as a ConfigurationError it would count as not possible here.
            DataParallelArguments(**chosen),  # type: ignore[arg-type]
            model_init=self.model_init,
            train_dataset=list(self.rows),
            callbacks=list(callbacks),
            distributed_env=env,
        )

    def train(self, env: DistributedEnvInterface, place: str, *callbacks: object, **given: object) -> Run:
        """Train to the end, or from a checkpoint that is there.

        Raises:
            KeyboardInterrupt: On every rank, if a signal stopped the run: it is meant for the verification.
        """
        trainer = self.trainer(env, place, *callbacks, **given)
        trainer.train()
        if trainer.stop_cause is not None and trainer.stop_cause.event == "signal":
            raise KeyboardInterrupt
        losses = [_number(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        return Run(losses, state_bytes(trainer), trainer.state.session_start_step)

    def in_two_parts(self, env: DistributedEnvInterface, **given: object) -> Run:
        """Train to the middle, save, and continue with a trainer that knows nothing of the first one."""
        place, middle = self.new_place(), self.steps // 2
        saving = {"save_strategy": "steps", "save_steps": middle, **given}
        self.train(env, place, StopBehind(middle), **saving)
        return self.train(env, place, **saving)


def state_bytes(trainer: Trainer) -> int:
    """What this rank holds of parameters, gradients of these, and optimizer state, in bytes."""
    parameters = [own_part(each) for each in trainer.model.parameters()]
    held = sum(each.nbytes * (2 if each.requires_grad else 1) for each in parameters)
    optimizer = trainer.optimizer
    for state in {} if optimizer is None else optimizer.state.values():
        held += sum(own_part(value).nbytes for value in state.values() if isinstance(value, Tensor))
    return held


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"the loss of a log entry is {value!r}, not a number.")
    return float(value)
