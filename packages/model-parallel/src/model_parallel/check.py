"""Whether a model can be divided by a plan, checked before anything is: structure, sizes, shares of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from .plan import PlanError, ancestors, collapsed, match_plan, module_at, tensor_plan

COLWISE = ("colwise", "colwise_gather_output", "packed_colwise")
ROWWISE = ("rowwise", "rowwise_split_input")
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


@dataclass
class Structure:
    """What a plan means in a model.

    Attributes:
        styles: By the full name of each module that owns parameters.
        declared: The part of it that the plan names.
        regions: Names of modules around colwise layers.
        heads: Heads that a layer's outputs are divided by, for layers of an attention.
        backbone: Name of the module that has the layers; None if there are none.
        layers: Names of the layers, in order.
        head: Name of the output head; None if there is none.
    """

    styles: dict[str, str]
    declared: dict[str, str]
    regions: list[str]
    heads: dict[str, int] = field(default_factory=dict)
    backbone: str | None = None
    layers: list[str] = field(default_factory=list)
    head: str | None = None

    def layer_of(self, name: str) -> str | None:
        """The layer that a module is in."""
        return next((each for each in (name, *ancestors(name)) if each in self.layers), None)

    def region_of(self, name: str) -> str | None:
        """The module around colwise layers that a module is in."""
        return next((each for each in ancestors(name) if each in self.regions), None)


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
    structure = _structure(model, declared)
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


def _structure(model: nn.Module, declared: dict[str, str]) -> Structure:
    owners = [name for name, module in model.named_modules() if _own(module)]
    styles = {name: declared.get(name, "") for name in dict.fromkeys([*owners, *declared])}
    _share_styles_of_ties(model, styles)
    regions = list(
        dict.fromkeys(
            name.rpartition(".")[0] for name, style in styles.items() if style in COLWISE and "." in name
        )
    )
    # A layer is what stands in a list; the outermost list counts.
    lists = {
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    around = []
    for region in regions:
        inside = [name for name in (region, *ancestors(region)) if name and name.rpartition(".")[0] in lists]
        around += inside[-1:]
    lists_used = list(dict.fromkeys(name.rpartition(".")[0] for name in around))
    structure = Structure(styles, declared, regions)
    if len(lists_used) == 1:
        structure.backbone = lists_used[0].rpartition(".")[0]
        children = module_at(model, lists_used[0]).named_children()
        structure.layers = [f"{lists_used[0]}.{name}" for name, _ in children]
    heads = [name for name, style in styles.items() if style in COLWISE and structure.layer_of(name) is None]
    if len(heads) == 1:
        structure.head = heads[0]
        # What stands beside the head, such as the backbone, has another input.
        structure.regions = [region for region in regions if region != heads[0].rpartition(".")[0]]
    structure.heads = _attention_heads(model, structure)
    return structure


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in module._parameters.items() if each is not None]


def _share_styles_of_ties(model: nn.Module, styles: dict[str, str]) -> None:
    """An embedding that no rule names is divided as the head that it is tied to."""
    by_weight: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            by_weight.setdefault(id(module.weight), []).append(name)
    for names in by_weight.values():
        given = {styles[name] for name in names}
        for name in names:
            if styles[name] or len(names) == 1 or not given - {""}:
                continue
            if isinstance(module_at(model, name), nn.Embedding) and given <= {"", *COLWISE}:
                styles[name] = "embedding_rowwise"
            elif isinstance(module_at(model, name), nn.Linear) and given <= {"", "embedding_rowwise"}:
                styles[name] = "colwise_gather_output"


def _attention_heads(model: nn.Module, structure: Structure) -> dict[str, int]:
    """For each colwise layer of an attention: by how many heads its outputs can be divided."""
    found: dict[str, int] = {}
    for region in structure.regions:
        children = [name for name in structure.styles if name.rpartition(".")[0] == region]
        size = _head_size(model, region)
        rows = [name for name in children if structure.styles[name] in ROWWISE]
        if size is None or not rows:
            continue
        width = module_at(model, rows[0]).in_features
        for name in children:
            if structure.styles[name] not in COLWISE:
                continue
            outputs = module_at(model, name).out_features
            # One layer for queries, keys and values has them side by side for each head.
            found[name] = width // size if outputs > width and outputs % width == 0 else outputs // size
        found[rows[0]] = width // size
    return found


def _head_size(model: nn.Module, region: str) -> int | None:
    module = module_at(model, region)
    for name in ("head_dim", "head_size"):
        if isinstance(size := getattr(module, name, None), int) and size > 0:
            return size
    if "att" not in region.rpartition(".")[2].lower():
        return None
    config = getattr(model, "config", None)
    if isinstance(size := getattr(config, "head_dim", None), int):
        return size
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None


def _layer_problems(model: nn.Module, structure: Structure) -> list[str]:
    problems = []
    for name, style in structure.styles.items():
        module, told = module_at(model, name), f"plan[{collapsed(name)!r}]={style!r}"
        own = dict(_own(module))
        if "forward" in vars(module):
            problems.append(
                f"The module {collapsed(name)} has a forward that was replaced on the object, which tensor "
                "parallelism would not be called by. Divide the model first, and replace it afterwards."
            )
        if style in (*COLWISE, *ROWWISE):
            kind = type(module).__name__
            if not isinstance(module, nn.Linear) or not set(own) <= {"weight", "bias"}:
                problems.append(
                    f"{told} needs an nn.Linear with a weight and a bias, but it is a {kind}. Use "
                    "'replicate'."
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
        if style == "sequence" and (region := structure.region_of(name)):
            problems.append(
                f"{told} stands in {collapsed(region)}, which works on the whole sequence. Use "
                "'replicated_with_grad_allreduce' if it works on each rank's own heads, or 'replicate' if "
                "not."
            )
        if (
            not style
            and own
            and (region := structure.region_of(name) or (name if name in structure.regions else None))
        ):
            problems.append(
                f"The module {collapsed(name)} stands beside colwise layers in {collapsed(region)}, and the "
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
        for _, parameter in _own(module_at(model, name)):
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
    for name, heads in structure.heads.items():
        if structure.styles[name] not in ("rowwise", "colwise"):
            continue
        region = name.rpartition(".")[0]
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
        if style == "packed_colwise" and width % 2:
            problems.append(
                f"plan[{collapsed(name)!r}]={style!r} needs an even number of outputs, but there are {width}."
            )
        width = width // 2 if style == "packed_colwise" else width
        # Parts are as large as the first one, and the last one is what is left, as torch.chunk has it.
        if what and -(-width // tensor) * (tensor - 1) >= width:
            largest = [size for size in range(1, width + 1) if -(-width // size) * (size - 1) < width]
            near = [size for size in largest if size <= tensor][-3:]
            problems.append(
                f"tensor={tensor} leaves a rank without any of the {width} {what} of {collapsed(name)}. "
                f"Allowed values of tensor near it are {', '.join(map(str, near))}."
            )
    return problems


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


def local_size(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first index and the number of those that a rank has, as `torch.chunk` divides."""
    part = -(-size // ranks)
    first = min(size, part * rank)
    return first, min(size, first + part) - first


def is_shared_head(structure: Structure, name: str, tensor: int) -> bool:
    """Whether several ranks use one head of a layer, so that each of them has the whole layer."""
    return structure.styles[name] == "colwise" and structure.heads.get(name, tensor) < tensor


def shares(model: nn.Module, structure: Structure, tensor: int) -> list[LayerShare]:
    """What each rank holds of the layers."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    kinds: dict[tuple[str, str, tuple[int, ...]], tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, style in structure.styles.items():
        own = _own(module_at(model, name))
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
