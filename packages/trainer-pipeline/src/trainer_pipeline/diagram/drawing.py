"""Timelines as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trainer_core import ConfigurationError

from ..schedules import ScheduleFactory
from .simulation import simulate, textbook_bubble
from .table import KINDS, Kind
from .timeline import Bar, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_SLOTS = 400
"""Widest diagram; a measured timeline may have bars that are very short beside the others."""
_SUFFIXES = (".png", ".svg")
# Three of Okabe and Ito's colours and a grey: of their sets of four the one whose members, and their paler
# shades, stay furthest apart with any colour vision (at least 12.9 in CIELAB, by Machado et al. 2009).
_COLOURS: dict[Kind, str] = {"F": "#0072B2", "B": "#E69F00", "I": "#D55E00", "W": "#444444"}
_MEANINGS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}
_GREY = "#5f6368"
_FRAME = "#c4c7cc"
_ROW = 0.82
"""Height of a bar; rows are 1 apart."""


def draw_schedule(
    schedule: str | ScheduleFactory,
    ranks: int,
    microbatches: int,
    output: str | Path,
    *,
    stages_per_rank: int | None = None,
    measured: Timeline | None = None,
) -> Path:
    """Draw the diagram of a schedule: a row for each rank, a bar for each pass, white where a rank waits.

    Bars carry the number of their microbatch where it fits. Where a rank has several stages, bars of later
    ones are paler. Below, on the same scale of time, comes what was measured, if given: the predicted times
    are then stretched so that the ranks compute for as long as they did when measured. What differs between
    the two is waiting, and stages of unlike cost. The picture replaces `output` in one step.

    Args:
        schedule: Name of the schedule, or a schedule class of torch, a subclass or a partial of one.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of one step.
        output: The picture; its suffix, .png or .svg, decides the kind.
        stages_per_rank: By default 1, or 2 for schedules with several stages on a rank.
        measured: What was measured, in any unit; a begin other than 0 is moved to 0.

    Returns:
        The path of the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says what to install.
        ConfigurationError: The suffix is another one, the measured timeline has other ranks or microbatches,
            or there is no such timeline (see `simulate`).
    """
    output = Path(output)
    predicted = simulate(schedule, ranks, microbatches, stages_per_rank=stages_per_rank)
    if measured is not None:
        _check_alike(predicted, measured)
    draw_timeline(predicted, output, measured)
    return output


def draw_timeline(predicted: Timeline, output: Path, measured: Timeline | None = None) -> None:
    """Draw a timeline, and what was measured below it; see `draw_schedule`."""
    if output.suffix.lower() not in _SUFFIXES:
        raise ConfigurationError(
            "output",
            str(output),
            "must have a suffix that says what kind of picture it is",
            "end it in .png or .svg",
        )
    panels = [("predicted", predicted.scaled(1.0, predicted.unit))]
    if measured is not None:
        stretch = sum(measured.busy) / sum(predicted.busy)
        panels = [
            ("predicted", predicted.scaled(stretch, measured.unit)),
            ("measured", measured.scaled(1.0, measured.unit)),
        ]
    figure = _draw(caption(predicted), panels)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.tmp{output.suffix}")
    figure.savefig(temporary, facecolor="white")
    temporary.replace(output)


def _check_alike(predicted: Timeline, measured: Timeline) -> None:
    for setting in ("ranks", "microbatches", "stages_per_rank"):
        value, expected = getattr(measured, setting), getattr(predicted, setting)
        if value != expected:
            raise ConfigurationError(
                f"measured.{setting}",
                value,
                f"differs from the {expected} for which the schedule is drawn",
                "draw the schedule that was measured",
            )


def _draw(title: str, panels: Sequence[tuple[str, Timeline]]) -> Figure:
    longest = max(timeline.makespan for _, timeline in panels)
    width = _inches(panels[0][1])
    height = sum(0.75 + 0.42 * timeline.ranks for _, timeline in panels) + 1.0
    # The object interface leaves the user's pyplot state, backend and rcParams alone.
    figure = _new_figure(width, height)
    rows = [timeline.ranks for _, timeline in panels]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for panel, (name, timeline) in zip(axes, panels, strict=True):
        _draw_panel(panel, timeline, longest, width)
        panel.set_title(_subtitle(name, timeline), loc="left", fontsize=11, color="#202124")
    axes[-1].set_xlabel(f"time ({panels[0][1].unit})", color=_GREY)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    _add_legend(figure, [timeline for _, timeline in panels])
    return figure


def _subtitle(name: str, timeline: Timeline) -> str:
    text = f"{name} bubble {percent(timeline.bubble)}"
    formula = textbook_bubble(
        timeline.schedule, timeline.ranks, timeline.microbatches, timeline.stages_per_rank
    )
    return text if name == "measured" or formula is None else f"{text} (textbook formula {percent(formula)})"


def _inches(timeline: Timeline) -> float:
    """Return a width at which the numbers in the bars can be read, within what a page can show."""
    shortest = min((bar.duration for bar in timeline.bars if bar.duration > 0), default=1.0)
    return min(24.0, max(9.0, 1.2 + 0.22 * timeline.makespan / shortest))


def _draw_panel(axes: Axes, timeline: Timeline, longest: float, width: float) -> None:
    for rank in range(timeline.ranks):
        row = (rank - _ROW / 2, _ROW)
        axes.broken_barh([(0, timeline.makespan)], row, facecolor="white", edgecolor=_FRAME, lw=0.8)
        for bar in timeline.of_rank(rank):
            depth = timeline.stages[rank].index(bar.stage) / timeline.stages_per_rank
            _draw_bar(axes, bar, _paler(_COLOURS[bar.kind], depth), width / longest)
    # A little more than all, for the frame's right edge.
    axes.set_xlim(0, longest * 1.002)
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)
    axes.tick_params(axis="both", colors=_GREY, labelsize=10)
    axes.tick_params(axis="y", length=0)


def _draw_bar(axes: Axes, bar: Bar, colour: tuple[float, float, float], inches_per_unit: float) -> None:
    inches = bar.duration * inches_per_unit
    axes.broken_barh(
        [(bar.start, bar.duration)],
        (bar.rank - _ROW / 2, _ROW),
        facecolor=colour,
        edgecolor="white",
        # In points; a narrow bar must not vanish below its edge.
        lw=min(0.7, 0.15 * 72 * inches),
    )
    label = str(bar.microbatch)
    # A digit of 9 points is about 0.08 inches wide.
    if inches >= 0.03 + 0.08 * len(label):
        axes.text(
            bar.start + bar.duration / 2,
            bar.rank,
            label,
            ha="center",
            va="center_baseline",
            fontsize=9,
            color="white" if _luminance(colour) < 0.36 else "#202124",
            clip_on=True,
        )


def _paler(colour: str, depth: float) -> tuple[float, float, float]:
    """Mix a colour with white: depth 0 is the colour itself, 1 would be white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * depth, green + (1 - green) * depth, blue + (1 - blue) * depth


