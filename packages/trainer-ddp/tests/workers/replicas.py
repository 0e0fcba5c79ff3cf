"""Two ranks of which rank 1 has, gets or uses something else: `replicas.py SCENARIO ...`.

Scenarios that end alike on both ranks may follow one another; each notes the error of this rank.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial

import torch
from tiny import RaggedLoader, TinyModel, digest, settings, write_notes
from torch import Tensor, nn

from dist_env import DistributedEnvInterface, DistributedEnvironment, broadcast_object
from trainer_ddp import DDPArguments, DDPTrainer, DDPTrainingArguments


class Flip:
    """Changes the sign of one weight, after the second optimizer step."""

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        if state.global_step == 2:  # type: ignore[attr-defined]
            with torch.no_grad():
                kw["model"].layers[0].weight[3, 5].neg_()  # type: ignore[attr-defined]


class Stop:
    """Asks for the end of the run after the second optimizer step."""

    name = "stops on one rank"

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        control.should_training_stop |= state.global_step == 2  # type: ignore[attr-defined]


class WithSpare(nn.Module):
    """Has a layer that only some forward passes in training use.

    Args:
        unused: Called with the number of the forward pass, from 0; whether it leaves the layer out.
    """

    def __init__(self, unused: Callable[[int], bool]) -> None:
        super().__init__()
        self.inner = TinyModel()
        self.spare = nn.Linear(23, 23)
        self._unused = unused
        self._passes = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.inner(input_ids)
        unused = self._unused(self._passes)
        self._passes += 1
        return logits if unused else self.spare(logits)


def same_model() -> nn.Module:
    """A model whose fresh weights are the same on every rank."""
    torch.manual_seed(1)
    return TinyModel()


def bfloat16_layer() -> nn.Module:
    model = same_model()
    model.layers[0].bfloat16()  # type: ignore[operator, union-attr]
    return model


def frozen_head() -> nn.Module:
    model = same_model()
    model.head.requires_grad_(False)  # type: ignore[operator, union-attr]
    return model


def other_weights() -> nn.Module:
    model = same_model()
    with torch.no_grad():
        model.head.bias[0] += 1e-3  # type: ignore[index, operator, union-attr]
    return model


def train(
    env: DistributedEnvInterface,
    *,
    model: Callable[[], nn.Module] = same_model,
    callback: object | None = None,
    **options: object,
) -> nn.Module:
    """Train four steps; the model afterwards."""
    folder = broadcast_object(tempfile.mkdtemp() if env.rank == 0 else None, env)
    trainer = DDPTrainer(
        DDPTrainingArguments(**settings(str(folder), **options)),  # type: ignore[arg-type]
        model=model(),
        train_dataset=RaggedLoader(),
        distributed_env=env,
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    return trainer.unwrapped_model()


def stop_cause(env: DistributedEnvInterface) -> str:
    """What both ranks know about a stop that a callback of rank 1 asked for."""
    folder = broadcast_object(tempfile.mkdtemp() if env.rank == 0 else None, env)
    trainer = DDPTrainer(
        DDPTrainingArguments(**settings(str(folder))),  # type: ignore[arg-type]
        model=same_model(),
        train_dataset=RaggedLoader(),
        distributed_env=env,
        callbacks=[Stop()] if env.rank == 1 else [],
    )
    trainer.train()
    return str(tuple(trainer.stop_cause or ()))


def of_rank_1(env: DistributedEnvInterface, usual: object, other: object) -> object:
    return other if env.rank == 1 else usual


SCENARIOS: Mapping[str, Callable[[DistributedEnvInterface], object]] = {
    "stop cause": stop_cause,
    "nothing": lambda env: digest(train(env, save_strategy="steps", save_steps=2)),
    "flipped": lambda env: train(
        env, callback=of_rank_1(env, None, Flip()), save_strategy="steps", save_steps=2
    ),
    "layers": lambda env: train(env, model=partial(TinyModel, layers=1 + env.rank)),
    "dtype": lambda env: train(env, model=of_rank_1(env, same_model, bfloat16_layer)),  # type: ignore[arg-type]
    "frozen": lambda env: train(env, model=of_rank_1(env, same_model, frozen_head)),  # type: ignore[arg-type]
    "learning_rate": lambda env: train(env, learning_rate=1e-2 * (1 + env.rank)),
    "option": lambda env: train(env, ddp=DDPArguments(gradient_as_bucket_view=env.rank == 1)),
    "weights": lambda env: train(
        env,
        model=of_rank_1(env, same_model, other_weights),  # type: ignore[arg-type]
        ddp=DDPArguments(init_sync=False),
    ),
    "weights, init_sync": lambda env: digest(
        train(env, model=of_rank_1(env, same_model, other_weights))  # type: ignore[arg-type]
    ),
    "unused, told": lambda env: digest(
        train(
            env,
            model=partial(WithSpare, lambda number: (number + env.rank) % 2 == 0),
            ddp=DDPArguments(find_unused_parameters=True),
        )
    ),
    "unused": lambda env: train(env, model=partial(WithSpare, lambda number: True)),
    "unused later on one": lambda env: train(
        env, model=partial(WithSpare, lambda number: env.rank == 1 and number == 3)
    ),
}


def main(names: list[str]) -> None:
    """Run the scenarios; the error of the last one ends this process."""
    notes: dict[str, object] = {}
    with DistributedEnvironment(no_accelerator=True, training_timeout=40) as env:
        for name in names:
            try:
                result = SCENARIOS[name](env)
            except Exception as error:
                notes[name] = {"error": f"{type(error).__name__}: {error}"}
                write_notes(notes)
                if name == names[-1]:
                    raise
            else:
                notes[name] = {"result": result if isinstance(result, str) else "no error"}
                write_notes(notes)


if __name__ == "__main__":
    main(sys.argv[1:])
