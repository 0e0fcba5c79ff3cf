"""What powerSGD does to gradients."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from model import (
    Job,
    Model,
    batches,
    difference,
    equal,
    mean,
    own_gradients,
    same_on_both,
    shard,
)
from torch import Tensor, nn

from trainer_ddp import CompressionArguments

RANK_1 = CompressionArguments(method="powerSGD", matrix_rank=1, start_step=0)
WHOLE_RANK = CompressionArguments(method="powerSGD", matrix_rank=1000, start_step=0, min_compression_rate=0)


def full_rank(directory: Path) -> object:
    """With factors as large as the matrices nothing is left out; a rate of 0 lets such factors through."""
    found: dict[str, object] = {}
    for dtype in (torch.float32, torch.float64):
        job = Job(WHOLE_RANK, model=Model().to(dtype))
        worst = 0.0
        for whole in batches(3):
            batch = shard(whole).to(dtype)
            worst = max(worst, difference(job.gradients(batch), mean(own_gradients(job.model, batch))))
        errors = mean(job.state()["errors"])
        found[str(dtype)] = {"worst": worst, "owed": max(float(e.abs().max()) for e in errors.values())}
    found["compressed"] = sorted(errors)
    return found


def _telescope(job: Job, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sum of what was sent plus what is owed, beside the sum of the true means; weights stay."""
    sent: dict[str, Tensor] = {}
    due: dict[str, Tensor] = {}
    for whole in batches(steps):
        batch = shard(whole).to(next(job.model.parameters()).dtype)
        for name, gradient in mean(own_gradients(job.model, batch)).items():
            due[name] = due.get(name, 0) + gradient
        for name, gradient in job.gradients(batch).items():
            sent[name] = sent.get(name, 0) + gradient.double()
    for name, error in mean(job.state()["errors"]).items():
        sent[name] += error.view(sent[name].shape)
    return sent, due


def error_feedback(directory: Path) -> object:
    """Nothing is lost: what was sent and what is owed are the sum of the gradients."""
    job = Job(RANK_1)
    sent, due = _telescope(job, 8)
    state = job.state()
    half = Job(RANK_1, model=Model().bfloat16())
    sent_half, due_half = _telescope(half, 8)
    only_sent = job.gradients(shard(next(batches(1, seed=5))))
    true = mean(own_gradients(job.model, shard(next(batches(1, seed=5)))))
    return {
        "float32": difference(sent, due),
        "bfloat16": difference(sent_half, due_half),
        "one step alone": difference(only_sent, true),
        "owed": float(min(e.abs().max() for e in state["errors"].values())),
        "factors same": same_on_both(state["factors"]) and same_on_both(half.state()["factors"]),
        "errors same": same_on_both(state["errors"]),
        "dtypes": sorted({str(t.dtype) for part in half.state().values() for t in part.values()}),
    }


def traffic(directory: Path) -> object:
    """Bytes per step, before and after `start_step`; accumulated microbatches travel once."""
    settings = CompressionArguments(method="powerSGD", matrix_rank=2, start_step=2, min_compression_rate=2)
    job = Job(settings)
    counts = []
    for done, whole in enumerate(batches(4), start=1):
        before = job.traffic.bytes
        with job.ddp.no_sync():
            job.ddp(shard(whole)).sum().backward()
        job.step(shard(whole), done)
        counts.append(job.traffic.bytes - before)
    return {"bytes": counts, "elements": {n: p.numel() for n, p in job.model.named_parameters()}}


def options(directory: Path) -> object:
    """Bits do not depend on buckets or views of them, and nothing is drawn from the usual generator."""
    jobs = [
        Job(RANK_1, **given)
        for given in ({}, {"bucket_cap_mb": 25}, {"gradient_as_bucket_view": True}, {"static_graph": True})
    ]
    before = torch.get_rng_state()
    same = True
    for whole in batches(4):
        first, *others = (job.gradients(shard(whole)) for job in jobs)
        same &= all(equal(first, other) for other in others)
    return {"same": same, "generator": torch.equal(before, torch.get_rng_state())}


