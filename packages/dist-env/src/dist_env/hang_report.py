"""`python -m dist_env doctor --dump DIRECTORY`: explain a hang by the traces that the ranks have written.

The ranks of a group call its collectives in one order, and the recorder numbers them. So the oldest
collective that some rank has not finished is the one that hangs, and who has not called it is missing.

torch's own analysis, `torch.distributed.flight_recorder`, is not used: it unpickles what it reads, prints
instead of returning its findings, needs the members of groups, which the traces of gloo lack, and does not
look at whether a collective was finished.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from dist_env.errors import DistributedEnvironmentError
from dist_env.tables import name_ranks

FILE_PREFIX, NCCL_FILE_PREFIX = "rank_", "nccl_rank_"
# To these every rank passes tensors of the same size.
_EQUAL_SIZES = re.compile(r"all_?reduce|broadcast|all_?gather|reduce_?scatter", re.IGNORECASE)
# Frames of these packages did not decide to call a collective.
_NOT_CALLERS = ("/torch/", "/dist_env/", "<frozen ")
_LARGEST_FILE = 512 * 1024**2
# NCCL's watchdog writes at its own timeout, which may come long before or after ours.
_SAME_RUN_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective as one rank has called it.

    Attributes:
        name: Backend and kind, such as `gloo:all_reduce`.
        group: Name of its group.
        description: What the group was called when it was made.
        number: Its place among the collectives of the group, from 1.
        sizes: Shapes of its input tensors.
        dtypes: Their types.
        finished: Whether the rank has got its result.
        caller: `file:line in function` that called it or waits for it, as far as that is recorded.
    """

    name: str
    group: str
    description: str
    number: int
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    finished: bool
    caller: str | None

    def __str__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self.sizes)
        types = f" {', '.join(dict.fromkeys(self.dtypes))}" if self.dtypes else ""
        return f"{self.name} #{self.number}" + (f" of {shapes}{types}" if shapes else "")

    @property
    def elements(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        kind = self.name.rpartition(":")[2]
        if not _EQUAL_SIZES.fullmatch(kind.strip("_").removesuffix("_base")):
            return (kind,)
        count = 0
        for shape in self.sizes:
            product = 1
            for length in shape:
                product *= length
            count += product
        return (kind, count, self.dtypes)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank has written.

    Attributes:
        rank: Global rank.
        host: Its host, if it is known.
        reason: Why it wrote, if it said so.
        collectives: What it has called, oldest first.
        groups: Global ranks by name of the group.
        world_size: Number of ranks of the job, if it is known.
    """

    rank: int
    host: str | None
    reason: str | None
    collectives: tuple[Collective, ...]
    groups: Mapping[str, tuple[int, ...]]
    world_size: int | None


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A collective that some ranks have not finished.

    Attributes:
        group: Name of the group.
        description: What the group was called when it was made; `default_pg` is the group of all ranks.
        members: Its global ranks.
        collective: `str` of what the first of the waiting ranks has called.
        number: Its place among the collectives of the group.
        waiting: By rank in it: the caller, if that is recorded.
        behind: By rank that has not called it: what it called last in this group; None if that is nothing.
        without_trace: Members that have written none.
    """

    group: str
    description: str
    members: tuple[int, ...]
    collective: str
    number: int
    waiting: Mapping[int, str | None]
    behind: Mapping[int, str | None]
    without_trace: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """What the traces of a job say.

    Attributes:
        directory: Where they are.
        ranks: Ranks that have written one.
        hosts: Host by rank, of those that told theirs.
        reasons: Why each has written, by rank.
        without_trace: Ranks of the job that have not.
        older: Ranks whose trace is of an earlier run, and was left out.
        hangs: Collectives that are not finished.
        mismatches: Places where ranks of a group have called different things, one sentence each.
    """

    directory: str
    ranks: tuple[int, ...]
    hosts: Mapping[int, str]
    reasons: Mapping[int, str]
    without_trace: tuple[int, ...]
    older: tuple[int, ...]
    hangs: tuple[Hang, ...]
    mismatches: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every rank has written, has finished what it called, and called the same as others."""
        return not (self.hangs or self.mismatches or self.without_trace)

    def __str__(self) -> str:
        total = len(self.ranks) + len(self.without_trace)
        lines = [f"traces of {name_ranks(self.ranks, total)} in {self.directory}"]
        if self.older:
            lines.append(f"left out, of an earlier run: {name_ranks(self.older, 0)}")
        by_reason: defaultdict[str, list[int]] = defaultdict(list)
        for rank, reason in self.reasons.items():
            by_reason[reason].append(rank)
        lines += [f"written by {name_ranks(ranks, total)}: {why}" for why, ranks in by_reason.items()]
        for hang in self.hangs:
            lines += self._lines_of(hang, total)
        lines += [f"mismatch: {text}" for text in self.mismatches]
        in_hangs = {rank for hang in self.hangs for rank in hang.without_trace}
        unseen = [rank for rank in self.without_trace if rank not in in_hangs]
        if unseen:
            lines.append(f"missing: {self._named(unseen)} wrote no trace: ended, stopped or cut off?")
        if self.ok:
            lines.append("nothing is wrong: every collective in the traces is finished.")
        return "\n".join(lines)

    def _lines_of(self, hang: Hang, total: int) -> list[str]:
        lines = [
            f"hang: {hang.collective} is not finished in group {hang.group!r} ({hang.description}) of "
            f"{name_ranks(hang.members, total)}"
        ]
        by_caller: defaultdict[str | None, list[int]] = defaultdict(list)
        for rank, caller in hang.waiting.items():
            by_caller[caller].append(rank)
        for caller, ranks in by_caller.items():
            lines.append(f"  waiting: {self._named(ranks)}" + (f", at {caller}" if caller else ""))
        for rank, last in hang.behind.items():
            told = f"its last one in this group is {last}" if last else "it has called none in this group"
            lines.append(f"  missing: {self._named([rank])} has not called it: {told}")
        for rank in hang.without_trace:
            lines.append(f"  missing: {self._named([rank])} wrote no trace: ended, stopped or cut off?")
        return lines

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(
            f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}" for rank in ranks
        )


def run(options: argparse.Namespace) -> int:
    """Print what the traces say.

    Returns:
        0 if nothing is wrong, 1 if there is a hang, a mismatch or a rank without a trace, 2 if the directory
        holds no traces or one that cannot be read.
    """
    try:
        report = explain_hang(options.dump)
    except DistributedEnvironmentError as error:
        print(f"dist_env doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2) if options.json else report)
    return 0 if report.ok else 1


def explain_hang(directory: Path) -> HangReport:
    """Read the traces in a directory and find who is missing in which collective.

    Args:
        directory: What `DistributedEnvironment(flight_recorder=...)` named.

    Raises:
        DistributedEnvironmentError: The directory is missing, holds no traces, or a file is not a trace.
    """
    if not directory.is_dir():
        raise DistributedEnvironmentError(
            f"--dump {directory} is not a directory. Name the one of the traces."
        )
    traces, older = _read_directory(directory)
    if not traces:
        raise DistributedEnvironmentError(
            f"--dump {directory} holds no traces ({FILE_PREFIX}*.json or {NCCL_FILE_PREFIX}*). Name the "
            "directory that flight_recorder= or DIST_ENV_FLIGHT_RECORDER named."
        )
    sizes = [trace.world_size for trace in traces.values() if trace.world_size]
    world = range(max([*sizes, max(traces) + 1]))
    groups: dict[str, set[int]] = {}
    for trace in traces.values():
        for name, ranks in trace.groups.items():
            groups.setdefault(name, set()).update(ranks)
        for collective in trace.collectives:
            groups.setdefault(collective.group, set()).add(trace.rank)
    hangs, mismatches = [], []
    for name, members in groups.items():
        called = {
            rank: {c.number: c for c in traces[rank].collectives if c.group == name}
            for rank in sorted(members)
            if rank in traces
        }
        hang = _find_hang(name, tuple(sorted(members)), called)
        if hang is not None:
            hangs.append(hang)
        mismatch = _find_mismatch(name, called)
        if mismatch is not None:
            mismatches.append(mismatch)
    return HangReport(
        directory=str(directory),
        ranks=tuple(sorted(traces)),
        hosts={rank: traces[rank].host or "" for rank in sorted(traces) if traces[rank].host},
        reasons={rank: traces[rank].reason or "" for rank in sorted(traces) if traces[rank].reason},
        without_trace=tuple(rank for rank in world if rank not in traces),
        older=older,
        hangs=tuple(hangs),
        mismatches=tuple(mismatches),
    )


def _find_hang(
    name: str, members: tuple[int, ...], called: Mapping[int, Mapping[int, Collective]]
) -> Hang | None:
    unfinished = [c.number for of_rank in called.values() for c in of_rank.values() if not c.finished]
    if not unfinished:
        return None
    number = min(unfinished)
    waiting = {
        rank: of_rank[number]
        for rank, of_rank in called.items()
        if number in of_rank and not of_rank[number].finished
    }
    behind: dict[int, str | None] = {}
    for rank, of_rank in called.items():
        last = max(of_rank, default=0)
        # The ring buffer keeps the newest, so a rank whose last number is smaller has not come so far.
        if last < number:
            behind[rank] = str(of_rank[last]) if last else None
    first = waiting[min(waiting)]
    return Hang(
        group=name,
        description=first.description,
        members=members,
        collective=str(first),
        number=number,
        waiting={rank: collective.caller for rank, collective in waiting.items()},
        behind=behind,
        without_trace=tuple(rank for rank in members if rank not in called),
    )


def _find_mismatch(name: str, called: Mapping[int, Mapping[int, Collective]]) -> str | None:
    """The first place where ranks disagree; what comes after it follows from it."""
    for number in sorted({number for of_rank in called.values() for number in of_rank}):
        kinds: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, of_rank in called.items():
            if number in of_rank:
                kinds[of_rank[number].elements].append(rank)
        if len(kinds) > 1:
            shown = "; ".join(
                f"{name_ranks(ranks, 0)}: {called[ranks[0]][number]}"
                + (f" at {called[ranks[0]][number].caller}" if called[ranks[0]][number].caller else "")
                for ranks in kinds.values()
            )
            return f"collective #{number} of group {name!r} is not the same on all ranks: {shown}"
    return None


def _read_directory(directory: Path) -> tuple[dict[int, RankTrace], tuple[int, ...]]:
    """Traces of the newest run by rank, and the ranks of which there is only an older one."""
    ours: dict[int, tuple[dict[str, Any], Path]] = {}
    for path in sorted(directory.glob(f"{FILE_PREFIX}*.json")):
        content = _read_json(path)
        ours[content["rank"]] = (content, path)
    newest = max((content["time"], content["run"]) for content, _ in ours.values())[1] if ours else None
    traces = {
        rank: _trace_of(content, path) for rank, (content, path) in ours.items() if content["run"] == newest
    }
    began = min((path.stat().st_mtime for rank, (_, path) in ours.items() if rank in traces), default=0.0)
    older = {rank for rank in ours if rank not in traces}
    for path in sorted(directory.glob(f"{NCCL_FILE_PREFIX}*")):
        digits = path.name.removeprefix(NCCL_FILE_PREFIX)
        if not digits.isdecimal() or int(digits) in traces:
            continue
        if path.stat().st_mtime < began - _SAME_RUN_SECONDS:
            older.add(int(digits))
        else:
            traces[int(digits)] = _trace_of_nccl(int(digits), path)
    return traces, tuple(sorted(older - set(traces)))


def _read_json(path: Path) -> dict[str, Any]:
    wanted: dict[str, type | tuple[type, ...]] = {
        "rank": int,
        "run": str,
        "time": (int, float),
        "trace": dict,
        "stacks": dict,
        "groups": dict,
    }
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict) or not all(isinstance(content.get(k), t) for k, t in wanted.items()):
        raise _unreadable(path, "it lacks what a trace has")
    return content


def _trace_of(content: dict[str, Any], path: Path) -> RankTrace:
    try:
        callers = {thread: _caller(stack) for thread, stack in content["stacks"].items()}
        return RankTrace(
            rank=content["rank"],
            host=content.get("host"),
            reason=content.get("reason"),
            collectives=tuple(_collectives(content["trace"].get("entries", ()), callers)),
            groups={name: tuple(ranks) for name, ranks in content["groups"].items()},
            world_size=content.get("world_size"),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _trace_of_nccl(rank: int, path: Path) -> RankTrace:
    """A pickle of NCCL's watchdog: numbers, texts, lists and dictionaries, and never anything else."""
    if path.stat().st_size > _LARGEST_FILE:
        raise _unreadable(path, f"it has more than {_LARGEST_FILE} bytes")
    try:
        content = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        groups = {
            str(name): tuple(map(int, re.findall(r"\d+", str(config["ranks"]))))
            for name, config in content.get("pg_config", {}).items()
        }
        return RankTrace(
            rank=rank,
            host=None,
            reason="a timeout of NCCL",
            collectives=tuple(_collectives(content["entries"], {})),
            groups={name: ranks for name, ranks in groups.items() if ranks},
            world_size=None,
        )
    # What a damaged pickle raises is not limited to UnpicklingError (documentation of pickle).
    except (
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        IndexError,
    ) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Makes no object of any class: a pickle that names one could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names the class {module}.{name}, and a trace has none")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it has a persistent id, and a trace has none")


