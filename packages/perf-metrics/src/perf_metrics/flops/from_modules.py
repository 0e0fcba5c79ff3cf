"""The architecture of a model from its modules, with what is trained and what is frozen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .accounts import KINDS, ROUTED_EXPERTS, SHORT_CONVOLUTION, FlopsUnknownError
from .architecture import Architecture, WeightGroup
from .attention import AttentionLayer, ScanLayer, mixing_layers
from .layer_kinds import kind_of
from .settings import Settings, UnknownShapeError

if TYPE_CHECKING:
    from torch import nn

_NOT_AS_CONFIGURED = {
    *("bart", "bigbird_pegasus", "diffllama", "gemma3n", "gemma3n_text", "hrm_text", "mimo_v2_flash"),
    *("mllama", "mllama_text_model", "mvp", "prophetnet", "trocr"),
}
"""Families whose attention is not what a decoder of their figures would have: twice, across, in streams."""
_ONE_OF_MANY = re.compile(r"(^|\.)experts\.\d+(\.|$)")


@dataclass(frozen=True)
class _Matrix:
    kind: str
    stored: int
    active: float
    trained: bool


def architecture_of_model(model: nn.Module) -> Architecture:
    """Return the architecture of a decoder-only model, from its modules and its `config`.

    Weights are counted from the modules: `nn.Linear` and its subclasses, modules whose weight is a matrix
    (`Conv1D` of GPT-2), experts held in one tensor or as a list, depthwise convolutions. Each use counts
    once, so a tied output projection counts and the lookup does not. Attention comes from the configuration.
    Shapes suffice: a model on the meta device will do.

    Frozen weights cost 2 forward, and 2 more where a gradient passes through, that is when a parameter
    registered before it is trained; attention and scans cost their backward in the layers that a gradient
    reaches. Adapters that are registered after the layer they adapt (LoRA) make the very first layer appear
    to pass a gradient on that it does not need; `count_flops` is exact there.

    Args:
        model: The model itself; of `DistributedDataParallel`, its `module`.

    Raises:
        FlopsUnknownError: The structure is not covered, with the reason.
    """
    try:
        return _architecture(model)
    except UnknownShapeError as reason:
        raise FlopsUnknownError(
            f"the FLOP formula does not cover {type(model).__name__}: {reason}; count_flops counts it instead"
        ) from None


def _architecture(model: nn.Module) -> Architecture:
    config = getattr(model, "config", None)
    if config is None:
        raise UnknownShapeError("it has no config with num_hidden_layers and num_attention_heads")
    settings = Settings(config)
    if settings.family in _NOT_AS_CONFIGURED:
        raise UnknownShapeError(f"layers of {settings.family} attend in ways that its config does not tell")
    mixing = _reached(model, mixing_layers(settings))
    groups: dict[str, WeightGroup] = {}
    for matrix, passes in _with_passes(model, settings):
        old = groups.get(matrix.kind, WeightGroup(matrix.kind, 0, 0.0, 0.0))
        groups[matrix.kind] = WeightGroup(
            matrix.kind,
            old.stored + matrix.stored,
            old.active + matrix.active,
            old.backward + passes * matrix.active,
        )
    ordered = tuple(groups[kind] for kind in KINDS if kind in groups)
    return Architecture(type(model).__name__, ordered, tuple(mixing), _parameters(model), _lookup(model))


def _with_passes(model: nn.Module, settings: Settings) -> Iterator[tuple[_Matrix, int]]:
    """Yield each matrix with the number of its products in the backward pass: 2, 1 or 0."""
    trained_below = False
    for path, module in model.named_modules():
        for matrix in _matrices(path, module, settings):
            yield matrix, 2 if matrix.trained else 1 if trained_below else 0
        trained_below = trained_below or any(p.requires_grad for p in module.parameters(recurse=False))


def _matrices(path: str, module: nn.Module, settings: Settings) -> Iterator[_Matrix]:
    from torch import nn

    kind = kind_of(path)
    if isinstance(module, nn.Linear):
        # The declared sizes, not the tensor's: packed low-bit weights hold fewer elements.
        size = module.in_features * module.out_features
        share = _share(path, settings) if _ONE_OF_MANY.search(path) else 1.0
        yield _Matrix(kind, size, size * share, module.weight.requires_grad)
        return
    if isinstance(module, nn.Conv1d) and module.groups == module.in_channels:
        size = module.weight.numel()
        yield _Matrix(SHORT_CONVOLUTION, size, size, module.weight.requires_grad)
        return
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm | nn.RMSNorm):
        return
    yield from _bare_matrices(path, kind, module, settings)


def _bare_matrices(path: str, kind: str, module: nn.Module, settings: Settings) -> Iterator[_Matrix]:
    """The matrices that a module of its own making holds as parameters."""
    experts = settings.experts
    own = [(name, tensor) for name, tensor in module.named_parameters(recurse=False)]
    holds_experts = any(
        len(tensor.shape) == 3 and experts and tensor.shape[0] == experts[0] for _, tensor in own
    )
    for name, parameter in own:
        size, trained = parameter.numel(), parameter.requires_grad
        if sum(length > 1 for length in parameter.shape) < 2:
            continue
        if holds_experts:
            if len(parameter.shape) == 3:
                yield _Matrix(ROUTED_EXPERTS, size, size * _share(path, settings), trained)
        elif len(parameter.shape) == 2 and (name.startswith("weight") or name.endswith("weight")):
            yield _Matrix(kind, size, size, trained)
        else:
            where = f"{path}.{name}" if path else name
            shape = "x".join(str(length) for length in parameter.shape)
            raise UnknownShapeError(
                f"parameter {where} ({shape}, in {type(module).__name__}) is neither the weight of a linear "
                "layer nor an embedding"
            )


def _share(path: str, settings: Settings) -> float:
    if settings.experts is None:
        raise UnknownShapeError(
            f"{path} is one of several experts, and config does not say how many are used"
        )
    total, used = settings.experts
    return used / total


def _reached(
    model: nn.Module, mixing: list[AttentionLayer | ScanLayer | None]
) -> list[AttentionLayer | ScanLayer | None]:
    """Note which layers no gradient reaches: those below the lowest trained parameter."""
    first = _first_reached(model, len(mixing))
    return [
        layer if layer is None or index >= first else replace(layer, reached=False)
        for index, layer in enumerate(mixing)
    ]


def _first_reached(model: nn.Module, layers: int) -> int:
    if not any(p.requires_grad for p in model.parameters()):
        return layers
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            if any(p.requires_grad for p in _parameters_before(model, module)):
                return 0
            trained = (any(p.requires_grad for p in layer.parameters()) for layer in module)
            return next((index for index, layer in enumerate(trained) if layer), layers)
    return 0


def _parameters_before(model: nn.Module, stop: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if module is stop:
            return
        yield from module.parameters(recurse=False)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _lookup(model: nn.Module) -> int:
    """Parameters of embeddings that no other module shares."""
    from torch import nn

    tables = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    for module in model.modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            for parameter in module.parameters(recurse=False):
                tables.pop(id(parameter), None)
    return sum(tables.values())
