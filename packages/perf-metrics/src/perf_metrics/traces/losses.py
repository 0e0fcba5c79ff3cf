"""What a job loses most of its steps to, in one sentence, and what to try."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .classify import LABELS, POINT_TO_POINT, Category
from .ranks import RankBreakdown, Straggler, TraceBreakdown

LossKind: TypeAlias = Literal[
    "waiting", "transfer", "pipeline", "memory_copies", "checkpoint", "data_wait", "host_gap"
]

_LEAST_LOSS = 0.02
"""A smaller share of a step is not called a loss."""
_LEAST_EXCESS = 0.01

_ADVICE: dict[Category, str] = {
    "memory_copies": "Pin host memory, copy with non_blocking=True, and keep tensors on the device.",
    "checkpoint": "Save in the background (async_save), to a faster disk, or less often.",
    "data_wait": "Give the loader more workers and prefetch, or prepare the data before the run.",
    "host_gap": (
        "The host launches work too late: compile the model, use larger microbatches, and look for .item(), "
        "prints and slow callbacks between kernels."
    ),
}
_CAUSE: dict[Category, str] = {
    "matmul": "Look at its clocks and temperature, and at what it computes more than the others.",
    "attention": "Look at the lengths of its sequences: longer documents take more attention.",
    "other_kernels": "Look at what it computes more than the others, and at its clocks and memory.",
    "memory_copies": "Look at its copies between host and device, and at the cores that its process may use.",
    "checkpoint": "Save in the background, or from every rank a part.",
    "data_wait": "Look at its loader workers and at the storage that it reads from.",
    "host_gap": "Look at its host: other processes on it, its CPU cores, and Python code that only it runs.",
}
_TRANSFER = {
    "all_reduce": (
        "Overlap it with the backward pass (larger or fewer buckets), reduce in a smaller dtype, accumulate "
        "gradients over more microbatches, and check the links between hosts."
    ),
    "all_gather": (
        "Prefetch weights one block ahead, keep them gathered (reshard_after_forward=False), or shard within "
        "a host and replicate over hosts; check the links between hosts."
    ),
    "all_to_all": "Keep the group within a host, and check the links between hosts.",
}
_TRANSFER["reduce_scatter"] = _TRANSFER["all_gather"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Time in which a step computes nothing, of one cause.

    Attributes:
        kind: What it is lost to: "waiting" for another rank, "transfer" over the network, "pipeline" for
            sends and receives of stages, or a category.
        share: Of a step, as the mean over ranks; those but the straggler, if there is one.
        subject: Such as "rank 2", or "all_gather (shard)"; empty for a category.
        sentence: What is lost, and what to try.
    """

    kind: LossKind
    share: float
    subject: str
    sentence: str


def losses_of(breakdown: TraceBreakdown) -> list[Loss]:
    """All losses, the largest first.

    If one rank is late, the others show what the job loses beside: the straggler's own time is what they
    wait for, and would be counted twice.
    """
    late = breakdown.straggler
    ranks = [one for one in breakdown.ranks if late is None or one.rank != late.rank]
    found = [
        Loss(kind, share, "", f"{share:.1%} of a step is {LABELS[kind]}. {_ADVICE[kind]}")
        for kind in ("memory_copies", "checkpoint", "data_wait", "host_gap")
        if (share := _mean(ranks, [one.nanoseconds[kind] for one in ranks])) > 0
    ]
    found += _transfers(ranks, alone=len(breakdown.ranks) == 1)
    waiting = _waiting(breakdown, late)
    return sorted([*found, *([] if waiting is None else [waiting])], key=lambda loss: -loss.share)


def largest_loss(breakdown: TraceBreakdown) -> str:
    """One sentence on the largest loss, with what to try in another."""
    losses = losses_of(breakdown)
    if not losses or losses[0].share < _LEAST_LOSS:
        return f"No loss takes {_LEAST_LOSS:.0%} of a step or more: the rest is computation."
    return f"Largest loss: {losses[0].sentence}"


def _mean(ranks: Sequence[RankBreakdown], nanoseconds: Sequence[int]) -> float:
    shares = [one.share(time) for one, time in zip(ranks, nanoseconds, strict=True)]
    return sum(shares) / len(shares) if shares else 0.0


def _transfers(ranks: Sequence[RankBreakdown], *, alone: bool) -> list[Loss]:
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for one in ranks:
        for each in one.communications:
            pair = each.collective.kind in POINT_TO_POINT
            # A stage that waits shows it in sends as well as in receives.
            label = "send and recv" if pair else each.collective.label
            sums["send_recv" if pair else each.collective.kind, label] += one.share(each.transfer_ns) / len(
                ranks
            )
    losses = []
    for (kind, label), share in sums.items():
        if share <= 0:
            continue
        if kind == "send_recv":
            text = (
                f"{share:.1%} of a step is exposed {label} of the pipeline, most of it the bubble. Use more "
                "microbatches or a schedule with a smaller bubble, and give the stages equal work."
            )
            losses.append(Loss("pipeline", share, label, text))
            continue
        advice = _TRANSFER.get(kind, "Check the links between hosts, and whether it can overlap computation.")
        waiting = (
            " With the trace of one rank, waiting for late ranks is part of it: read those of all." * alone
        )
        text = f"{share:.1%} of a step is exposed {label} over the network. {advice}{waiting}"
        losses.append(Loss("transfer", share, label, text))
    return losses


def _waiting(breakdown: TraceBreakdown, late: Straggler | None) -> Loss | None:
    ranks = breakdown.ranks
    if late is None:
        share = _mean(ranks, [sum(one.waiting_ns.values()) for one in ranks])
        text = (
            f"{share:.1%} of a step is spent waiting for other ranks, for no one in particular. Look at what "
            "differs from step to step: lengths of sequences, data, other processes on the hosts."
        )
        return Loss("waiting", share, "other ranks", text) if share > 0 else None
    subject = f"rank {late.rank}"
    text = f"{late.waiting_share:.1%} of a step is spent waiting for {subject}"
    if late.share - late.others_share < _LEAST_EXCESS:
        text += ", which spends its time on the same things as the others. Look at its clocks and its links."
        return Loss("waiting", late.waiting_share, subject, text)
    text += (
        f", which spends {late.share:.1%} of its own steps on {LABELS[late.category]} (the others "
        f"{late.others_share:.1%}). {_CAUSE[late.category]}"
    )
    return Loss("waiting", late.waiting_share, subject, text)