def _collectives(entries: Sequence[Mapping[str, Any]], callers: Mapping[str, str | None]) -> list[Collective]:
    """The entries of a trace, without sends and receives, which have numbers of their own."""
    found = []
    for entry in entries:
        if entry["is_p2p"]:
            continue
        finished = bool(entry["retired"]) or entry["state"] == "completed"
        recorded = [
            f"{f['filename']}:{f['line']} in {f['name']}" for f in reversed(entry.get("frames") or ())
        ]
        found.append(
            Collective(
                name=str(entry["profiling_name"]),
                group=str(entry["process_group"][0]),
                description=str(entry["process_group"][1]),
                number=int(entry["collective_seq_id"]),
                sizes=tuple(tuple(map(int, shape)) for shape in entry["input_sizes"]),
                dtypes=tuple(map(str, entry["input_dtypes"])),
                finished=finished,
                # Where a thread is now explains only what it still waits for.
                caller=_caller(recorded)
                if recorded
                else None
                if finished
                else callers.get(entry["thread_id"]),
            )
        )
    return found


def _caller(stack: Sequence[str]) -> str | None:
    """The innermost frame that is neither torch's nor ours; innermost is last."""
    return next((f for f in reversed(stack) if not any(part in f for part in _NOT_CALLERS)), None)


def _unreadable(path: Path, reason: object) -> DistributedEnvironmentError:
    return DistributedEnvironmentError(
        f"{path} cannot be read as a trace of the flight recorder: {reason}. Remove it, or name "
        "another directory."
    )
