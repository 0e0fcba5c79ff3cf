"""What every way to train has to agree with: a loop by hand, in plain torch."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .data import GLOBAL_BATCH, IGNORED, ROWS, RaggedLoader
from .experts import BalanceByHand, ExpertsDecoder
from .model import BLOCKS, WIDTH, Decoder


class Point(NamedTuple):
    """One optimizer step."""

    loss: float
    """Mean over the counted tokens of the global batch, in nats."""
    grad_norm: float
    """2-norm of the gradient before clipping."""


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how."""

    steps: int = 50
    seed: int = 11
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 5
    max_grad_norm: float | None = 1.6
    tied: bool = False
    width: int = WIDTH
    blocks: int = BLOCKS
    global_batch: int = GLOBAL_BATCH
    """Rows of an optimizer step."""
    autocast: bool = False
    """Whether products are rounded to bfloat16."""
    float16: bool = False
    """Whether they are rounded to float16, and the loss is scaled."""
    optimizer: str = "adamw"
    """Name of the built-in optimizer: adamw, muon, or schedule_free_adamw, which has no schedule."""
    ema_decay: float | None = None
    """That of the moving average which is evaluated, if one is."""
    fused: bool = False
    """Whether to take torch's fused AdamW, which rounds otherwise than the one for each parameter."""
    evaluated: bool = False
    """Whether the trained model is evaluated: its loss then comes as one more point."""
    experts: str | None = None
    """Scores of the experts in all blocks but the first, softmax or sigmoid; none: there are no experts."""
    balance: float = 0.0
    """Weight of the balance loss of their routers."""
    bias_rate: float = 0.0
    """How far the biases of routers move in a step."""
    bad_step: int | None = None
    """The optimizer step whose gradient is made not a number; it is left out, and the schedule continues. In
    float16 it overflows instead: the loss scale is halved, and the schedule waits."""


def decoder_of(recipe: Recipe) -> Decoder:
    """The model of a recipe."""
    shape = {"tied": recipe.tied, "width": recipe.width, "blocks": recipe.blocks}
    if recipe.experts is None:
        return Decoder(**shape)
    return ExpertsDecoder(scores=recipe.experts, balance=recipe.balance, bias_rate=recipe.bias_rate, **shape)


def train(recipe: Recipe, microbatch: int = 2) -> list[Point]:
    """Train from scratch, with so many rows in a microbatch; one point for each optimizer step."""
    torch.manual_seed(recipe.seed)
    model = decoder_of(recipe)
    everything = list(model.parameters())
    average = [parameter.detach().clone() for parameter in everything]
    optimizers = _optimizers(recipe, model)
    optimizer = optimizers[0]
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.float16)
    dtype = torch.float16 if recipe.float16 else torch.bfloat16
    precision = torch.autocast("cpu", dtype) if recipe.float16 or recipe.autocast else nullcontext()
    loader, points, waited = RaggedLoader(microbatch), [], 0
    steps_per_epoch = -(-ROWS // recipe.global_batch)
    balance = BalanceByHand(model, recipe.balance, recipe.bias_rate)
    balance.watch()
    for step in range(recipe.steps):
        if step % steps_per_epoch == 0:
            loader.set_epoch(step // steps_per_epoch)
            batches = iter(loader)
        window = list(islice(batches, recipe.global_batch // microbatch))
        tokens = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in window)
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = recipe.learning_rate * _factor(step - waited, recipe)
        model.zero_grad()
        total = 0.0
        for batch in window:
            with precision:
                loss = next_token_losses(model, batch)
            added = balance.loss(batch["labels"][:, 1:] != IGNORED)
            scaler.scale((loss + added) / tokens).backward()
            total += loss.item()
        if step == recipe.bad_step:
            points.append(Point(math.nan, math.nan))
            if recipe.float16:
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
                waited += 1
            continue
        scaler.unscale_(optimizer)
        limit = math.inf if recipe.max_grad_norm is None else recipe.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(everything, limit)
        scaler.step(optimizer)
        for another in optimizers[1:]:
            another.step()
        scaler.update()
        balance.step()
        points.append(Point(total / tokens, norm.item()))
        for before, now in zip(average, everything, strict=True):
            before.lerp_(now.detach(), 1 - (recipe.ema_decay or 0.0))
    balance.end()
    if recipe.ema_decay is not None:
        torch.nn.utils.vector_to_parameters(torch.cat([each.flatten() for each in average]), everything)
    if recipe.optimizer == "schedule_free_adamw":
        optimizer.eval()  # type: ignore[attr-defined]
    return [*points, evaluation_point(_evaluated(model))] if recipe.evaluated else points


def _optimizers(recipe: Recipe, model: Decoder) -> list[torch.optim.Optimizer]:
    everything, betas = list(model.parameters()), recipe.betas
    ends = {id(model.embed.weight), id(model.head.weight)}
    hidden = [p for p in everything if recipe.optimizer == "muon" and p.ndim == 2 and id(p) not in ends]
    taken = {id(parameter) for parameter in hidden}
    groups = [
        {
            "params": [p for p in everything if p.ndim > 1 and id(p) not in taken],
            "weight_decay": recipe.weight_decay,
        },
        {"params": [p for p in everything if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "schedule_free_adamw":
        from schedulefree import AdamWScheduleFree

        free = AdamWScheduleFree(
            groups, recipe.learning_rate, betas, recipe.epsilon, warmup_steps=recipe.warmup
        )
        free.train()
        return [free]
    adamw = torch.optim.AdamW(groups, recipe.learning_rate, betas, recipe.epsilon, fused=recipe.fused)
    if not hidden:
        return [adamw]
    rate, decay = recipe.learning_rate, recipe.weight_decay
    return [adamw, torch.optim.Muon(hidden, rate, decay, adjust_lr_fn="match_rms_adamw")]


def evaluation_point(loss: float) -> Point:
    """The loss of an evaluation, where points of training have a norm as well."""
    return Point(loss, loss)


@torch.no_grad()
def _evaluated(model: Decoder) -> float:
    """Loss per counted token of the evaluation rows, one by one."""
    batches = list(RaggedLoader(1, seed=1))
    tokens = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
    return sum(next_token_losses(model, batch).item() for batch in batches) / tokens


def next_token_losses(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    """Sum of the cross-entropies of one microbatch: float32 scalar."""
    logits = model(batch["input_ids"])[:, :-1].float()
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up from zero, then half a cosine down to zero."""
    if recipe.optimizer == "schedule_free_adamw":
        return 1.0
    if step < recipe.warmup:
        return step / recipe.warmup
    done = (step - recipe.warmup) / (recipe.steps - recipe.warmup)
    return 0.5 * (1.0 + math.cos(math.pi * done))