def _luminance(colour: tuple[float, float, float]) -> float:
    red, green, blue = (float(channel**2.2) for channel in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _add_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    used = {bar.kind for timeline in timelines for bar in timeline.bars}
    kinds = [kind for kind in KINDS if kind in used]
    entries: list[tuple[tuple[Patch, ...], str]] = [
        ((Patch(color=_COLOURS[kind]),), _MEANINGS[kind]) for kind in kinds
    ]
    stages = max(timeline.stages_per_rank for timeline in timelines)
    for i in range(1, stages):
        paler = tuple(Patch(color=_paler(_COLOURS[kind], i / stages)) for kind in kinds)
        entries.append((paler, f"the same, {_ordinal(i + 1)} stage of the rank"))
    entries.append(((Patch(facecolor="white", edgecolor=_FRAME),), "waiting"))
    # The handler draws the patches of a tuple side by side; the types of `legend` know single ones only.
    handles = cast("list[Patch]", [patches for patches, _ in entries])
    figure.legend(
        handles,
        [label for _, label in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower left",
        ncols=len(entries),
        frameon=False,
        fontsize=10,
        handlelength=1.6,
    )


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "draw_schedule needs matplotlib, which is not installed. Install it with `pip install "
            "'trainer-pipeline[plot]'`.",
            name=error.name,
        ) from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


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
