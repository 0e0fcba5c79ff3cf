"""`verify`: train a small model in every way that is asked for, and hold each run against the CPU."""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from dist_env import DistributedEnvInterface, gather_objects

from ..arguments import DataParallelArguments
from ..errors import ConfigurationError
from ..inputs import environment_of
from ..model import ModelInit
from .probes import (
    NotPossibleError,
    Outcome,
    StagedSave,
    StepTimes,
    check_compiles,
    count_waits,
    ofu_of_matmul,
    save_while_changing,
    state_and_peak,
    times,
)
from .runs import ROWS_PER_RANK, Run, Runs

_Found = TypeVar("_Found")
_TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Largest relative difference of a loss from the CPU's in the same precision. An accelerator orders its sums
otherwise, which a few steps do not carry far in fp32."""
_RESUMED = 1e-6
"""The same behind a restart, from the run that was not stopped, on an accelerator; a CPU repeats each bit."""
_SLOWER, _LONGER_SECONDS = 1.25, 2e-3
"""A step may take this much longer than one of plain torch, and these seconds, for it checks and counts."""
_LEAST_STEPS = 4
"""Of a run that is stopped in its middle, and whose first steps set things up."""
_LONGEST_ERROR = 400
"""Characters; errors of compilers have pages."""
_PARTS = ("curve", "repeat", "resume", "save", "waits", "feature", "speed", "memory", "utilization")
_FEATURES: Mapping[str, Mapping[str, object]] = {
    "torch_compile": {"torch_compile": True},
    "fp8_recipe=tensorwise": {"fp8_recipe": "tensorwise", "mixed_precision": "bf16"},
}
_FEATURE_TOLERANCE: Mapping[str, float] = {"torch_compile": 1e-5, "fp8_recipe=tensorwise": 5e-2}


@dataclass(frozen=True, kw_only=True)
class VerificationCheck:
    """One thing that was looked at.

    Attributes:
        part: What it belongs to, such as "curve".
        name: What was looked at.
        passed: Whether it holds; None if it was not looked at.
        found: What was seen, with figures; or why nothing was.
        rule: What must hold.
        figures: The figures as plain JSON values, with their units in their names.
    """

    part: str
    name: str
    passed: bool | None
    found: str
    rule: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found.

    Attributes:
        checks: In the order in which they were made.
        curves: Losses by step, nats per token, of each run that was held against another.
        facts: What it was found on: versions, devices, ranks.
        seconds: Duration.
    """

    checks: tuple[VerificationCheck, ...]
    curves: Mapping[str, Sequence[float]]
    facts: Mapping[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and something was looked at."""
        made = [check.passed for check in self.checks if check.passed is not None]
        return bool(made) and all(made)

    def to_json(self) -> dict[str, object]:
        """Everything as plain JSON values."""
        return {"passed": self.passed, **asdict(self)}


def check_verify_settings(*, precisions: Sequence[str], steps: int, parts: Sequence[str] = ()) -> None:
    """Check settings of `verify` that depend on no rank, for programs that start the ranks.

    Args:
        precisions: As `verify` takes them.
        steps: Likewise.
        parts: Likewise.

    Raises:
        ConfigurationError: Too few steps, or an unknown precision or part.
    """
    if steps < _LEAST_STEPS:
        fix = f"set it to {_LEAST_STEPS} or more"
        raise ConfigurationError("steps", steps, f"must be at least {_LEAST_STEPS}", fix)
    for setting, given, known in (("precisions", precisions, _TOLERANCE), ("parts", parts, _PARTS)):
        for value in given:
            if value not in known:
                rule = f"must be one of {', '.join(known)}"
                raise ConfigurationError(setting, value, rule, "choose among these")


def verify(
    model_init: ModelInit,
    rows: Sequence[Mapping[str, Tensor]],
    layouts: Sequence[str] = (),
    *,
    directory: str | Path,
    env: DistributedEnvInterface | None = None,
    precisions: Sequence[str] = ("fp32", "bf16"),
    parts: Sequence[str] | None = None,
    settings: Mapping[str, object] | None = None,
    steps: int = 8,
    on_check: Callable[[VerificationCheck], None] | None = None,
) -> Verification:
    """Train a small model in every way that is asked for, and hold each run against the CPU. Collective.

    Each rank trains alone on its device, too, so that a device that computes wrongly is named.

    Args:
        model_init: Builds the model; small, because the CPU trains it as well.
        rows: Examples with `input_ids` and `labels`, int64 of one length; at least `4 * steps` for each rank.
        layouts: Meshes of all ranks, such as "dp=2" or "shard=2,tp=2". What cannot be had is said.
        directory: Scratch directory that all ranks see; the runs are left in it.
        env: An open environment; otherwise one process, on its accelerator if it has one.
        precisions: Values of `mixed_precision`, "fp32" for none, in which each layout trains.
        parts: Of "curve", "repeat", "resume", "save", "waits", "feature", "speed", "memory", "utilization";
            all of them when not given.
        settings: Further settings of the runs, as `DataParallelArguments` has them.
        steps: Optimizer steps of each run, at least 4.
        on_check: Called with each check when it was made, on every rank.

    Returns:
        The same on every rank. Behind a check of several ranks that ended with an error nothing is tried, for
        they may be out of step; a rank where that happened alone should end.

    Raises:
        ConfigurationError: Too few rows or steps, or an unknown precision or part.
    """
    check_verify_settings(precisions=precisions, steps=steps, parts=parts or ())
    env = env or environment_of(DataParallelArguments())
    needed = ROWS_PER_RANK * env.world_size * steps
    if len(rows) < needed:
        raise ConfigurationError("rows", f"{len(rows)} rows", f"are fewer than {needed}", "give more")
    runs = Runs(model_init, rows, env, Path(directory), settings or {}, steps)
    chosen = frozenset(_PARTS if parts is None else parts)
    return _Verifier(runs, on_check or (lambda check: None), chosen).verify(layouts, precisions)


@dataclass
class _Verifier:
    runs: Runs
    on_check: Callable[[VerificationCheck], None]
    parts: frozenset[str]
    checks: list[VerificationCheck] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    broken: str | None = None

    def __post_init__(self) -> None:
        self.env = self.runs.env
        self.one = "one process" if self.env.device.type == "cpu" else "one device"
        self.facts = gather_objects(_facts_of(self.env), self.env)

    def verify(self, layouts: Sequence[str], precisions: Sequence[str]) -> Verification:
        """Make all checks, in order."""
        started = time.monotonic()
        for precision in precisions:
            self.check("curve", f"{self.one}, {precision}", self.curve_alone, precision)
        for layout, precision in itertools.product(layouts, precisions):
            self.check("curve", f"{layout}, {precision}", self.curve, layout, precision)
        self.check("repeat", f"{self.one}, the same again", self.repeat)
        self.check("resume", self.one, self.resume_alone)
        for layout in layouts:
            self.check("resume", layout, self.resume, layout)
        self.check("save", "weights that change behind an asynchronous save", self.save)
        self.check("waits", "of the host, in steps without a log entry", self.waits)
        for name in _FEATURES:
            self.check("feature", name, self.feature, name)
        self.check("speed", "a step beside plain torch", self.speed)
        self.check("memory", "beside the dry run", self.memory)
        self.check("utilization", "OFU of a matrix product", self.utilization)
        facts = {name: ", ".join(sorted({each[name] for each in self.facts})) for name in self.facts[0]}
        return Verification(
            checks=tuple(self.checks),
            curves=self.curves,
            facts={"ranks": str(self.env.world_size), **facts},
            seconds=time.monotonic() - started,
        )

    def check(self, part: str, name: str, make: Callable[..., Outcome], *given: str) -> None:
        """Make a check, and note what came of it; behind one that broke the job only note that."""
        if part not in self.parts:
            return
        if self.broken is not None:
            outcome = Outcome(None, f"not tried: ranks may be out of step behind {self.broken}")
        else:
            try:
                outcome = make(*given)
            except (ConfigurationError, NotPossibleError) as error:
                outcome = Outcome(None, f"not possible here: {_line(error)}")
            except Exception as error:  # noqa: BLE001  # a device that is not right may raise anything
                apart = isinstance(error, _FailedOnRanksError)  # which has the names of the errors in it
                text = _line(error) if apart else f"{type(error).__name__}: {_line(error)}"
                outcome = Outcome(False, text, "runs to its end")
                if self.env.world_size > 1 and not apart:
                    self.broken = f"{part}, {name}"
        self.checks.append(VerificationCheck(part=part, name=name, **vars(outcome)))
        self.on_check(self.checks[-1])

    # Ways to train.

    def curve_alone(self, precision: str) -> Outcome:
        """Each rank alone on its device, against the CPU."""
        expected = self.reference(precision)
        found = [run.losses for run in self.alone(precision)]
        self.curves[f"{self.one}, {precision}"] = found[0]
        return self.compare(found, expected, _TOLERANCE[precision], "the CPU's")

    def curve(self, layout: str, precision: str) -> Outcome:
        """All ranks together, against the CPU."""
        expected = self.reference(precision)
        run = self.runs.train(self.env, self.runs.new_place(), mesh=layout, **_precision(precision))
        self.curves[f"{layout}, {precision}"] = run.losses
        return self.compare([run.losses], expected, _TOLERANCE[precision], "the CPU's")

    def reference(self, precision: str) -> list[float]:
        """The losses of one process on the CPU, trained by rank 0."""
        name = f"CPU, {precision}"
        if name not in self.curves:
            place = self.runs.new_place()

            def train() -> list[float]:
                if self.env.rank != 0:
                    return []
                return self.runs.train(self.runs.on_cpu, place, **_precision(precision)).losses

            self.curves[name] = self.on_each_rank(train)[0]
        return self.curves[name]

    def alone(self, precision: str = "fp32", given: Mapping[str, object] = MappingProxyType({})) -> list[Run]:
        """The run of each rank alone on its device."""
        place = self.runs.new_place()
        chosen = {**_precision(precision), **given}
        return self.runs_of_ranks(lambda: self.runs.train(self.runs.alone, place, **chosen))

    def repeat(self) -> Outcome:
        """Two runs with the same seed: where they differ, a kernel depends on the order of its threads."""
        first, second = (self.alone() for _ in range(2))
        most = self.exactness()
        return self.compare([run.losses for run in second], first[0].losses, most, "the first run's")

    def resume_alone(self) -> Outcome:
        """Each rank alone: to the middle, and on from the checkpoint."""
        whole = self.alone()
        parts = self.runs_of_ranks(lambda: self.runs.in_two_parts(self.runs.alone))
        return self.resumed(parts, whole[0].losses)

    def resume(self, layout: str) -> Outcome:
        """All ranks together: to the middle, and on from the checkpoint."""
        whole = self.runs.train(self.env, self.runs.new_place(), mesh=layout)
        return self.resumed([self.runs.in_two_parts(self.env, mesh=layout)], whole.losses)

    def resumed(self, parts: Sequence[Run], whole: Sequence[float]) -> Outcome:
        """Whether runs that were stopped in the middle continued there, on the same curve."""
        middle = self.runs.steps // 2
        for rank, run in enumerate(parts):
            if run.began != middle:
                found = f"{self.who(rank)} began behind step {run.began}, not {middle}"
                return Outcome(False, found, f"continues behind step {middle}")
        losses = [run.losses[-(self.runs.steps - middle) :] for run in parts]
        return self.compare(losses, whole[middle:], self.exactness(), "the whole run's", first=middle)

    def exactness(self) -> float:
        """How far a run on one kind of device may be from the same run on it."""
        return 0.0 if self.env.device.type == "cpu" else _RESUMED

    def feature(self, name: str) -> Outcome:
        """A setting whose kernels only some devices have, on each rank alone."""
        if name == "torch_compile":
            self.on_each_rank(lambda: check_compiles(self.env.device))
        tolerance = _FEATURE_TOLERANCE[name]
        precision = "bf16" if "mixed_precision" in _FEATURES[name] else "fp32"
        expected = self.reference(precision)
        found = [run.losses for run in self.alone(given=_FEATURES[name])]
        self.curves[f"{self.one}, {name}"] = found[0]
        return self.compare(found, expected, tolerance, "the CPU's without it")

    # What a device does under the runs.

    def save(self) -> Outcome:
        """An asynchronous save must hold what the weights were when it began."""
        place = self.runs.directory / self.runs.new_place() / f"rank-{self.env.rank}"
        told = self.on_each_rank(lambda: asdict(save_while_changing(self.env.device, place)))
        found = [StagedSave(**each) for each in told]
        wrong = [rank for rank, each in enumerate(found) if each.wrong]
        slowest = max(found, key=lambda each: each.blocked_seconds)
        text = (
            f"{slowest.bytes >> 20} MiB held up the program for {slowest.blocked_seconds:.3f} s of "
            f"{slowest.seconds:.3f} s"
        )
        if wrong:
            text = "; ".join(f"{self.who(rank)}: {found[rank].wrong}" for rank in wrong)
        figures = {name: value for name, value in vars(slowest).items() if name != "wrong"}
        return Outcome(not wrong, text, "what is loaded is what was there when the save began", figures)

    def waits(self) -> Outcome:
        """The host must not wait for the device, so that this always has work."""
        place = self.runs.new_place()
        found = self.on_each_rank(lambda: count_waits(self.runs, place))
        worst = max(found, key=len)
        text = f"{len(worst)}" if not worst else f"{len(worst)}: {'; '.join(sorted(set(worst))[:3])}"
        return Outcome(not worst, text, "0 behind the first steps", {"waits": len(worst)})

    def speed(self) -> Outcome:
        """Seconds of a step beside a loop of plain torch, on rank 0 while the others wait."""
        place = self.runs.new_place()
        found = StepTimes(
            **self.on_each_rank(lambda: asdict(times(self.runs, place)) if self.env.rank == 0 else {})[0]
        )
        ratio = found.seconds / found.plain_seconds
        text = (
            f"{found.seconds * 1e3:.2f} ms, plain torch {found.plain_seconds * 1e3:.2f} ms: {ratio:.2f} times"
        )
        if found.mfu is not None:
            text += f", MFU {found.mfu:.1%}"
        most = _SLOWER * found.plain_seconds + _LONGER_SECONDS
        rule = f"at most {_SLOWER} times and {_LONGER_SECONDS * 1e3:g} ms"
        return Outcome(found.seconds <= most, text, rule, {**vars(found), "ratio": ratio})

    def memory(self) -> Outcome:
        """What a rank holds and needs at most, beside what the dry run says."""
        place = self.runs.new_place()
        return self.worst_of(lambda: state_and_peak(self.runs, place))

    def utilization(self) -> Outcome:
        """OFU, as counters have it, beside the FLOP/s of a matrix product."""
        return self.worst_of(lambda: ofu_of_matmul(self.env.device))

    # How ranks find something together.

    def on_each_rank(self, make: Callable[[], _Found]) -> list[_Found]:
        """What each rank finds by itself, as values that ranks can send one another.

        Raises:
            ConfigurationError: If it cannot be had; on the ranks where it cannot.
            NotPossibleError: If that is so on other ranks.
            _FailedOnRanksError: On every rank, if it failed on some, naming them.
        """
        found: list[_Found] = []
        error: Exception | None = None
        try:
            found.append(make())
        except Exception as raised:  # noqa: BLE001  # told to all ranks below
            error = raised
        impossible = isinstance(error, (ConfigurationError, NotPossibleError))
        answer = None if error is None else (impossible, f"{type(error).__name__}: {_line(error)}")
        answers = gather_objects((answer, found), self.env)
        failed = [(rank, said) for rank, (said, _) in enumerate(answers) if said is not None]
        if any(not cannot for _, (cannot, _) in failed):
            told = "; ".join(f"{self.who(rank)}: {text}" for rank, (cannot, text) in failed if not cannot)
            raise _FailedOnRanksError(told) from error
        if failed:
            raise NotPossibleError(failed[0][1][1].partition(": ")[2]) from error
        return [value for _, values in answers for value in values]

    def runs_of_ranks(self, make: Callable[[], Run]) -> list[Run]:
        """The run that each rank makes by itself."""
        return [Run(**each) for each in self.on_each_rank(lambda: asdict(make()))]

    def worst_of(self, make: Callable[[], Outcome]) -> Outcome:
        """What the first rank found that something is wrong with; rank 0 otherwise."""
        found = [Outcome(**each) for each in self.on_each_rank(lambda: asdict(make()))]
        wrong = next((rank for rank, each in enumerate(found) if not each.passed), None)
        if wrong is None:
            return found[0]
        return replace(found[wrong], found=f"{self.who(wrong)}: {found[wrong].found}")

    def who(self, rank: int) -> str:
        """A rank with its host and device."""
        return f"rank {rank} ({self.facts[rank]['hosts']}, {self.facts[rank]['devices']})"

    def compare(
        self,
        found: Sequence[Sequence[float]],
        expected: Sequence[float],
        most: float,
        whose: str,
        *,
        first: int = 0,
    ) -> Outcome:
        """Hold the losses of each rank, or those of all, against others."""
        apart = [largest_difference(losses, expected) for losses in found]
        wrong = [rank for rank, difference in enumerate(apart) if not difference <= most]
        rule = f"each loss within {most:g} of {whose}" if most else f"each loss equal to {whose}"
        largest = max(apart, key=lambda each: math.inf if math.isnan(each) else each)
        text = f"largest relative difference {largest:.1e}"
        if wrong:
            step = first_difference(found[wrong[0]], expected, most)
            seen = found[wrong[0]][step] if step < len(found[wrong[0]]) else "missing"
            where = f"{self.who(wrong[0])}: " if len(found) > 1 else ""
            others = f"; and {len(wrong) - 1} more ranks" if len(wrong) > 1 else ""
            text = f"{where}step {first + step + 1}: {seen}, not {expected[step]}{others}"
        return Outcome(not wrong, text, rule, {"largest_relative_difference": largest})


class _FailedOnRanksError(RuntimeError):
    """Something that ranks did by themselves has failed on some of them; all know it."""


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite where lengths differ or a number is not finite."""
    if len(found) != len(expected) or not all(map(math.isfinite, [*found, *expected])):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)), default=0.0)


def first_difference(found: Sequence[float], expected: Sequence[float], most: float) -> int:
    """Index of the first loss that is further away than `most`."""
    for index, pair in enumerate(zip(found, expected, strict=False)):
        if not largest_difference(*([each] for each in pair)) <= most:
            return index
    return min(len(found), len(expected) - 1)


def _precision(name: str) -> dict[str, object]:
    return {} if name == "fp32" else {"mixed_precision": name}


def _facts_of(env: DistributedEnvInterface) -> dict[str, str]:
    device = env.device
    name = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return {
        "hosts": platform.node(),
        "devices": f"{device}{name}",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _line(error: Exception) -> str:
    """The text of an error in one line, of one from elsewhere as much as a table has room for."""
    text = " ".join(str(error).split())
    told = isinstance(error, (ConfigurationError, NotPossibleError, _FailedOnRanksError))
    return text if told or len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} ..."
