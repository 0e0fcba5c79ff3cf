"""Whether a model can be divided by a plan, checked before anything is: structure, sizes, shares of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .plan import PlanError, collapsed, match_plan, module_at, tensor_plan
from .structure import (
    COLWISE,
    ROWWISE,
    Structure,
    is_shared_head,
    local_size,
    own_parameters,
    rows_around,
    structure_of,
)

_LARGE = 2**20
"""Parameters from which on it is said that nothing divides a layer."""


@dataclass(frozen=True)
class LayerShare:
    """Layers of one kind, and what each rank holds of one of them.

    Attributes:
        name: With `*` for the numbers of layers.
        style: Its style; "" for a layer that no rule names, which is whole on each rank.
        layers: How many there are.
        shape: Of the weight.
        local_shape: Of the weight on the rank that holds most.
        parameters: Of all these layers.
        local_parameters: Those on the rank that holds most.
    """

    name: str
    style: str
    layers: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    parameters: int
    local_parameters: int


def check_plan(
    model: nn.Module,
    plan: Mapping[str, str] | None = None,
    *,
    tensor: int,
    sequence: bool = False,
    loss: bool = False,
) -> list[LayerShare]:
    """Check that a model can be divided over `tensor` ranks, without any communication.

    Args:
        model: The whole model, not yet divided; its parameters may be on the meta device.
        plan: Styles by name; None: the model's own, as `tensor_plan` finds it.
        tensor: The number of ranks.
        sequence: Whether activations between the layers are to be divided by the sequence.
        loss: Whether logits are to stay divided by the vocabulary.

    Returns:
        What each rank will hold, in the order of the model. Layers whose style is "" are whole on each rank.

    Raises:
        PlanError: With every reason why it cannot, and the sizes that would be allowed.
    """
    return shares(model, examine(model, plan, tensor=tensor, sequence=sequence, loss=loss), tensor)


def examine(
    model: nn.Module, plan: Mapping[str, str] | None, *, tensor: int, sequence: bool, loss: bool
) -> Structure:
    """The structure of a model under a plan, if it can be divided.

    Raises:
        PlanError: As for `check_plan`.
    """
    if isinstance(tensor, bool) or not isinstance(tensor, int) or tensor < 1:
        raise PlanError(
            f"tensor={tensor!r} is not a number of ranks. Give an integer of 1 or more, such as tensor=2."
        )
    declared = match_plan(model, tensor_plan(model, plan))
    structure = structure_of(model, declared)
    problems = _layer_problems(model, structure)
    if not problems:
        problems = _size_problems(model, structure, tensor)
    if sequence:
        problems += _sequence_problems(model, structure)
    if loss and (structure.head is None or structure.styles[structure.head] != "colwise_gather_output"):
        problems.append(
            "loss=True needs an output head of the style 'colwise_gather_output', whose logits can stay "
            "divided, and the plan gives "
            f"{'none' if structure.head is None else repr(structure.styles[structure.head])}. Add 'lm_head': "
            "'colwise_gather_output', or the name that the head has, or set loss=False."
        )
    if problems:
        raise PlanError("\n".join(dict.fromkeys(problems)))
    return structure


def _parameter_problems(name: str, own: Mapping[str, nn.Parameter]) -> list[str]:
    """Parameters whose values are not those of a plain tensor."""
    problems = []
    for each, parameter in own.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problems.append(
                f"The parameter {collapsed(name)}.{each} has no shape yet. Give the layer its sizes, or run "
                "the model once before it is divided."
            )
        elif is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor):
            # Quantized weights: their scales would have to be divided with them.
            problems.append(
                f"The parameter {collapsed(name)}.{each} is a {type(parameter).__name__}, which cannot be "
                "divided into parts. Divide the model first, and quantize it afterwards."
            )
    return problems


def _layer_problems(model: nn.Module, structure: Structure) -> list[str]:
    problems = []
    # Of a model without a list of layers, such as an nn.Sequential, the model itself is around colwise
    # layers.
    at_root = structure.backbone is None and any(
        style in ("colwise", "packed_colwise") and "." not in name for name, style in structure.styles.items()
    )
    for name, style in structure.styles.items():
        module, told = module_at(model, name), f"plan[{collapsed(name)!r}]={style!r}"
        own = dict(own_parameters(module))
        problems += _parameter_problems(name, own)
        if "forward" in vars(module):
            problems.append(
                f"The module {collapsed(name)} has a forward that was replaced on the object, which tensor "
                "parallelism would not be called by. Divide the model first, and replace it afterwards."
            )
        if style in (*COLWISE, *ROWWISE):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            if not isinstance(module, nn.Linear) or not {"weight"} <= set(own) <= {"weight", "bias"}:
                problems.append(
                    f"{told} needs an nn.Linear with a weight, and a bias or none, as its parameters, but "
                    f"it is a {kind} with {', '.join(own) or 'none'}. Use 'replicate', or divide the model "
                    "before adapters or parametrizations are added."
                )
        elif style == "embedding_rowwise":
            if not isinstance(module, nn.Embedding) or set(own) != {"weight"}:
                problems.append(
                    f"{told} needs an nn.Embedding, but it is a {type(module).__name__}. Use 'replicate'."
                )
            elif module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                problems.append(
                    f"{told} divides an embedding with max_norm, scale_grad_by_freq or sparse, which needs "
                    "all of its rows in one place. Use 'replicate', or make it without them."
                )
        elif style and not own:
            problems.append(
                f"{told} is given to a module without parameters of its own. Name the layers in it."
            )
        region = structure.region_of(name) or (name if name in structure.regions else None)
        if not style and own and (region is not None or at_root):
            problems.append(
                f"The module {(collapsed(name) if region else name) or type(model).__name__} stands beside "
                f"colwise layers in {collapsed(region) if region else 'the model itself'}, and the "
                "plan does not say whether it works on each rank's own heads. Add it to the plan, as "
                "'replicated_with_grad_allreduce' if it does, or as 'replicate' if not."
            )
    problems += _tie_problems(model, structure)
    return problems


def _tie_problems(model: nn.Module, structure: Structure) -> list[str]:
    placed: dict[int, tuple[str, str]] = {}
    problems = []
    for name, style in structure.styles.items():
        rows = (
            "rows" if style in (*COLWISE, "embedding_rowwise") else "columns" if style in ROWWISE else "whole"
        )
        for _, parameter in own_parameters(module_at(model, name)):
            first, other = placed.setdefault(id(parameter), (name, rows))
            if other != rows:
                problems.append(
                    f"The modules {first} and {name} share a weight, and the plan divides it in two ways. "
                    "Give both a style that divides rows, such as 'embedding_rowwise' and "
                    "'colwise_gather_output'."
                )
    return problems


def _size_problems(model: nn.Module, structure: Structure, tensor: int) -> list[str]:
    problems = []
    for name, parts in structure.parts.items():
        if parts == 2 and name not in structure.heads:
            continue
        problems += _stacked_problems(model, structure, name, tensor)
    for name, heads in structure.heads.items():
        region = name.rpartition(".")[0]
        if structure.styles[name] not in ("rowwise", "colwise"):
            continue
        all_heads = next(
            count
            for each, count in structure.heads.items()
            if each.rpartition(".")[0] == region and structure.styles[each] in ROWWISE
        )
        if all_heads % tensor or (heads % tensor and tensor % heads):
            fewest = min(
                count for each, count in structure.heads.items() if each.rpartition(".")[0] == region
            )
            allowed = [
                size
                for size in range(1, all_heads + 1)
                if all_heads % size == 0 and (fewest % size == 0 or size % fewest == 0)
            ]
            kv = f" and {fewest} key-value heads" if fewest != all_heads else ""
            problems.append(
                f"tensor={tensor} does not divide the {all_heads} heads{kv} of {collapsed(region)}. Allowed "
                f"values of tensor are {', '.join(map(str, allowed))}."
            )
    for name, style in structure.styles.items():
        module = module_at(model, name)
        width, what = 0, ""
        if name in structure.heads and style in ("rowwise", "colwise"):
            continue
        if style == "embedding_rowwise":
            width, what = module.num_embeddings, "rows"
        elif style in COLWISE:
            width, what = module.out_features, "outputs"
        elif style in ROWWISE:
            width, what = module.in_features, "inputs"
        if style == "packed_colwise" and name in structure.heads:
            continue
        if style == "packed_colwise" and structure.parts.get(name, 2) == 2 and width % 2:
            problems.append(
                f"plan[{collapsed(name)!r}]={style!r} needs an even number of outputs, but there are {width}."
            )
        width = width // structure.parts.get(name, 2) if style == "packed_colwise" else width
        # Parts are as large as the first one, and the last one is what is left, as torch.chunk has it.
        if what and -(-width // tensor) * (tensor - 1) >= width:
            largest = [size for size in range(1, width + 1) if -(-width // size) * (size - 1) < width]
            near = [size for size in largest if size <= tensor][-3:]
            problems.append(
                f"tensor={tensor} leaves a rank without any of the {width} {what} of {collapsed(name)}. "
                f"Allowed values of tensor near it are {', '.join(map(str, near))}."
            )
    return problems


def _stacked_problems(model: nn.Module, structure: Structure, name: str, tensor: int) -> list[str]:
    """Why a layer of an attention that stacks queries, keys and values cannot be divided part by part."""
    outputs, parts = module_at(model, name).out_features, structure.parts[name]
    heads = structure.heads.get(name, 0)  # not known where an adapter stands between
    told = f"plan[{collapsed(name)!r}]='packed_colwise'"
    rows = rows_around(structure, name.rpartition(".")[0])[0]
    width = module_at(model, rows).in_features
    if outputs % parts or (parts == 3 and outputs != 3 * width):
        return [
            f"{told} stacks queries, keys and values, which are not of equal size: there are {outputs} "
            f"outputs, and the queries have {width}. Use 'colwise_gather_output' for it, and "
            f"'rowwise_split_input' for {collapsed(rows)}, or layers of their own for queries, keys and "
            "values."
        ]
    if heads % tensor:
        allowed = [size for size in range(1, heads + 1) if heads % size == 0]
        return [
            f"tensor={tensor} does not divide the {heads} heads that {collapsed(name)} stacks. Allowed "
            f"values of tensor are {', '.join(map(str, allowed))}."
        ]
    return []


def stacked_by_head(model: nn.Module, structure: Structure) -> list[str]:
    """Sentences about colwise layers of queries, keys and values that are right for one order of their "
    "outputs."""
    found = []
    for name in structure.heads:
        region = name.rpartition(".")[0]
        columns = [
            each
            for each in structure.heads
            if each.rpartition(".")[0] == region and structure.styles[each] in COLWISE
        ]
        if structure.styles[name] == "colwise" and columns == [name]:
            found.append(
                f"{collapsed(name)} computes queries, keys and values. 'colwise' divides it by heads, which "
                "is right only if each head has its query, key and value side by side, as in GPT-NeoX. Use "
                "'packed_colwise' if all queries come first, then all keys, then all values."
            )
    return list(dict.fromkeys(found))


