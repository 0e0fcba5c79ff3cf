"""Models and settings that do not fit each other, or the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import VOCABULARY, WIDTH, Batches, Tiny, losses, trainer_of
from torch import Tensor, nn

from dist_env import DistributedEnvInterface, StaticDistributedEnvironment
from trainer_core import DataParallelArguments, Trainer, fsdp_modules
from trainer_fsdp2 import FSDP2Arguments, FullyShard


class Flat(nn.Module):
    """A model without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.embed(input_ids))


def shared_weight() -> nn.Module:
    """Two blocks with one weight."""
    model = Tiny()
    model.layers[1].mixing.weight = model.layers[0].mixing.weight
    return model


def shared_module() -> nn.Module:
    """Two blocks with one layer."""
    model = Tiny()
    model.layers[1].mixing = model.layers[0].mixing
    return model


def shared_with_root() -> nn.Module:
    """A block with a weight of the rest of the model."""
    model = Tiny()
    model.layers[1].norm = model.norm
    return model


def one_block_twice() -> nn.Module:
    """A model that goes through one block two times."""
    model = Tiny()
    model.layers[1] = model.layers[0]
    return model


class Seldom(Tiny):
    """Uses a parameter for some batches alone: in the first step on one rank, in the second on none."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary]."""
        logits = super().forward(input_ids)
        if int(input_ids.sum()) % 5 != 4:
            return logits
        return logits + (self.embed(input_ids) * self.seldom).sum(dim=-1, keepdim=True).sin() * logits


class Alternating(Tiny):
    """Uses one of two parameters of a shape, another one on each rank."""

    def __init__(self, env: DistributedEnvInterface) -> None:
        super().__init__()
        self.others = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self._rank = env.rank

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary]."""
        scale = (self.embed(input_ids) * self.others[self._rank % 2]).sum(dim=-1, keepdim=True).sin()
        return super().forward(input_ids) * scale


def as_of_torch_2_11(env: DistributedEnvInterface, folder: Path) -> None:
    """Train where a rank sends gradients only of what it has used, as torch 2.11 does."""
    trainer = trainer_of(env, folder, partial(Alternating, env), train=Batches())
    for unit in fsdp_modules(trainer.unwrapped_model()):
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(False)
    trainer.train()


def with_scalar() -> nn.Module:
    """A parameter without a dimension."""
    model = Tiny()
    model.layers[0].temperature = nn.Parameter(torch.ones(()))
    return model


def with_mixed_dtypes() -> nn.Module:
    """A block that trains weights of two dtypes."""
    model = Tiny()
    model.layers[1].norm.to(torch.bfloat16)
    return model


def with_transposed() -> nn.Module:
    """A weight whose rows do not lie one after another."""
    model = Tiny()
    model.layers[0].mixing.weight = nn.Parameter(torch.ones(WIDTH, WIDTH + 1).T)
    return model


def with_nothing() -> nn.Module:
    """A parameter without elements."""
    model = Tiny()
    model.layers[0].nothing = nn.Parameter(torch.ones(0, 3))
    return model


def on_meta() -> nn.Module:
    """A model without values."""
    with torch.device("meta"):
        return Tiny()


def of_this_rank(env: DistributedEnvInterface) -> nn.Module:
    """A model whose weights depend on the rank."""
    model = Tiny()
    with torch.no_grad():
        model.layers[1].mixing.weight[3, 5] += 1e-3 * env.rank
    return model


def grown_with_rank(env: DistributedEnvInterface) -> nn.Module:
    """A model whose size depends on the rank."""
    return Tiny(layers=2 + env.rank)


def settings_in_transform(env: DistributedEnvInterface, folder: Path) -> None:
    """Settings that are not part of the arguments, and others on each rank."""
    shard = FullyShard(FSDP2Arguments(reshard_after_forward=env.rank == 0, shard_transformer_layers=False))
    args = DataParallelArguments(output_dir=str(folder), use_cpu=True, seed=1, mesh=f"shard={env.world_size}")
    Trainer(args, parallel=[shard], model_init=Tiny, callbacks=[], distributed_env=env).unwrapped_model()


def built(
    env: DistributedEnvInterface,
    folder: Path,
    model_init: Callable[[], nn.Module] = Tiny,
    **settings: object,
) -> object:
    """Build the model, which is not what comes out of a refusal."""
    trainer_of(env, folder, model_init, **settings).unwrapped_model()  # type: ignore[arg-type]
    return {}


def of_rank(make: Callable[[DistributedEnvInterface], nn.Module], *, given: bool = False) -> Scenario:
    """A model that depends on the rank: built by the trainer, or given."""

    def scenario(env: DistributedEnvInterface, folder: Path) -> object:
        if given:
            return built(env, folder, model=make(env))
        return built(env, folder, partial(make, env))

    return scenario


OF_MODEL: dict[str, Scenario] = {
    "class": partial(built, layer_classes=("Blok",)),
    "class of the root": partial(built, layer_classes=("Tiny",)),
    "class of a container": partial(built, layer_classes=("ModuleList",)),
    "mixed dtypes": partial(built, model_init=with_mixed_dtypes),
    "not contiguous": partial(built, model_init=with_transposed),
    "no elements": partial(built, model_init=with_nothing),
    "built on meta": partial(built, model_init=on_meta),
    "path": partial(built, transformer_layers_path="layer"),
    "path to a module": partial(built, transformer_layers_path="embed"),
    "no blocks": partial(built, model_init=Flat),
    "shared weight": partial(built, model_init=shared_weight),
    "shared layer": partial(built, model_init=shared_module),
    "shared with the rest": partial(built, model_init=shared_with_root),
    "scalar": partial(built, model_init=with_scalar),
    "weights of the rank": of_rank(of_this_rank),
    "layers of the rank": of_rank(grown_with_rank),
    "layers of the rank, built": of_rank(grown_with_rank, given=True),
    "settings of the rank, in the transform": settings_in_transform,
    "other parameters on each rank": as_of_torch_2_11,
    "settings of the rank": lambda env, folder: built(env, folder, reshard_after_forward=env.rank == 0),
}
OF_MESH: dict[str, Scenario] = {
    "replicas 3": partial(built, replicas=3),
    "replicas 4": partial(built, replicas=4),
    "reshard 3": partial(built, reshard_after_forward=3),
    "reshard 3 of 2": partial(built, replicas=2, reshard_after_forward=3),
}


def trained(
    env: DistributedEnvInterface, folder: Path, model_init: Callable[[], nn.Module], **settings: object
) -> object:
    """The curve of the ranks, and that of one process with the same batches."""
    trainer = trainer_of(env, folder, model_init, train=Batches(), **settings)  # type: ignore[arg-type]
    trainer.train()
    alone = trainer_of(
        StaticDistributedEnvironment(),
        folder / f"alone-{env.rank}",
        model_init,
        train=Batches(),
        gradient_accumulation_steps=env.world_size,
    )
    alone.train()
    return {"losses": losses(trainer), "alone": losses(alone)}


ACCEPTED: dict[str, Scenario] = {
    "no blocks, one piece": partial(trained, model_init=Flat, shard_transformer_layers=False),
    "shared weight, one piece": partial(trained, model_init=shared_weight, shard_transformer_layers=False),
    "shared layer, one piece": partial(trained, model_init=shared_module, shard_transformer_layers=False),
    "one block twice": partial(trained, model_init=one_block_twice),
    "a parameter seldom used": partial(trained, model_init=Seldom),
}
