"""Models, splitters and settings that do not fit each other, or the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import Batches, Tiny, trainer_of
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from dist_env import DistributedEnvInterface
from trainer_pipeline import BlockSplitter, ModelSplitter


class Skipping(Tiny):
    """Does not call its last blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.norm(self.layers[0](self.embed(input_ids))))


class Reversed(Tiny):
    """Calls its blocks from the last to the first."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(input_ids)
        for layer in reversed(list(self.layers)):
            x = layer(x)
        return self.head(self.norm(x))


class Twice(Tiny):
    """Goes through its blocks twice."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(input_ids)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(self.norm(x))


class Beside(Tiny):
    """Keeps a sum beside its blocks, which later stages do not get."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def half_frozen() -> nn.Module:
    """A model with nothing to train in its second half."""
    model = Tiny()
    for part in (*list(model.layers)[len(model.layers) // 2 :], model.norm, model.head):
        part.requires_grad_(False)
    return model


def called_alone(env: DistributedEnvInterface, folder: Path) -> object:
    """Call what a rank has of the model."""
    model = trainer_of(env, folder, Tiny).unwrapped_model()
    return {"shape": list(model(torch.zeros(1, 4, dtype=torch.int64)).shape)}


class Flat(nn.Module):
    """A model without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, 16)
        self.head = nn.Linear(16, 53)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.embed(input_ids))


class Stingy:
    """Makes one stage too few."""

    def __call__(self, model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
        """Make the stages."""
        return BlockSplitter()(model, num_stages - 1)


class Tupled:
    """Makes stages that hand on two things."""

    def __call__(self, model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
        """Make the stages."""
        return [Pair(stage) for stage in BlockSplitter()(model, num_stages)]


class Pair(nn.Module):
    """A stage that returns a pair."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden: Tensor | None, **inputs: object) -> object:
        """The hidden state, twice."""
        found = self.stage(hidden, **inputs)
        return found, found


def built(
    env: DistributedEnvInterface,
    folder: Path,
    model_init: Callable[[], nn.Module] = Tiny,
    *,
    splitter: ModelSplitter | None = None,
    **settings: object,
) -> object:
    """Build the model, which is not what comes out of a refusal."""
    trainer_of(env, folder, model_init, splitter=splitter, **settings).unwrapped_model()  # type: ignore[arg-type]
    return {}


def trained(
    env: DistributedEnvInterface,
    folder: Path,
    model_init: Callable[[], nn.Module] = Tiny,
    *,
    splitter: ModelSplitter | None = None,
    **settings: object,
) -> object:
    """Train, which is not what comes out of a refusal."""
    trainer = trainer_of(env, folder, model_init, train=Batches(), splitter=splitter, **settings)  # type: ignore[arg-type]
    trainer.train()
    return {"steps": trainer.state.global_step}


def prepared(env: DistributedEnvInterface, folder: Path, **settings: object) -> object:
    """Build all of a run; nothing is trained."""
    trainer_of(env, folder, train=Batches(), **settings).unwrapped_model()  # type: ignore[arg-type]
    return {}


def given(env: DistributedEnvInterface, folder: Path) -> object:
    """A built model."""
    trainer_of(env, folder, model=Tiny()).unwrapped_model()
    return {}


def of_rank(make: Callable[[int], nn.Module]) -> Scenario:
    """A model that depends on the rank."""
    return lambda env, folder: built(env, folder, partial(make, env.rank))


def nudged(rank: int) -> nn.Module:
    """A model whose tied weight depends on the rank."""
    model = Tiny(tied=True)
    with torch.no_grad():
        model.embed.weight[3, 5] += 0.5 * rank
    return model


def differing(setting: str, values: Sequence[object]) -> Scenario:
    """A setting that depends on the rank."""
    return lambda env, folder: built(env, folder, **{setting: values[env.rank]})  # type: ignore[arg-type]


OF_TWO: dict[str, Scenario] = {
    "model": given,
    "few blocks": partial(built, model_init=partial(Tiny, 3), schedule="zbv"),
    "one block": partial(built, model_init=partial(Tiny, 1)),
    "sum of layers": partial(built, layers_per_stage=(2, 3)),
    "frozen rank": partial(built, model_init=half_frozen),
    "called alone": called_alone,
    "no blocks": partial(built, model_init=Flat),
    "path": partial(built, transformer_layers_path="layer"),
    "loss of a stage": partial(prepared, fused_loss="chunked"),
    "loss": partial(prepared, fused_loss="torch", label_smoothing=0.1),
    "settings of the rank": differing("n_microbatches", (4, 8)),
    "schedule of the rank": differing("schedule", ("gpipe", "1f1b")),
    "layers of the rank": of_rank(lambda rank: Tiny(4 + 4 * rank)),
    "values of the rank": of_rank(nudged),
    "too few stages": partial(built, splitter=Stingy()),
    "microbatches": partial(prepared, schedule="interleaved_1f1b", n_microbatches=7),
    "microbatches of a factory": partial(prepared, factory=ScheduleInterleaved1F1B, n_microbatches=7),
}
IN_STEPS: dict[str, Scenario] = {
    "two things": partial(trained, splitter=Tupled()),
    "skipping": partial(trained, model_init=Skipping),
    "reversed": partial(trained, model_init=Reversed),
    "twice": partial(trained, model_init=Twice),
    "beside": partial(trained, model_init=Beside),
}
"""What is only seen in a step; the ranks end with it."""