def own_forwards(model: nn.Module, structure: Structure) -> list[str]:
    """Sentences about layers that may do more with their weight than multiply by it."""
    found: dict[type[nn.Module], str] = {}
    for name, style in structure.styles.items():
        module = module_at(model, name)
        if style in (*COLWISE, *ROWWISE) and type(module).forward is not nn.Linear.forward:
            found.setdefault(type(module), collapsed(name))
    return [
        f"{name} is a {kind.__module__}.{kind.__qualname__} with a forward of its own, which is given this "
        "rank's part of the weight. What it takes over a whole weight or input, such as a scale or a mean, "
        "is taken over that part, so that the loss differs from that of one process."
        for kind, name in found.items()
    ]


def _sequence_problems(model: nn.Module, structure: Structure) -> list[str]:
    """Why activations between the layers cannot be divided by the sequence."""
    if structure.backbone is None:
        return [
            "sequence=True needs the layers of the model in one nn.ModuleList, with colwise layers in them, "
            "to know where the sequence is divided. Set sequence=False."
        ]
    problems = []
    for region in structure.regions:
        if region in structure.layers or structure.layer_of(region) is None:
            problems.append(
                f"sequence=True needs a module around the colwise layers of {collapsed(region)}, such as an "
                "attention or an MLP, whose input can be gathered. Set sequence=False."
            )
    for name, style in structure.styles.items():
        outside = bool(structure.backbone) and not name.startswith(f"{structure.backbone}.")
        if outside and name != structure.head and style != "embedding_rowwise":
            problems.append(
                f"sequence=True cannot tell whether the module {name}, outside {structure.backbone}, works "
                "on the whole sequence. Set sequence=False."
            )
    return problems


