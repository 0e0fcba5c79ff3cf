"""A model run on tensors without values."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn

from trainer_core import ordinary_tensors

LENGTHS = (256, 16)
"""Tokens of the row that is counted: the first that the model takes. Longer rows shift weight from the head
to attention, a little."""


class Outline:
    """A model run once on tensors without values: what is called when, and how much each module computes.

    Args:
        model: The model, which stays as it is.
        path: Where its blocks are.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        self.problem = ""
        """Why the model could not be run; empty if it was."""
        self.returns: int | None = None
        """How many things the blocks return as a tuple; None if they return one thing, or were not seen."""
        self._after: set[str] = set()
        self._called: set[str] = set()
        self._flops: dict[str, float] = {}
        self._path = path
        with ordinary_tensors():
            self._run(model)

    def is_after(self, name: str) -> bool | None:
        """Whether a module is called after the blocks and not before them; None if that is not known."""
        return name in self._after if name in self._called else None

    def flops(self, name: str) -> float:
        """Forward FLOPs of a module."""
        return self._flops.get(name, 0.0)

    def _run(self, model: nn.Module) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        for length in LENGTHS:
            outline = copy.deepcopy(model).to("meta").eval()
            self._watch(outline)
            tokens = torch.zeros((1, length), dtype=torch.int64, device="meta")
            counter = FlopCounterMode(display=False)
            try:
                with torch.no_grad(), counter:
                    outline(input_ids=tokens)
            except Exception as error:  # noqa: BLE001 - whatever a model does, there is another way
                self.problem = str(error).partition("\n")[0][:200] or type(error).__name__
                self._after.clear()
                self._called.clear()
                continue
            prefix = f"{type(outline).__name__}."
            self.problem, self._flops = (
                "",
                {
                    name.removeprefix(prefix): float(sum(table.values()))
                    for name, table in counter.get_flop_counts().items()
                },
            )
            return

    def _watch(self, outline: nn.Module) -> None:
        self._after.clear()
        self._called.clear()
        reached = False

        def note(name: str, *_: object) -> None:
            nonlocal reached
            if name.startswith(f"{self._path}."):
                reached = True
            elif name not in self._called:
                self._called.add(name)
                if reached:
                    self._after.add(name)

        def note_output(module: nn.Module, args: object, output: object) -> None:
            self.returns = len(output) if isinstance(output, tuple) else None

        for name, module in outline.named_modules():
            module.register_forward_pre_hook(partial(note, name))
        for block in outline.get_submodule(self._path).children():
            block.register_forward_hook(note_output)


class OwnParameters(nn.Module):
    """The parameters that a module has itself, without those of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module._parameters.items():
            self.register_parameter(name, parameter)
