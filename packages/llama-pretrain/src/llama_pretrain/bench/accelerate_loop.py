"""A loop with Accelerate: model, optimizer and loader prepared, as its manual shows."""

from __future__ import annotations

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch.optim import AdamW

from .options import LOG_EVERY
from .work import CLIP_NORM, LEARNING_RATE, Work, mean_loss


def train(work: Work, model: nn.Module) -> None:
    """Train with Accelerate."""
    accelerator = Accelerator(
        cpu=work.device.type == "cpu",
        mixed_precision=work.args.mixed_precision,
        dynamo_backend="inductor" if work.args.torch_compile else None,
    )
    plain = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    prepared, optimizer, loader = accelerator.prepare(model, plain, work.loader())
    total = torch.zeros((), device=work.device)
    prepared.train()
    for step, batch in enumerate(loader, start=1):
        loss = mean_loss(prepared(batch["input_ids"]), batch["labels"])
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(prepared.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_EVERY == 0:
            accelerator.print(step, total.item() / LOG_EVERY, norm.item())
            total.zero_()
