"""What each rank holds, and the values that it begins with, beside those of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import SEED, Tiny, seeded, trainer_of
from torch import Tensor, nn

from dist_env import DistributedEnvInterface

LAYERS = 8


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def storage(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def compared(model: nn.Module, expected: nn.Module) -> dict[str, object]:
    """Hold what a rank has against the whole model."""
    found, wanted = dict(model.named_parameters()), dict(expected.named_parameters())
    saved = dict(expected.named_buffers())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    stand_ins = [buffer for name, buffer in model.named_buffers() if name not in saved]
    return {
        "held": list(found),
        "numel": sum(parameter.numel() for parameter in found.values()),
        "whole": {name: parameter.numel() for name, parameter in wanted.items()},
        "bytes": storage(list(found.values())),
        "bytes of stand-ins": storage(stand_ins),
        "differing": [name for name, value in found.items() if not same_bits(value, wanted[name])],
        "buffers": list(buffers),
        "differing buffers": [n for n, buffer in buffers.items() if not same_bits(buffer, saved[n])],
    }


def drawn(env: DistributedEnvInterface, folder: Path, *, tied: bool = False, **settings: object) -> object:
    """From model_init, after a seed."""
    make = partial(Tiny, LAYERS, tied=tied)
    trainer = trainer_of(env, folder, make, **settings)  # type: ignore[arg-type]
    return compared(trainer.unwrapped_model(), seeded(make))


def without_seed(env: DistributedEnvInterface, folder: Path) -> object:
    """From model_init, when each rank has random generators of its own."""
    make = partial(Tiny, LAYERS)
    torch.manual_seed(200 + env.rank)
    trainer = trainer_of(env, folder, make, seed=-1)
    return compared(trainer.unwrapped_model(), seeded(make, 200))


def generators(env: DistributedEnvInterface, folder: Path) -> object:
    """What is drawn after building, here and in one process."""
    make = partial(Tiny, LAYERS)
    trainer_of(env, folder, make).unwrapped_model()
    after = torch.rand(4).tolist()
    seeded(make, SEED)
    return [after, torch.rand(4).tolist()]


SCENARIOS: dict[str, Scenario] = {
    "drawn, 1f1b": drawn,
    "drawn, tied": partial(drawn, tied=True),
    "drawn, interleaved_1f1b": partial(drawn, schedule="interleaved_1f1b"),
    "drawn, zbv": partial(drawn, schedule="zbv", tied=True),
    "drawn, unseeded": without_seed,
    "generators": generators,
}