def shares(model: nn.Module, structure: Structure, tensor: int) -> list[LayerShare]:
    """What each rank holds of the layers."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    kinds: dict[tuple[str, str, tuple[int, ...]], tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, style in structure.styles.items():
        own = own_parameters(module_at(model, name))
        if not own:
            continue
        shape = tuple(own[0][1].shape)
        local = list(shape)
        whole = style == "packed_colwise" or is_shared_head(structure, name, tensor)
        if style in (*COLWISE, "embedding_rowwise") and not whole:
            local[0] = local_size(shape[0], tensor, 0)[1]
        elif style in ROWWISE:
            local[1] = local_size(shape[1], tensor, 0)[1]
        key = collapsed(name), style, shape
        kinds[key] = tuple(local)
        row = rows.setdefault(key, [0, 0, 0])
        row[0] += 1
        for parameter_name, parameter in own:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            row[1] += parameter.numel()
            divided = parameter_name == "weight" or style in COLWISE
            part = parameter.numel() * local[0] * (local[1] if len(local) > 1 else 1)
            row[2] += (
                part // (shape[0] * (shape[1] if len(shape) > 1 else 1)) if divided else parameter.numel()
            )
    return [
        LayerShare(name, style, row[0], shape, kinds[name, style, shape], row[1], row[2])
        for (name, style, shape), row in rows.items()
    ]


def undivided(table: list[LayerShare]) -> list[str]:
    """Sentences about large layers that nothing divides."""
    return [
        f"{each.name} is whole on each rank: {each.parameters:,} parameters that nothing divides."
        for each in table
        if each.parameters == each.local_parameters and each.parameters // each.layers >= _LARGE
    ]


def cautions(
    model: nn.Module, structure: Structure, plan: Mapping[str, str] | None, tensor: int
) -> list[str]:
    """Sentences about what is divided, and may not be meant so.

    Args:
        model: The model, not yet divided.
        structure: What `examine` found.
        plan: The plan that was given; None for the model's own, which transformers has tried.
        tensor: The number of ranks.
    """
    told = undivided(shares(model, structure, tensor)) + own_forwards(model, structure)
    if plan is not None or not type(model).__module__.startswith("transformers."):
        told += stacked_by_head(model, structure)
    return told
