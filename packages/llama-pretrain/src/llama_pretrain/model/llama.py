"""A Llama whose parameters have the names of Hugging Face's `LlamaForCausalLM`, and generation with it."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    Preprocessor,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    load_model_weights,
)
from dist_env import StaticDistributedEnvironment
from model_parallel import CausalAttention
from trainer_core import ConfigurationError, Sampling

from .config import LlamaConfig
from .moe_weights import has_separate_experts, with_separate_experts
from .rope import RotaryEmbedding, apply_rotary


class KVCache:
    """Keys and values of the layers that compute, each in storage allocated once, when its first ones come.

    Layers that other ranks compute take no memory.

    Args:
        max_length: Number of positions there is room for.
    """

    def __init__(self, max_length: int) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.max_length = max_length
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one layer and return those of all positions.

        Both are `[batch, kv_heads, new, head_dim]`; what comes back is longer along the third dimension.
        `length` stays as it is until every layer has stored its part: see `advance`.
        """
        if layer not in self._layers:
            # Only here it is known where and in what the layer computes, and how many heads this rank has of
            # it; sharding may decide that.
            shape = (*keys.shape[:2], self.max_length, keys.shape[3])
            self._layers[layer] = keys.new_empty(shape), values.new_empty(shape)
        all_keys, all_values = self._layers[layer]
        end = self.length + keys.shape[2]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def advance(self, count: int) -> None:
        """Count `count` positions as stored in every layer."""
        self.length += count


class RMSNorm(nn.Module):
    """Divide by the root mean square in float32, then scale (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed `x`, in the shape and dtype of `x` `[..., size]`."""
        if torch.compiler.is_compiling():  # which decides itself what to keep
            return _normed(x, self.weight, self.eps)
        return _Normed.apply(x, self.weight, self.eps)


class _NormedContext(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, bool, bool]
    eps: float


