"""Attention and state-scan layers of a model, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args


class UnknownShapeError(ValueError):
    """The model holds something that the formula does not cover; the message names it."""


class Settings:
    """A configuration in the Hugging Face style.

    Args:
        config: An object with attributes, or a mapping. A configuration of a language model within another
            one (`text_config`) is taken for it.
    """

    def __init__(self, config: object) -> None:
        inner = _read(config, "text_config")
        self._config = config if inner is None else inner

    def or_else(self, defaults: Mapping[str, object]) -> Settings:
        """The same mapping, with figures for what is not there; what is null stays so."""
        # What has keys and items will do, such as a config of other libraries.
        return Settings({**defaults, **cast("Mapping[str, object]", self._config)})

    def get(self, *names: str) -> object:
        """The first of these settings that is there and not None; otherwise None."""
        found = (_read(self._config, name) for name in names)
        return next((value for value in found if value is not None), None)

    def count(self, *names: str) -> int:
        """The first of these settings that is there, a positive integer.

        Raises:
            UnknownShapeError: None of them is there, or it is something else.
        """
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnknownShapeError(f"config.{names[0]}={value!r} is not a positive integer")
        return value

    def count_or(self, default: int, *names: str) -> int:
        """The same, with a value for when none of them is there."""
        return default if self.get(*names) is None else self.count(*names)

    def texts(self, name: str) -> list[str] | None:
        """A list of texts; None if it is not there or empty."""
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            return None
        return [str(item) for item in value]

    def numbers(self, name: str) -> list[int]:
        """A list of integers; empty if it is not there."""
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            return []
        return [item for item in value if isinstance(item, int)]

    @property
    def family(self) -> str:
        """The `model_type`, or an empty text."""
        value = self.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.count("hidden_size", "n_embd", "d_model")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.count("num_hidden_layers", "n_layer", "num_layers")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.count("num_attention_heads", "n_head")

    @property
    def head_size(self) -> int:
        """Width of a head."""
        if self.get("head_dim") is not None:
            return self.count("head_dim")
        if self.hidden % self.heads:
            raise UnknownShapeError(
                f"config.hidden_size={self.hidden} is not a multiple of num_attention_heads={self.heads}, "
                "and there is no head_dim"
            )
        return self.hidden // self.heads

    @property
    def experts(self) -> tuple[int, int] | None:
        """Routed experts of a layer, and how many of them each token is sent to; None without experts."""
        total = self.get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if not isinstance(total, int) or total < 2:
            return None
        used = self.count("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k", "top_k")
        if used > total:
            raise UnknownShapeError(f"each token is sent to {used} of {total} experts")
        return total, used


def _read(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception as error:  # a property may raise what it likes
        raise UnknownShapeError(f"config.{name} cannot be read: {error}") from error


Causal: TypeAlias = Literal["full", "half", "dense"]

_KINDS = {
    "attention": "full",
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "mamba": "scan",
    "mamba2": "scan",
}
_PATTERN = {"*": "full", "M": "scan", "-": "none", "E": "none"}
_ALTERNATING = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Every how many layers one attends to everything, in families whose older files do not say so."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer with attention.

    Attributes:
        query_width: Query heads times the size of queries and keys.
        value_width: Query heads times the size of values.
        window: Keys that a query sees at most; None for all before it.
        chunked: Whether the window is a block that begins anew, rather than one that slides.
        reached: Whether a gradient reaches it.
    """

    query_width: int
    value_width: int
    window: int | None = None
    chunked: bool = False
    reached: bool = True

    def forward(self, length: int, causal: Causal) -> float:
        """FLOPs per token of the scores and of their product with the values: 2 S (d_qk + d_v)."""
        return 2.0 * (self.query_width + self.value_width) * self.keys(length, causal)

    def keys(self, length: int, causal: Causal) -> float:
        """Mean number of keys that count for a query.

        "full": all S, or the window. "half": those that a causal mask leaves, S / 2; with a sliding window
        W shorter than S, W - W (W - 1) / (2 S). "dense": S whatever the window, as a kernel that is given a
        mask computes, and as torch's counter counts.
        """
        window = self.window
        if causal == "dense" or window is None or window >= length:
            return length / 2 if causal == "half" else float(length)
        if causal == "full":
            return float(window)
        return window / 2 if self.chunked else window - window * (window - 1) / (2 * length)


