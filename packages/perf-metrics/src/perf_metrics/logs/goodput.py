"""Goodput: what the device time of a run was spent on, over all of its sessions, and what it cost."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, get_args

from ..display import format_value, text_table
from .log_file import LOG_FILENAME, JsonValue
from .summary import duration, summarize_log

GOODPUT_FOLDER = "goodput"
"""Where `GoodputLogger` writes, in the directory of a run."""

Kind: TypeAlias = Literal[
    "steps", "lost", "start", "compilation", "data", "evaluation", "saving", "other", "down"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_UNWRITTEN_SECONDS = 1.0
"""The last line of a session that lives is at most that old."""
_SIGNS_OF_LIFE_SECONDS = 10.0
"""A session that gave one so lately still runs; it gives one each second."""
MEANINGS: Mapping[Kind, str] = {
    "steps": "steps that are in the model",
    "lost": "steps that were done again after a restart, and work that a kill cut off",
    "start": "starting processes, loading weights and checkpoint, and the first batch of a session",
    "compilation": "torch.compile",
    "data": "waiting for data",
    "evaluation": "scoring held-out data",
    "saving": "saving checkpoints, as far as training waited for it",
    "other": "the end of a session, and what is nothing of the above",
    "down": "between two sessions",
}
ADVICE: Mapping[Kind, str] = {
    "lost": "Save more often, or to a faster place: steps since the last checkpoint are done again.",
    "start": "Start less often, or faster: keep environment and data near, and weights sharded.",
    "compilation": "Keep the compiler's cache between starts (TORCHINDUCTOR_CACHE_DIR), and shapes the same.",
    "data": "Give the loader more workers, or a faster place to read from.",
    "evaluation": "Evaluate less often, or on fewer batches.",
    "saving": "Save asynchronously, or less often.",
    "other": "Look at the log from the last step of each session on.",
    "down": "Let the scheduler start the job again at once: requeue it, or keep spare nodes.",
}


@dataclass(frozen=True, kw_only=True)
class Session:
    """One session of a run; seconds are those of the wall, of one rank."""

    started: float
    """When its process was started, in seconds since 1970."""
    ended: float
    """Its last sign of life."""
    ranks: int
    first_step: int
    """The step that it began with: 0, or that of the checkpoint."""
    last_step: int
    outcome: str
    """"end", "running", or "no end" for one that was killed, or that an exception ended."""
    seconds: Mapping[Kind, float]
    """By kind, of the time from `started` to `ended`, which they add up to; and "down", before it."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What the device time of a run was spent on; read it with `read_goodput`."""

    sessions: tuple[Session, ...]

    @property
    def device_seconds(self) -> Mapping[Kind, float]:
        """Seconds times ranks by kind: each session counts with its own number of ranks."""
        return {
            kind: math.fsum(each.ranks * each.seconds.get(kind, 0.0) for each in self.sessions)
            for kind in KINDS
        }

    @property
    def total(self) -> float:
        """All device seconds from the first start to the last sign of life."""
        return math.fsum(self.device_seconds.values())

    @property
    def ratio(self) -> float | None:
        """Effective training time ratio: device time of steps that are in the model, over all of it."""
        return self.device_seconds["steps"] / self.total if self.total > 0 else None

    @property
    def largest_loss(self) -> Kind | None:
        """What most of the rest was spent on."""
        losses = {kind: seconds for kind, seconds in self.device_seconds.items() if kind != "steps"}
        worst = max(losses, key=lambda kind: losses[kind])
        return worst if losses[worst] > 0 else None


def read_goodput(run: str | Path) -> Goodput:
    """Read the account of a run that `GoodputLogger` has kept.

    The last session began with a checkpoint of an earlier one, and that with one of another: steps on this
    way are in the model, and all others are lost. What a session was doing when its last sign of life came,
    without an end, is lost too. From then to the start of the next session the run was down, with as many
    ranks as that has.

    Args:
        run: The directory of the run.

    Raises:
        FileNotFoundError: It has no account.
        ValueError: A file of it is not one of a session.
    """
    folder = Path(run) / GOODPUT_FOLDER
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(
            f"{run} has no account of its time, which perf_metrics.GoodputLogger writes. Give that callback "
            "to the trainer, or name the directory of a run that had it."
        )
    read = [session for file in files if (session := _read(file)) is not None]
    # By the beginning of training: a process that was started early may have waited for its turn.
    read.sort(key=lambda each: each.began)
    if not read:
        raise FileNotFoundError(f"{folder} has no session that began. Name the directory of another run.")
    _mark_lost(read)
    last = read[-1].last
    alive = last.event == "alive" and time.time() - last.time < _SIGNS_OF_LIFE_SECONDS
    sessions: list[Session] = []
    for each in read:
        before = max((session.ended for session in sessions), default=None)
        sessions.append(each.session(before, running=alive and each is read[-1]))
    return Goodput(sessions=tuple(sessions))