def under_autocast(directory: Path) -> object:
    """A backward pass under autocast: its gradients are its own, and compression adds no rounding."""
    gradients = []
    for settings in (CompressionArguments(), WHOLE_RANK):
        job = Job(settings)
        loss = job.ddp(shard(next(batches(1)))).square().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        gradients.append({name: parameter.grad for name, parameter in job.model.named_parameters()})
    return difference(gradients[1], gradients[0])


def channels_last(directory: Path) -> object:
    """A bucket holds a gradient in its parameter's strides; the matrix is the same."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    gradients = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)).to(memory_format=form)
        job = Job(RANK_1, model=model)
        gradients.append(job.gradients(images))
    return {
        "difference": difference(gradients[1], gradients[0]),
        "strides": [*gradients[1]["1.weight"].stride()],
    }


def not_finite(directory: Path) -> object:
    """Rank 1 has an inf in one matrix, once."""
    job = Job(RANK_1)
    samples = list(batches(6))
    for whole in samples[:2]:
        job.gradients(shard(whole))
    before = job.state()["factors"]["second.weight"]

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[3, 5] = torch.inf
        return gradient

    handle = job.model.second.weight.register_hook(spoil) if dist.get_rank() == 1 else None
    spoilt = job.gradients(shard(samples[2]))
    state = job.state()
    if handle:
        handle.remove()
    later = [job.gradients(shard(whole)) for whole in samples[3:]]
    return {
        "not finite": sorted(name for name, g in spoilt.items() if not bool(g.isfinite().all())),
        "owed": float(state["errors"]["second.weight"].abs().max()),
        "factor kept": torch.equal(before, state["factors"]["second.weight"]),
        "later finite": all(bool(g.isfinite().all()) for each in later for g in each.values()),
        "later sent": min(float(each["second.weight"].abs().max()) for each in later),
        "later same": all(same_on_both(each) for each in later),
    }


def unused(directory: Path) -> object:
    """What is owed of a parameter that no rank uses in a step stays owed; one rank's use is enough."""
    job = Job(RANK_1, find_unused_parameters=True)
    samples = [shard(whole) for whole in batches(4)]
    job.gradients(samples[0])
    before = job.state()
    nobody = job.gradients(samples[1], seldom=False)
    after = job.state()
    one = job.gradients(samples[2], seldom=dist.get_rank() == 0)
    moved = job.state()
    return {
        "gradient": "seldom.weight" in nobody,
        "kept": [torch.equal(before[p]["seldom.weight"], after[p]["seldom.weight"]) for p in before],
        "others continue": not torch.equal(before["errors"]["first.weight"], after["errors"]["first.weight"]),
        "used by one": float(one["seldom.weight"].abs().max()),
        "moved": not torch.equal(after["factors"]["seldom.weight"], moved["factors"]["seldom.weight"]),
    }


def converges(directory: Path) -> object:
    """A regression on a teacher's outputs, whole and compressed."""
    teacher = Model(seed=7)
    losses = {}
    for name, settings in {"whole": CompressionArguments(), "compressed": RANK_1}.items():
        job = Job(settings, bucket_cap_mb=25)
        curve = []
        for whole in batches(150, seed=11):
            batch = shard(whole)
            loss = (job.ddp(batch) - teacher(batch).detach()).square().mean()
            job.model.zero_grad()
            loss.backward()
            job.optimizer.step()
            curve.append(loss.item())
        losses[name] = [sum(curve[:10]) / 10, sum(curve[-20:]) / 20]
        losses[f"{name} same"] = same_on_both(dict(job.model.named_parameters()))
    return losses


STEPS = [
    full_rank,
    error_feedback,
    traffic,
    options,
    under_autocast,
    channels_last,
    not_finite,
    unused,
    converges,
]
