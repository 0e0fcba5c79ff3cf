"""The breakdown of steps as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from ..display import text_table
from .classify import CATEGORIES, LABELS
from .losses import largest_loss, losses_of
from .ranks import RankBreakdown, TraceBreakdown

_MS = 1e6


def breakdown_as_text(breakdown: TraceBreakdown) -> str:
    """The largest loss, a table of categories by rank, a table of communication, and notes."""
    first = breakdown.ranks[0]
    steps = f"{len(first.steps)} step{'s' * (len(first.steps) != 1)}"
    count = len(breakdown.ranks)
    heading = f"{steps} of {count} rank{'s' * (count != 1)}; shares of a step, which add up to 100 %"
    blocks = [largest_loss(breakdown), f"{heading}\n{_categories(breakdown)}"]
    if any(one.communications for one in breakdown.ranks):
        blocks.append(f"communication, as shares of a step (mean over ranks)\n{_communication(breakdown)}")
    notes = [*breakdown.notes, *_device_note(breakdown), *_outside_note(breakdown)]
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


def _categories(breakdown: TraceBreakdown) -> str:
    several = len(breakdown.ranks) > 1
    header = ["rank", "ms a step"]
    for name in CATEGORIES:
        if name == "exposed_communication" and several:
            header += ["waiting", "transfer"]
        else:
            header.append(LABELS[name])
    rows = []
    for one in breakdown.ranks:
        cells = [str(one.rank), f"{one.total_ns / max(1, len(one.steps)) / _MS:,.3f}"]
        for name, share in one.shares.items():
            if name == "exposed_communication" and several:
                waiting = one.share(sum(one.waiting_ns.values()))
                cells += [f"{waiting:.1%}", f"{max(0.0, share - waiting):.1%}"]
            else:
                cells.append(f"{share:.1%}")
        rows.append((*cells, f"+ {one.share(one.overlapped_ns):.1%}"))
    return text_table((*header, "overlapped"), rows, left=())


def _communication(breakdown: TraceBreakdown) -> str:
    sums: dict[str, list[float]] = {}
    ranks = breakdown.ranks
    for one in ranks:
        for each in one.communications:
            row = sums.setdefault(each.collective.label, [0.0, 0.0, 0.0, 0.0])
            row[0] += each.calls / max(1, len(one.steps)) / len(ranks)
            for place, time in enumerate((each.waiting_ns, each.transfer_ns, each.overlapped_ns), start=1):
                row[place] += one.share(time) / len(ranks)
    found = sorted(sums.items(), key=lambda item: -item[1][1] - item[1][2])
    if len(ranks) == 1:
        rows = [(label, f"{row[0]:,.1f}", f"{row[2]:.1%}", f"{row[3]:.1%}") for label, row in found]
        return text_table(("collective", "calls a step", "exposed", "overlapped"), rows)
    header = ("collective", "calls a step", "waiting", "transfer", "overlapped")
    compared = [(label, f"{row[0]:,.1f}", *(f"{share:.1%}" for share in row[1:])) for label, row in found]
    return text_table(header, compared)


def _device_note(breakdown: TraceBreakdown) -> list[str]:
    if any(one.on_device for one in breakdown.ranks):
        return []
    return ["The traces have no kernels of an accelerator: operators of the main thread are what computes."]


def _outside_note(breakdown: TraceBreakdown) -> list[str]:
    outside = sum(one.outside_ns for one in breakdown.ranks) / _MS / len(breakdown.ranks)
    if outside < 0.001:
        return []
    return [f"{outside:,.3f} ms of work for each rank lies outside of the recorded steps."]


def breakdown_as_json(breakdown: TraceBreakdown) -> dict[str, object]:
    """All figures, in seconds and shares."""
    return {
        "largest_loss": largest_loss(breakdown),
        "losses": [asdict(loss) for loss in losses_of(breakdown)],
        "straggler": None if breakdown.straggler is None else asdict(breakdown.straggler),
        "ranks": [_rank_json(one) for one in breakdown.ranks],
        "clock_offset_seconds": {
            str(rank): offset / 1e9 for rank, offset in breakdown.clock_offsets_ns.items()
        },
        "notes": [*breakdown.notes, *_device_note(breakdown), *_outside_note(breakdown)],
    }


def _rank_json(one: RankBreakdown) -> dict[str, object]:
    return {
        "rank": one.rank,
        "on_device": one.on_device,
        "seconds": {name: time / 1e9 for name, time in one.nanoseconds.items()},
        "shares": one.shares,
        "waiting_seconds": {str(rank): time / 1e9 for rank, time in one.waiting_ns.items()},
        "overlapped_communication_seconds": one.overlapped_ns / 1e9,
        "outside_seconds": one.outside_ns / 1e9,
        "communication": [
            {
                "collective": each.collective.kind,
                "group": each.collective.group,
                "calls": each.calls,
                "waiting_seconds": each.waiting_ns / 1e9,
                "transfer_seconds": each.transfer_ns / 1e9,
                "overlapped_seconds": each.overlapped_ns / 1e9,
            }
            for each in one.communications
        ],
        "steps": [
            {
                "number": step.number,
                "seconds": step.seconds,
                "category_seconds": {name: time / 1e9 for name, time in step.nanoseconds.items()},
                "overlapped_communication_seconds": step.overlapped_ns / 1e9,
            }
            for step in one.steps
        ],
    }
