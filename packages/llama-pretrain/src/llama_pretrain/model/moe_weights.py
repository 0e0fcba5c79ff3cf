"""The other layout of weights with experts, in which most are published: a tensor for each expert."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from .config import LlamaConfig

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_LONGEST_HEADER = 100_000_000
"""Bytes; what safetensors itself allows."""


def has_separate_experts(directory: str | Path) -> bool:
    """Whether the weights of a Hugging Face directory have tensors of single experts."""
    index, single = (Path(directory) / f"model.safetensors{end}" for end in (".index.json", ""))
    try:
        if single.is_file():
            with single.open("rb") as file:
                # The format: the length of the header, 8 bytes little-endian, and the header, JSON by name.
                (length,) = struct.unpack("<Q", file.read(8))
                names = json.loads(file.read(min(length, _LONGEST_HEADER)))
        elif index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            return False
    except (struct.error, ValueError, KeyError, TypeError):
        return False  # damaged: whoever reads the weights says so
    return any(_OF_ONE_EXPERT.search(name) for name in names)


def with_separate_experts(model: nn.Module) -> nn.Module:
    """A module with the weights of a model, under the names of the layout with a tensor for each expert.

    They are views: what is read into it is in the model. transformers writes this layout from its
    `save_pretrained`, for example `model.layers.0.mlp.experts.3.up_proj.weight`; of a Mixtral
    `model.layers.0.block_sparse_moe.experts.3.w3.weight`.

    Args:
        model: A `Llama` with experts, on one device.
    """
    root = nn.Module()
    for name, tensor in _separated(model):
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if tensor.is_floating_point() and isinstance(tensor, nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor)
    return root


def _separated(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from .moe import MoE  # loads torch's compiler

    config = model.config
    mixtral = isinstance(config, LlamaConfig) and config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    held = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, _, rest = name.partition(".mlp.")
        moe = held.get(f"{owner}.mlp")
        outer = f"{owner}.block_sparse_moe" if mixtral else f"{owner}.mlp"
        if moe is None:
            yield name, tensor
        elif rest == "experts.gate_up_proj":
            for number, part in enumerate(tensor.detach()):
                both = part.chunk(2)
                for short, half in zip((gate, up), both, strict=True):
                    yield f"{outer}.experts.{number}.{short}.weight", nn.Parameter(half, requires_grad=False)
        elif rest == "experts.down_proj":
            for number, part in enumerate(tensor.detach()):
                yield f"{outer}.experts.{number}.{down}.weight", nn.Parameter(part, requires_grad=False)
        else:
            yield f"{outer}.{rest}", tensor
