"""Divide a model over the ranks of a mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_env import get_logger

from .check import Structure, examine, is_shared_head, local_size, shares, undivided
from .plan import PlanError, module_at
from .styles import (
    Colwise,
    FirstLayer,
    Layers,
    Progress,
    Region,
    Rowwise,
    Scope,
    Style,
    Styled,
    Vocabulary,
    Whole,
    add_style,
    styles_of,
)

_LOGGER = get_logger(__name__)


def shard_tensors(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
    loss: bool = False,
) -> nn.Module:
    """Divide a model over the ranks of a mesh, in place; collective.

    Every parameter becomes a DTensor on the mesh, divided or replicated, under its own name, and its
    gradient has the same placement. Weights that are tied stay tied. Each rank gives the same batch, and
    gets the same loss. The model is divided before `fully_shard`, over another dimension of the same mesh.

    Key-value heads that are fewer than the ranks are whole on each rank, and each computes the one that its
    queries need. Widths and vocabularies need not be a multiple of the ranks.

    Args:
        model: Parameters have values, of which those of the first rank count, or are on the meta device.
            They are not divided yet.
        mesh: One dimension, such as `dist_env.Meshes(...).tensor`.
        plan: Styles by name; None: the model's own, as `tensor_plan` finds it.
        sequence: Whether activations between the layers are divided by the sequence (Korthikanti et al.
            2022). Sequences must then be a multiple of the ranks. Hidden states that the model returns are
            parts.
        loss: Whether logits stay divided by the vocabulary: a DTensor [batch, sequence, vocabulary], for
            `sharded_cross_entropy`.

    Returns:
        The model.

    Raises:
        PlanError: On every rank, before anything is divided: the model cannot be divided, or ranks have
            different models or plans.
    """
    _check_mesh(mesh)
    structure, error = None, None
    try:
        if any(isinstance(module, Styled) for module in model.modules()) or any(
            isinstance(parameter, DTensor) for parameter in model.parameters()
        ):
            raise PlanError(
                "The model is divided already. Give shard_tensors a model as it was made, and only once."
            )
        structure = examine(model, plan, tensor=mesh.size(), sequence=sequence, loss=loss)
    except (PlanError, ValueError) as raised:
        error = raised
    _check_same(model, structure, mesh, (sequence, loss))
    if error is not None or structure is None:
        raise error or PlanError("The plan was refused.")
    for sentence in undivided(shares(model, structure, mesh.size())):
        _LOGGER.warning(sentence)
    _add_styles(model, structure, mesh, sequence=sequence, loss=loss)
    _place_parameters(model, structure, mesh)
    return model


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise PlanError(
            f"mesh has {mesh.ndim} dimensions, and tensors are divided over one. Give that one, such as "
            "dist_env.Meshes(layout).tensor."
        )


def _check_same(
    model: nn.Module, structure: Structure | None, mesh: DeviceMesh, settings: tuple[bool, ...]
) -> None:
    """Refuse different models, plans or settings, and let all ranks know of one that refuses."""
    digest = 0
    if structure is not None:
        facts = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.named_parameters()]
        text = repr((facts, sorted(structure.styles.items()), settings))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") | 1
    mine = torch.tensor([digest], device=mesh.device_type)
    told = [torch.zeros_like(mine) for _ in range(mesh.size())]
    dist.all_gather(told, mine, group=mesh.get_group())
    digests = [int(each) for each in told]
    if digest == 0 or len(set(digests)) == 1:
        return
    refused = [rank for rank, each in enumerate(digests) if each == 0]
    if refused:
        raise PlanError(
            f"The plan was refused on rank(s) {_listed(refused)} of the mesh. See the error there."
        )
    other = [rank for rank, each in enumerate(digests) if each != digests[0]]
    raise PlanError(
        f"Rank(s) {_listed(other)} of the mesh have another model, plan or setting than rank 0. Give all "
        "ranks the same."
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _add_styles(
    model: nn.Module, structure: Structure, mesh: DeviceMesh, *, sequence: bool, loss: bool
) -> None:
    progress = Progress()
    scopes: dict[str, Scope] = {}
    if sequence and structure.backbone is not None:
        add_style(module_at(model, structure.backbone), Layers(mesh, sequence, progress))
        add_style(module_at(model, structure.layers[0]), FirstLayer(mesh, sequence, progress))
    for region in structure.regions:
        style = Region(mesh, sequence, Scope(region))
        scopes[region] = style.scope
        add_style(module_at(model, region), style)
    for name in structure.styles:
        module = module_at(model, name)
        if module._parameters:
            scope = scopes.get(name.rpartition(".")[0])
            add_style(module, _style_of(module, name, structure, mesh, sequence, loss, scope, progress))
    tensor = mesh.size()
    for name in structure.styles:
        if is_shared_head(structure, name, tensor):
            _regroup(module_at(model, name.rpartition(".")[0]), structure, name, tensor)


def _style_of(
    module: nn.Module,
    name: str,
    structure: Structure,
    mesh: DeviceMesh,
    sequence: bool,
    loss: bool,
    scope: Scope | None,
    progress: Progress,
) -> Style:
    style, tensor, rank = structure.styles[name], mesh.size(), mesh.get_local_rank()
    if style in ("colwise", "colwise_gather_output", "packed_colwise"):
        rows: Tensor | slice | None = None
        if is_shared_head(structure, name, tensor):
            # Ranks that share a head are neighbours, as their queries are.
            size = cast(int, module.out_features) // structure.heads[name]
            head = rank * structure.heads[name] // tensor
            rows = slice(head * size, (head + 1) * size)
        elif style == "packed_colwise":
            # Whole, for torch's DTensor has no placement for two parts that full_tensor restores under FSDP.
            half = cast(int, module.out_features) // 2
            first, count = local_size(half, tensor, rank)
            own = torch.arange(first, first + count, device=mesh.device_type)
            rows = torch.cat([own, own + half])
        output = "gathered" if style == "colwise_gather_output" else "local"
        if name == structure.head and loss:
            output = "logits"
        return Colwise(mesh, sequence, output, scope, rows)
    if style in ("rowwise", "rowwise_split_input"):
        return Rowwise(mesh, sequence, style == "rowwise_split_input", scope)
    if style == "embedding_rowwise":
        embedding = cast(nn.Embedding, module)
        first, count = local_size(embedding.num_embeddings, tensor, rank)
        if embedding.padding_idx is not None:
            # Only the gradient of that row depends on it; it counts this rank's rows now.
            here = first <= embedding.padding_idx < first + count
            embedding.padding_idx = embedding.padding_idx - first if here else None
        return Vocabulary(mesh, sequence, first, count)
    in_layer = structure.layer_of(name) is not None
    if style == "replicated_with_grad_allreduce":
        return Whole(mesh, sequence, sum_gradients=True)
    if in_layer:
        # Between the modules that gather their input, everything works on a part of the sequence.
        return Whole(mesh, sequence, sequence and structure.region_of(name) is None)
    on_parts = sequence and (style == "sequence" or (not style and not isinstance(module, nn.Embedding)))
    return Whole(mesh, sequence, on_parts, progress, name)


def _regroup(attention: nn.Module, structure: Structure, name: str, tensor: int) -> None:
    """Tell an attention how many of its queries share a key-value head, now that it has one of these."""
    # So called in transformers, whose eager attention repeats keys and values by it.
    if isinstance(getattr(attention, "num_key_value_groups", None), int):
        region = name.rpartition(".")[0]
        queries = max(count for each, count in structure.heads.items() if each.rpartition(".")[0] == region)
        setattr(attention, "num_key_value_groups", queries // tensor)  # noqa: B010


def _place_parameters(model: nn.Module, structure: Structure, mesh: DeviceMesh) -> None:
    """Make every parameter a DTensor, and one that several modules share a single one."""
    placed: dict[int, nn.Parameter] = {}
    kept = []  # or a new parameter might get the id of an old one
    for name in structure.styles:
        module = module_at(model, name)
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in placed:
                placement = styles_of(module)[-1].placement(own)
                # Values come from the first rank, so that whole ones are the same everywhere.
                source = None if parameter.is_meta else 0
                value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
                new = nn.Parameter(value, requires_grad=parameter.requires_grad)
                vars(new).update(vars(parameter))
                placed[id(parameter)] = new
                kept.append(parameter)
            module._parameters[own] = placed[id(parameter)]
