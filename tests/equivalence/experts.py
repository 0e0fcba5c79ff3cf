"""The decoder with experts in the place of some feed-forwards, and the balance of its routers by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .model import BLOCKS, WIDTH, Decoder

EXPERTS, USED, HIDDEN = 8, 2, 24


@dataclass
class BalanceConfig:
    """What a trainer reads of the model's config."""

    output_router_logits: bool
    router_aux_loss_coef: float
    router_bias_update_rate: float


class Router(nn.Module):
    """Returns logits, weights and chosen experts, as those of Hugging Face do."""

    e_score_correction_bias: Tensor

    def __init__(self, width: int, scores: str) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.scores = EXPERTS, USED, scores
        self.weight = nn.Parameter(torch.empty(EXPERTS, width))
        if scores == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x, self.weight).float()
        if self.scores == "softmax":
            weights, chosen = logits.softmax(dim=-1).topk(USED, dim=-1)
        else:
            chosen = (logits.sigmoid() + self.e_score_correction_bias).topk(USED, dim=-1).indices
            weights = logits.sigmoid().gather(-1, chosen)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen


class Choice(nn.Module):
    """Every expert computes every token, and those that were not chosen have the weight 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, width))
        self.down = nn.Parameter(torch.empty(EXPERTS, width, HIDDEN))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        share = hidden_states.new_zeros(len(hidden_states), self.num_experts)
        share = share.scatter(1, top_k_index, top_k_weights.to(share.dtype))
        # All experts at once: gradients of such products are transposed views, as autograd computes them.
        h = functional.silu(torch.einsum("tw,ehw->teh", hidden_states, self.up))
        return torch.einsum("teh,ewh,te->tw", h, self.down, share)


class Mixture(nn.Module):
    """A router, and the experts that it chooses from."""

    def __init__(self, width: int, scores: str) -> None:
        super().__init__()
        self.gate = Router(width, scores)
        self.experts = Choice(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        _, weights, chosen = self.gate(tokens)
        return self.experts(tokens, chosen, weights).view(x.shape)


class ExpertsDecoder(Decoder):
    """A decoder with experts in all blocks but the first.

    Args:
        scores: softmax or sigmoid.
        balance: Weight of the balance loss; 0: none is wanted.
        bias_rate: How far biases move in a step.
        tied: As in `Decoder`.
        blocks: As in `Decoder`.
        width: As in `Decoder`.
    """

    tp_plan: ClassVar[Mapping[str, str]] = {**Decoder.tp_plan, "layers.*.mlp.experts": "moe_tp_experts"}

    def __init__(
        self,
        *,
        scores: str,
        balance: float,
        bias_rate: float,
        tied: bool = False,
        blocks: int = BLOCKS,
        width: int = WIDTH,
    ) -> None:
        super().__init__(tied=tied, blocks=blocks, width=width)
        self.config = BalanceConfig(balance > 0, balance, bias_rate)
        for block in self.layers[1:]:
            block.mlp = Mixture(width, scores)
            for parameter in block.mlp.parameters():
                # Wide enough that experts are clearly apart: a tie would turn with the last bit.
                nn.init.normal_(parameter, std=0.2)


class BalanceByHand:
    """The routers of a model, and what their balance costs.

    Args:
        model: The model.
        weight: Of the balance loss.
        rate: How far biases move in a step.
    """

    def __init__(self, model: nn.Module, weight: float, rate: float) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        self._weight, self._rate = weight, rate
        self._seen: dict[Router, tuple[Tensor, Tensor]] = {}
        self._load = {router: torch.zeros(EXPERTS) for router in self._routers}

    def watch(self) -> None:
        """Begin to see what routers return."""
        self._hooks = [router.register_forward_hook(self._see) for router in self._routers]

    def end(self) -> None:
        """See nothing more, such as evaluations."""
        for hook in self._hooks:
            hook.remove()

    def _see(self, router: nn.Module, given: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if isinstance(router, Router):
            self._seen[router] = output[0], output[2]

    def loss(self, targets: Tensor) -> Tensor | float:
        """Of the microbatch that was computed last, to be added to the sum of its token losses.

        Args:
            targets: Whether each position but the last is predicted: bool [rows, length - 1].
        """
        total: Tensor | float = 0.0
        rows, length = targets.shape[0], targets.shape[1] + 1
        for router in self._routers:
            logits, chosen = self._seen[router]
            for logit, choice, counts in zip(
                logits.view(rows, length, -1)[:, :-1],
                chosen.view(rows, length, -1)[:, :-1],
                targets,
                strict=True,
            ):
                tokens = int(counts.sum())
                if not tokens:
                    continue
                often = torch.bincount(choice[counts].flatten(), minlength=EXPERTS).float()
                self._load[router] += often
                scores = logit[counts].sigmoid() if router.scores == "sigmoid" else logit[counts].exp()
                mean = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
                if router.scores == "sigmoid":  # DeepSeek-V3, eq. 17 and 18
                    balance = (EXPERTS / (USED * tokens) * often * mean).sum()
                else:  # transformers: mean over layers of experts x sum of shares
                    balance = EXPERTS * (often / tokens * mean).sum() / len(self._routers)
                total = total + self._weight * tokens * balance
        return total

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases."""
        for router, load in self._load.items():
            if self._rate:
                router.e_score_correction_bias += self._rate * torch.sign(load.mean() - load)
            load.zero_()
