"""What a plan means in a model: styles of all modules, layers, heads of attentions, the output head."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from .plan import ancestors, are_divided, module_at

COLWISE = ("colwise", "colwise_gather_output", "packed_colwise")
ROWWISE = ("rowwise", "rowwise_split_input")


@dataclass
class Structure:
    """What a plan means in a model.

    Attributes:
        styles: By the full name of each module that owns parameters.
        declared: The part of it that the plan names.
        regions: Names of modules around colwise layers.
        heads: Heads that a layer's outputs are divided by, for layers of an attention; those of one part if
            it stacks several.
        parts: How many layers of equal size a layer stacks, for packed ones of an attention.
        backbone: Name of the module that has the layers; None if there are none.
        layers: Names of the layers, in order.
        head: Name of the output head; None if there is none.
    """

    styles: dict[str, str]
    declared: dict[str, str]
    regions: list[str]
    heads: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    backbone: str | None = None
    layers: list[str] = field(default_factory=list)
    head: str | None = None

    def layer_of(self, name: str) -> str | None:
        """The layer that a module is in."""
        return next((each for each in (name, *ancestors(name)) if each in self.layers), None)

    def region_of(self, name: str) -> str | None:
        """The module around colwise layers that a module is in."""
        return next((each for each in ancestors(name) if each in self.regions), None)


def structure_of(model: nn.Module, declared: dict[str, str]) -> Structure:
    """What a plan means in a model; `declared` is what `match_plan` returned."""
    owners = [
        name for name, module in model.named_modules() if own_parameters(module) and not are_divided(module)
    ]
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


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of a module itself, by name."""
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


def rows_around(structure: Structure, region: str) -> list[str]:
    """The rowwise layers in a module, or else in the nearest module around it that has any."""
    rows = [name for name, style in structure.styles.items() if style in ROWWISE]
    found = (
        [name for name in rows if name.startswith(f"{each}.")]
        for each in (region, *ancestors(region))
        if each
    )
    return next(filter(None, found), [])


def _attention_heads(model: nn.Module, structure: Structure) -> dict[str, int]:
    """For each colwise layer of an attention: by how many heads its outputs can be divided."""
    found: dict[str, int] = {}
    for region in structure.regions:
        children = [name for name in structure.styles if name.rpartition(".")[0] == region]
        columns = [name for name in children if structure.styles[name] in COLWISE]
        rows = [name for name in children if structure.styles[name] in ROWWISE]
        packed = [name for name in columns if structure.styles[name] == "packed_colwise"]
        # An adapter, or a module around the output projection, puts it elsewhere.
        near = rows or (rows_around(structure, region) if packed else [])
        if not near or not all(isinstance(module_at(model, name), nn.Linear) for name in (*near, *columns)):
            continue
        width = module_at(model, near[0]).in_features
        size = _head_size(model, region, width)
        around = ".".join(region.split(".")[-1 if rows else -2 :])
        for name in packed:
            outputs = module_at(model, name).out_features
            # All queries, then all keys, then all values; or keys and values beside a layer for queries.
            stacks_queries = columns == packed and (size is not None or "att" in around.lower())
            parts = structure.parts[name] = 3 if stacks_queries or outputs == 3 * width else 2
            if size is not None:
                found[name] = outputs // parts // size
        if size is None or not rows:
            continue
        for name in columns:
            if name in packed:
                continue
            outputs = module_at(model, name).out_features
            # One layer for queries, keys and values has them side by side for each head.
            found[name] = width // size if outputs > width and outputs % width == 0 else outputs // size
        found[rows[0]] = width // size
    return found


def _head_size(model: nn.Module, region: str, width: int) -> int | None:
    """Features of a head, in an attention whose heads have `width` together; None in another module."""
    module = module_at(model, region)
    for name in ("head_dim", "head_size"):
        if isinstance(size := getattr(module, name, None), int) and size > 0:
            return size
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if isinstance(heads := getattr(module, name, None), int) and heads > 0 and width % heads == 0:
            return width // heads
    if "att" not in region.rpartition(".")[2].lower():
        return None
    config = getattr(model, "config", None)
    if isinstance(size := getattr(config, "head_dim", None), int):
        return size
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None


def local_size(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first index and the number of those that a rank has, as `torch.chunk` divides."""
    part = -(-size // ranks)
    first = min(size, part * rank)
    return first, min(size, first + part) - first


def is_shared_head(structure: Structure, name: str, tensor: int) -> bool:
    """Whether several ranks use one head of a layer, so that each of them has the whole layer."""
    return structure.styles[name] == "colwise" and structure.heads.get(name, tensor) < tensor
