"""The values that a sharded model begins with, beside those of one process."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import Scenario
from tiny import SEED, Tiny, trainer_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dist_env import DistributedEnvInterface


def seeded(seed: int) -> Tiny:
    """The model as one process would build it."""
    torch.manual_seed(seed)
    return Tiny()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def whole(parameter: Tensor) -> Tensor:
    """A parameter put together from all ranks; collective."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def compared(model: nn.Module, expected: nn.Module, env: DistributedEnvInterface) -> dict[str, object]:
    """Hold a sharded model against a whole one; collective."""
    found, wanted = dict(model.named_parameters()), dict(expected.named_parameters())
    pieces = {}
    for name, value in wanted.items():
        chunks = value.chunk(env.world_size)
        own = found[name].to_local() if isinstance(found[name], DTensor) else found[name]
        pieces[name] = {
            "rows": own.shape[0],
            "rows of torch.chunk": chunks[env.rank].shape[0] if env.rank < len(chunks) else 0,
            "bytes held": own.untyped_storage().nbytes(),
            "bytes of the largest piece": chunks[0].numel() * value.element_size(),
            "is sharded": isinstance(found[name], DTensor),
        }
    buffers = dict(model.named_buffers())
    return {
        "names": [list(found), list(wanted)],
        "differing": [name for name, value in wanted.items() if not same_bits(whole(found[name]), value)],
        "pieces": pieces,
        "differing buffers": [n for n, b in expected.named_buffers() if not same_bits(buffers[n], b)],
        "buffers": list(buffers),
        "tied": model.head.weight is model.embed.weight,  # type: ignore[union-attr]
    }


def drawn(env: DistributedEnvInterface, folder: Path) -> object:
    """From model_init."""
    trainer = trainer_of(env, folder)
    return compared(trainer.unwrapped_model(), seeded(SEED), env)


def of_rank_0(env: DistributedEnvInterface, folder: Path) -> object:
    """A built model, another one on each rank."""
    trainer = trainer_of(env, folder, model=seeded(100 + env.rank))
    return compared(trainer.unwrapped_model(), seeded(100), env)


def without_seed(env: DistributedEnvInterface, folder: Path) -> object:
    """From model_init, when each rank has random generators of its own."""
    torch.manual_seed(200 + env.rank)
    trainer = trainer_of(env, folder, seed=-1)
    return compared(trainer.unwrapped_model(), seeded(200), env)


def generators(env: DistributedEnvInterface, folder: Path) -> object:
    """What is drawn after building, here and in one process."""
    trainer_of(env, folder).unwrapped_model()
    after = torch.rand(4).tolist()
    seeded(SEED)
    return [after, torch.rand(4).tolist()]


SCENARIOS: dict[str, Scenario] = {
    "drawn": drawn,
    "of rank 0": of_rank_0,
    "without a seed": without_seed,
    "generators": generators,
}