class _Normed(torch.autograd.Function):
    """The formula of `RMSNorm`, with a gradient that keeps nothing but `x`.

    Torch's own gradient of these operators keeps three tensors of that size, and takes twice the time.
    """

    if TYPE_CHECKING:
        apply: ClassVar[Callable[[Tensor, Tensor, float], Tensor]]  # torch's has no types

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normed(x, weight, eps)

    @staticmethod
    def setup_context(ctx: _NormedContext, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        x, weight, eps = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.eps = eps

    # With n = x * scale: d scale / d x = -scale^2 * n / size, so d n = scale * (d x - n * mean(n * d x)), in
    # both directions. All of it can be differentiated again: a scale that was kept would be a constant here.

    @staticmethod
    def backward(ctx: _NormedContext, *outer: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (x, weight) = outer, ctx.saved_tensors
        scale = _inverse_rms(x, ctx.eps)
        normed = x.float() * scale
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _change(normed, scale, (grad * weight).to(x.dtype).float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed.to(x.dtype)).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return of_x, of_weight, None

    @staticmethod
    def jvp(ctx: _NormedContext, *tangents: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = tangents
        scale = _inverse_rms(x, ctx.eps)
        normed = x.float() * scale
        change = torch.zeros_like(normed) if of_x is None else _change(normed, scale, of_x.float())
        result = weight * change.to(x.dtype)
        return result if of_weight is None else result + of_weight * normed.to(x.dtype)


def _change(normed: Tensor, scale: Tensor, given: Tensor) -> Tensor:
    along = (given * normed).mean(-1, keepdim=True)
    return (given - normed * along) * scale


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x.float() * _inverse_rms(x, eps)).to(x.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads may share a key-value head."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        width, wide = config.hidden_size, config.num_attention_heads * config.head_dim
        narrow = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, width, bias=False)
        self.attend = CausalAttention()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, document_ids: Tensor | None
    ) -> Tensor:
        """Attend from `x` `[batch, positions, hidden]` to itself and to what `cache` holds.

        With `document_ids` `[batch, all positions]`, each position attends within its document.
        """
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        query = apply_rotary(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        key = apply_rotary(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        if cache is None:
            mixed = self.attend(query, key, value, document_ids)
        else:
            mixed = self._with_cache(query, key, value, cache)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _with_cache(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache) -> Tensor:
        length = query.shape[2]
        key, value = cache.extend(self.layer, key, value)
        mask: Tensor | None = None
        if length > 1 and cache.length > 0:
            # is_causal lines up the first positions, new queries belong to the last ones.
            mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=key.device).tril(cache.length)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=length > 1 and mask is None,
            enable_gqa=self.grouped,
        )


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[..., hidden]` to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = _feed_forward(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the stream `[batch, positions, hidden]` after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, document_ids)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _feed_forward(config: LlamaConfig, layer: int) -> nn.Module:
    experts = config.experts(layer)
    if experts is None:
        return MLP(config.hidden_size, config.intermediate_size)
    from .moe import MoE  # loads torch's compiler, which takes more than a second

    shared = MLP(config.hidden_size, experts.shared_width) if experts.shared_width else None
    return MoE(config.hidden_size, experts, shared)


class LlamaBackbone(nn.Module):
    """Everything up to the last norm. The attribute names are those of Hugging Face's `LlamaModel`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the normed hidden states `[batch, positions, hidden]`."""
        if position_ids is None:
            start = 0 if cache is None else cache.length
            cos, sin = self.rotary_emb(start, input_ids.shape[1])
        else:
            cos, sin = self.rotary_emb.at(position_ids)
        x: Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, cache, document_ids)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        out: Tensor = self.norm(x)
        return out


def _plan_with_experts(plan: Mapping[str, str], config: LlamaConfig) -> dict[str, str]:
    """The plan of a model that has experts in some layers."""
    kinds = [config.experts(layer) for layer in range(config.num_hidden_layers)]
    feed_forward = {name: style for name, style in plan.items() if ".mlp." in name}
    # Refused by this name where experts are not divided: each rank would compute all of them.
    rules = {name: style for name, style in plan.items() if name not in feed_forward}
    rules["model.layers.*.mlp.experts"] = "moe_tp_experts"
    if None in kinds:
        rules |= feed_forward
    if any(experts is not None and experts.shared_width for experts in kinds):
        rules |= {
            name.replace(".mlp.", ".mlp.shared_experts."): style for name, style in feed_forward.items()
        }
    return rules


class Llama(nn.Module):
    """A causal language model; weights interchange with Hugging Face's `LlamaForCausalLM`.

    Args:
        config: Shape of the model. Kept as `.config`.
    """

    tp_plan: Mapping[str, str] = {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
    """How tensor parallelism divides the model: styles of `model_parallel` by names of modules."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaBackbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.experts(config.num_hidden_layers - 1) is not None:
            self.tp_plan = _plan_with_experts(self.tp_plan, config)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            input_ids: Token ids `[batch, positions]`, int64.
            position_ids: Positions by which heads are turned, int64 `[batch, positions]`; None: from 0 on, or
                behind `cache`.
            document_ids: Integers `[batch, positions]`: each position attends to those with its own number.
                Of whole rows, also where sequences are divided. None: each row is one document.
            cache: Earlier positions of the same sequences. It is extended by the new ones.

        Returns:
            Logits `[batch, positions, vocab_size]` in the dtype of the computation.

        Raises:
            ValueError: If there are more positions than `max_position_embeddings`, or positions or documents
                are given beside a cache, which has its own.
        """
        if cache is not None and not (position_ids is None and document_ids is None):
            raise ValueError(
                "position_ids and document_ids cannot be used together with a cache, whose positions go on. "
                "Leave them out."
            )
        end = input_ids.shape[1] + (0 if cache is None else cache.length)
        if end > self.config.max_position_embeddings:
            raise ValueError(
                f"the input has {end} positions, but the model has "
                f"max_position_embeddings={self.config.max_position_embeddings}. Shorten the input."
            )
        logits: Tensor = self.lm_head(self.model(input_ids, cache, position_ids, document_ids))
        return logits

    def make_cache(self, rows: int, positions: int) -> KVCache:
        """Return an empty cache for the keys and values of `rows` sequences of up to `positions` tokens."""
        return KVCache(positions)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the projection to logits."""
        return self.lm_head

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw fresh weights.

        Matrices are normal with standard deviation `initializer_range`. The two projections of a layer that
        are added to the stream are drawn narrower by `1 / sqrt(2 * num_hidden_layers)`, so that the variance
        of the stream does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Norm weights are 1.
        """
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                nn.init.normal_(parameter, std=residual_std)
            elif name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=std)


@torch.no_grad()
def generate(
    model: Llama,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue token sequences, one token at a time.

    Args:
        model: The model. It runs in evaluation mode; afterwards each of its modules has its own mode again.
        input_ids: Prompts of one length `[batch, positions]`, int64, on the model's device.
        max_new_tokens: Most tokens to add.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Draw from the `top_k` most probable tokens only.
        top_p: Draw from the fewest most probable tokens whose probabilities sum to `top_p` or more
            (Holtzman et al. 2020).
        eos_token_id: Token that ends a sequence. It is kept, and the sequence is filled up with it.
            Generation stops when every sequence has ended.
        generator: Source of randomness, on the model's device; torch's default one when not given.

    Returns:
        Prompts and continuations `[batch, positions + new]`, int64.

    Raises:
        ConfigurationError: If a setting is out of range, or the result would not fit the model's positions.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    _check_room(model, input_ids, max_new_tokens)
    if max_new_tokens == 0:
        return input_ids
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return _continue(model, input_ids, max_new_tokens, sampling, eos_token_id, generator)
    finally:
        for module, training in modes:
            module.training = training


def _continue(
    model: Llama,
    input_ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    eos_token_id: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    batch, prompt_length = input_ids.shape
    cache = model.make_cache(batch, prompt_length + max_new_tokens)
    ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    pieces, new = [input_ids], input_ids
    for _ in range(max_new_tokens):
        token = sampling.choose(model(new, cache=cache)[:, -1], generator=generator)
        if eos_token_id is not None:
            token = torch.where(ended, eos_token_id, token)
            ended |= token == eos_token_id
        new = token[:, None]
        pieces.append(new)
        if eos_token_id is not None and bool(ended.all()):
            break
    return torch.cat(pieces, dim=1)


def _check_room(model: Llama, input_ids: Tensor, max_new_tokens: int) -> None:
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ConfigurationError(
            "input_ids",
            tuple(input_ids.shape),
            "must be [batch, positions], both 1 or more",
            "give a prompt of at least one token",
        )
    if max_new_tokens < 0:
        raise ConfigurationError("max_new_tokens", max_new_tokens, "must be 0 or more", "set it to 0 or more")
    total, room = input_ids.shape[1] + max_new_tokens, model.config.max_position_embeddings
    if total > room:
        raise ConfigurationError(
            "max_new_tokens",
            max_new_tokens,
            f"needs {total} positions with a prompt of {input_ids.shape[1]} tokens, but the model has {room}",
            f"use at most {max(0, room - input_ids.shape[1])}, or a shorter prompt",
        )


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def dtype_names() -> tuple[str, ...]:
    """Return the names of the dtypes that `save_pretrained` writes."""
    return tuple(_DTYPES)


def has_weights(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds weights in the Hugging Face layout."""
    return any((Path(directory) / name).is_file() for name in _WEIGHTS)


def load_pretrained(directory: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Llama:
    """Load a Llama from a directory in the Hugging Face layout, such as a checkpoint or an export.

    Args:
        directory: Holds `config.json` and `model.safetensors`, or the files that
            `model.safetensors.index.json` lists. Experts may be stored together or one by one.
        dtype: Dtype of the parameters; weights of another dtype are cast.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        ConfigurationError: If `config.json` is missing or describes a model that is not implemented.
        CheckpointError: If the weights are missing or damaged, or do not fit the configuration.
    """
    config = LlamaConfig.load(directory)
    with torch.device("meta"):
        model = Llama(config).to(dtype)
    model = model.to_empty(device="cpu")
    if config.tie_word_embeddings:
        # Each parameter was just given memory of its own.
        model.lm_head.weight = model.model.embed_tokens.weight
    separate = has_separate_experts(Path(directory))
    load_model_weights(with_separate_experts(model) if separate else model, Path(directory))
    return model.eval()


def save_pretrained(
    model: Llama,
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    tokenizer: Preprocessor | None = None,
) -> Path:
    """Write `config.json` and safetensors weights, which transformers reads as `LlamaForCausalLM`.

    A model with experts it reads as `MixtralForCausalLM` or `Glm4MoeForCausalLM`, from version 5 on. Weights
    of more than 5 GB are divided into several files with an index.

    Args:
        model: The model.
        directory: Made if it is not there; must hold no weights.
        dtype: Dtype of the written weights, one of `dtype_names()`; that of the model when not given.
        tokenizer: Saved beside the weights.

    Returns:
        The directory.

    Raises:
        ConfigurationError: If the dtype is unknown, or a weight is too large for it.
        CheckpointError: If there are weights already, or writing fails.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigurationError(
            "dtype", dtype, f"must be one of {', '.join(_DTYPES)}", "choose one of these"
        )
    if dtype is not None and any(_DTYPES[dtype] != weight.dtype for weight in model.parameters()):
        model = _cast(model, dtype)
    component = StateComponent(
        key="model", stateful=ModelState(model), sharing_pattern=SharingPattern.GLOBAL, required=True
    )
    manager = CheckpointManager(
        CheckpointConfig(output_dir=Path(directory)),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider([component]),
        preprocessor=tokenizer,
    )
    return manager.save_model(Path(directory))


def _cast(model: Llama, dtype: str) -> Llama:
    """A copy in another dtype; refuses weights that would be infinite there."""
    cast = copy.deepcopy(model).to(_DTYPES[dtype])
    for (name, weight), before in zip(cast.state_dict().items(), model.state_dict().values(), strict=True):
        if bool((weight.isinf() & ~before.isinf()).any()):
            raise ConfigurationError(
                "dtype",
                dtype,
                f"has no values above {torch.finfo(weight.dtype).max:g}, and {name} has larger ones",
                "write the weights as bfloat16 or float32",
            )
    return cast
