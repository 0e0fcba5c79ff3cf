"""Divide a model over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_env import get_logger

from .activations import Scope
from .check import cautions, examine
from .draws import Draws, share_generators
from .experts import Dispatched
from .plan import PlanError, are_divided, as_kind, module_at
from .same import check_inputs, check_same
from .structure import COLWISE, ROWWISE, Structure, is_shared_head, local_size
from .styles import (
    Colwise,
    Layer,
    Layers,
    Progress,
    Region,
    Rowwise,
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
    stages: bool = False,
) -> nn.Module:
    """Divide a model over the ranks of a mesh, in place; collective.

    Every parameter becomes a DTensor on the mesh, divided or replicated, under its own name, and its
    gradient has the same placement. Weights that are tied stay tied. Each rank gives the same batch, and
    gets the same loss. The model is divided before `fully_shard`, over another dimension of the same mesh.

    Make the optimizer afterwards, for the parameters are new ones.

    Key-value heads that are fewer than the ranks are whole on each rank, and each computes the one that its
    queries need. An attention that keeps its numbers of heads is told those of its rank. Widths and
    vocabularies need not be a multiple of the ranks.

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
        stages: Whether layers will be called by the stages of a pipeline, of which only one has the first
            layer. With `sequence` a stage is then given, and returns, this rank's part of the sequence.

    Returns:
        The model.

    Raises:
        PlanError: On every rank, before anything is divided: the model cannot be divided, or ranks have
            different models or plans.
    """
    _check_mesh(mesh)
    structure, error = None, None
    try:
        if any(_is_divided(module) for module in model.modules()):
            raise PlanError(
                "The model is divided already. Give shard_tensors a model as it was made, and only once."
            )
        structure = examine(model, plan, tensor=mesh.size(), sequence=sequence, loss=loss)
    except (PlanError, ValueError) as raised:
        error = raised
    _check_same(model, structure, mesh, (sequence, loss, stages))
    if error is not None or structure is None:
        raise error or PlanError("The plan was refused.")
    for sentence in cautions(model, structure, plan, mesh.size()):
        _LOGGER.warning(sentence)
    _add_styles(model, structure, mesh, sequence=sequence, loss=loss, stages=stages)
    _place_parameters(model, structure, mesh)
    _equal_buffers(model, mesh)
    share_generators(mesh)
    check_inputs(model, mesh)
    return model


def _is_divided(module: nn.Module) -> bool:
    """Whether something has divided a module; experts are divided before tensors."""
    if are_divided(module):
        return False
    own = module._parameters.values()
    return isinstance(module, Styled) or any(isinstance(parameter, DTensor) for parameter in own)


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
    facts = None
    if structure is not None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        described = [
            (name, tuple(value.shape), str(value.dtype), value.requires_grad, value.is_meta)
            for name, value in tensors
        ]
        facts = (described, sorted(structure.styles.items()), settings)
    check_same(facts, mesh, refused="The plan was refused", differs="have another model, plan or setting")


def _add_styles(
    model: nn.Module, structure: Structure, mesh: DeviceMesh, *, sequence: bool, loss: bool, stages: bool
) -> None:
    progress = Progress(stages)
    draws = Draws(mesh)
    scopes: dict[str, Scope] = {}
    if sequence and structure.backbone is not None:
        add_style(module_at(model, structure.backbone), Layers(mesh, sequence, progress))
        for name in structure.layers:  # all of them: they stay of one class, by which others find them
            first = name == structure.layers[0]
            add_style(module_at(model, name), Layer(mesh, sequence, first, progress, draws=draws))
    for name, module in model.named_modules():
        for experts in (each for each in styles_of(module) if isinstance(each, Dispatched)):
            # These ranks have the same tokens, unless each has a part of the sequence.
            experts.same_tokens = experts.same_tokens or mesh
            in_layer = structure.layer_of(name) is not None
            experts.sequence = sequence and in_layer and structure.region_of(name) is None
    # Of a model without layers, such as an nn.Sequential, the model itself is around colwise layers.
    at_root = structure.backbone is None and any(
        style in ("colwise", "packed_colwise") and "." not in name for name, style in structure.styles.items()
    )
    for region in [*structure.regions, *([""] if at_root else [])]:
        within = progress if structure.backbone is not None else None
        style = Region(mesh, sequence, within, scope=Scope(draws, region or type(model).__name__))
        scopes[region] = style.scope
        add_style(module_at(model, region), style)
    for region in structure.regions:
        scopes[region].around = scopes.get(structure.region_of(region) or "")
    for name in structure.styles:
        module = module_at(model, name)
        if module._parameters:
            # A layer shares the scope of its own module; what is whole is looked at by the nearest one.
            scope, around = scopes.get(name.rpartition(".")[0]), scopes.get(structure.region_of(name) or "")
            if structure.styles[name] in ROWWISE:
                scope = scope or around  # an adapter, or a module such as nn.Sequential, may hold the layer
            elif structure.styles[name] not in COLWISE:
                scope = scopes.get(name) or around
            add_style(module, _style_of(module, name, structure, mesh, sequence, loss, scope, progress))
    for region in structure.regions:
        _count_own_heads(model, structure, region, mesh.size())


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
        width = as_kind(module, nn.Linear, name).out_features
        if is_shared_head(structure, name, tensor):
            # Ranks that share a head are neighbours, as their queries are.
            size = width // structure.heads[name]
            head = rank * structure.heads[name] // tensor
            rows = slice(head * size, (head + 1) * size)
        elif style == "packed_colwise":
            # Whole, for torch's DTensor has no placement for several parts that full_tensor restores under
            # FSDP.
            parts = structure.parts.get(name, 2)
            size = width // parts
            first, count = local_size(size, tensor, rank)
            own = torch.arange(first, first + count, device=mesh.device_type)
            rows = torch.cat([own + part * size for part in range(parts)])
        output = "gathered" if style == "colwise_gather_output" else "local"
        if name == structure.head and loss:
            output = "logits"
        return Colwise(mesh, sequence, output, scope, rows, width=width)
    if style in ("rowwise", "rowwise_split_input"):
        return Rowwise(mesh, sequence, style == "rowwise_split_input", scope)
    if style == "embedding_rowwise":
        embedding = as_kind(module, nn.Embedding, name)
        first, count = local_size(embedding.num_embeddings, tensor, rank)
        if embedding.padding_idx is not None:
            # Only the gradient of that row depends on it; it counts this rank's rows now.
            here = first <= embedding.padding_idx < first + count
            embedding.padding_idx = embedding.padding_idx - first if here else None
        return Vocabulary(mesh, sequence, first=first, count=count, size=embedding.num_embeddings)
    in_layer = structure.layer_of(name) is not None
    if style == "replicated_with_grad_allreduce":
        return Whole(mesh, sequence, sum_gradients=True, name=name, scope=scope)
    if in_layer:
        # Between the modules that gather their input, everything works on a part of the sequence.
        on_parts = sequence and (structure.region_of(name) is None or style == "sequence")
        return Whole(mesh, sequence, on_parts, name=name, scope=scope)
    on_parts = sequence and (style == "sequence" or (not style and not isinstance(module, nn.Embedding)))
    return Whole(mesh, sequence, on_parts, progress, name, scope)


# What modules call the numbers of their heads: of queries, of keys and values, and of queries for each of
# these.
_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_GROUPS = ("num_key_value_groups", "num_queries_per_kv", "n_rep")


def _count_own_heads(model: nn.Module, structure: Structure, region: str, tensor: int) -> None:
    """Tell an attention how many heads this rank has, if it keeps these numbers.

    One that views its queries as [..., heads, -1] would otherwise compute with as many heads of another size.
    """
    counts = {
        name: heads
        for name, heads in structure.heads.items()
        if name.rpartition(".")[0] == region
        and structure.styles[name] in ("colwise", "packed_colwise", "rowwise")
    }
    rows = [heads for name, heads in counts.items() if structure.styles[name] == "rowwise"]
    if not rows or len(counts) < 2:
        return
    queries, keys = rows[0], min(counts.values())
    own = max(1, keys // tensor)
    numbers = [(_QUERIES, queries, queries // tensor), (_KEYS, keys, own)]
    numbers.append((_GROUPS, queries // keys, queries // tensor // own))
    attention = module_at(model, region)
    for names, whole, local in numbers:
        for name in names:
            value = getattr(attention, name, None)
            if isinstance(value, int) and value == whole:
                setattr(attention, name, local)


def _place_parameters(model: nn.Module, structure: Structure, mesh: DeviceMesh) -> None:
    """Make every parameter a DTensor, and one that several modules share a single one."""
    placed: dict[int, nn.Parameter] = {}
    first: dict[int, tuple[str, str]] = {}
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
            other, there = first.setdefault(id(parameter), (name, own))
            if other != name:
                _tie(model, (name, own), (other, there))


def _tie(model: nn.Module, one: tuple[str, str], other: tuple[str, str]) -> None:
    """Let both modules notice when a parameter of theirs is not the same any more."""
    here, there = (f"model.{'.'.join(each)}" for each in (one, other))
    message = (
        f"The modules {other[0]} and {one[0]} share a weight, and have two now, each trained by "
        "itself. Keep them in one group of fully_shard, or tie them again before the optimizer is made: "
        f"{here} = {there}."
    )
    for (name, own), (name_there, own_there) in ((one, other), (other, one)):
        as_kind(module_at(model, name), Styled, name)._tensor_ties.append(
            (own, module_at(model, name_there), own_there, message)
        )


@torch.no_grad()
def _equal_buffers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the buffers of the first one, as they have its parameters."""
    for buffer in model.buffers():
        # A fake tensor, as of a dry run, has no values; it and this class of it are private to torch (2.13).
        if buffer.is_meta or buffer.numel() == 0 or isinstance(buffer, FakeTensor):
            continue
        # As bytes, for gloo knows neither complex numbers nor all integers.
        value = buffer.detach().to(mesh.device_type, copy=True).contiguous()
        dist.broadcast(value.reshape(-1).view(torch.uint8), group=mesh.get_group(), group_src=0)
        if not torch.equal(value, buffer.to(value.device)):
            buffer.copy_(value)
