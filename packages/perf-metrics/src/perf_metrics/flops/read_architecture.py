"""Reads the architecture of a model from its modules, or from its config.json without torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from .architecture import (
    ATTENTION_PROJECTIONS,
    KINDS,
    MLP,
    OUTPUT_PROJECTION,
    ROUTED_EXPERTS,
    ROUTER,
    SHARED_EXPERTS,
    SHORT_CONVOLUTION,
    STATE_PROJECTIONS,
    Architecture,
    FlopsUnknownError,
    WeightGroup,
    kind_of,
)
from .attention import AttentionLayer, ScanLayer, Settings, UnknownShapeError, mixing_layers, scan_shape

if TYPE_CHECKING:
    from torch import nn

_NOT_AS_CONFIGURED = {
    *("albert", "bart", "bigbird_pegasus", "deberta", "deberta-v2", "diffllama", "fnet", "gemma3n"),
    *("gemma3n_text", "hrm_text", "mimo_v2_flash", "mllama", "mllama_text_model", "mvp"),
    *("prophetnet", "rwkv", "trocr"),
    # Attention in blocks or within windows that other settings tell, or by hashes.
    *("big_bird", "longformer", "mra", "yoso"),
    # Weights that most tokens do not pass: of entities, of tags, of other languages.
    *("luke", "markuplm", "xmod"),
}
"""Families whose layers do not compute what those of a decoder of their figures would: they attend twice,
across, in streams, in part or not at all, or are used several times."""
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
    once, so a tied output projection counts and the lookup does not. Layers that share their modules are not
    covered. Attention comes from the configuration.
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
            f"the FLOP formula does not cover {type(model).__name__}: {reason}. count_flops counts it "
            "instead."
        ) from None


def _architecture(model: nn.Module) -> Architecture:
    config = getattr(model, "config", None)
    if config is None:
        raise UnknownShapeError("it has no config with num_hidden_layers and num_attention_heads")
    settings = Settings(config)
    if settings.family in _NOT_AS_CONFIGURED:
        raise UnknownShapeError(f"layers of {settings.family} compute otherwise than its config tells")
    mixing = mixing_layers(settings)
    _check_layers_apart(model, len(mixing))
    mixing = _reached(model, mixing)
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


def _check_layers_apart(model: nn.Module, layers: int) -> None:
    """Refuse weights that are used more than once in a pass, which their modules do not tell.

    One module in several places, such as a block that two layers share, is walked through once; and a list
    that is shorter than the layers of the config is run through again, as ALBERT does.
    """
    from torch import nn

    first: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        before = first.setdefault(id(module), path)
        holds_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue  # lookups cost nothing
        if before != path and holds_matrix:
            raise UnknownShapeError(f"{before} and {path} are one module, which may be used twice")
    lists = [len(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
    if lists and max(lists) < layers:
        raise UnknownShapeError(
            f"config has {layers} layers, and no list of modules in it has so many: layers may share weights"
        )


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


@dataclass(frozen=True)
class _Family:
    """What a config.json of a family leaves unsaid, as transformers 5 fills it in, and what it must say."""

    mlp: Literal["gated", "plain", "none"] = "gated"
    positions: bool = False
    required: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)


def _gated(*required: str, tied: bool = False, **defaults: object) -> _Family:
    return _Family(required=required, defaults={"tie_word_embeddings": tied, **defaults})


def _plain(*, positions: bool = False, tied: bool = False, **defaults: object) -> _Family:
    return _Family("plain", positions, defaults={"tie_word_embeddings": tied, **defaults})


_USED = "num_experts_per_tok|experts_per_token"
_EXPERTS = "num_local_experts|num_experts"
"""Names of which one must be there."""
_DEEPSEEK = (_USED, "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace")
FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("llama", "phi3", "olmo", "olmo2", "granite"), _gated()),
    "olmoe": _gated(_USED, _EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _gated(*_DEEPSEEK, "kv_lora_rank")),
    "glm4_moe": _gated(*_DEEPSEEK, "num_key_value_heads"),
    "mistral": _gated(num_key_value_heads=8, sliding_window=4096),
    "mixtral": _gated(_USED, _EXPERTS, num_key_value_heads=8),
    "qwen2": _gated(num_key_value_heads=32, use_sliding_window=False),
    "qwen2_moe": _gated(
        *(_USED, _EXPERTS, "moe_intermediate_size", "shared_expert_intermediate_size"),
        use_sliding_window=False,
    ),
    "qwen3": _gated(head_dim=128, num_key_value_heads=32, use_sliding_window=False),
    "qwen3_moe": _gated(
        *(_USED, _EXPERTS, "moe_intermediate_size"), num_key_value_heads=4, use_sliding_window=False
    ),
    "gpt_oss": _gated(*(_USED, _EXPERTS), num_key_value_heads=8, head_dim=64, sliding_window=128),
    **dict.fromkeys(("glm", "glm4"), _gated(num_key_value_heads=2, head_dim=128)),
    "smollm3": _gated(num_key_value_heads=4, tied=True),
    "stablelm": _gated(num_key_value_heads=32),
    "gemma": _gated(num_key_value_heads=16, head_dim=256, tied=True),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma3"),
        _gated(num_key_value_heads=4, head_dim=256, tied=True, sliding_window=4096),
    ),
    "cohere": _gated(tied=True),
    "cohere2": _gated(tied=True, sliding_window=4096),
    "bamba": _gated(num_key_value_heads=8, attn_layer_indices=[], mamba_n_groups=1, mamba_d_conv=4),
    **dict.fromkeys(("gpt_neox", "phi"), _plain()),
    "starcoder2": _plain(num_key_value_heads=2, tied=True),
    "gpt2": _plain(positions=True, tied=True, n_positions=1024),
    "opt": _plain(positions=True, tied=True, max_position_embeddings=2048),
    "mamba2": _Family("none", defaults={"tie_word_embeddings": False, "n_groups": 8, "conv_kernel": 4}),
}
"""Families whose layers are known from their figures alone; others are built and walked through."""


def architecture_of_config(config: Mapping[str, object]) -> Architecture:
    """Return the architecture of a Hugging Face `config.json`, all of it trained.

    It needs neither torch nor the model. Norms and biases, a ten-thousandth of the parameters, are left out.

    Args:
        config: The contents of the file.

    Raises:
        FlopsUnknownError: The family is not known, or a figure is missing; the message says which.
    """
    known = Settings(config)
    family = FAMILIES.get(known.family)
    if family is None:
        raise FlopsUnknownError(
            f"model_type={known.family!r} is not one of the families known from their figures "
            f"({', '.join(sorted(FAMILIES))}). Build the model on the meta device and count it instead."
        )
    try:
        for name in family.required:
            if known.get(*name.split("|")) is None:
                raise UnknownShapeError(f"config.{name.replace('|', ' or ')} is not there")
        return _Figures(known.or_else(family.defaults), family).architecture()
    except UnknownShapeError as reason:
        raise FlopsUnknownError(f"the FLOPs of this {known.family} are unknown: {reason}.") from None


class _Figures:
    """Adds the weights of one layer after the other up."""

    def __init__(self, settings: Settings, family: _Family) -> None:
        self._settings = settings
        self._family = family
        self._hidden = settings.hidden
        embedded = settings.count_or(self._hidden, "word_embed_proj_dim")
        if embedded != self._hidden:
            raise UnknownShapeError(
                f"config.word_embed_proj_dim={embedded} is not hidden_size={self._hidden}: not covered"
            )
        self._stored: dict[str, int] = defaultdict(int)
        self._active: dict[str, float] = defaultdict(float)

    def architecture(self) -> Architecture:
        settings = self._settings
        mixing = mixing_layers(settings)
        for index, layer in enumerate(mixing):
            if isinstance(layer, AttentionLayer):
                self._attention(layer)
            elif isinstance(layer, ScanLayer):
                self._scan()
            if self._family.mlp != "none":
                self._feed_forward(index)
        table = settings.count("vocab_size") * self._hidden
        self._add(OUTPUT_PROJECTION, table)
        lookup = 0 if settings.get("tie_word_embeddings") else table
        if self._family.positions:
            lookup += settings.count("n_positions", "max_position_embeddings") * self._hidden
        groups = (
            WeightGroup(kind, self._stored[kind], self._active[kind], 2 * self._active[kind])
            for kind in KINDS
            if kind in self._stored
        )
        total = sum(self._stored.values()) + lookup
        return Architecture(settings.family, tuple(groups), tuple(mixing), total, lookup)

    def _add(self, kind: str, weights: int, share: float = 1.0) -> None:
        self._stored[kind] += weights
        self._active[kind] += weights * share

    def _attention(self, layer: AttentionLayer) -> None:
        settings, hidden = self._settings, self._hidden
        out = layer.value_width * hidden
        if settings.get("kv_lora_rank"):
            latent, heads = settings.count("kv_lora_rank"), settings.heads
            rotary = settings.count("qk_rope_head_dim")
            unrotated = layer.query_width - heads * rotary
            values = hidden * (latent + rotary) + latent * (unrotated + layer.value_width)
            rank = settings.count_or(0, "q_lora_rank")
            queries = rank * (hidden + layer.query_width) if rank else hidden * layer.query_width
            self._add(ATTENTION_PROJECTIONS, queries + values + out)
            return
        shared = settings.count_or(settings.heads, "num_key_value_heads")
        if settings.heads % shared:
            raise UnknownShapeError(
                f"config.num_key_value_heads={shared} does not divide num_attention_heads={settings.heads}"
            )
        narrow = shared * (layer.query_width // settings.heads)
        self._add(ATTENTION_PROJECTIONS, hidden * (layer.query_width + 2 * narrow) + out)

    def _scan(self) -> None:
        settings, hidden = self._settings, self._hidden
        width, state, groups = scan_shape(settings)
        heads = settings.count("mamba_n_heads", "num_heads")
        inner = width + 2 * groups * state
        self._add(STATE_PROJECTIONS, hidden * (width + inner + heads) + width * hidden)
        self._add(SHORT_CONVOLUTION, inner * settings.count_or(4, "mamba_d_conv", "conv_kernel"))

    def _feed_forward(self, index: int) -> None:
        settings, hidden = self._settings, self._hidden
        matrices = 3 if self._family.mlp == "gated" else 2
        experts = settings.experts
        if experts is None or self._is_dense(index):
            wide = settings.count_or(4 * hidden, "intermediate_size", "n_inner", "ffn_dim")
            self._add(MLP, matrices * hidden * wide)
            return
        total, used = experts
        wide = settings.count("moe_intermediate_size", "intermediate_size")
        self._add(ROUTED_EXPERTS, total * matrices * hidden * wide, used / total)
        self._add(ROUTER, total * hidden)
        if shared := settings.count_or(0, "shared_expert_intermediate_size"):
            # The gate that weighs the shared expert is one row more.
            self._add(SHARED_EXPERTS, matrices * hidden * shared + hidden)
        elif count := settings.count_or(0, "n_shared_experts"):
            self._add(SHARED_EXPERTS, count * matrices * hidden * wide)

    def _is_dense(self, index: int) -> bool:
        """Whether this layer of a model with experts has none."""
        settings = self._settings
        first = settings.get("first_k_dense_replace")
        if isinstance(first, int) and index < first:
            return True
        every = settings.count_or(1, "decoder_sparse_step", "moe_layer_freq")
        offset = 1 if settings.get("decoder_sparse_step") is not None else 0
        return (index + offset) % every != 0 or index in settings.numbers("mlp_only_layers")
