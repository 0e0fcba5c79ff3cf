"""The architecture of a model from its config.json alone, without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .accounts import (
    ATTENTION_PROJECTIONS,
    KINDS,
    MLP,
    OUTPUT_PROJECTION,
    ROUTED_EXPERTS,
    ROUTER,
    SHARED_EXPERTS,
    SHORT_CONVOLUTION,
    STATE_PROJECTIONS,
    FlopsUnknownError,
)
from .architecture import Architecture, WeightGroup
from .attention import AttentionLayer, ScanLayer, mixing_layers, scan_shape
from .settings import Settings, UnknownShapeError


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
            f"({', '.join(sorted(FAMILIES))}); build the model on the meta device and count it instead"
        )
    try:
        for name in family.required:
            if known.get(*name.split("|")) is None:
                raise UnknownShapeError(f"config.{name.replace('|', ' or ')} is not there")
        return _Figures(known.or_else(family.defaults), family).architecture()
    except UnknownShapeError as reason:
        raise FlopsUnknownError(f"FLOPs of this {known.family} unknown: {reason}") from None


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
