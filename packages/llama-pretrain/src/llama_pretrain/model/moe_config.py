"""The shapes of models with experts, with the field names of the two Hugging Face kinds that they load as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

from trainer_core import ConfigurationError

from .config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of one layer."""

    count: int
    """Experts that are chosen from."""
    used: int
    """How many of them a token goes to."""
    width: int
    """Hidden units of one expert."""
    shared_width: int = 0
    """Hidden units of the experts that every token goes to; 0: there are none."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of logits. With sigmoids, a bias takes part in the choice; it is a buffer."""
    normalized: bool = True
    """Whether the weights of the chosen experts add up to 1."""
    scale: float = 1.0
    """What the weights are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """A Llama with experts in every layer, chosen by softmax: Hugging Face's `MixtralForCausalLM`.

    Attention, norms and embeddings are those of a Llama. `intermediate_size` is the width of one expert.

    Args:
        num_local_experts: Experts of a layer.
        num_experts_per_tok: How many of them a token goes to. Their weights are normalised to 1.
        output_router_logits: Whether the balance loss of the routers is part of the training loss.
        router_aux_loss_coef: Its weight.

    Raises:
        ConfigurationError: If a value breaks a rule. The message names setting, value, rule and fix.
    """

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    fixed: ClassVar[Mapping[str, object]] = {
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }

    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_experts(self, "num_local_experts", self.num_local_experts, self.num_experts_per_tok)

    def experts(self, layer: int) -> Experts:
        """The experts of a layer."""
        return Experts(
            count=self.num_local_experts, used=self.num_experts_per_tok, width=self.intermediate_size
        )


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(LlamaConfig):
    """A Llama whose experts are chosen as in DeepSeek-V3: Hugging Face's `Glm4MoeForCausalLM`.

    Scores are sigmoids, and a bias that is added for the choice alone balances the load (arXiv 2412.19437,
    section 2.1.2). Attention is that of a Llama: `partial_rotary_factor` must be 1. Choosing among groups of
    experts is not implemented.

    Args:
        intermediate_size: Width of the feed-forward in the first layers, which have no experts.
        moe_intermediate_size: Width of one expert.
        n_routed_experts: Experts of a layer that are chosen from.
        num_experts_per_tok: How many of them a token goes to.
        n_shared_experts: Experts beside them that every token goes to, computed as one.
        first_k_dense_replace: Layers at the beginning without experts.
        norm_topk_prob: Whether the weights of the chosen experts are normalised to 1.
        routed_scaling_factor: What these weights are multiplied by.
        output_router_logits: Whether the balance loss of the routers is part of the training loss.
        router_aux_loss_coef: Its weight, alpha in eq. 17 there. transformers keeps it and does not use it.
        router_bias_update_rate: How far the bias of an expert moves after each optimizer step, gamma there; 0
            leaves it as it is. transformers keeps it and does not use it.

    Raises:
        ConfigurationError: If a value breaks a rule. The message names setting, value, rule and fix.
    """

    model_type: ClassVar[str] = "glm4_moe"
    architecture: ClassVar[str] = "Glm4MoeForCausalLM"
    fixed: ClassVar[Mapping[str, object]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }

    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    num_experts_per_tok: int = 6
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.0001
    router_bias_update_rate: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_experts(self, "n_routed_experts", self.n_routed_experts, self.num_experts_per_tok)
        for name in ("moe_intermediate_size", "n_shared_experts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    name, getattr(self, name), "must be at least 1", "set it to 1 or more"
                )
        for name in ("first_k_dense_replace", "router_bias_update_rate"):
            if getattr(self, name) < 0:
                raise ConfigurationError(
                    name, getattr(self, name), "must be 0 or more", "set it to 0 or more"
                )
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ConfigurationError(
                "first_k_dense_replace",
                self.first_k_dense_replace,
                f"leaves none of num_hidden_layers={self.num_hidden_layers} with experts",
                "lower it, or use a model without experts",
            )
        if self.routed_scaling_factor <= 0:
            raise ConfigurationError(
                "routed_scaling_factor",
                self.routed_scaling_factor,
                "must be above 0",
                "set it to a positive number",
            )

    def to_dict(self) -> dict[str, object]:
        """Return the content of a `config.json` that transformers reads as `Glm4MoeForCausalLM`."""
        values, rotary = super().to_dict(), self._rope_parameters()
        # transformers turns half of each head if nothing says how much.
        whole = {"partial_rotary_factor": 1.0}
        return {**values, "rope_parameters": {**rotary, **whole}, **whole}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> LlamaConfig:
        """Read the content of a `config.json`.

        Raises:
            ConfigurationError: If a key is unknown, or a value asks for what this model does not compute.
        """
        values = dict(values)
        # Layers behind the last one that predict a second token: the logits are the same without them, and
        # files that hold their weights are refused by these names.
        values.pop("num_nextn_predict_layers", None)
        turned = values.pop("partial_rotary_factor", None)
        for key in ("rope_parameters", "rope_scaling"):  # transformers 5 lets the second one win
            parameters = values.get(key)
            if isinstance(parameters, Mapping):
                inside = dict(parameters)
                turned = inside.pop("partial_rotary_factor", turned)
                values[key] = inside
        if turned is None:
            turned = 0.5  # what transformers takes where nothing says so
        if turned != 1:
            raise ConfigurationError(
                "partial_rotary_factor",
                turned,
                "is not supported: only 1.0 is implemented, the default of transformers is 0.5",
                "use a model that turns whole heads",
            )
        return super().from_dict(values)

    def experts(self, layer: int) -> Experts | None:
        """The experts of a layer; None in the first ones."""
        if layer < self.first_k_dense_replace:
            return None
        return Experts(
            count=self.n_routed_experts,
            used=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=self.n_shared_experts * self.moe_intermediate_size,
            scores="sigmoid",
            normalized=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )


CONFIGS: tuple[type[LlamaConfig], ...] = (MixtralConfig, Glm4MoeConfig)
"""Configurations of models with experts."""


def _check_experts(config: MixtralConfig | Glm4MoeConfig, setting: str, count: int, used: int) -> None:
    if count < 2:
        raise ConfigurationError(setting, count, "must be at least 2", "set it to 2 or more")
    if not 1 <= used <= count:
        raise ConfigurationError(
            "num_experts_per_tok",
            used,
            f"must be between 1 and {setting}={count}",
            f"set it to a number from 1 to {count}",
        )
    if config.router_aux_loss_coef < 0:
        raise ConfigurationError(
            "router_aux_loss_coef",
            config.router_aux_loss_coef,
            "must be 0 or more",
            "set it to 0 or more, such as 0.01",
        )


# The vocabulary and special tokens are those of bytes, as those of `tiny`.
class _Nano(TypedDict):
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    initializer_range: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


_NANO: _Nano = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.09,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
PRESETS: Mapping[str, LlamaConfig] = {
    "moe-nano": Glm4MoeConfig(
        **_NANO,
        intermediate_size=344,
        moe_intermediate_size=96,
        n_routed_experts=16,
        num_experts_per_tok=3,
        output_router_logits=True,
    ),
    "mixtral-nano": MixtralConfig(
        **_NANO,
        intermediate_size=176,
        num_local_experts=8,
        rope_theta=10000.0,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    ),
    # The shape of Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088, table 1).
    "mixtral-8x7b": MixtralConfig(),
}
"""Named shapes with experts: two for a laptop, whose tokens pass about as many weights as those of `tiny`."""