class _Save(TypedDict):
    """What a line says of a save: what had been done, by kind, at its step."""

    step: int
    seconds: Mapping[Kind, float]


class _Read:
    """What the file of a session says."""

    def __init__(self, begin: Mapping[str, float], saves: Sequence[_Save], last: _Last) -> None:
        self.started, self.began = begin["started"], begin["time"]
        self.ranks, self.first_step = int(begin["ranks"]), int(begin["step"])
        self.saves = {save["step"]: dict(save["seconds"]) for save in saves}
        self.last = last
        self.lost = 0.0
        self.seconds = dict(last.seconds)

    def how_surely_leads_to(self, step: int) -> int:
        """How surely a later session has begun with what this one had at a step; 0: it has not."""
        if step < self.first_step:
            return 0
        if step in self.saves or step == self.last.step:
            return 2
        return 1 if step < self.last.step + self._unwritten() else 0

    def _unwritten(self) -> float:
        """Steps, and one, that may have come behind the last sign of life, and been saved in memory."""
        if self.last.event != "alive":
            return 0
        done, seconds = self.last.step - self.first_step, self.last.seconds.get("steps", 0.0)
        return 2 + (done / seconds * _UNWRITTEN_SECONDS if seconds > 0 else 0)

    def keep(self, step: int) -> None:
        """What was done behind a step is lost; 0 for all of it."""
        kept = self.seconds if step >= self.last.step else self.saves.get(step)
        if kept is None:
            before = [each for each in self.saves if each <= step]
            kept = self.saves[max(before)] if before else {}
        for kind in ("steps", "data"):
            self.lost += max(0.0, self.seconds.get(kind, 0.0) - kept.get(kind, 0.0))
            self.seconds[kind] = kept.get(kind, 0.0)

    def session(self, ended_before: float | None, *, running: bool) -> Session:
        """The session, after the last sign of life of those before it."""
        ended = self.last.event == "end"
        seconds: dict[Kind, float] = {kind: self.seconds.get(kind, 0.0) for kind in KINDS}
        started = self.started if ended_before is None else min(max(self.started, ended_before), self.began)
        seconds["start"] += self.began - started
        seconds["lost"] += self.lost
        spent = math.fsum(seconds.values())
        # A clock that was set back says less than what was measured.
        last = max(self.last.time, started + spent)
        # Of a session without an end: what it was doing when the last sign of life came.
        seconds["other" if ended or running else "lost"] += last - started - spent
        if ended_before is not None:
            seconds["down"] = max(0.0, started - ended_before)
        return Session(
            started=started,
            ended=last,
            ranks=self.ranks,
            first_step=self.first_step,
            last_step=self.last.step,
            outcome="running" if running else "end" if ended else "no end",
            seconds=seconds,
        )


def _mark_lost(read: Sequence[_Read]) -> None:
    """Follow the last session back to the first step: what is not on the way is not in the model."""
    place = len(read) - 1
    kept = {place: read[place].last.step}
    while place > 0 and (step := read[place].first_step) > 0:
        sure = [each.how_surely_leads_to(step) for each in read[:place]]
        if not any(sure):
            break
        place = max(range(place), key=lambda each: (sure[each], each))
        kept[place] = step
    for place, own in enumerate(read):
        own.keep(kept.get(place, -1))


@dataclass(frozen=True)
class _Last:
    event: str
    time: float
    step: int
    seconds: Mapping[Kind, float]


def _read(file: Path) -> _Read | None:
    """The session of a file; None where a kill or a full disk came before its first line."""
    lines = []
    for text in file.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break  # the torn rest of a longer line
        if not isinstance(line, dict):
            break
        lines.append(line)
    if not lines:
        return None
    begin, *others = lines
    try:
        if begin["event"] != "begin":
            raise ValueError("its first line is not that of a beginning")
        end = others[-1] if others else {**begin, "seconds": {}}
        last = _Last(end["event"], end["time"], end["step"], end["seconds"])
        saves = [line for line in others if line["event"] == "save"]
        told = [
            _Save(step=int(each["step"]), seconds=each["seconds"])
            for each in (*saves, *end.get("memory", []))
        ]
        return _Read(begin, told, last)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not the account of a session: {error}. Remove it.") from error


def mfu_of_run(run: str | Path) -> float | None:
    """The median MFU of the log in the directory of a run, as a share; None if there is none."""
    path = Path(run)
    return summarize_log(path).mfu_median if (path / LOG_FILENAME).is_file() else None