@dataclass(frozen=True)
class ScanLayer:
    """One layer with a Mamba-2 state: `width` channels (heads times head size), each with `state` numbers.

    The scan costs 7 FLOPs per channel and number forward, the count of Megatron-LM's `mamba_layer_flops`;
    kernels that compute it in chunks do more. Backward is taken as twice that.
    """

    width: int
    state: int
    reached: bool = True

    @property
    def forward(self) -> float:
        """FLOPs per token."""
        return 7.0 * self.width * self.state


def check_causal(causal: str) -> None:
    """Raise ValueError unless this is one of the three ways to count keys."""
    if causal not in get_args(Causal):
        raise ValueError(f'causal={causal!r} must be "full", "half" or "dense".')


def mixing_layers(settings: Settings) -> list[AttentionLayer | ScanLayer | None]:
    """What each layer mixes tokens with, in order; None for a layer that does not.

    Raises:
        UnknownShapeError: A layer does it in another way, or a figure is missing.
    """
    if settings.get("is_encoder_decoder"):
        raise UnknownShapeError("config.is_encoder_decoder=True: only decoder-only models are counted")
    return [_layer(kind, settings) for kind in _kinds(settings)]


def _kinds(settings: Settings) -> Sequence[str]:
    if settings.family == "mamba2":
        return ["scan"] * settings.layers
    pattern = settings.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_known(mark, _PATTERN, "hybrid_override_pattern") for mark in pattern]
    for name in ("layers_block_type", "layer_types"):
        if (kinds := settings.texts(name)) is not None:
            if len(kinds) != settings.layers:
                raise UnknownShapeError(f"config.{name} names {len(kinds)} layers of {settings.layers}")
            return [_known(kind, _known_kinds(settings), name) for kind in kinds]
    if settings.family == "bamba" or settings.get("attn_layer_indices") is not None:
        attending = settings.numbers("attn_layer_indices")
        return ["full" if index in attending else "scan" for index in range(settings.layers)]
    return [_kind_by_rule(index, settings) for index in range(settings.layers)]


def _known_kinds(settings: Settings) -> dict[str, str]:
    """What the names of layers stand for; Mamba-2 passes under the name of linear attention too."""
    if settings.get("mamba_n_heads", "mamba_num_heads") is None:
        return _KINDS
    return {**_KINDS, "linear_attention": "scan"}


def _known(kind: str, kinds: dict[str, str], name: str) -> str:
    if kind not in kinds:
        raise UnknownShapeError(f"config.{name} has {kind}, which the formula does not cover")
    return kinds[kind]


def _kind_by_rule(index: int, settings: Settings) -> str:
    if settings.get("sliding_window") is None or settings.get("use_sliding_window") is False:
        return "full"
    every = settings.get("sliding_window_pattern") or _ALTERNATING.get(settings.family)
    if isinstance(every, int):
        return "sliding" if (index + 1) % every else "full"
    first = settings.get("max_window_layers")
    return "full" if isinstance(first, int) and index < first else "sliding"


def _layer(kind: str, settings: Settings) -> AttentionLayer | ScanLayer | None:
    if kind == "none":
        return None
    if kind == "scan":
        return ScanLayer(*scan_shape(settings)[:2])
    heads = settings.heads
    if settings.get("kv_lora_rank"):
        # Latent attention (DeepSeek-V2): the sizes that are attended with, not those that are cached.
        query = settings.count("qk_nope_head_dim") + settings.count("qk_rope_head_dim")
        value = settings.count("v_head_dim")
    else:
        query = value = settings.head_size
    window = None
    if kind == "sliding":
        window = settings.count("sliding_window")
    elif kind == "chunked":
        window = settings.count("attention_chunk_size")
    return AttentionLayer(heads * query, heads * value, window, kind == "chunked")


def scan_shape(settings: Settings) -> tuple[int, int, int]:
    """Channels, state size and groups of the Mamba-2 layers."""
    heads = settings.count("mamba_n_heads", "mamba_num_heads", "num_heads", "n_mamba_heads")
    size = settings.count("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    state = settings.count("mamba_d_state", "ssm_state_size", "state_size")
    return heads * size, state, settings.count_or(1, "mamba_n_groups", "mamba_ngroups", "n_groups")
