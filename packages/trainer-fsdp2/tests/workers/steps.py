"""What happens in steps: how often gradients travel, and what is whole in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import Scenario
from tiny import VOCABULARY, Batches, Tiny, losses, trainer_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from dist_env import DistributedEnvInterface
from trainer_core import TextSamples

STEPS = 6
UNITS = 3
"""Two blocks and the root."""


class Collectives(TorchDispatchMode):
    """Counts calls of torch's collectives by name; on the CPU the backward pass runs in the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = str(func).partition(".")
        if namespace == "c10d":
            self.calls[name.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def counted(env: DistributedEnvInterface, folder: Path, **settings: object) -> dict[str, object]:
    """Collectives of a run by name."""
    trainer = trainer_of(env, folder, train=Batches(96), max_steps=2, **settings)  # type: ignore[arg-type]
    trainer.unwrapped_model()
    with Collectives() as collectives:
        trainer.train()
    return {"calls": collectives.calls, "steps": trainer.state.global_step, "losses": losses(trainer)}


def accumulating(env: DistributedEnvInterface, folder: Path) -> object:
    """One microbatch a step, and four in several ways."""
    found = {
        "1": counted(env, folder / "1"),
        "4": counted(env, folder / "4", gradient_accumulation_steps=4),
        "4, kept": counted(env, folder / "kept", gradient_accumulation_steps=4, reshard_after_forward=False),
    }
    found["4, each"] = counted(
        env, folder / "each", gradient_accumulation_steps=4, reduce_each_microbatch=True
    )
    if env.world_size == 4:
        found["4, copies"] = counted(env, folder / "copies", gradient_accumulation_steps=4, replicas=2)
    return found


def whole_parameters(model: nn.Module) -> list[str]:
    """Names of parameters that are not this rank's shards."""
    return [
        name
        for name, parameter in model.named_parameters()
        if not (isinstance(parameter, DTensor) and parameter.placements == (Shard(0),))
    ]


class Watch:
    """Notes which parameters are not sharded, after what may have gathered them."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def _look(self, event: str, model: nn.Module) -> None:
        self.found.setdefault(event, []).extend(whole_parameters(model))

    def on_evaluate(self, args: object, state: object, control: object, **kw: object) -> None:
        self._look("evaluation and samples", kw["model"])  # type: ignore[arg-type]

    def on_step_begin(self, args: object, state: object, control: object, **kw: object) -> None:
        self._look("the step before", kw["model"])  # type: ignore[arg-type]

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kw: object) -> None:
        self._look("the backward pass", kw["model"])  # type: ignore[arg-type]


class Writer:
    """Draws letters until the model draws the first one; remembers what it wrote."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, model: nn.Module, prompt: str) -> str:
        ids = [ord(letter) % VOCABULARY for letter in prompt]
        for _ in range(12):
            logits = model(torch.tensor([ids[-5:]]))[0, -1]
            ids.append(int(torch.multinomial(torch.softmax(3 * logits, dim=-1), 1)))
            if ids[-1] < 5:
                break
        self.texts.append(" ".join(map(str, ids[len(prompt) :])))
        return self.texts[-1]


def evaluating(env: DistributedEnvInterface, folder: Path) -> object:
    """A run that evaluates and writes in between, and one that does not."""
    settings: dict[str, object] = {"train": Batches(), "max_steps": STEPS, "gradient_accumulation_steps": 2}
    plain = trainer_of(env, folder / "plain", **settings)  # type: ignore[arg-type]
    plain.train()
    watch, writer = Watch(), Writer()
    disturbed = trainer_of(
        env,
        folder / "disturbed",
        evaluate=Batches(10),
        callbacks=[TextSamples(["abc", "xy"], generate=writer), watch],
        eval_strategy="steps",
        eval_steps=2,
        **settings,  # type: ignore[arg-type]
    )
    disturbed.train()
    at_the_end = disturbed.evaluate()
    return {
        "losses": [losses(plain), losses(disturbed)],
        "whole": watch.found,
        "whole after evaluate()": whole_parameters(disturbed.unwrapped_model()),
        "whole after training": whole_parameters(plain.unwrapped_model()),
        "texts": writer.texts,
        "eval_loss": at_the_end["eval_loss"],
    }


def work(env: DistributedEnvInterface, folder: Path) -> object:
    """What blocks that are computed again are logged to cost."""
    settings = {"gradient_checkpointing": True, "check_flops": True, "peak_hardware_flops": 1e9}
    trainer = trainer_of(env, folder, train=Batches(), **settings)  # type: ignore[arg-type]
    trainer.train()
    keys = ("flos", "hardware_flos", "peak_flops")
    return [[entry[key] for key in keys] for entry in trainer.state.log_history if "loss" in entry]


class Opinionated(Tiny):
    """A model that sees things differently on each rank: its cache, which is not saved, differs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.register_buffer("opinion", torch.randn(VOCABULARY, generator=generator), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of this rank."""
        return super().forward(input_ids) + self.opinion


def generating(env: DistributedEnvInterface, folder: Path) -> object:
    """Texts of ranks whose logits differ: in the context, and what ranks would write alone."""
    trainer = trainer_of(env, folder, lambda: Opinionated(env.rank))
    model, writer = trainer.unwrapped_model(), Writer()
    torch.manual_seed(env.rank)
    with trainer.generating():
        for prompt in ("abc", "de", "f"):
            writer(model, prompt)
        inside, evaluated = whole_parameters(model), not model.training
    drawn = torch.rand(3).tolist()
    with torch.no_grad():
        alone = model(torch.tensor([[1, 2, 3]]))[0, -1].tolist()
    return {"texts": writer.texts, "inside": inside, "alone": alone, "evaluated": evaluated, "drawn": drawn}


class Fails:
    """Fails once, after a microbatch."""

    def __init__(self, number: int) -> None:
        self._left = number

    def on_forward_backward_end(self, args: object, state: object, control: object, **kw: object) -> None:
        self._left -= 1
        if self._left == 0:
            raise ArithmeticError("this microbatch")


def fails_backward(number: int) -> Tiny:
    """A model whose backward pass fails once, between two blocks; 0: never."""
    model, left = Tiny(), [number]

    def hook(module: nn.Module, gradients: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ArithmeticError("this microbatch")

    model.layers[0].register_full_backward_pre_hook(hook)
    return model


def left(env: DistributedEnvInterface, folder: Path) -> object:
    """Curves of runs that continue after an error in their third step.

    It comes behind the first microbatch of that step, behind the last one, with which the step is complete,
    or in the backward pass of the first one, after which torch 2.11 and 2.12 cannot continue.
    """
    places = [(5, 0), (6, 0), *([(0, 5)] if hasattr(FSDPModule, "reset_iter_state") else [])]
    curves = {}
    for dtype in (None, "bfloat16"):
        for after, backward in places:
            trainer = trainer_of(
                env,
                folder / f"{after} {backward} {dtype}",
                partial(fails_backward, backward),
                train=Batches(96),
                callbacks=[Fails(after)],
                max_steps=4,
                gradient_accumulation_steps=2,
                param_dtype=dtype,
            )
            try:
                trainer.train()
            except ArithmeticError:
                trainer.train()
            curves[f"{after} {backward} {dtype}"] = losses(trainer)
    return curves


SCENARIOS: dict[str, Scenario] = {
    "left": left,
    "accumulating": accumulating,
    "evaluating": evaluating,
    "generating": generating,
    "work": work,
}
