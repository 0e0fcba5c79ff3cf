"""A timeline as text."""

from __future__ import annotations

from .timeline import Bar, Timeline

_MOST_SLOTS = 400
"""Widest diagram; a measured timeline may have bars that are very short beside the others."""


def timeline_text(timeline: Timeline) -> str:
    """Return a timeline as text: one line for each rank, from left to right in time.

    A pass is written as torch writes it: its stage (left out where each rank has one), F for forward, B for
    backward, I and W for the backward passes for inputs and weights, and its microbatch. Dashes follow for as
    long as it lasts, dots mean waiting. The shortest pass is as wide as one label; times between are rounded.

    Args:
        timeline: What to write.

    Returns:
        A line of caption, then one line for each rank; lines end with "\\n".
    """
    width = 1 + max(len(_label(timeline, bar)) for bar in timeline.bars)
    lines = [caption(timeline)]
    for rank in range(timeline.ranks):
        cells = _cells(timeline, rank, width)
        lines.append(f"rank {rank}: {cells}".rstrip())
    return "".join(f"{line}\n" for line in lines)


def _cells(timeline: Timeline, rank: int, width: int) -> str:
    slot = _slot(timeline)
    text, now = "", 0
    for bar in timeline.of_rank(rank):
        # Begin and end are rounded, not the duration: passes that follow one another stay together.
        begin = max(now, round((bar.start - timeline.start) / slot))
        end = max(begin + 1, round((bar.end - timeline.start) / slot))
        text += (
            _waiting(begin - now, width) + _label(timeline, bar).ljust((end - begin) * width - 1, "-") + " "
        )
        now = end
    return text + _waiting(round(timeline.makespan / slot) - now, width)


def caption(timeline: Timeline) -> str:
    """Return what a timeline shows: "1f1b, 4 ranks, 8 microbatches"."""
    parts = [
        timeline.schedule,
        _counted(timeline.ranks, "rank"),
        _counted(timeline.microbatches, "microbatch", "microbatches"),
    ]
    if timeline.stages_per_rank > 1:
        parts.append(f"{timeline.stages_per_rank} stages per rank")
    return ", ".join(parts)


def percent(share: float) -> str:
    """Return a share as a percentage with one digit after the point."""
    return f"{100 * share:.1f} %"


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _label(timeline: Timeline, bar: Bar) -> str:
    stage = str(bar.stage) if timeline.stages_per_rank > 1 else ""
    return f"{stage}{bar.kind}{bar.microbatch}"


def _slot(timeline: Timeline) -> float:
    shortest = min((bar.duration for bar in timeline.bars if bar.duration > 0), default=0.0)
    return max(shortest, timeline.makespan / _MOST_SLOTS) or 1.0


def _waiting(slots: int, width: int) -> str:
    return ".".ljust(width) * slots
