"""Small language models with an output head, and labels with ragged rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 29
FEATURES = 12


class TinyLM(nn.Module):
    """An embedding, a mean over the past, a layer and a head; `after` is applied to the logits."""

    def __init__(
        self,
        *,
        bias: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        self.mix = nn.Linear(FEATURES, FEATURES)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=bias)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        if tied:
            self.head.weight = self.embed.weight
        self.after = after

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def hidden(self, input_ids: Tensor) -> Tensor:
        embedded = self.embed(input_ids)
        steps = torch.arange(1, embedded.shape[1] + 1, device=embedded.device)
        past = embedded.cumsum(dim=1) / steps.unsqueeze(-1)
        return self.dropout(torch.tanh(self.mix(past)))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids))
        return logits if self.after is None else self.after(logits)


@dataclass(frozen=True)
class Settings:
    """The arguments that choose a loss."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    fused_loss: str = "no"


@pytest.fixture
def tiny_lm() -> type[TinyLM]:
    return TinyLM


@pytest.fixture
def settings() -> type[Settings]:
    return Settings


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """4 rows of 9; the second half counts nothing, the third row is cut, the others have gaps."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (4, 9), generator=generator)
    labels = ids.clone()
    labels[0, 4] = labels[3, 0] = -100
    labels[1] = -100
    labels[2, 5:] = -100
    return {"input_ids": ids, "labels": labels}


Step = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@pytest.fixture
def step() -> Step:
    """Loss of a batch and the gradients of all parameters, as the trainer computes them."""

    def run(
        loss: object, model: nn.Module, batch: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from trainer_core.loss import predict

        model.zero_grad()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            predictions = predict(loss, model, inputs, batch["labels"])  # type: ignore[arg-type]
        total = loss(predictions, batch["labels"])  # type: ignore[operator]
        (total / loss.count(batch["labels"]).clamp(min=1)).backward()  # type: ignore[attr-defined]
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return total.detach(), gradients

    return run