def goodput_as_text(goodput: Goodput, mfu: float | None = None, price: float | None = None) -> str:
    """Return tables of the kinds and of the sessions, and a sentence for the largest loss.

    Args:
        goodput: The account.
        mfu: MFU of the steps, as a share, to multiply the ratio with.
        price: Of one device hour, in any currency.
    """
    spent, total = goodput.device_seconds, goodput.total
    header = ["", "share", "device hours", *([] if price is None else ["cost"]), ""]
    rows = [
        [
            kind,
            format_value(spent[kind] / total if total else None, ".1%"),
            f"{spent[kind] / 3600:,.2f}",
            *([] if price is None else [f"{spent[kind] / 3600 * price:,.2f}"]),
            MEANINGS[kind],
        ]
        for kind in KINDS
        if spent[kind] > 0
    ]
    cost = [] if price is None else [f"{total / 3600 * price:,.2f}"]
    rows.append(["all", "", f"{total / 3600:,.2f}", *cost, ""])
    lines = text_table(header, rows, left=(0, len(header) - 1)).splitlines()
    each = [
        [
            str(number),
            str(session.ranks),
            f"{session.first_step:,}",
            f"{session.last_step:,}",
            duration(session.ended - session.started),
            duration(session.seconds["down"]),
            duration(session.seconds["lost"]),
            session.outcome,
        ]
        for number, session in enumerate(goodput.sessions, start=1)
    ]
    names = ["session", "ranks", "from step", "to step", "lasted", "down before", "lost", "ended"]
    lines += ["", *text_table(names, each, left=(len(names) - 1,)).splitlines(), ""]
    ratio = format_value(goodput.ratio, ".1%")
    lines.append(f"Effective training time: {ratio} of the device time.")
    if mfu is not None and goodput.ratio is not None:
        lines.append(f"MFU of the steps {mfu:.1%}; of all device time {mfu * goodput.ratio:.1%}.")
    worst = goodput.largest_loss
    if worst is not None:
        share = format_value(spent[worst] / total, ".1%")
        lines.append(f"Largest loss: {worst}, {share} ({MEANINGS[worst]}). {ADVICE[worst]}")
    return "\n".join(lines)


def goodput_as_json(
    goodput: Goodput, mfu: float | None = None, price: float | None = None
) -> dict[str, JsonValue]:
    """Return the account as plain JSON data, in seconds and shares."""
    hours = goodput.total / 3600
    return {
        "device_seconds": _by_name(goodput.device_seconds),
        "total_device_seconds": goodput.total,
        "effective_training_time_ratio": goodput.ratio,
        "mfu_median": mfu,
        "mfu_of_all_time": None if mfu is None or goodput.ratio is None else mfu * goodput.ratio,
        "largest_loss": goodput.largest_loss,
        "cost": None if price is None else hours * price,
        "sessions": [
            {
                "started": each.started,
                "ended": each.ended,
                "ranks": each.ranks,
                "first_step": each.first_step,
                "last_step": each.last_step,
                "outcome": each.outcome,
                "seconds": _by_name(each.seconds),
            }
            for each in goodput.sessions
        ],
    }


def _by_name(seconds: Mapping[Kind, float]) -> dict[str, JsonValue]:
    return {str(kind): value for kind, value in seconds.items()}


_COLOURS: Mapping[Kind, str] = {
    "steps": "#2a9d55",
    "lost": "#c0392b",
    "start": "#8e6bbf",
    "compilation": "#5d8fd6",
    "data": "#e8a33d",
    "evaluation": "#48b5c4",
    "saving": "#d97fb0",
    "other": "#9aa0a6",
    "down": "#e4e4e4",
}


def plot_goodput(goodput: Goodput, path: str | Path, *, title: str | None = None) -> Path:
    """Draw the sessions over time, as high as they have ranks, and the whole above them.

    Within a session the kinds are beside each other, and not in the order in which they came.

    Args:
        goodput: The account.
        path: The picture, .png or .svg; an existing one is replaced.
        title: Above the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    whole, sessions = figure.subplots(2, 1, height_ratios=[1, 3])
    left, spent, total = 0.0, goodput.device_seconds, goodput.total or 1.0
    for kind in KINDS:
        share = spent[kind] / total
        if share > 0:
            label = f"{kind} {share:.1%}"
            whole.barh(0, share, left=left, color=_COLOURS[kind], label=label, height=1)
            left += share
    whole.set(xlim=(0, 1), yticks=[], xticks=[])
    whole.margins(0)
    if goodput.total > 0:
        whole.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=9)
    first = goodput.sessions[0].started
    # The unit in which the whole has a few to a few hundred ticks.
    length = max(each.ended for each in goodput.sessions) - first
    name, unit = next((n, u) for n, u in _UNITS if length >= 2 * u or u == 1)
    for session in goodput.sessions:
        start = session.started - first
        for kind in KINDS:
            seconds = session.seconds[kind]
            if kind != "down" and seconds > 0:
                sessions.bar(start / unit, session.ranks, seconds / unit, align="edge", color=_COLOURS[kind])
                start += seconds
    sessions.set(xlim=(0, length / unit or 1), ylabel="ranks", xlabel=f"{name} since the first start")
    if title is not None:
        figure.suptitle(title, parse_math=False)  # a path may have dollars
    figure.savefig(path, dpi=130)
    return Path(path)


_IN_A_SESSION: tuple[Kind, ...] = (
    "start",
    "compilation",
    "data",
    "steps",
    "evaluation",
    "saving",
    "other",
    "lost",
)
_UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
