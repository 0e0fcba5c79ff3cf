"""Count how the costs of the control plane grow with the number of ranks, and fit the growth.

    python tests/benchmarks/scale.py --json scale.json --plot scale.png

All ranks are threads of this process, each with a default process group of its own, and run the control code
of the packages: start-up, check of equal facts, flags per step, liveness, checkpoint planning and commit,
resume, data agreement, dispatch. Few ranks talk over a real TCP store and real gloo groups (``--real``), more
over memory, with the same counters in the same places; where both run, their counts must be equal. What gloo
puts on its connections for a collective is taken from formulas, which are checked against the system's own
counts of bytes on real connections.

Counted are messages and bytes that a rank handles (sends, receives, and asks of the store), as the mean over
the ranks, and those of rank 0, which holds the store and so handles the requests of all; and the messages of
collectives that have to follow one another. Requests that are repeated while a rank waits are left out: their
number depends on time. Nothing is timed. Control groups connect as they do among more than 128 ranks,
whatever their size, so that one law holds. ``--before other.json`` shows an earlier result beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _scale_counts import Counts, total
from _scale_fit import Fit, fit, human, plot
from _scale_phases import PHASES, scenario
from _scale_transport import Job
from _scale_wire import HEADERS_BYTES, check_wire
from _timing import machine, print_table

REAL = (2, 4, 8, 16, 32)
COUNTED = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FAR = 16_384
_MEASURES = ("messages_per_rank", "bytes_per_rank", "messages_rank_0", "bytes_rank_0", "rounds")
_DRAWN = ("start", "facts", "flags", "manager", "save", "dispatch")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    wire = [row for size in options.real if size <= 16 for row in check_wire(size)]
    print(
        f"{len(wire)} collectives on real connections: as by formula, with {HEADERS_BYTES} bytes of headers"
    )
    counted = {size: count(size, is_real=False) for size in options.ranks}
    real = {size: count(size, is_real=True) for size in options.real}
    for size in set(real) & set(counted):
        check_equal(size, real[size], counted[size])
        print(f"{size} ranks: the same counts over real groups and over memory")
    results: dict[str, Any] = {
        "benchmark": "scale",
        "machine": machine(Path.cwd(), ()),
        "names": PHASES,
        "ranks": {"real": list(real), "counted": list(counted)},
        "wire": wire,
        "phases": {phase: _growth(phase, {**real, **counted}) for phase in PHASES},
    }
    before = json.loads(options.before.read_text()) if options.before else None
    for key, title in (("bytes_per_rank", "bytes per rank"), ("bytes_rank_0", "bytes of rank 0")):
        print()
        print_table(_rows(results, before, key, title))
    print()
    print_table(_rows(results, before, "messages_rank_0", "messages of rank 0"))
    print()
    print_table(_rows(results, before, "rounds", "messages of collectives one after another"))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(options.plot, results, before, _DRAWN)


def count(size: int, *, is_real: bool) -> dict[str, list[Counts]]:
    """Run all phases with some ranks, and return what each rank handled in each."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        found = Job(size, is_real=is_real).run(lambda job, rank: scenario(job, rank, Path(folder)))
    print(f"{size} ranks over {'a TCP store and gloo' if is_real else 'memory'}: counted", file=sys.stderr)
    return found


def check_equal(
    size: int, real: Mapping[str, Sequence[Counts]], counted: Mapping[str, Sequence[Counts]]
) -> None:
    """Compare what both transports counted.

    The last rank to come to a barrier clears the one before, whichever that is, so requests to the store are
    compared in sum.

    Raises:
        SystemExit: They differ.
    """
    for phase in real:
        for name, look in _COMPARED.items():
            if look(real[phase]) != look(counted[phase]):
                raise SystemExit(
                    f"{phase}, {size} ranks: {name} are {look(real[phase])} over real groups and "
                    f"{look(counted[phase])} over memory"
                )


_COMPARED = {
    "requests to the store and their bytes": total,
    "messages sent by each rank": lambda counts: [each.sent for each in counts],
    "bytes between ranks": lambda counts: sum(each.num_bytes - each.request_bytes for each in counts),
    "rounds": lambda counts: max(each.rounds for each in counts),
}


def _growth(phase: str, jobs: Mapping[int, Mapping[str, Sequence[Counts]]]) -> dict[str, Any]:
    measured: dict[str, dict[int, float]] = {name: {} for name in _MEASURES}
    for size, phases in sorted(jobs.items()):
        counts = phases[phase]
        requests, request_bytes = total(counts)
        first = counts[0]
        measured["messages_per_rank"][size] = sum(each.messages for each in counts) / size
        measured["bytes_per_rank"][size] = sum(each.num_bytes for each in counts) / size
        measured["messages_rank_0"][size] = first.messages - first.requests + requests
        measured["bytes_rank_0"][size] = first.num_bytes - first.request_bytes + request_bytes
        measured["rounds"][size] = max(each.rounds for each in counts)
    told = {}
    for name, by_size in measured.items():
        law = fit(by_size)
        told[name] = {"counts": by_size, "fit": asdict(law), "law": str(law), "far": law.at(FAR)}
    return told


def _rows(
    results: Mapping[str, Any], before: Mapping[str, Any] | None, key: str, title: str
) -> list[list[str]]:
    sizes = [size for size in (8, 32, 256, 1024) if size in results["ranks"]["counted"]]
    head = [title, *map(str, sizes), "growth", "law", f"{FAR:,}"]
    rows = [[*head, *(["before: law", f"{FAR:,}"] if before else [])]]
    for phase, name in PHASES.items():
        entry = results["phases"][phase][key]
        law = Fit(**entry["fit"])
        row = [
            name,
            *(human(entry["counts"][size]) for size in sizes),
            law.law,
            str(law),
            human(entry["far"]),
        ]
        if before:
            earlier = before["phases"][phase][key]
            row += [earlier["law"], human(earlier["far"])]
        rows.append(row)
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=_sizes, default=COUNTED, help="sizes over memory, as 2,8,64")
    parser.add_argument("--real", type=_sizes, default=REAL, help="sizes over a TCP store and gloo")
    parser.add_argument("--quick", action="store_true", help="2 and 8 ranks, which shows that all of it runs")
    parser.add_argument("--before", type=Path, help="JSON of an earlier run to set beside this one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks = options.real = (2, 8)
    return options


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
