"""The tables, the JSON and the picture of the checkpoint benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from _checkpoint_samples import (
    ASYNC_LABELS,
    ASYNC_SAVES,
    BLOCK_FACTOR,
    LABELS,
    SYNC_LABELS,
    AsyncSample,
    LoadSample,
    SaveSample,
)
from _timing import PeakMemory, Spread, print_table

AIMS = {"durable": 1.15, "load": 1.5, "async": 1.0, "memory": 64.0}


@dataclass
class Results:
    """Samples by contender, one for each round."""

    saves: dict[str, list[SaveSample]]
    loads: dict[str, list[LoadSample]]
    asyncs: dict[str, list[AsyncSample]]

    @classmethod
    def of(cls, names: Sequence[str]) -> Results:
        """No samples yet, of the contenders in their order."""
        sync = [name for name in names if name in SYNC_LABELS]
        return cls(
            saves={name: [] for name in sync},
            loads={name: [] for name in sync},
            asyncs={name: [] for name in names if name in ASYNC_LABELS},
        )


_METHOD = {
    "rounds": "one process for each save and each load; contenders interleaved, in rotated order; each "
    "process saves and loads a tiny model first",
    "baseline": "raw write and read of the same bytes in the same process beside each contender, by turns "
    "before and after it; ratios are medians of the ratios of such pairs",
    "durable": "save, then sync of every file and directory; checkpoint-core and "
    "torch.distributed.checkpoint sync their files inside the save",
    "load": "warm page cache, fresh model and optimizer: weights go into touched memory, optimizer state "
    "into fresh memory, and the baseline reads as many bytes into memory of each kind; loaded values are "
    "compared with the saved ones after the clock has stopped",
    "memory": PeakMemory.METHOD,
    "async": "blocking: until the call returns; committed: until the save is complete and synced; the first "
    "save comes after the reservation has finished; copy: all tensors into a buffer touched before",
    "trainer": "a real Hugging Face Trainer: _save_checkpoint; _load_from_checkpoint, "
    "_load_optimizer_and_scheduler and _load_rng_state",
}


def method(*, drop_caches: bool) -> dict[str, str]:
    """Say how the figures came about."""
    cache = "drop the page cache" if drop_caches else "leave the page cache as it is"
    pages = (
        f"before each timed save: sync, {cache}, touch a block of {BLOCK_FACTOR}x the bytes and free it; "
        "before each timed load: sync, touch and free such a block, read the files once"
    )
    return {**_METHOD, "pages": pages}


def print_results(results: Results) -> None:
    """Print the tables, then our figures beside the aims."""
    if results.saves:
        print("\nSave: seconds, medians; in brackets the lowest and highest ratio")
        print_table([_SAVE_HEADING, *(_save_row(name, rows) for name, rows in results.saves.items())])
        print("\nLoad, warm: seconds, medians; ratios to raw reads, each into memory of the kind named")
        print_table([_LOAD_HEADING, *(_load_row(name, rows) for name, rows in results.loads.items())])
    if results.asyncs:
        print(f"\nAsynchronous save, {ASYNC_SAVES} in a row: seconds, medians")
        print_table([_ASYNC_HEADING, *(_async_row(name, rows) for name, rows in results.asyncs.items())])
    _print_aims(results)


_SAVE_HEADING = ["save", "save s", "durable s", "/ raw durable", "CPU s", "peak extra MB", "MB on disk"]
_LOAD_HEADING = ["load", "load s", "CPU s", "/ raw read, same kinds", "/ fresh", "/ touched"]
_ASYNC_HEADING = [
    "async save",
    "first blocks",
    "later block",
    "warm copy",
    "later / copy",
    "committed",
    "peak extra MB",
]


def durable_ratio(rows: Sequence[SaveSample]) -> Spread:
    """Durable save to raw durable write."""
    return Spread.of_ratios([row.durable_seconds for row in rows], [row.raw_durable_seconds for row in rows])


def load_ratio(rows: Sequence[LoadSample]) -> Spread:
    """Load to raw read into the same kinds of memory."""
    return Spread.of_ratios([row.seconds for row in rows], [row.raw_seconds for row in rows])


def first_ratio(rows: Sequence[AsyncSample]) -> Spread:
    """What the first asynchronous save blocks, to a copy into touched memory."""
    return Spread.of_ratios(
        [row.blocking_seconds[0] for row in rows], [row.warm_copy_seconds for row in rows]
    )


def later_ratio(rows: Sequence[AsyncSample]) -> Spread:
    """What a later asynchronous save blocks, to a copy into touched memory."""
    pairs = [(seconds, row.warm_copy_seconds) for row in rows for seconds in row.blocking_seconds[1:]]
    return Spread.of_ratios([seconds for seconds, _ in pairs], [copy for _, copy in pairs])


def _save_row(name: str, rows: Sequence[SaveSample]) -> list[str]:
    return [
        LABELS[name],
        _seconds([row.seconds for row in rows]),
        _seconds([row.durable_seconds for row in rows]),
        _ratio(durable_ratio(rows)),
        _seconds([row.cpu_seconds for row in rows]),
        _megabytes([row.peak_extra_bytes for row in rows]),
        _megabytes([row.disk_bytes for row in rows]),
    ]


def _load_row(name: str, rows: Sequence[LoadSample]) -> list[str]:
    seconds = [row.seconds for row in rows]
    return [
        LABELS[name],
        _seconds(seconds),
        _seconds([row.cpu_seconds for row in rows]),
        _ratio(load_ratio(rows)),
        f"{Spread.of_ratios(seconds, [row.raw_fresh_seconds for row in rows]).median:.2f}",
        f"{Spread.of_ratios(seconds, [row.raw_touched_seconds for row in rows]).median:.2f}",
    ]


def _async_row(name: str, rows: Sequence[AsyncSample]) -> list[str]:
    return [
        LABELS[name],
        _seconds([row.blocking_seconds[0] for row in rows]),
        _seconds([seconds for row in rows for seconds in row.blocking_seconds[1:]]),
        _seconds([row.warm_copy_seconds for row in rows]),
        _ratio(later_ratio(rows)),
        _seconds([seconds for row in rows for seconds in row.committed_seconds]),
        _megabytes([row.peak_extra_bytes for row in rows]),
    ]


def _seconds(values: Sequence[float]) -> str:
    return f"{Spread.of(values).median:.3f}"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _megabytes(values: Sequence[int | None]) -> str:
    known = [value / 1e6 for value in values if value is not None]
    return f"{Spread.of(known).median:.1f}" if known else "unknown"


Row = TypeVar("Row")


def _bars(samples: Mapping[str, list[Row]], ratio: Callable[[Sequence[Row]], Spread]) -> dict[str, Spread]:
    return {LABELS[name]: ratio(rows) for name, rows in samples.items()}


def _print_aims(results: Results) -> None:
    """Set our medians beside what is aimed at on a full run. Nothing is asserted."""
    lines = []
    if rows := results.saves.get("ours"):
        lines.append(
            f"durable save / raw durable write {durable_ratio(rows).median:.2f}, aim {AIMS['durable']}"
        )
        peak = _megabytes([row.peak_extra_bytes for row in rows])
        lines.append(f"peak extra memory of a save {peak} MB, aim under {AIMS['memory']:.0f} MB")
    if loads := results.loads.get("ours"):
        lines.append(f"load with verification / raw read {load_ratio(loads).median:.2f}, aim {AIMS['load']}")
    if asyncs := results.asyncs.get("ours-async"):
        lines.append(
            f"blocking of an asynchronous save / warm copy: first {first_ratio(asyncs).median:.2f}, later "
            f"{later_ratio(asyncs).median:.2f}, aim {AIMS['async']:.0f}"
        )
    if lines:
        print("\ncheckpoint-core beside its aims, which hold for a full run:")
        for line in lines:
            print(f"  {line}")


def write_json(path: Path, results: Results, header: Mapping[str, object]) -> None:
    """Write the header, the samples and their medians."""
    document = {
        **header,
        "ratios": {
            "durable_save_to_raw": {
                name: asdict(durable_ratio(rows)) for name, rows in results.saves.items()
            },
            "load_to_raw": {name: asdict(load_ratio(rows)) for name, rows in results.loads.items()},
            "async_first_to_copy": {name: asdict(first_ratio(rows)) for name, rows in results.asyncs.items()},
            "async_later_to_copy": {name: asdict(later_ratio(rows)) for name, rows in results.asyncs.items()},
        },
        "samples": asdict(results),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(path: Path, results: Results, title: str) -> None:
    """Draw the ratios as bars, one picture for each kind of measurement, shorter is better."""
    from matplotlib.figure import Figure

    panels = [
        ("durable save / raw durable write", _bars(results.saves, durable_ratio), AIMS["durable"]),
        ("warm load / raw read", _bars(results.loads, load_ratio), AIMS["load"]),
        ("async save: blocking, first / copy", _bars(results.asyncs, first_ratio), AIMS["async"]),
        ("async save: blocking, later / copy", _bars(results.asyncs, later_ratio), AIMS["async"]),
    ]
    panels = [panel for panel in panels if panel[1]]
    heights = [len(bars) + 1 for _, bars, _ in panels]
    figure = Figure(figsize=(8, 0.36 * sum(heights) + 0.5 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
    for axis, (name, bars, aim) in zip(axes[:, 0], panels, strict=True):
        labels, spreads = list(bars), list(bars.values())
        medians = [spread.median for spread in spreads]
        ends = [
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ]
        colours = ["tab:blue" if label.startswith("checkpoint-core") else "tab:gray" for label in labels]
        drawn = axis.barh(labels, medians, xerr=ends, color=colours, ecolor="black", capsize=2)
        axis.bar_label(drawn, labels=[f"{value:.2f}" for value in medians], padding=6)
        axis.axvline(aim, color="tab:green", linestyle="--")
        axis.set_title(f"{name} (dashed: aim {aim:g})", loc="left", fontsize=10)
        axis.set_xlim(left=0, right=1.12 * max(aim, *(spread.high for spread in spreads)))
        axis.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
