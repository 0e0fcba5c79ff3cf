"""A small decoder with the names of Llama, its data, and a training loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH = 8, 32


class RMSNorm(nn.Module):
    """As in Llama."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    """Causal, with key-value heads that several query heads may share; `q_norm` where `norm` says so."""

    def __init__(self, width: int, heads: int, kv_heads: int, norm: bool, bias: bool) -> None:
        super().__init__()
        self.head_dim = size = width // heads
        self.q_proj = nn.Linear(width, heads * size, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, width, bias=bias)
        self.q_norm = RMSNorm(size) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (p(x).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    """SwiGLU; `stacked` has gate and up in one layer."""

    def __init__(self, width: int, inner: int, bias: bool, stacked: bool) -> None:
        super().__init__()
        self.stacked = stacked
        if stacked:
            self.gate_up_proj = nn.Linear(width, 2 * inner, bias=bias)
        else:
            self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1) if self.stacked else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention and MLP, each normed before."""

    def __init__(
        self, width: int, inner: int, heads: int, kv_heads: int, norm: bool, bias: bool, stacked: bool
    ) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, kv_heads, norm, bias)
        self.mlp = MLP(width, inner, bias, stacked)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """int64 tokens [batch, sequence] to logits, with a plan of its own."""

    def __init__(
        self,
        *,
        vocabulary: int = 64,
        width: int = 32,
        inner: int = 48,
        heads: int = 4,
        kv_heads: int = 4,
        layers: int = 2,
        tied: bool = False,
        norm: bool = False,
        bias: bool = False,
        stacked: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Backbone(vocabulary, width, inner, heads, kv_heads, layers, norm, bias, stacked)
        self.lm_head = nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not name.endswith("norm.weight"):
                    parameter.normal_(0.0, 0.08)

    @property
    def tp_plan(self) -> dict[str, str]:
        names = {
            "self_attn.q_proj": "colwise",
            "self_attn.k_proj": "colwise",
            "self_attn.v_proj": "colwise",
            "self_attn.o_proj": "rowwise",
            "mlp.down_proj": "rowwise",
        }
        attention, mlp = self.model.layers[0].self_attn, self.model.layers[0].mlp
        if isinstance(attention.q_norm, RMSNorm):
            names["self_attn.q_norm"] = "replicated_with_grad_allreduce"
        names |= (
            {"mlp.gate_up_proj": "packed_colwise"}
            if mlp.stacked
            else {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise"}
        )
        return {
            "model.embed_tokens": "embedding_rowwise",
            **{f"model.layers.*.{name}": style for name, style in names.items()},
            "lm_head": "colwise_gather_output",
        }

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))


class Backbone(nn.Module):
    """Everything but the output head."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        inner: int,
        heads: int,
        kv_heads: int,
        layers: int,
        norm: bool,
        bias: bool,
        stacked: bool,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Layer(width, inner, heads, kv_heads, norm, bias, stacked) for _ in range(layers)
        )
        self.norm = RMSNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def batches(vocabulary: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets, of which some do not count, most of them in the first row."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(0, vocabulary, (BATCH, 1), generator=generator)
        step = torch.randint(1, 5, (BATCH, 1), generator=generator)
        ids = (start + step * torch.arange(LENGTH + 1)) % vocabulary
        tokens, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
        left_out = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
        left_out[0, : LENGTH // 2] = True
        targets[left_out] = -100
        yield tokens, targets


def plain_loss(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Sum over the targets that count, from whole logits."""
    flat = logits.float().flatten(0, -2)
    total = F.cross_entropy(flat, targets.flatten(), reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        total = total + z_loss * (torch.logsumexp(flat, -1).square() * (targets.flatten() != -100)).sum()
    return total


def train(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    vocabulary: int,
    steps: int,
    part: tuple[int, int] = (0, 1),
    total: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> SimpleNamespace:
    """Train with clipping by torch's own functions; loss and norm of each step, and gradients of the first.

    `part` is which of how many parts of each batch this rank has, and `total` sums a loss over them.
    """
    from torch.distributed.tensor import DTensor

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms, gradients = [], [], {}
    for tokens, targets in batches(vocabulary, steps):
        count = (targets != -100).sum()
        tokens, targets = (each.chunk(part[1])[part[0]] for each in (tokens, targets))
        loss = loss_of(tokens, targets) / count
        loss.backward()
        for name, each in () if gradients else list(model.named_parameters()):
            assert isinstance(each, DTensor) == isinstance(each.grad, DTensor), name
            if isinstance(each, DTensor):
                assert each.placements == each.grad.placements, name
            gradients[name] = (each.grad.full_tensor() if isinstance(each, DTensor) else each.grad).clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total(loss.detach().clone())))
    return SimpleNamespace(losses=losses, norms=norms, gradients=gradients)
