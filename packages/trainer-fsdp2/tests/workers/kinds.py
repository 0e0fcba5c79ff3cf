"""Compilation, and the dtypes and places of what is sharded."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import Batches, Tiny, losses, trainer_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from dist_env import DistributedEnvInterface


def compiled(env: DistributedEnvInterface, folder: Path, scope: str, layers: int) -> dict[str, object]:
    """What torch compiles in a run."""
    torch._dynamo.reset()
    counters.clear()
    trainer = trainer_of(
        env,
        folder,
        partial(Tiny, layers),
        train=Batches(),
        torch_compile=True,
        torch_compile_backend="aot_eager",
        torch_compile_scope=scope,
    )
    trainer.train()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "recompiles": sum(counters["recompiles"].values()),
        "compiled": [
            name
            for name, module in trainer.unwrapped_model().named_modules()
            if module._compiled_call_impl is not None
        ],
        "losses": losses(trainer),
    }


def compiling(env: DistributedEnvInterface, folder: Path) -> object:
    """The model as a whole; two blocks and five."""
    eager = trainer_of(env, folder / "eager", train=Batches())
    eager.train()
    return {
        "eager": losses(eager),
        "model": compiled(env, folder / "model", "model", 2),
        "2 blocks": compiled(env, folder / "2", "blocks", 2),
        "5 blocks": compiled(env, folder / "5", "blocks", 5),
    }


class State:
    """Notes dtypes and devices, before a step and at the end."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kw: object) -> None:
        model: nn.Module = kw["model"]  # type: ignore[assignment]
        self._note("gradients", [p.grad for p in model.parameters() if p.grad is not None])

    def on_train_end(self, args: object, state: object, control: object, **kw: object) -> None:
        model: nn.Module = kw["model"]  # type: ignore[assignment]
        self._note("weights", list(model.parameters()))
        optimizer: torch.optim.Optimizer = kw["optimizer"]  # type: ignore[assignment]
        values = [value for each in optimizer.state.values() for value in each.values()]
        self._note("optimizer", [value for value in values if isinstance(value, Tensor) and value.ndim])

    def _note(self, what: str, tensors: list[Tensor]) -> None:
        kinds = Counter(
            f"{'shard' if isinstance(tensor, DTensor) else 'whole'} {tensor.dtype} {tensor.device.type}"
            for tensor in tensors
        )
        self.found[what] = sorted(kinds)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def kept(env: DistributedEnvInterface, folder: Path, **settings: object) -> object:
    """A run; the kinds of its tensors, what layers compute with, and the table that it prints."""
    state, lines, computing = State(), Lines(), set()
    logging.getLogger().addHandler(lines)
    trainer = trainer_of(env, folder, train=Batches(), callbacks=[state], **settings)  # type: ignore[arg-type]
    layer = trainer.unwrapped_model().layers[0].mixing  # type: ignore[index, union-attr]
    logging.getLogger().removeHandler(lines)
    layer.register_forward_hook(
        lambda module, inputs, output: computing.update(
            {f"input {inputs[0].dtype}", f"weight {module.weight.dtype}", f"output {output.dtype}"}
        )
    )
    trainer.train()
    return {
        **state.found,
        "computing": sorted(computing),
        "table": lines.lines,
        "losses": losses(trainer),
    }


SCENARIOS: dict[str, Scenario] = {
    "compiling": compiling,
    "plain": kept,
    "bf16 policy": partial(kept, param_dtype="bfloat16"),
    "bf16 autocast": partial(kept, mixed_precision="bf16"),
    "on the host": partial(kept, cpu_offload=True),
}
