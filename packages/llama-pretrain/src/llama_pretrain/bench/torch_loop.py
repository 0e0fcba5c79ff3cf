"""The loop that everybody writes: loader, clipping, AdamW, and a line every few steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW

from .options import LOG_EVERY
from .work import CLIP_NORM, LEARNING_RATE, Work, mean_loss


def train(work: Work, model: nn.Module) -> None:
    """Train with nothing but torch."""
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    compiled, total = work.compiled(model), torch.zeros((), device=work.device)
    in_bf16 = work.args.mixed_precision == "bf16"
    compiled.train()
    for step, batch in enumerate(work.loader(), start=1):
        rows = batch["input_ids"].to(work.device, non_blocking=True)
        with torch.autocast(work.device.type, torch.bfloat16, enabled=in_bf16):
            loss = mean_loss(compiled(rows), rows)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_EVERY == 0:
            print(step, total.item() / LOG_EVERY, norm.item())
            total.zero_()
