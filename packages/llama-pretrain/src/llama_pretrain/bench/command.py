"""The command `bench`: rounds, tables and a file."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ..program import EXIT_ABORTED, PROG
from ..targets import check_writable
from .agreement import Agreement, agreement
from .contenders import CONTENDERS, INSTALL, Contender, chosen
from .model_shape import model_shape
from .options import BenchArguments
from .published import published
from .rounds import Measured, run_rounds
from .summary import summarise
from .table import measured_table, published_table
from .turn import Turn


def bench(args: BenchArguments, words: Sequence[str]) -> int:
    """Measure, print the tables, and write the file if one is named.

    Args:
        args: The settings.
        words: The command line behind the name of the command, for the file.

    Returns:
        Exit code: 0, or 1 if a contender failed or did other work than the plain loop.

    Raises:
        ConfigurationError: If a setting cannot be used, or a contender that is named is not installed.
        OSError: If the file cannot be written.
    """
    contenders, missing = chosen(args.contenders)
    model_shape(args)
    check_writable("json", args.json)
    for contender in missing:
        print(
            f"{contender.label} takes no part: {', '.join(contender.missing())} is not installed; {INSTALL}"
        )
    with _ended_by_sigterm():
        measured = run_rounds(args, contenders)
    agreed = agreement(measured.turns, args.mixed_precision)
    results = _results(args, words, measured, missing, agreed)
    print(f"\n{_headline(args, measured)}")
    print(measured_table(summarise(measured.turns, args), measured.failures))
    for name in measured.turns if args.mixed_precision == "bf16" else ():
        if note := CONTENDERS[name].in_bf16:
            print(f"{CONTENDERS[name].label}: {note}")
    if agreed is not None:
        print(_agreement_line(agreed))
    print("\nnot measured here, but published by others of their runs:")
    print(published_table(published(args.model)), flush=True)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    other_work = agreed is not None and agreed.other_work()
    return EXIT_ABORTED if measured.failures or other_work else 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM is an exception, as Ctrl-C is, so that no contender is left computing."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _results(
    args: BenchArguments,
    words: Sequence[str],
    measured: Measured,
    missing: Sequence[Contender],
    agreed: Agreement | None,
) -> dict[str, object]:
    summaries = summarise(measured.turns, args)
    turns = [turn for theirs in measured.turns.values() for turn in theirs]
    return {
        "command": [PROG, "bench", *words],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": turns[0].device if turns else None,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "threads": turns[0].threads if turns else None,
        "versions": _versions(turns),
        "settings": asdict(args),
        "contenders": {
            name: {**asdict(summary), "turns": [asdict(turn) for turn in measured.turns[name]]}
            for name, summary in summaries.items()
        },
        "failed": measured.failures,
        "not_installed": {contender.name: contender.missing() for contender in missing},
        "agreement": None if agreed is None else asdict(agreed),
        "published": [asdict(row) for row in published(args.model)],
    }


def _versions(turns: Sequence[Turn]) -> Mapping[str, str]:
    found = {"python": platform.python_version(), PROG: version(PROG)}
    for turn in turns:
        found |= turn.versions
    return found


def _headline(args: BenchArguments, measured: Measured) -> str:
    turn = next((theirs[0] for theirs in measured.turns.values()), None)
    rows = f"{args.per_device_train_batch_size} x {args.sequence_length} tokens"
    kind = ("bf16" if args.mixed_precision == "bf16" else "float32") + (", compiled" * args.torch_compile)
    where = "" if turn is None else f" on {turn.device}, {turn.threads} threads"
    return f"{args.model}, {rows}, {kind}{where}; medians of {args.rounds} rounds of {args.steps} steps:"


def _agreement_line(agreed: Agreement) -> str:
    others = {name: value for name, value in agreed.deviations.items() if name != agreed.beside}
    name = max(others, key=others.__getitem__)
    beside = CONTENDERS[agreed.beside].label
    if wrong := agreed.other_work():
        told = ", ".join(f"{CONTENDERS[each].label} ({agreed.deviations[each]:.1%})" for each in wrong)
        return (
            f"OTHER WORK than the {beside}, so the figures compare nothing: {told} apart in what was learned"
        )
    return (
        f"the same work: what {CONTENDERS[name].label} learned is farthest from the {beside}, "
        f"by {others[name]:.1e} of it"
    )
