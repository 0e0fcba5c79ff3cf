"""A feed-forward of experts: each token goes to a few of them, chosen by a router, and none is dropped."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_env import get_logger
from trainer_core import is_fake

from .moe_config import Experts

logger = get_logger(__name__)


_Products: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Router(nn.Module):
    """Chooses experts for each token; computed in float32 under any precision, for near ties decide much.

    With softmax, the experts of the highest probabilities, weighted by these (Mixtral, arXiv:2401.04088,
    section 2.1). With sigmoids, those whose score plus bias is highest, weighted by the score alone
    (DeepSeek-V3, arXiv:2412.19437, eq. 12 to 16). The names are those of Hugging Face's routers, and so is
    what `forward` returns, which `trainer_core` reads to balance the load.

    Args:
        hidden_size: Width of a token.
        experts: What is chosen from.
    """

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.num_experts = experts.count
        self.top_k = experts.used
        self.scores = experts.scores
        self.normalized = experts.normalized
        self.scale = experts.scale
        self.weight = nn.Parameter(torch.empty(experts.count, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        if experts.scores == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(experts.count, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose.

        Args:
            x: Tokens `[tokens, hidden]`.

        Returns:
            Logits `[tokens, experts]` and weights of the chosen experts `[tokens, used]`, both float32, and
            their numbers `[tokens, used]`, int64.
        """
        logits = _linear_in_float32(x, self.weight)
        if self.scores == "softmax":
            probabilities = logits.softmax(dim=-1)
            weights, chosen = probabilities.topk(self.top_k, dim=-1)
        else:
            probabilities = logits.sigmoid()
            chosen = (probabilities + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
            weights = probabilities.gather(-1, chosen)
        if self.normalized:
            # As in transformers: sigmoids may all be 0, where those of a softmax cannot.
            weights = weights / (
                weights.sum(dim=-1, keepdim=True) + (1e-20 if self.scores == "sigmoid" else 0)
            )
        return logits, weights * self.scale, chosen

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = getattr(self, "e_score_correction_bias", None)
        nn.Module._apply(self, fn, recurse)
        if before is not None and self.e_score_correction_bias.dtype is not torch.float32:
            # Steps of 0.001 would be lost in bfloat16. What was cast has been rounded, so it is taken anew.
            self.e_score_correction_bias = before.to(self.e_score_correction_bias.device, torch.float32)
        return self


class ExpertWeights(nn.Module):
    """The weights of all experts, one tensor for each product, as transformers 5 holds them.

    Args:
        hidden_size: Width of a token.
        experts: Their number and width.
    """

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.num_experts = experts.count
        self.gate_up_proj = nn.Parameter(torch.empty(experts.count, 2 * experts.width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts.count, hidden_size, experts.width))
        nn.init.normal_(self.gate_up_proj, std=hidden_size**-0.5)
        nn.init.normal_(self.down_proj, std=experts.width**-0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token through its experts, and add up what they return.

        Arguments are called as in transformers, by which `model_parallel` knows experts.

        Args:
            hidden_states: Tokens `[tokens, hidden]`.
            top_k_index: Numbers of the chosen experts `[tokens, used]`, int64.
            top_k_weights: Their weights `[tokens, used]`, float32.

        Returns:
            `[tokens, hidden]` in the dtype of `hidden_states`.
        """
        used = top_k_index.shape[-1]
        flat = top_k_index.flatten()
        order = flat.argsort(stable=True)
        # Not bincount, whose result has no shape that is known before.
        counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        out = self._products(hidden_states[order // used], counts)
        out = out * top_k_weights.flatten()[order].unsqueeze(-1)
        # Back into the order of tokens by their places: unlike `index_add_`, this gives the same bits every
        # time on a GPU.
        out = out[order.argsort()].view(*top_k_index.shape, hidden_states.shape[-1])
        return out.sum(dim=-2).to(hidden_states.dtype)

    def _products(self, x: Tensor, counts: Tensor) -> Tensor:
        """What each expert makes of its tokens `[tokens x used, hidden]`, in the order of experts."""
        device = x.device.type
        dtype = x.dtype
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        up, down = self.gate_up_proj, self.down_proj
        if x.is_meta or is_fake():
            return _even_products(x.to(dtype), up.to(dtype), down.to(dtype))
        if not _grouped_fits(up, down, dtype) or not has_grouped_products(device, dtype):
            return _looped_products(x, up, down, counts)
        if dtype is not torch.bfloat16:
            # torch 2.13 can trace grouped products of bfloat16 alone.
            return _untraced_grouped_products(x.to(dtype), up.to(dtype), down.to(dtype), counts)
        return _grouped_products(x.to(dtype), up.to(dtype), down.to(dtype), counts)


class MoE(nn.Module):
    """A feed-forward of experts. Names of parameters are those of Hugging Face's Mixtral and GLM-4 MoE.

    Args:
        hidden_size: Width of a token.
        experts: The experts.
        shared: What every token goes through beside them.
    """

    def __init__(self, hidden_size: int, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = Router(hidden_size, experts)
        self.experts = ExpertWeights(hidden_size, experts)
        if shared is not None:
            self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[..., hidden]` to the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        _, weights, chosen = self.gate(tokens)
        out: Tensor = self.experts(tokens, chosen, weights).view(x.shape)
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out


def _linear_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return F.linear(x.float(), weight.float())
    with torch.autocast(device, enabled=False):
        return F.linear(x.float(), weight.float())


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _grouped_products(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    hidden = _gated(F.grouped_mm(x, gate_up.transpose(-2, -1), offs=ends))
    return F.grouped_mm(hidden, down.transpose(-2, -1), offs=ends)


_untraced_grouped_products: _Products = torch.compiler.disable(_grouped_products)


def _looped(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    """The same, one expert after the other, without those that have no token; the host waits for counts."""
    sizes = counts.tolist()
    # By `unbind`, whose backward puts the gradients of all experts together once. Each index would have a
    # tensor of zeros for all of them.
    parts = zip(torch.split(x, sizes), gate_up.unbind(), down.unbind(), strict=True)
    # Without any token all of them compute nothing, so that weights have gradients of zeros.
    some = [each for each in parts if len(each[0]) or not len(x)]
    return torch.cat([F.linear(_gated(F.linear(part, up)), back) for part, up, back in some])


_looped_products: _Products = torch.compiler.disable(_looped)


def _even_products(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same for tensors without values, as if every expert had equally many tokens."""
    sizes = [len(part) for part in torch.empty(len(x), device="meta").tensor_split(len(gate_up))]
    parts = zip(torch.split(x, sizes), gate_up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(_gated(F.linear(part, up)), back) for part, up, back in parts])


def _grouped_fits(gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows begin at multiples of 16 bytes, which the grouped kernels ask for."""
    return all(side * dtype.itemsize % 16 == 0 for side in (gate_up.shape[-1], down.shape[-1]))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def has_grouped_products(device: str, dtype: torch.dtype) -> bool:
    """Whether `torch.nn.functional.grouped_mm` computes products of this dtype, found out by one of them.

    Args:
        device: Type of the device, such as "cuda".
        dtype: Dtype of both factors.
    """
    found = hasattr(F, "grouped_mm")
    why = "torch has no grouped one"
    if found:
        here = torch.empty(0, device=device).device  # a thread begins with the first accelerator
        # A thread of its own has none of the modes of this one: a checkpoint of activations would keep what
        # is computed here, and miss it when it computes the block again.
        with ThreadPoolExecutor(1) as thread:
            try:
                found = thread.submit(_grouped_is_right, here, dtype).result()
                why = "the grouped one computed wrong values"
            except RuntimeError as error:  # how torch says that it has no kernel for this device or dtype
                found, why = False, f"the grouped one failed: {str(error).partition(chr(10))[0]}"
    name = str(dtype).removeprefix("torch.")
    how = "one grouped product" if found else f"one product after the other, as {why}"
    logger.info("experts on %s in %s are computed by %s", device, name, how)
    return found


def _grouped_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    x = torch.ones(4, 16, device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
    ends = torch.tensor([1, 4], device=device, dtype=torch.int32)
    out = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    return bool((out == 16).all())
